"""Supervised warm start: it learns, it is cached by all that it is made from, and leaves nothing
half done."""

import json
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file

from isobit.config import ArchitectureConfig, SftConfig, load_sft_config
from isobit.config.load import in_its_order
from isobit.config.reading import override
from isobit.data.dataset import Example
from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.errors import IsobitError, RunFailed
from isobit.evaluation.measure import EvaluationPlan, measure
from isobit.evaluation.result import Graded, Question
from isobit.model import Model, ModelConfig, Tokenizer
from isobit.model.families import FAMILIES
from isobit.options.declare import choices, options_of
from isobit.precision import Precision, precision_from
from isobit.run.checkpoints import all_checkpoints
from isobit.tasks.builtin import TaskSettings, load_task
from isobit.tasks.rewards.pool import RewardPool
from isobit.training.commands.dry_run import supervised_dry_run
from isobit.training.parts import base
from isobit.training.parts.base import cached_model
from isobit.training.parts.given import load_supervised
from isobit.training.parts.held_out import HeldOutAnswers
from isobit.training.parts.model import architecture_of
from isobit.training.rollouts.given import GivenAnswers
from isobit.training.train import resume, train_supervised
from tests.until import until

WriteConfig = Callable[..., Path]


def answered(correct: int) -> tuple[Question, ...]:
    """16 answers, so many of them right."""
    return tuple(Question("", None, Graded("", float(place < correct))) for place in range(16))


def made(config: SftConfig, quiet: bool = True) -> Path:
    """The model that a supervised run ends with."""
    return made_in(train_supervised(config, quiet=quiet).run_dir)


def made_in(run: Path) -> Path:
    """The newest model of a run."""
    return all_checkpoints(run / "checkpoints")[-1]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteConfig:
    monkeypatch.setenv("ISOBIT_CACHE", str(tmp_path / "cache"))

    def write(**changes: object) -> Path:
        init = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_layers": 2,
            "num_heads": 2,
            "max_positions": 32,
        }
        values = {
            "model": {"init": init},
            "task": {"name": "arithmetic", "held_out_size": 16, "options": {"digits": 1}},
            "steps": 3,
            "batch_size": 16,
            "max_new_tokens": 4,
            "optimizer": {"learning_rate": 5e-3},
            "out": str(tmp_path / "run"),
            **changes,
        }
        path = tmp_path / "sft.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


def test_every_family_can_be_made(config: WriteConfig) -> None:
    """And its config.json says what was made: a SmolLM3 has layers without rotary embedding."""
    names = choices(options_of(ArchitectureConfig)["family"].kind)
    assert sorted(names) == sorted(FAMILIES)
    for family in names:
        changes = [f"model.init.family={family}", "model.init.num_layers=5"]
        experts = ["model.init.num_experts=4"] if FAMILIES[family].mixtures else []
        if FAMILIES[family].latent is not None:
            with pytest.raises(IsobitError, match="has latent attention, whose sizes"):
                load_sft_config(config(), changes + experts)
            continue
        if FAMILIES[family].one_part:
            with pytest.raises(IsobitError, match="has Mamba-2 layers, whose sizes"):
                load_sft_config(config(), changes + experts)
            continue
        init = load_sft_config(config(), changes + experts).model.init
        assert init is not None
        found = architecture_of(init, Tokenizer.characters("0123456789"))
        read = ModelConfig.from_hf(found.to_hf())
        assert replace(read, query_scalar=found.query_scalar) == found
        assert read.attention_scale == found.attention_scale
        assert found.unrotated == ((3,) if family == "smollm3" else ())


@pytest.mark.slow
def test_a_model_learns_one_digit_additions(config: WriteConfig) -> None:
    """From scratch, under `fp8`; before, it knows none."""
    out = made(load_sft_config(config(steps=350)))
    task = load_task(TaskSettings("arithmetic", held_out_size=16, options={"digits": 1}))
    examples = list(task.train.examples)
    untrained = made(load_sft_config(config(), ["steps=1", f"out={out / 'untrained'}"]))
    accuracy = {}
    for path in (untrained, out):
        engine = Engine.sized_for(Model.load(path), [e.prompt for e in examples], len(examples), 4)
        with RewardPool(task.rewards) as pool:
            questions = measure(engine, examples, pool, EvaluationPlan(Sampling(max_new_tokens=4)))
            accuracy[path] = sum(question.greedy.correct for question in questions) / len(questions)
    assert accuracy[untrained] < 0.2
    assert accuracy[out] > 0.75


