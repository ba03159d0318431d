"""Evaluation inside training: what it logs, that training does not feel it, and that the best model
is kept through kills and resumes."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isobit.config import load_config
from isobit.engine.engine import Engine
from isobit.errors import RunFailed
from isobit.evaluation.best import Best
from isobit.evaluation.majority import majority_at_k
from isobit.evaluation.periodic import PeriodicEvaluation
from isobit.model import Model
from isobit.monitor.report.intervals import pass_at_k
from isobit.run import checkpoints
from isobit.run.directory import read_jsonl
from isobit.run.metrics import is_timing
from isobit.training.parts.assembly import evaluation_plan, open_parts
from isobit.training.train import resume, train
from tests.runs import fingerprint, write_config

STEPS = 8
SETTINGS: dict[str, Any] = {
    "evaluation": {"every": 1, "samples": 6, "num_samples": 4, "best_by": "reward/held_out"},
    "optimizer": {"learning_rate": 5e-3},
    "run": {"checkpoint_every": 3},
    "steps": STEPS,
}


def digest(path: Path) -> str:
    return hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()


def described(run: Path) -> dict[str, Any]:
    return json.loads((run / "best" / "best.json").read_text())


def logged(run: Path, metric: str) -> dict[int, float]:
    return {row["step"]: row[metric] for row in read_jsonl(run / "metrics.jsonl") if metric in row}


def training_only(row: dict[str, float]) -> dict[str, float]:
    """A row of metrics without what depends on time, and without what an evaluation adds."""
    evaluated = ("accuracy/", "reward/held_out", "memory/kv_cache_mib")
    return {
        name: value
        for name, value in row.items()
        if not is_timing(name) and not name.startswith(evaluated)
    }


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    return train(load_config(write_config(folder, base_model, **SETTINGS))).run_dir


def test_the_best_model_is_that_of_the_largest_value(
    unbroken: Path, tmp_path: Path, base_model: Path
) -> None:
    """Its step, its value, and its weights: those of a run that ends there. Not the last, so that
    the test is one."""
    values = logged(unbroken, "reward/held_out")
    best = described(unbroken)
    assert best == {
        "step": max(values, key=lambda s: (values[s], -s)),
        "metric": "reward/held_out",
        "value": max(values.values()),
    }
    assert 0 < best["step"] < STEPS
    shorter = train(
        load_config(write_config(tmp_path, base_model, **SETTINGS), [f"steps={best['step']}"])
    ).run_dir
    assert digest(unbroken / "best") == digest(checkpoints.newest(shorter / "checkpoints")[0])
    assert digest(unbroken / "best") != digest(checkpoints.newest(unbroken / "checkpoints")[0])


def test_it_is_a_whole_model_of_weights_only(unbroken: Path) -> None:
    folder = unbroken / "best"
    assert checkpoints.damage(folder) is None
    assert not (folder / "trainer").exists()
    assert Model.load(folder).config.num_layers == 2
    assert not list(unbroken.glob(".*-*"))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp8", "fp8-rollout-kv"])
def test_training_does_not_feel_the_evaluation(
    tmp_path: Path, base_model: Path, precision: str
) -> None:
    """Without it, greedy only, and with samples: the same weights, completions and metrics, bit for
    bit, also after a resume, and where batches wait and old groups are replayed."""
    hard = {
        "rollouts_ahead": 1,
        "replay": {"capacity": 5, "groups_per_step": 1, "max_staleness": 4},
    }
    found = []
    for name, evaluation in (
        ("off", {}),
        ("greedy", {"every": 2}),
        ("sampled", {"every": 1, "num_samples": 5}),
    ):
        (tmp_path / name).mkdir()
        config = write_config(
            tmp_path / name, base_model, precision=precision, evaluation=evaluation, **hard
        )
        run = train(load_config(config, ["steps=2"])).run_dir
        result = resume(run, ["steps=4"])
        prints = fingerprint(result.run_dir)
        del (
            prints["best"],
            prints["manifest.json"],
        )  # which has that of the state, where the best value is
        prints["metrics"] = json.dumps(
            [training_only(row) for row in result.metrics if row["step"] > 0]
        )
        found.append(prints)
    assert found[0] == found[1] == found[2]


def test_samples_are_neither_those_of_training_nor_of_another_step(
    unbroken: Path, base_model: Path, tmp_path: Path
) -> None:
    config = load_config(write_config(tmp_path, base_model, **SETTINGS))
    assert evaluation_plan(config).asked.seed != config.seed
    assert (
        evaluation_plan(config).asked.seed
        != evaluation_plan(load_config(tmp_path / "config.yaml", ["seed=1"])).asked.seed
    )


def test_the_metrics_are_those_of_the_completions(tmp_path: Path, base_model: Path) -> None:
    """pass@k and maj@k of samples that are drawn again here, and accuracy by tag."""
    rows = [{"prompt": f"{i}+{i + 1}=", "level": "low" if i < 4 else "high"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "threes.py").write_text(
        "def threes(prompts, completions, **k):\n    return [float('3' in c) for c in "
        "completions]\n"
    )
    config = load_config(
        write_config(
            tmp_path,
            base_model,
            rewards={"functions": [{"function": f"{tmp_path}/threes.py:threes"}]},
        ),
        [
            f"task={{path: {tmp_path}/rows.jsonl, held_out_path: {tmp_path}/rows.jsonl}}",
            "evaluation={every: 1, num_samples: 6, pass_at: [1, 3, 6], tag: level, temperature: "
            "0.8}",
            "steps=1",
        ],
    )
    run = train(config).run_dir
    first = next(iter(read_jsonl(run / "metrics.jsonl")))
    engine = Engine(Model.load(base_model))
    groups = engine.generate([row["prompt"] for row in rows], evaluation_plan(config).sampling)
    right = [["3" in c.text for c in group] for group in groups]
    assert 0 < sum(map(sum, right)) < 48
    for k in (1, 3, 6):
        passed = [pass_at_k(6, sum(flags), k) for flags in right]
        voted = [
            majority_at_k([c.text or None for c in g], f, [k])[k] for g, f in zip(groups, right)
        ]
        assert first[f"accuracy/pass_at_{k}"] == pytest.approx(sum(passed) / 8)
        assert first[f"accuracy/majority_at_{k}"] == pytest.approx(sum(voted) / 8)
    assert first["accuracy/majority_at_1"] == first["accuracy/pass_at_1"]
    by_tag = (first["accuracy/tag/low"] + first["accuracy/tag/high"]) / 2
    assert by_tag == pytest.approx(first["accuracy/held_out"])


class Killed(Exception):
    """Stands for SIGKILL: nothing of the run's own code runs after it."""


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_killed_run_ends_with_the_same_best_model(
    tmp_path: Path, base_model: Path, unbroken: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Killed after the evaluation of every step, before the checkpoint that may follow."""
    config = write_config(tmp_path, base_model, **SETTINGS)

    def kill(self: Best, at: int, metrics: dict[str, float]) -> None:
        consider(self, at, metrics)
        if at == step:
            raise Killed

    consider = Best.consider
    monkeypatch.setattr(Best, "consider", kill)
    with pytest.raises(Killed):
        train(load_config(config))
    monkeypatch.setattr(Best, "consider", consider)
    values = logged(unbroken, "reward/held_out")
    run, at = tmp_path / "run", (step - 1) // 3 * 3  # the newest checkpoint
    known = max(range(at + 1), key=lambda s: (values[s], -s))
    restored: list[int] = []
    restore = Best.restore

    def watched(self: Best, saved: dict[str, Any] | None) -> None:
        restore(self, saved)
        restored.append(described(run)["step"])

    monkeypatch.setattr(Best, "restore", watched)
    resume(run)
    assert restored == [
        known
    ]  # what an unbroken run had at that checkpoint, not what the killed one went on to
    assert described(run) == described(unbroken)
    assert digest(run / "best") == digest(unbroken / "best")
    assert not list(run.glob(".*-*"))
    assert fingerprint(run) == fingerprint(unbroken)


@pytest.mark.slow
def test_rewards_below_one_are_told_apart_by_their_mean(
    tmp_path: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default. The control asks for accuracy, which is 0 throughout: the initial model stays."""
    (tmp_path / "low.py").write_text(
        "def low(completions, **k):\n    return [sum(c in '56789' for c in text) / 9 for text "
        "in completions]\n"
    )
    found = {}
    for by in ("auto", "accuracy/held_out"):
        evaluation = {**SETTINGS["evaluation"], "best_by": by}
        changes = {
            **SETTINGS,
            "evaluation": evaluation,
            "run": {"dir": str(tmp_path / by), "checkpoint_every": 3},
        }
        functions = [{"function": f"{tmp_path}/low.py:low"}]
        config = write_config(tmp_path, base_model, **changes, rewards={"functions": functions})
        found[by] = train(load_config(config), quiet=False).run_dir
    said = capsys.readouterr().err
    values = logged(found["auto"], "reward/held_out")
    assert max(values.values()) < 1
    best = described(found["auto"])
    assert (best["metric"], best["value"]) == ("reward/held_out", max(values.values()))
    assert best["step"] == max(values, key=lambda s: (values[s], -s)) > 0
    assert described(found["accuracy/held_out"]) == {
        "step": 0,
        "metric": "accuracy/held_out",
        "value": 0.0,
    }
    assert (
        f"best reward/held_out {best['value']:.4f} (accuracy/held_out is 0 throughout) at step "
        f"{best['step']}"
    ) in said


def test_auto_takes_accuracy_first(tmp_path: Path) -> None:
    best = Best(
        tmp_path, "auto", lambda to: (to / "model.safetensors").write_text("weights") and None
    )
    rows = [
        (0.0, 0.3),
        (0.0, math.nan),
        (0.0, 0.4),
        (0.5, 0.2),
        (0.25, 0.9),
        (0.5, 0.3),
        (0.5, 0.3),
        (math.nan, 2.0),
    ]
    kept = []
    for step, (accuracy, reward) in enumerate(rows):
        best.consider(step, {"accuracy/held_out": accuracy, "reward/held_out": reward})
        kept.append(described(tmp_path)["step"])
    assert kept == [0, 0, 2, 3, 3, 5, 5, 5]
    assert described(tmp_path)["values"] == {"accuracy/held_out": 0.5, "reward/held_out": 0.3}
    assert "best accuracy/held_out 0.5000 (reward/held_out 0.3000) at step 5" in str(best.line(7))
    again = Best(tmp_path, "auto", lambda to: None)
    again.restore(best.to_json())
    assert again.to_json() == best.to_json()
    assert (again.step, again.values) == (best.step, best.values)


def keeper(folder: Path, text: Callable[[], str] = lambda: "weights") -> Best:
    return Best(folder, "m", lambda to: (to / "model.safetensors").write_text(text()) and None)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda best: (best / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda best: (best / "model.safetensors").write_text("x"), "does not match its checksum"),
        (shutil.rmtree, "manifest.json is missing"),
        (lambda best: checkpoints.replace(best, lambda to: None), "names no files"),
    ],
)
def test_a_best_model_that_is_not_whole_is_said(
    tmp_path: Path, harm: Callable[[Path], None], reason: str
) -> None:
    """The control is whole, or none was kept."""
    best = keeper(tmp_path)
    assert best.problem(None) is None
    best.consider(1, {"m": 0.1})
    saved = best.to_json()
    assert best.problem(saved) is None
    assert "is damaged (its best.json is not the checkpoint's)" in str(
        best.problem({**(saved or {}), "step": 2})
    )
    harm(tmp_path / "best")
    line = best.problem(saved)
    assert line is not None
    assert line.startswith(f"warning: {tmp_path / 'best'} is damaged (")
    assert reason in line


