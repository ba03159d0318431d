"""Tasks of several turns: their data, tools and environments, and a step of each config."""

import asyncio
import functools
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from isobit.config import load_config
from isobit.data.turns import Turn
from isobit.errors import IsobitError
from isobit.model.text.tool_formats.table import FORMATS
from isobit.run.directory import read_jsonl
from isobit.tasks.builtin import Task, TaskSettings, load_task
from isobit.tasks.builtin.arithmetic import reward
from isobit.tasks.builtin.calculator import python
from isobit.tasks.builtin.guess import Guess, left_after
from isobit.tasks.builtin.lookup import KINDS, NOTHING, Library, corpus_of
from isobit.tasks.rewards.sandbox.launch import check_cage
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


@pytest.mark.slow
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
    assert reward([None] * 5, said, [column] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


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
    """Halving finds every number; the dense reward is what is known, the sparse one the secret, and
    to know it is not to have named it."""
    steps = play(["8", "12", "10", "11"], True)
    assert [step.messages[0]["content"] for step in steps[:3]] == [">", "<", ">"]
    assert [step.done for step in steps] == [False, False, False, True]
    known = [math.log(15 / left) / math.log(30) for left in (7, 3, 1)]
    assert [step.reward for step in steps] == [*known, 1.0]
    assert [step.reward for step in play(["8", "12", "10", "11"], False)] == [0, 0, 0, 1]
    missed = play(["8", "x", "", "9"], True)
    assert [step.messages[0]["content"] for step in missed] == [">", "?", "?", ">"]
    assert missed[-1].done
    assert missed[-1].reward == math.log(15 / 6) / math.log(30)
    assert play(["11"], True)[0].reward == 1.0
    assert max(step.reward for step in play(["8", "12", "10", "10"], True)) < 0.8


def shown_chances() -> dict[str, float]:
    """How often demonstrations take the middle of what is left, and its lowest number, where the
    two differ."""
    counts = Counter[str]()
    options = {"numbers": 10, "largest": 40, "guesses": 4}
    for example in task("guess", demonstrations=True, **options).train.examples:
        prompt: Any = example.prompt
        (low, high), said = map(int, asked(example).split("-")), prompt[1:]
        for guess, hint in zip(said[::2], said[1::2], strict=True):
            secret = high if hint["content"] == ">" else low
            low, high = left_after(low, high, int(guess["content"]), secret)
        guess = int(example.columns["guess"])
        middle = (low + high) // 2
        assert guess in (low, middle)
        if low < middle:
            counts["middle" if guess == middle else "lowest"] += 1
    return {kind: count / counts.total() for kind, count in counts.items()}


def chance_and_explained(middle: float, lowest: float, at_random: float) -> tuple[float, float]:
    """Of 10 numbers and 4 guesses, each of these kinds so often: the chance of a win, and what
    the choice of guesses explains of its variance, the rest being where the secret is.

    A win less its chance is a sum over guesses of two parts: what the choice adds to the chance, and
    what the answer adds. They are uncorrelated, so their variances add up."""

    def choices(left: int) -> list[float]:
        return [
            at_random / left + middle * (place == (left - 1) // 2) + lowest * (place == 0)
            for place in range(left)
        ]

    @functools.cache
    def won(left: int, guesses: int) -> float:
        chances = choices(left) if guesses else []
        return math.fsum(c * after(left, guesses, place) for place, c in enumerate(chances))

    def after(left: int, guesses: int, place: int) -> float:
        below, above = place, left - 1 - place
        return (1 + below * won(below, guesses - 1) + above * won(above, guesses - 1)) / left

    @functools.cache
    def variance(left: int, guesses: int) -> float:
        """Of choices, in games of which so many numbers and guesses are left."""
        if left == 0 or guesses == 0:
            return 0.0
        total = 0.0
        for place, chance in enumerate(choices(left)):
            here = (after(left, guesses, place) - won(left, guesses)) ** 2
            later = [n / left * variance(n, guesses - 1) for n in (place, left - 1 - place)]
            total += chance * (here + sum(later))
        return total

    return won(10, 4), variance(10, 4)


def test_the_choices_that_demonstrations_show_decide_games() -> None:
    """What a sparse reward needs: a base whose choices explain enough of a win, and that can win more.
    One that guesses at random among what is left wins more often, and its choices explain less."""
    shown = shown_chances()
    assert shown["middle"] == pytest.approx(1 / 3, abs=0.02)
    wins, variance = chance_and_explained(1 / 3, 2 / 3, 0)
    assert (round(wins, 2), round(variance / (wins * (1 - wins)), 2)) == (0.62, 0.19)
    at_random, of_it = chance_and_explained(0, 0, 1)
    assert (round(at_random, 2), round(of_it / (at_random * (1 - at_random)), 2)) == (0.76, 0.14)
    assert chance_and_explained(1, 0, 0) == (1.0, 0.0)
    assert chance_and_explained(0, 1, 0)[0] == pytest.approx(0.4)


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
    shutil.copy(ROOT / "configs/turns.jinja", tmp_path)  # which is looked for next to the config
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
