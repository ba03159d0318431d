"""Exact resume: whatever interrupts a run, the one that goes on ends as the one that was never
stopped."""

import json
import os
import random
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isobit.config import load_config
from isobit.errors import IsobitError, RunFailed
from isobit.evaluation.periodic import PeriodicEvaluation
from isobit.monitor.screen.watch import Watched
from isobit.options.consistency import TDP32, VDP32, default_order
from isobit.rl.learner.learner import Learner
from isobit.run import checkpoints
from isobit.run.directory import LOCK, REPORT, read_jsonl
from isobit.training.commands.evaluate import evaluation_config
from isobit.training.loop import training_step
from isobit.training.objects import Given
from isobit.training.train import open_resumed, resume, train
from tests import warm
from tests.models import slow_where, tiny_model
from tests.runs import fingerprint, killed_after, wait_for_lines, write_config

STEPS = 8
HARD = {
    "algorithm": {"preset": "dapo", "updates_per_batch": 2},
    "rollouts_ahead": 1,
    "replay": {"capacity": 5, "groups_per_step": 1, "max_staleness": 4},
    "evaluation": {"every": 3, "samples": 4},
    "prompts_per_step": 3,
    "sampling": {"group_size": 3, "max_new_tokens": 3},
    "steps": STEPS,
}
"""Dynamic sampling leaves groups over, a batch waits, past groups are replayed, several updates
shuffle, evaluation syncs: all that a checkpoint must hold."""


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("unbroken")
    return fingerprint(train(load_config(write_config(folder, base_model, **HARD))).run_dir)


def start(config: Path) -> warm.Process:
    return warm.start(["isobit", "train", str(config), "--quiet"], config.parent)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_killed_at_a_random_moment(
    tmp_path: Path, base_model: Path, unbroken: dict[str, object], seed: int
) -> None:
    """SIGKILL in the middle of step k, for five random k."""
    generator = random.Random(seed)
    config = write_config(tmp_path, base_model, **HARD)
    process = start(config)
    killed_after(process, tmp_path / "run", generator.randint(1, STEPS), generator.random() * 0.05)
    result = resume(tmp_path / "run")
    assert result.exit_code == 0
    assert fingerprint(result.run_dir) == unbroken


@pytest.mark.slow
def test_killed_under_muon(tmp_path: Path, base_model: Path, unbroken: dict[str, object]) -> None:
    """Its momentum goes on too; the control is the run of the default, AdamW."""
    settings = {**HARD, "optimizer": {"name": "muon"}}
    (tmp_path / "whole").mkdir()
    whole = fingerprint(
        train(load_config(write_config(tmp_path / "whole", base_model, **settings))).run_dir
    )
    killed_after(start(write_config(tmp_path, base_model, **settings)), tmp_path / "run", 4)
    assert fingerprint(resume(tmp_path / "run").run_dir) == whole
    assert whole != unbroken


FAILING = """
from pathlib import Path

def digits(prompts, completions, trainer_state):
    if trainer_state.global_step >= {step} and Path({flag!r}).exists():
        raise ConnectionError("the judge is away")
    return [sum(c in "56789" for c in text) / 3 for text in completions]
"""