def test_ties_and_nan_keep_the_earlier(tmp_path: Path) -> None:
    best = keeper(tmp_path)
    for step, value in enumerate([math.nan, 0.2, 0.2, math.nan, 0.1]):
        best.consider(step, {"m": value})
    assert described(tmp_path) == {"step": 1, "metric": "m", "value": 0.2}
    assert best.to_json() == described(tmp_path)


@pytest.mark.parametrize("lost", ["both", "best", "write"])
def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path, lost: str) -> None:
    """The states that a kill can leave between `replace`'s steps, or a damaged newest
    checkpoint."""
    best = keeper(tmp_path)
    best.consider(1, {"m": 0.1})
    best.settle()
    saved = best.to_json()
    best.consider(2, {"m": 0.2})
    assert described(tmp_path)["step"] == 2
    if lost == "best":
        shutil.rmtree(tmp_path / "best")
    if lost == "both":
        shutil.rmtree(tmp_path / ".best-previous")
    if lost == "write":
        (tmp_path / ".writing-best").mkdir()
    again = keeper(tmp_path)
    again.restore(saved)
    assert again.to_json() == saved
    assert described(tmp_path)["step"] == (2 if lost == "both" else 1)
    assert sorted(os.listdir(tmp_path)) == ["best"]
    again.consider(2, {"m": 0.2})
    assert described(tmp_path)["step"] == 2


