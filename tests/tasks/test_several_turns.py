"""Tasks of several turns: their data, tools and environments, and a step of each config."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from isobit.config import load_config
from isobit.environments.base import Turn
from isobit.errors import IsobitError
from isobit.model.text.tool_formats.table import FORMATS
from isobit.rewards.sandbox.launch import check_cage
from isobit.run.directory import read_jsonl
from isobit.tasks import Task, TaskSettings, load_task
from isobit.tasks.calculator import python
from isobit.tasks.guess import Guess
from isobit.tasks.lookup import KINDS, NOTHING, Library, corpus_of
from isobit.tasks.turns import correct
from isobit.training.train import train

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("calculator", "guess", "lookup")


def task(name: str, **options: Any) -> Task:
    return load_task(TaskSettings(name=name, options=options))


def asked(example: Any) -> str:
    return str(example.prompt[0]["content"])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_held_out_is_never_trained_on(name: str) -> None:
    """Nor learned from demonstrations; the same options give the same data, another seed others."""
    one, again, other = task(name), task(name), task(name, seed=1)
    held_out = {asked(example) for example in one.held_out.examples}
    assert held_out.isdisjoint(asked(example) for example in one.train.examples)
    shown = task(name, demonstrations=True)
    assert held_out.isdisjoint(asked(example) for example in shown.train.examples)
    assert list(one.train.examples) == list(again.train.examples)
    assert list(one.train.examples) != list(other.train.examples)
    assert len(held_out) > 8 or name == "guess"


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_are_turns_of_what_is_played(name: str) -> None:
    """A chat that ends with what the model answers to; every call in them parses."""
    shown = task(name, demonstrations=True)
    assert shown.gold is not None
    assert not shown.rewards
    calls = turns = 0
    for example in shown.train.examples[:2000]:
        last = example.prompt[-1]
        assert isinstance(last, dict)
        assert last["role"] != "assistant"
        reply = FORMATS["pythonic"].read_text(example.columns[shown.gold])
        assert reply is None or not reply.problems
        calls += 0 if reply is None else len(reply.calls)
        turns += len(example.prompt) > 1
        characters = example.columns[shown.gold] + "".join(m["content"] for m in example.prompt)  # type: ignore[index]
        assert set(characters) <= set(shown.alphabet or "")
    assert (calls > 0) is (name != "guess")
    assert turns > 500


def test_the_tool_runs_in_the_cage() -> None:
    try:
        check_cage("namespaces", False)
    except IsobitError as error:
        pytest.skip(str(error))
    assert python("738211*40122") == str(738211 * 40122)
    assert python("x = 3\nprint(x * 2)") == "6"
    assert python("print(1)") == "1"
    assert python("1/0") == "ZeroDivisionError: division by zero"
    assert python("'\u00e9' * 3") == "???"
    assert len(python("'a' * 10**4")) == 200
    assert python("import os; os._exit(3)") == "error: it was stopped"
    assert "Error" in python(f"open({str(ROOT / 'pyproject.toml')!r}).read()")
    assert "1" not in python("-" * 200_000 + "1")  # what a parser gives up on


@pytest.mark.parametrize("column", ["8", "devasi"])
def test_only_the_last_answer_counts(column: str) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    tool = {"role": "tool", "name": "f", "content": column}
    right, wrong = ({"role": "assistant", "content": text} for text in (f" {column}\n", "no"))
    said = [[right], [call, tool, right], [call, tool, wrong], [call, tool], [right, tool, call]]
    assert correct([None] * 5, said, [column] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_an_answer_takes_two_searches() -> None:
    """And every question can be answered so; a query is text, whatever is in it."""
    library, corpus = Library(), corpus_of(400, 40, 0)
    for example in task("lookup").held_out.examples:
        library.reset(**example.columns)
        kind, person = asked(example).removesuffix("?").split(" of ")
        assert kind in KINDS
        town = library.search(f"{person} town").split()[-1]
        assert town == corpus.homes[person]
        assert library.search(f"{town} {kind}").split()[-1] == example.columns["answer"]
        assert example.columns["answer"] not in library.search(person)
    for query in ("", '"', "* OR", "NEAR(", "zzz", "a\0b"):
        assert library.search(query) == NOTHING


def play(guesses: list[str], dense: bool) -> list[Any]:
    game = Guess()
    game.reset(low=1, high=15, secret=11, guesses=4, dense=dense)

    async def steps() -> list[Any]:
        return [await game.step(Turn(number, text, text)) for number, text in enumerate(guesses)]

    return asyncio.run(steps())


def test_a_game() -> None:
    """Halving finds every number; the dense reward is what is known, the sparse one the secret."""
    steps = play(["8", "12", "10", "11"], True)
    assert [step.messages[0]["content"] for step in steps[:3]] == [">", "<", ">"]
    assert [step.done for step in steps] == [False, False, False, True]
    known = [math.log(15 / left) / math.log(15) for left in (7, 3, 1)]
    assert [step.reward for step in steps] == [*known, 1.0]
    assert [step.reward for step in play(["8", "12", "10", "11"], False)] == [0, 0, 0, 1]
    missed = play(["8", "x", "", "9"], True)
    assert [step.messages[0]["content"] for step in missed] == [">", "?", "?", ">"]
    assert missed[-1].done
    assert missed[-1].reward == math.log(15 / 6) / math.log(15)
    assert play(["11"], True)[0].reward == 1.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("guess", {"numbers": 50, "largest": 52}, "leaves 3 ranges of 50 numbers"),
        ("calculator", {"digits": 2, "min_digits": 3}, "must not be above digits"),
        ("calculator", {"digits": 1, "min_digits": 1}, "these options give only about"),
        ("lookup", {"people": 8}, "leave none to train on"),
    ],
)
def test_options_that_cannot_be_are_one_line(name: str, options: Any, message: str) -> None:
    with pytest.raises(IsobitError, match=message):
        task(name, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_config_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step from a base of some steps: turns are played, and no token of any turn differs."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("ISOBIT_CACHE", str(tmp_path / "cache"))
    short = (ROOT / f"configs/{name}-sft.yaml").read_text()
    lines = ["steps: 5" if line.startswith("steps:") else line for line in short.splitlines()]
    (tmp_path / "sft.yaml").write_text("\n".join(lines))
    changes = [
        f"model.sft={tmp_path / 'sft.yaml'}",
        f"run.dir={tmp_path / 'run'}",
        *("steps=1", "prompts_per_step=4", "evaluation.every=0"),
    ]
    result = train(load_config(ROOT / f"configs/{name}.yaml", changes))
    (row,) = read_jsonl(result.run_dir / "metrics.jsonl")
    assert row["mismatch/differing_tokens"] == 0
    assert row["mismatch/compared_tokens"] > 0
    assert row["env/turns"] >= 1
    seconds = [took for key, took in row.items() if key.startswith("time/tools/")]
    assert sum(seconds) == pytest.approx(row["time/tools"])
    calls = [count for key, count in row.items() if key.startswith("tools/call_frequency/")]
    assert sum(calls) == pytest.approx(row["tools/call_frequency"])