@pytest.mark.parametrize(
    ("step", "changes"),
    slow_where(
        [
            (0, {}),
            (4, {}),  # while step 5 is rolled out
            (3, {}),  # in the evaluation after step 3: only the row of metrics is missing
            (STEPS, {"evaluation": {"every": STEPS, "samples": 4}}),  # in the very last evaluation
            (4, {"precision": "fp8-rollout-kv", "algorithm": {"preset": "grpo"}}),
        ],
        lambda step, changes: (step, changes) != (4, {}),
    ),
    ids=["first step", "a step", "evaluation", "last evaluation", "calibrated cache"],
)
def test_a_reward_that_fails_loses_no_finished_step(
    tmp_path: Path, base_model: Path, step: int, changes: dict[str, Any]
) -> None:
    """Without a checkpoint of its own since the beginning, the run that goes on is the one that
    never failed."""
    settings = {**HARD, **changes}
    (tmp_path / "unbroken").mkdir()
    whole = fingerprint(
        train(load_config(write_config(tmp_path / "unbroken", base_model, **settings))).run_dir
    )
    flag = tmp_path / "away"
    (tmp_path / "failing.py").write_text(FAILING.format(step=step, flag=str(flag)))
    rewards = {"functions": [{"function": f"{tmp_path}/failing.py:digits"}]}
    config = load_config(
        write_config(tmp_path, base_model, **settings, rewards=rewards), ["run.checkpoint_every=0"]
    )
    if step:
        flag.touch()
        saved = (
            f"ConnectionError: the judge is away .*; step {step} is saved; go on with: "
            "isobit train --resume "
        )
        with pytest.raises(RunFailed, match=saved):
            train(config)
        newest = checkpoints.newest(tmp_path / "run" / "checkpoints")[0]
        assert newest.name == f"step-{step:06d}"
        with pytest.raises(RunFailed, match="the judge is away"):
            resume(tmp_path / "run")  # still away: fails again, and loses nothing again
        flag.unlink()
        resume(tmp_path / "run")
    else:
        flag.touch()
        with pytest.raises(
            RunFailed, match="the judge is away"
        ):  # in the evaluation before the first step
            train(config)
        flag.unlink()
        resume(tmp_path / "run")
    assert fingerprint(tmp_path / "run") == whole


