"""Prompts of chats in a run: its date is kept, begun answers are continued, and what ends a
completion is said."""

import json
import shutil
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from isobit import load_config, resume, train
from isobit.config.commands import GenerateConfig, command_config
from isobit.data.dataset import Example
from isobit.engine.engine import Engine
from isobit.errors import RunFailed
from isobit.model import Tokenizer
from isobit.run.completions import COMPLETIONS, read
from isobit.run.directory import model_directory
from isobit.training.commands.evaluate import Request, evaluate_command
from isobit.training.commands.generate import print_completions
from isobit.training.commands.verify import verify_command
from isobit.training.parts.assembly import open_parts
from isobit.training.rollouts.lengths import encode_prompt
from isobit.training.train import replay
from tests.models import ALPHABET, tiny_model
from tests.runs import fingerprint

CHAT = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
DATED = "{{ strftime_now('%H %M %S %f') }} " + CHAT


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random model whose tokenizer ends a completion with another token than
    generation_config.json says."""
    monkeypatch.chdir(tmp_path)
    made = tiny_model("float32", "llama", alphabet=ALPHABET)
    made.save("model")
    settings = json.loads(Path("model/tokenizer_config.json").read_text())
    Path("model/tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<s>"}))
    Path("reward.py").write_text(
        "def score(prompts, completions, **columns):\n    return [len(c) for c in completions]\n"
    )
    return Path("model")


def config(prompts: list[Any], template: str = CHAT, **changes: Any) -> dict[str, Any]:
    Path("chat.jinja").write_text(template)
    Path("rows.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    )
    return {
        "model": {"path": "model", "chat_template": "chat.jinja"},
        "task": {"path": "rows.jsonl", "held_out_size": 1},
        "rewards": {"functions": ["reward.py:score"]},
        "precision": "float32",
        "sampling": {"group_size": 2, "max_new_tokens": 4},
        "prompts_per_step": 1,
        "run": {"dir": "run", "report": False, "checkpoint_every": 1, "keep_last": 9},
        "steps": 2,
        **changes,
    }


def user(text: str, *more: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, *more]


def prompts_of(run: str) -> list[str]:
    return [row["prompt"] for row in read(Path(run) / COMPLETIONS)]


@pytest.mark.slow
def test_the_date_of_a_run_is_that_of_its_beginning(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On resume, replay, verification and evaluation: the template writes microseconds."""
    given = config([user("a"), user("b"), user("c")], DATED)
    train(load_config(given | {"run": {**given["run"], "dir": "whole"}, "steps": 3}))
    began = json.loads(Path("whole/machine.json").read_text())["date"]
    said = datetime.fromisoformat(began).strftime("%H %M %S %f")
    assert len(prompts_of("whole")) == 6
    assert all(prompt.startswith(f"{said} user") for prompt in prompts_of("whole"))

    train(load_config(given))
    facts = json.loads(Path("run/machine.json").read_text())
    assert facts["date"] != began
    for path in (
        Path("run").iterdir()
    ):  # as if it had been killed at its beginning; it begins again, with the other's date
        if path.name not in ("config.yaml", "format.txt", "machine.json", "inputs.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    Path("run/machine.json").write_text(json.dumps(facts | {"date": began}))
    resume("run", ["steps=2"])
    resume("run", ["steps=3"])
    assert fingerprint(Path("run")) == fingerprint(Path("whole"))

    replay(Path("whole"), Path("again"))
    assert json.loads(Path("again/machine.json").read_text())["date"] == began
    asked = []

    def measured(engine: Engine, examples: Sequence[Example], *_: object, **__: object) -> None:
        asked.append(engine.model.tokenizer.render_chat(examples[0].prompt))  # type: ignore[arg-type]
        raise RunFailed("enough")

    monkeypatch.setattr("isobit.training.commands.evaluate.measure_each", measured)
    with pytest.raises(RunFailed, match="enough"):
        evaluate_command(Path("whole"), None, Request([]), None)
    assert asked[0].startswith(f"{said} user")
    verify_command(Path("whole"), None)
    assert "0 of" in capsys.readouterr().out


def test_a_run_that_knows_no_date_goes_on_with_the_present_one(model: Path) -> None:
    """Begun before dates were recorded, or with a damaged record."""
    given = load_config(config([user("a"), user("b")], DATED))
    for began in ({}, {"date": None}, {"date": "yesterday"}):
        parts = open_parts(given, quiet=True, began=began)
        parts.processes.close()
        assert abs((parts.model.tokenizer.now - datetime.now()).total_seconds()) < 600


def test_a_begun_answer_is_continued(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = {"role": "assistant", "content": "well 1+"}
    train(load_config(config([user("a", begun), user("b", begun)])))
    assert {row["prompt_rendered"] for row in read(Path("run") / COMPLETIONS)} <= {
        f"user {name}</s>assistant well 1+" for name in "ab"
    }
    given = load_config(
        config([user("a", begun), user("b")], run={"dir": "other"}, task={"path": "rows.jsonl"})
    )
    parts = open_parts(given, quiet=True)
    parts.processes.close()
    tokenizer, examples = parts.model.tokenizer, parts.task.train.examples
    texts = [
        tokenizer.decode(encode_prompt(example, parts.model), special=True) for example in examples
    ]
    assert texts == ["user a</s>assistant well 1+", "user b</s>assistant "]


def test_what_ends_a_completion_is_said_once(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (
        "model: a completion ends with </s> (id 2) of generation_config.json, or <s> (id 1) "
        "of the tokenizer"
    )
    train(load_config(config(["a", "b"])), quiet=False)
    assert capsys.readouterr().err.splitlines().count(line) == 1
    rows = list(read(Path("run") / COMPLETIONS))
    assert {row["truncated"] for row in rows} == {False} or all(
        len(row["completion_ids"]) == 4 for row in rows
    )
    evaluate_command(model, None, Request(evaluation("a", "b")), None)
    keys = ["sampling.max_new_tokens=2", "precision=float32"]
    assert capsys.readouterr().err.splitlines().count(line) == 1
    print_completions(command_config(GenerateConfig, model, keys, "test"), ["a"])
    assert capsys.readouterr().err.splitlines().count(line) == 1
    saved = model_directory(Path("run"))  # whose generation_config.json has both
    print_completions(command_config(GenerateConfig, saved, keys, "test"), ["a"])
    assert "a completion ends" not in capsys.readouterr().err


def evaluation(*prompts: str) -> list[str]:
    Path("held.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    )
    return [
        "task={name: file, held_out_path: held.jsonl, path: held.jsonl}",
        "rewards.functions=[reward.py:score]",
        "sampling.max_new_tokens=3",
        "precision=float32",
    ]


def test_a_special_stop_string_in_a_run(model: Path) -> None:
    """Each completion ends at the token, or has none."""
    made = tiny_model("float32", "llama", alphabet=ALPHABET)
    tokenizer = made.tokenizer
    names = [tokenizer.fast.id_to_token(i) for i in range(3, tokenizer.vocab_size)][:40]
    special = [AddedToken(name, special=True, normalized=False) for name in names]
    tokenizer.fast.add_special_tokens(special)
    made.tokenizer = Tokenizer(tokenizer.fast, tokenizer.settings, tokenizer.eos_ids, None)
    made.save("model")
    sampling = {"group_size": 8, "max_new_tokens": 12, "stop": names[:20]}
    train(
        load_config(
            config(["zz", "zy"], model={"path": "model"}, sampling=sampling, prompts_per_step=1)
        )
    )
    rows = list(read(Path("run") / COMPLETIONS))
    stops = {tokenizer.fast.token_to_id(name) for name in names[:20]}
    assert any(row["completion_ids"][-1] in stops for row in rows)
    for row in rows:
        assert not stops & {*row["completion_ids"][:-1]}
        assert row["truncated"] == (
            row["completion_ids"][-1] not in {*stops, *tokenizer.eos_ids, 1}
        )
        assert not {*row["completion"]} & {*names}