def test_training_ends_at_the_accuracy_that_is_asked_for(
    config: WriteConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first of its evaluations that finds it, with the weights of as many steps. The
    control: never found."""
    answers = iter([9, 3, 8, 12])  # the first one before the first step, which does not count
    monkeypatch.setattr(HeldOutAnswers, "answers", lambda _: answered(next(answers)))
    asked = {"samples": 16, "every": 2, "stop_at": 0.5}
    out = made(load_sft_config(config(steps=7, evaluation=asked)), quiet=False)
    said = capsys.readouterr().err
    assert "step 4: held-out greedy accuracy 0.5000" in said
    assert "step 6:" not in said
    resume(out.parents[1], quiet=True)  # it has what was asked for, and stays
    assert made_in(out.parents[1]) == out
    monkeypatch.undo()
    short = made(load_sft_config(config(steps=4), [f"out={out / 'short'}"]))
    assert (out / "model.safetensors").read_bytes() == (short / "model.safetensors").read_bytes()
    answers = iter([0, 3, 4, 5, 6])
    monkeypatch.setattr(HeldOutAnswers, "answers", lambda _: answered(next(answers)))
    long = made(load_sft_config(config(steps=7, evaluation=asked), [f"out={out / 'long'}"]))
    assert next(answers, None) is None
    assert (out / "model.safetensors").read_bytes() != (long / "model.safetensors").read_bytes()


def test_where_nothing_can_be_evaluated_no_accuracy_is_waited_for(
    config: WriteConfig, tmp_path: Path
) -> None:
    with pytest.raises(
        IsobitError, match=r"evaluation\.stop_at is looked at every evaluation\.every steps"
    ):
        load_sft_config(config(evaluation={"stop_at": 0.5}))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(f'{{"prompt": "{n}+1=", "completion": "{n + 1}"}}\n' for n in range(40))
    )
    given = config(task={"path": str(rows)}, evaluation={"every": 2})
    alphabet = "model.init.vocabulary=0123456789+="
    with pytest.raises(IsobitError, match=r"evaluation\.stop_at: task 'file' has no reward"):
        made(load_sft_config(given, [alphabet, "evaluation.stop_at=0.5"]))
    with pytest.raises(IsobitError, match=r"evaluation\.every: the held-out split is empty"):
        made(load_sft_config(given, [alphabet, "task.held_out_size=0"]))


def test_the_result_loads_in_transformers(config: WriteConfig) -> None:
    transformers = pytest.importorskip("transformers")
    out = made(load_sft_config(config()))
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.config.num_hidden_layers == 2


def test_the_same_config_is_made_once(
    config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config()
    first = cached_model(str(path))
    assert "making the base model" in capsys.readouterr().err
    before = (first / "model.safetensors").stat().st_mtime_ns
    assert cached_model(str(path)) == first
    assert capsys.readouterr().err == ""
    assert (first / "model.safetensors").stat().st_mtime_ns == before
    assert not (path.parent / "run").exists()
    assert {each.name for each in first.parent.iterdir()} == {first.name, f".{first.name}.lock"}


def test_a_base_has_the_bits_of_the_run_and_goes_on_where_it_was(
    config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal ends the making; what is there after it is made anew from the second step on, not
    from the first."""
    path = config(steps=5)
    wanted = (made(load_sft_config(path)) / "model.safetensors").read_bytes()
    next_batch, steps = GivenAnswers.next, list[int]()

    def interrupted(source: GivenAnswers) -> Any:
        steps.append(source.state.step)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return next_batch(source)

    monkeypatch.setattr(GivenAnswers, "next", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cached_model(str(path), quiet=True)
    found = cached_model(str(path), quiet=True)
    assert steps == [0, 1, 2, 3, 4]
    assert (found / "model.safetensors").read_bytes() == wanted


@pytest.mark.parametrize("changes", [{"seed": 1}, {"steps": 2}, {"precision": "bf16"}])
def test_another_config_is_another_model(config: WriteConfig, changes: dict[str, object]) -> None:
    first = cached_model(str(config()), quiet=True)
    assert cached_model(str(config(**changes)), quiet=True) != first


@pytest.mark.parametrize(
    ("stops", "changes", "same"),
    [
        (True, "held out", False),
        (False, "held out", True),
        (False, "train", False),
        (False, "file", False),
        (True, None, True),
    ],
)
def test_a_base_is_known_by_what_decides_about_it(
    stops: bool, changes: str | None, same: bool, config: WriteConfig
) -> None:
    """Held-out rows decide where an evaluation may end its making, and only there."""
    asked = {"every": 2, "stop_at": 0.5} if stops else {"every": 2}
    loaded = load_sft_config(config(evaluation=asked))
    task = load_supervised(loaded)
    first = base._identity(loaded, task)

    def other(examples: Sequence[Example]) -> list[Example]:
        if changes == "file":
            return [replace(examples[0], source=1), *examples[1:]]
        return [replace(examples[0], columns={"answer": "another"}), *examples[1:]]

    name = "held_out" if changes == "held out" else "train"
    if changes is not None:
        split = getattr(task, name)
        task = replace(task, **{name: replace(split, examples=other(split.examples))})
    assert (base._identity(loaded, task) == first) == same


def test_what_ends_one_file_does_not_begin_the_next(config: WriteConfig, tmp_path: Path) -> None:
    """Nor is a folder of weights held in memory to be hashed: it is read in pieces."""
    folder = made(load_sft_config(config()))
    loaded = load_sft_config(config(model={"path": str(folder)}))
    task = load_supervised(loaded)
    first = base._identity(loaded, task)
    (folder / "a.x").write_bytes(b"one")
    (folder / "b.x").write_bytes(b"two")
    both = base._identity(loaded, task)
    (folder / "a.x").write_bytes(b"onet")
    (folder / "b.x").write_bytes(b"wo")
    assert len({first, both, base._identity(loaded, task)}) == 3


def test_a_precision_with_other_formats_is_another_model(
    config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name stays, where a version changes what a preset is."""
    first = cached_model(str(config(precision="fp8")), quiet=True)
    assert cached_model(str(config(precision="fp8")), quiet=True) == first
    then = precision_from("fp8[kv_cache=e4m3]").formats()
    monkeypatch.setattr(Precision, "formats", lambda self: then)
    assert cached_model(str(config(precision="fp8")), quiet=True) != first


def test_a_base_has_its_own_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the run's is: on another processor its sums stay in the order that they had."""
    monkeypatch.setattr("isobit.config.load.default_order", lambda: "vdp32")
    on_a_gpu = {"backend": "triton", "order": "triton", "bitwise": "tdp32"}
    on_a_cpu = {"backend": "native", "order": "tdp32-v1+rows32-v1", "bitwise": "tdp32"}
    kept = {"consistency": "bitwise-tdp32"}
    assert in_its_order({"backend": "native"}, on_a_gpu) == {"backend": "native", **kept}
    assert in_its_order({"backend": "triton"}, on_a_cpu) == {"backend": "triton"}
    assert in_its_order({}, on_a_gpu) == {}
    assert in_its_order({}, on_a_cpu) == kept
    assert in_its_order({"consistency": "fast"}, on_a_cpu) == {"consistency": "fast"}
    assert in_its_order({}, {}) == in_its_order({}, {**on_a_cpu, "bitwise": "vdp32"}) == {}


def test_other_data_and_other_weights_are_another_model(
    config: WriteConfig, base_model: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "completion": "2"}\n')
    task = {"path": str(rows), "held_out_size": 0}
    first = cached_model(str(config(task=task, model={"path": str(base_model)})), quiet=True)
    rows.write_text('{"prompt": "1+1=", "completion": "3"}\n')
    second = cached_model(str(config(task=task, model={"path": str(base_model)})), quiet=True)
    assert cached_model(str(config(task=task, model={"path": str(first)})), quiet=True) not in (
        first,
        second,
    )
    assert first != second


def test_an_existing_model_is_not_overwritten(config: WriteConfig) -> None:
    settings = load_sft_config(config())
    out = made(settings)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(IsobitError, match=r"exists and is a run; .* isobit train --resume"):
        made(settings)
    with pytest.raises(IsobitError, match=r"exists and is a model; choose another") as caught:
        made(load_sft_config(settings, [f"out={out}"]))
    assert "--resume" not in str(caught.value)
    assert (out / "model.safetensors").read_bytes() == before


def test_steps_that_are_not_finite_end_the_run(
    config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "isobit.rl.optim.sharded.ShardedOptimizer.gradient_norm", lambda self: float("inf")
    )
    with pytest.raises(
        RunFailed, match="step 3: 3 optimizer steps in a row had a loss or gradient"
    ):
        made(load_sft_config(config(steps=5)))


def test_examples_that_do_not_fit_are_named(config: WriteConfig, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "completion": "2" * 40}) + "\n")
    init = {
        "hidden_size": 32,
        "num_layers": 1,
        "num_heads": 2,
        "max_positions": 32,
        "vocabulary": "0123456789+=",
    }
    path = config(task={"path": str(rows), "held_out_size": 0}, model={"init": init})
    with pytest.raises(
        IsobitError,
        match=r"rows\.jsonl:1: a prompt of 4 tokens .* exceeds the model's context of 32",
    ):
        made(load_sft_config(path))
    assert not (tmp_path / "run").exists()


def test_what_is_held_out_for_the_evaluation_must_fit_too(
    config: WriteConfig, tmp_path: Path
) -> None:
    for name, question in (("train", "1+1="), ("test", "1" * 32)):
        (tmp_path / f"{name}.jsonl").write_text(
            json.dumps({"question": question, "answer": "2"}) + "\n"
        )
    init = {
        "hidden_size": 32,
        "num_layers": 1,
        "num_heads": 2,
        "max_positions": 32,
        "vocabulary": "0123456789+=",
    }
    files = {"path": str(tmp_path / "train.jsonl"), "held_out_path": str(tmp_path / "test.jsonl")}
    path = config(
        task={"name": "gsm8k", "prompt_template": "{prompt}", **files}, model={"init": init}
    )
    with pytest.raises(
        IsobitError,
        match=r"test\.jsonl:1: a prompt of 32 tokens with a completion of 2 exceeds the model's context",
    ):
        made(load_sft_config(path))


def test_what_does_not_fit_is_dropped_where_asked(
    config: WriteConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text(f"question,solution\n1+1=,{'2' * 40}\n1+2=,3\n1+1+1=,3\n")
    columns = {"prompt": "question", "completion": "solution"}
    init = {
        "hidden_size": 32,
        "num_layers": 1,
        "num_heads": 2,
        "max_positions": 32,
        "vocabulary": "0123456789+=",
    }
    task = {
        "path": str(rows),
        "held_out_size": 0,
        "columns": columns,
        "too_long": "drop",
        "max_prompt_tokens": 5,
    }
    made(load_sft_config(config(task=task, model={"init": init})), quiet=False)
    said = capsys.readouterr().err
    assert "2 of 3 training examples dropped for their length; the first: " in said
    assert "rows.csv:2: a prompt of 4 tokens with a completion of 41" in said


def test_what_is_dropped_is_not_planned(config: WriteConfig, tmp_path: Path) -> None:
    """Nor chosen micro-batches for: the longest example is one that is learned. The control keeps
    it, in a longer context."""
    rows = tmp_path / "rows.jsonl"
    long = {"prompt": "1+1=", "completion": "2" * 90}
    rows.write_text(
        "".join(json.dumps(row) + "\n" for row in ({"prompt": "1+2=", "completion": "3"}, long))
    )
    init = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "vocabulary": "0123456789+="}
    task = {"path": str(rows), "held_out_size": 0, "too_long": "drop"}
    for positions, longest in ((32, 6), (128, 95)):
        path = config(task=task, model={"init": {**init, "max_positions": positions}})
        blocks: list[str] = []
        supervised_dry_run(load_sft_config(path), blocks.append)
        assert f"longest example: {longest} tokens" in "".join(blocks)


def test_conversations_are_learned_under_a_given_template(
    config: WriteConfig, tmp_path: Path
) -> None:
    """`messages` as SFT sets have them; the template is saved with the model, and part of what it
    is cached by."""
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    pq.write_table(pa.Table.from_pylist([{"messages": messages}] * 4), tmp_path / "rows.parquet")
    template = tmp_path / "template.jinja"
    turns = "{% for m in messages %}{{ m.content }}{% endfor %}"
    template.write_text(turns)
    init = {
        "hidden_size": 32,
        "num_layers": 1,
        "num_heads": 2,
        "max_positions": 32,
        "vocabulary": "0123456789+=",
    }
    task = {"path": str(tmp_path / "rows.parquet"), "held_out_size": 0}
    path = config(
        task=task, model={"init": init, "chat_template": str(template)}, steps=30, batch_size=4
    )
    first = cached_model(str(path), quiet=True)
    model = Model.load(first)
    assert model.tokenizer.chat_template == template.read_text()
    (group,) = Engine(model).generate([messages[:1]], Sampling(1, 4, 0.0))
    assert (group[0].text, group[0].finish_reason) == ("2", "stop")
    template.write_text(f"={turns}")
    assert cached_model(str(path), quiet=True) != first
    template.unlink()
    with pytest.raises(
        IsobitError, match=r"cannot read chat template .*template\.jinja: No such file"
    ):
        cached_model(str(path), quiet=True)


def test_two_runs_that_begin_at_once_make_their_base_once(
    config: WriteConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    makings, waiting = list[Path](), list[Path]()
    alone = base.alone

    def counted(lock: Path) -> AbstractContextManager[None]:
        waiting.append(lock)
        return alone(lock)

    def make(given: SftConfig, place: Path, quiet: bool) -> None:
        makings.append(place)
        until(lambda: len(waiting) == 4, 60)
        place.mkdir()
        (place / "config.json").touch()

    monkeypatch.setattr(base, "_make", make)
    monkeypatch.setattr(base, "alone", counted)
    path = str(config())
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: cached_model(path, quiet=True), range(4)))
    assert len(makings) == len(found) == 1
    monkeypatch.setenv("ISOBIT_CACHE", str(tmp_path / "sft.yaml"))
    with pytest.raises(
        IsobitError,
        match=r"cannot make the cache folder .*/sft: .*sft.yaml is a file; set ISOBIT_CACHE",
    ):
        cached_model(path)