@pytest.mark.slow
def test_a_run_that_a_reward_stopped_goes_on_without_it(tmp_path: Path, base_model: Path) -> None:
    """`rewards.on_error` may change: completions that cannot be scored are left out from there
    on."""
    source = (
        "def digits(completions, **columns):\n    if completions[0] > '5':\n        raise "
        "ValueError('never')\n"
    )
    (tmp_path / "choosy.py").write_text(
        source + "    return [float(len(text)) for text in completions]\n"
    )
    rewards = {"functions": [{"function": f"{tmp_path}/choosy.py:digits"}]}
    with pytest.raises(RunFailed, match="ValueError: never"):
        train(load_config(write_config(tmp_path, base_model, steps=2, rewards=rewards)))
    with pytest.raises(RunFailed, match="ValueError: never"):
        resume(tmp_path / "run")
    assert len(resume(tmp_path / "run", ["rewards.on_error=skip"]).metrics) == 2
    assert sum(row["groups/unscored"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")) > 0


def test_weights_that_broke_are_not_saved(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: after a step that learned, and where the run diverged, the last checkpoint stays
    the last."""
    config = load_config(write_config(tmp_path, base_model, **HARD), ["run.checkpoint_every=0"])
    learn = Learner.learn

    def broken(self: Learner, samples: Any, advantages: Any, step: int) -> dict[str, float]:
        learned = learn(self, samples, advantages, step)
        if step == 3:
            raise RunFailed("half a step is learned")
        return learned

    monkeypatch.setattr(Learner, "learn", broken)
    with pytest.raises(RunFailed, match=r"half a step is learned$"):
        train(config)
    assert checkpoints.newest(tmp_path / "run" / "checkpoints")[0].name == "step-000000"


def test_control_another_seed_is_told_apart(
    tmp_path: Path, base_model: Path, unbroken: dict[str, object]
) -> None:
    other = train(load_config(write_config(tmp_path, base_model, **HARD, seed=1)))
    for name in ("model.safetensors", "completions", "metrics"):
        assert fingerprint(other.run_dir)[name] != unbroken[name]


@pytest.mark.slow
def test_extended_step_by_step(
    tmp_path: Path, base_model: Path, unbroken: dict[str, object]
) -> None:
    """A constant rate does not depend on the number of steps, so a run may be stopped and extended
    at every step. What is evaluated only because a step was the last one leaves no trace in a
    longer run."""
    train(load_config(write_config(tmp_path, base_model, **HARD), ["steps=1"]))
    for steps in range(2, STEPS + 1):
        *_, last = read_jsonl(tmp_path / "run" / "metrics.jsonl")
        assert "accuracy/held_out" in last
        if steps in (3, 6):  # finished: it stays as it is
            resume(tmp_path / "run")
        resume(tmp_path / "run", [f"steps={steps}"])
    assert fingerprint(tmp_path / "run") == unbroken
    resume(tmp_path / "run")
    assert fingerprint(tmp_path / "run") == unbroken


def _content(run: Path) -> dict[str, bytes]:
    """Every file but the report, which says when it was written, and the lock."""
    files = (path for path in run.rglob("*") if path.is_file() and path.name not in (REPORT, LOCK))
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


@pytest.mark.parametrize("steps", [3, 4])
def test_a_finished_run_has_nothing_to_do(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Also where its last step was evaluated only for being the last, and the model of that step is
    the best."""
    evaluate, counted = PeriodicEvaluation.evaluate, list[int]()

    def better(self: PeriodicEvaluation, progress: Mapping[str, float]) -> Any:
        found, line, answered = evaluate(self, progress)
        counted.append(len(counted))
        return found | {"accuracy/held_out": len(counted) / 10}, line, answered

    monkeypatch.setattr(PeriodicEvaluation, "evaluate", better)
    run = train(load_config(write_config(tmp_path, base_model, **HARD), [f"steps={steps}"])).run_dir
    before, evaluations = _content(run), len(counted)
    assert json.loads(before["best/best.json"])["step"] == steps
    resumed = open_resumed(run, (), Given(), quiet=True)
    assert resumed.best.step == steps
    with resumed:
        assert not resumed.unfinished
        resumed.finish()
    assert (_content(run), len(counted)) == (before, evaluations)
    # the control: with the end of the last row lost, only a step that was evaluated as the last is
    # evaluated again
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[: None if steps == 3 else -1])
    resume(run)
    assert len(counted) == evaluations + (steps == 4)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_finish_the_step_and_save(
    tmp_path: Path, base_model: Path, unbroken: dict[str, object], number: signal.Signals, code: int
) -> None:
    process = start(write_config(tmp_path, base_model, **HARD))
    wait_for_lines(tmp_path / "run" / "metrics.jsonl", 3)
    process.kill(number)
    done = process.wait()
    assert done.returncode == code
    assert "finishing this step" in done.stderr
    state = json.loads(
        (
            checkpoints.newest(tmp_path / "run" / "checkpoints")[0] / "trainer" / "state.json"
        ).read_text()
    )
    assert 2 <= state["step"] < STEPS
    assert fingerprint(resume(tmp_path / "run").run_dir) == unbroken


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path,
    base_model: Path,
    unbroken: dict[str, object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(load_config(write_config(tmp_path, base_model, **HARD), ["steps=6"]))
    newest = checkpoints.all_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    with (newest / "model.safetensors").open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\x00\x01\x02")
    resume(tmp_path / "run", [f"steps={STEPS}"])
    assert (
        "step-000006 is damaged (model.safetensors does not match its checksum)"
        in capsys.readouterr().err
    )
    found = fingerprint(tmp_path / "run")
    for name in ("model.safetensors", "completions"):
        assert found[name] == unbroken[name]


def test_a_bf16_model_is_first_saved_as_such_and_goes_on_from_there(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_model().save(base, torch.bfloat16)
    finished = train(load_config(write_config(tmp_path, base))).run_dir
    wanted = fingerprint(finished)
    saved = checkpoints.all_checkpoints(finished / "checkpoints")
    kinds = [{x.dtype for x in load_file(path / "model.safetensors").values()} for path in saved]
    assert kinds == [{torch.float32}, {torch.float32}], "what has learned is no BF16 model"
    config = write_config(tmp_path, base, run={"dir": str(tmp_path / "again"), "keep_last": 9})
    again = train(load_config(config)).run_dir
    first, *others = checkpoints.all_checkpoints(again / "checkpoints")
    assert {x.dtype for x in load_file(first / "model.safetensors").values()} == {torch.bfloat16}
    for path in others:
        shutil.rmtree(path)
    assert fingerprint(resume(again).run_dir) == wanted


def test_a_run_goes_on_with_its_own_backend_only(tmp_path: Path, base_model: Path) -> None:
    """`auto` may choose another on another machine, whose bits would be others. A run from before a
    format was recorded has none of it, and goes on; the control is one that had another."""
    config = write_config(tmp_path, base_model, steps=1, backend="auto")
    run_dir = train(load_config(config)).run_dir
    machine = json.loads((run_dir / "machine.json").read_text())
    assert machine["backend"] in ("native", "reference")
    assert machine["backend"] in machine["why"]
    assert machine["torch"] == torch.__version__
    (run_dir / "machine.json").write_text(json.dumps(machine | {"backend": "triton"}))
    with pytest.raises(
        IsobitError, match="was computed by the triton backend, and here it would go on by"
    ):
        resume(run_dir, ["steps=2"])
    formats = machine["formats"]
    assert (
        formats.pop("rollout.probabilities")
        == formats.pop("learner.probabilities")
        == "not rounded"
    )
    other = {**machine, "formats": formats | {"learner.probabilities": "e4m3"}}
    (run_dir / "machine.json").write_text(json.dumps(other))
    with pytest.raises(
        IsobitError, match=r"began with learner\.probabilities e4m3, and .* has not rounded; resume"
    ):
        resume(run_dir, ["steps=2"])
    (run_dir / "machine.json").write_text(json.dumps(machine))
    assert resume(run_dir, ["steps=2"]).metrics[-1]["step"] == 2


@pytest.mark.parametrize(
    ("file", "was", "message"),
    [
        (
            "machine.json",
            {"calibration": "Calibration(side='rollout', percentile=99.9, margin=1.05, prompts=8)"},
            r"began with calibration Calibration\(side='rollout'.*this version of isobit has Calib",
        ),
        ("resolved.json", {"correction": "none"}, "began with correction none .* with token_tis"),
    ],
)
def test_a_run_of_a_preset_that_had_another_rule_is_not_resumed(
    tmp_path: Path, base_model: Path, file: str, was: dict[str, str], message: str
) -> None:
    """A run keeps a preset by name; the rules that the name stood for are recorded beside it. The
    control has today's, in the words of a release that knew no other."""
    config = write_config(tmp_path, base_model, steps=1, precision="fp8-rollout-kv")
    run_dir = train(load_config(config)).run_dir
    recorded = json.loads((run_dir / file).read_text())
    place = recorded["formats"] if file == "machine.json" else recorded
    before = dict(place)
    place.update(was)
    (run_dir / file).write_text(json.dumps(recorded))
    with pytest.raises(IsobitError, match=message):
        resume(run_dir, ["steps=2"])
    place.update(before)
    (run_dir / file).write_text(json.dumps(recorded))
    assert resume(run_dir, ["steps=2"]).metrics[-1]["step"] == 2
    rule = "Calibration(side='learner', percentile=99.9, margin=1.05, prompts=8)"
    assert before.get("calibration", rule) == rule


@pytest.mark.slow
def test_a_run_of_another_processor_goes_on_in_its_order(tmp_path: Path, base_model: Path) -> None:
    """`bitwise` has the order that the run began with. The control: the other order is refused by
    name."""
    here, there = (
        name if default_order() == TDP32 else other
        for name, other in ((TDP32, VDP32), (VDP32, TDP32))
    )
    config = write_config(tmp_path, base_model, steps=2, consistency=f"bitwise-{there}")
    unbroken = fingerprint(train(load_config(config)).run_dir)
    other = train(
        load_config(config, ["consistency=bitwise", f"run.dir={tmp_path / 'here'}"])
    ).run_dir
    assert fingerprint(other) != unbroken
    run_dir = tmp_path / "there"
    train(load_config(config, ["steps=1", f"run.dir={run_dir}"]))
    machine = json.loads((run_dir / "machine.json").read_text())
    assert (machine["bitwise"], machine["order"]) == (here, f"{there}-v1+rows32-v1")
    text = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(text.replace(f"bitwise-{there}", f"bitwise-{here}"))
    with pytest.raises(
        IsobitError, match=rf"in the order {there}-v1\S+, and here it would go on in {here}-v1"
    ):
        resume(run_dir, ["steps=2"])
    (run_dir / "config.yaml").write_text(text.replace(f"bitwise-{there}", "bitwise"))
    (run_dir / "machine.json").write_text(json.dumps(machine | {"bitwise": there}))
    assert evaluation_config(run_dir, ()).consistency == f"bitwise-{there}"
    resume(run_dir, ["steps=2"])
    assert fingerprint(run_dir) == unbroken


def test_what_cannot_be_resumed_is_said(tmp_path: Path, base_model: Path) -> None:
    with pytest.raises(IsobitError, match="not a run directory"):
        resume(tmp_path)
    train(load_config(write_config(tmp_path, base_model), ["steps=2"]))
    with pytest.raises(IsobitError, match="only these may change: steps, "):
        resume(tmp_path / "run", ["optimizer.learning_rate=1"])
    with pytest.raises(IsobitError, match="has finished step 2"):
        resume(tmp_path / "run", ["steps=1"])
    for path in checkpoints.all_checkpoints(tmp_path / "run" / "checkpoints"):
        (path / "manifest.json").unlink()
    with pytest.raises(IsobitError, match=r"all 2 are damaged: .*manifest\.json is missing"):
        resume(tmp_path / "run", ["steps=4"])


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o007])
def test_modes_are_those_of_the_umask(tmp_path: Path, base_model: Path, mask: int) -> None:
    """Every file and directory of a run: whoever shares a group's directory can read its runs, or
    nobody can."""
    before = os.umask(mask)
    try:
        evaluation = {"every": 1, "samples": 2}
        run = train(
            load_config(write_config(tmp_path, base_model, evaluation=evaluation), ["steps=1"])
        ).run_dir
        resume(run, ["steps=2", "run.report=true"])
    finally:
        os.umask(before)
    paths = [run, *run.rglob("*")]
    assert {"model.safetensors", "optimizer.safetensors"} < {path.name for path in paths}
    modes = {str(path): path.stat().st_mode & 0o777 for path in paths}
    assert modes == {str(path): (0o777 if path.is_dir() else 0o666) & ~mask for path in paths}


def test_an_extended_run_is_counted_right(
    tmp_path: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On its own screen, with what it had done before; in its config, also after a kill; and for
    `isobit watch`, which looks on meanwhile."""
    run = train(load_config(write_config(tmp_path, base_model), ["steps=2"])).run_dir
    seen = Watched(run)
    seen.look()
    assert (seen.history.step, seen.history.total, seen.finished) == (2, 2, True)
    resumed = open_resumed(run, ["steps=4"], Given(), quiet=False)
    capsys.readouterr()
    with resumed:
        assert resumed.display.history.step == 2
        assert len(resumed.display.history.values("reward/mean")) == 2
        training_step(resumed)
        seen.look()
        assert (seen.history.step, seen.history.total, seen.finished) == (3, 4, False)
        assert resumed.display.history.values("reward/mean") == seen.history.values("reward/mean")
        assert resumed.display.history.total_of("mismatch/compared_tokens") > 0
    # killed here: what was extended goes on to its new end
    assert resume(run, quiet=False).metrics[-1]["step"] == 4
    assert "step 4/4" in capsys.readouterr().err
    assert load_config(run / "config.yaml").steps == 4
    assert Watched(run).history.total == 4