def test_a_full_disk_leaves_the_best_so_far(tmp_path: Path) -> None:
    best = keeper(tmp_path)
    best.consider(1, {"m": 0.1})

    def full() -> str:
        raise OSError(28, "No space left on device")

    unlucky = keeper(tmp_path, full)
    unlucky.restore(best.to_json())
    with pytest.raises(RunFailed, match=r"cannot save .*/best: No space left on device"):
        unlucky.consider(2, {"m": 0.2})
    assert described(tmp_path)["step"] == 1
    assert sorted(os.listdir(tmp_path)) == ["best"]


def test_it_is_not_kept_where_it_is_not_wanted(tmp_path: Path, base_model: Path) -> None:
    for number, evaluation in enumerate(({}, {"every": 1, "keep_best": False})):
        (tmp_path / str(number)).mkdir()
        config = write_config(tmp_path / str(number), base_model, evaluation=evaluation)
        run = train(load_config(config, ["steps=1"])).run_dir
        assert not (run / "best").exists()


def test_the_end_of_a_run_says_that_the_best_was_earlier(
    tmp_path: Path, base_model: Path, unbroken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    run = train(load_config(write_config(tmp_path, base_model, **SETTINGS)), quiet=False).run_dir
    best = described(unbroken)
    line = (
        f"best reward/held_out {best['value']:.4f} at step {best['step']}, in "
        f"{run / 'best'}; the newest"
    )
    said = capsys.readouterr().err
    assert f"{line} checkpoint is of step {STEPS}\n" in said
    assert "pass@4" in said


def test_memory_counts_the_evaluations_cache(tmp_path: Path, base_model: Path) -> None:
    config = write_config(tmp_path, base_model, sampling={"max_new_tokens": 32})
    parts = [
        open_parts(load_config(config, [f"evaluation={e}"]), quiet=True)
        for e in ("{}", "{every: 1, num_samples: 64}")
    ]
    for opened in parts:
        opened.processes.close()
    allocated = [opened.memory_metrics()["memory/kv_cache_mib"] * 2**20 for opened in parts]
    assert allocated[0] == parts[0].engine.kv_bytes
    assert isinstance(parts[1].held_out, PeriodicEvaluation)
    assert allocated[1] == parts[1].engine.kv_bytes + parts[1].held_out.engine.kv_bytes
    assert parts[1].held_out.engine.kv_bytes > parts[1].engine.kv_bytes