@pytest.mark.slow
def test_bf16_masters_learn_and_are_saved_as_they_are(config: WriteConfig) -> None:
    """Their loss falls as that of FP32 masters does, and is not the same in any step."""
    losses: dict[str, list[float]] = {}
    for name in ("fp32", "bf16"):
        path = config(steps=10, batch_size=32)
        changes = [f"optimizer.masters={name}", f"out={path.parent / name}"]
        found = train_supervised(load_sft_config(path, changes), quiet=True)
        losses[name] = [row["loss/cross_entropy"] for row in found.metrics]
        out = made_in(found.run_dir)
        saved = load_file(out / "model.safetensors")
        assert {tensor.dtype for tensor in saved.values()} == {
            torch.bfloat16 if name == "bf16" else torch.float32
        }
    assert losses["bf16"] == pytest.approx(losses["fp32"], abs=0.06)
    assert all(one != other for one, other in zip(losses["bf16"], losses["fp32"]))
    assert losses["bf16"][-1] < losses["bf16"][0] - 0.5


ROWS = "".join(f'{{"prompt": "{n}+1=", "completion": "{n + 1}"}}\n' for n in range(40))


def test_rows_without_an_answer_are_refused(
    config: WriteConfig, base_model: Path, tmp_path: Path
) -> None:
    """A list was learned as Python writes it, null as None."""
    rows = tmp_path / "rows.jsonl"
    given = load_sft_config(
        config(task={"path": str(rows), "held_out_size": 0}, model={"path": str(base_model)})
    )
    for value in (None, ["2"], 2, [{"role": "user", "content": "2"}]):
        rows.write_text(ROWS + json.dumps({"prompt": "9+1=", "completion": value}) + "\n")
        with pytest.raises(
            IsobitError,
            match=r"rows\.jsonl:41: column 'completion': expected text or the messages of",
        ):
            made(given)
    assert not (tmp_path / "run").exists()
    taught = set()
    for value in (
        "2",
        [{"role": "assistant", "content": "2"}],
        [{"role": "assistant", "content": "3"}],
    ):
        rows.write_text(json.dumps({"prompt": "1+1=", "completion": value}) + "\n")
        taught.add(made(load_sft_config(given, [override("out", tmp_path / f"{value}")])))
    weights = [(folder / "model.safetensors").read_bytes() for folder in sorted(taught)]
    assert len(set(weights)) == 2
