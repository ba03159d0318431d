"""A supervised run's memory, planned before it reads weights: `isobit sft --dry-run`,
`optimizer.micro_batch_tokens: auto`, and that the plan is what a step takes."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from isobit.config import load_sft_config
from isobit.errors import IsobitError
from isobit.training.commands.dry_run import supervised_dry_run
from isobit.training.loop import training_step
from isobit.training.parts.base import cached_model
from isobit.training.parts.given import lessons_of, load_supervised
from isobit.training.parts.model import described_model
from isobit.training.plan import Job, Machine, host, plan
from isobit.training.plan.advice import changes
from isobit.training.plan.job import supervised_job_of
from isobit.training.plan.live_bytes import LiveBytes
from isobit.training.plan.memory import fitting_tokens
from isobit.training.train import open_run, resume, train_supervised
from tests.models import tiny_model
from tests.runs import fingerprint
from tests.training.test_preference_run import pairs
from tests.training.test_sft_run import written

AUTO = "optimizer.micro_batch_tokens=auto"
HERE = Machine("this machine", 64 << 30, host=True, packs=True)


def job_of(path: Path, *overrides: str) -> Job:
    """What is planned of a config, without weights."""
    config = load_sft_config(path, overrides)
    task = load_supervised(config)
    model = described_model(config, task)
    return lessons_of(task, model, config, True).job(config, model.config, HERE)


def said(path: Path, *overrides: str) -> str:
    blocks: list[str] = []
    supervised_dry_run(load_sft_config(path, overrides), blocks.append)
    return "\n".join(blocks)


def _memory(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(host, "memory_limit", lambda device: (size, "memory of this machine"))


def test_a_dry_run_says_what_a_run_is_and_writes_nothing(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, base_model)
    text = said(path)
    assert "60 training and 8 held-out examples" in text
    assert "6 steps of 7 examples; loss: cross_entropy" in text
    assert "learning: gradients, and saved activations of" in text
    assert "answering held-out prompts: activations" in text
    assert "keys and values of the evaluation" in text
    assert "rolling out" not in text
    assert text.endswith("2 of 2 tokens learned:\n10<eos>") or "tokens learned:\n" in text
    assert "micro-batches of 24 tokens" in text
    assert not (tmp_path / "run").exists()
    of_pairs = said(pairs(tmp_path / "pairs", base_model))
    assert "loss: dpo with beta 0.1" in of_pairs
    assert "reference, working weights only" in of_pairs
    assert "answering held-out prompts" not in of_pairs, "which have no reward"
    _memory(monkeypatch, 1 << 10)
    with pytest.raises(IsobitError, match="the rest of the check, which needs them, is left out"):
        said(path)


def test_random_weights_are_planned_too(tmp_path: Path) -> None:
    assert "qwen3, " in said(written(tmp_path))


@pytest.mark.slow
def test_auto_is_a_number_that_a_run_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner's own; a run that goes on where there is less memory has it still, and its
    bits."""
    path = written(tmp_path)
    limit = int(plan(job_of(path, "optimizer.micro_batch_tokens=128")).total / 0.9)
    small = limit + (64 << 10)
    _memory(monkeypatch, small)
    run = train_supervised(load_sft_config(path, [AUTO, "steps=2"]), quiet=True).run_dir
    kept = yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["micro_batch_tokens"]
    machine = Machine("this machine", small, host=True, packs=True)
    job = job_of(path, AUTO)
    assert kept == fitting_tokens(Job(**{**vars(job), "machine": machine}))
    assert kept % 128 == 0
    _memory(monkeypatch, small // 2)
    resume(run, ["steps=4"], quiet=True)
    plain = written(tmp_path / "plain")
    whole = train_supervised(
        load_sft_config(plain, [f"optimizer.micro_batch_tokens={kept}", "steps=4"]), quiet=True
    )
    assert fingerprint(run) == fingerprint(whole.run_dir)
    with pytest.raises(IsobitError, match="isobit sft --dry-run with a number names the keys"):
        train_supervised(load_sft_config(path, [AUTO, f"run.dir={tmp_path / 'none'}"]), quiet=True)


def test_a_base_model_takes_a_number(tmp_path: Path) -> None:
    path = written(tmp_path, optimizer={"micro_batch_tokens": "auto"})
    with pytest.raises(IsobitError, match="the base model of a run is the same everywhere"):
        cached_model(str(path), quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    ["cross_entropy", "dpo"],
)
def test_a_step_takes_what_was_planned(loss: str, tmp_path: Path) -> None:
    """To 10 %, beyond the weights. The control is the plan of an eighth of a micro-batch."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_layers": 4}
    tiny_model("fp8", **sizes).save(tmp_path / "model")
    given: dict[str, Any] = {"evaluation": {"every": 0}, "batch_size": 84}
    if loss == "cross_entropy":  # answers of one length, of which 42 are a micro-batch
        rows = [{"prompt": f"{a}+{9 - a}=", "completion": "9"} for a in range(1, 9)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        given["task"] = {"path": str(tmp_path / "rows.jsonl"), "held_out_size": 0}
    make = written if loss == "cross_entropy" else pairs
    path = make(tmp_path, tmp_path / "model", **given)
    tokens = "optimizer.micro_batch_tokens=256"
    config = load_sft_config(path, [tokens, "optimizer.share_prompts=false"])
    with LiveBytes() as live, open_run(config, quiet=True) as run:
        loaded = live.live
        for _ in range(2):  # the first makes the moments
            live.take()
            training_step(run)
        measured = live.take() - loaded
    job = job_of(path, tokens, "optimizer.share_prompts=false", "task.held_out_size=0")
    assert measured == pytest.approx(_of_a_step(job), rel=0.1)
    other = job.changed("optimizer.micro_batch_tokens=32")
    assert measured != pytest.approx(_of_a_step(other), rel=0.1), "the control"


def _of_a_step(job: Job) -> int:
    planned = plan(job)
    held = sum(size for label, size in planned.held if "moments" in label)
    return held + next(size for label, size in planned.parts if label.startswith("learning"))


def test_a_plan_without_data_is_the_one_with_its_lengths(tmp_path: Path, base_model: Path) -> None:
    """That of a run whose longest example has as many tokens; the control has one more."""
    tokens = "optimizer.micro_batch_tokens=4096"
    for path in (written(tmp_path, base_model), pairs(tmp_path / "pairs", base_model)):
        read, config = job_of(path, tokens), load_sft_config(path, [tokens])
        learning = plan(read).parts[0]
        for more in (0, 1):
            lengths = read.prompt, read.completion + more
            planned = plan(supervised_job_of(config, HERE, read.model, *lengths))
            assert (planned.parts[0] == learning) == (more == 0)


@pytest.mark.slow
def test_what_lowers_a_plan_are_keys_of_a_supervised_run(tmp_path: Path) -> None:
    tiny_model(hidden_size=256, intermediate_size=768, num_layers=6).save(tmp_path / "model")
    path = written(tmp_path, tmp_path / "model", optimizer={"micro_batch_tokens": 4096})
    keys = {change.keys[0].partition("=")[0] for change in changes(job_of(path))}
    assert {"optimizer.state", "adapter.rank"} <= keys
    assert not {key for key in keys if key.startswith(("engine", "serve", "sampling", "prec"))}
