"""When a run ends before its last step, and that an interrupted one ends at the same."""

import math
from pathlib import Path
from typing import Any

import pytest

from isobit.config import load_config, load_sft_config
from isobit.errors import IsobitError
from isobit.evaluation.early_stop import EarlyStop, StopConfig
from isobit.training.parts.assembly import evaluation_plan
from isobit.training.train import resume, train, train_supervised
from tests.runs import fingerprint, write_config
from tests.training.test_sft_run import written


def ended(values: list[float], name: str = "accuracy/held_out", **config: Any) -> int | None:
    """The step at which evaluations of these values end a run; the first is before the first
    step."""
    stop = EarlyStop(StopConfig(stop_by=name, **config))
    return next((i for i, value in enumerate(values) if stop.consider(i, {name: value})), None)


def test_a_value_that_is_reached_ends_a_run() -> None:
    assert ended([0.1, 0.3, 0.5, 0.9], stop_at=0.5) == 2
    assert ended([0.9, 0.3, 0.4], stop_at=0.5) is None, "before the first step nothing ends"
    assert ended([2.0, 1.5, 0.9], "loss/held_out", stop_at=1.0) == 2
    assert ended([0.1, 1.5, 1.2], "loss/held_out", stop_at=1.0) is None
    assert ended([0.1, math.nan, 0.2], stop_at=0.5) is None


def test_patience_counts_evaluations_that_are_not_better() -> None:
    assert ended([0.5, 0.4, 0.5, 0.6, 0.6, 0.5], patience=2) == 2
    assert ended([0.1, 0.2, 0.2, 0.3, 0.3, 0.3], patience=2) == 5
    assert ended([3.0, 2.0, 2.5, 2.1], "loss/held_out", patience=2) == 3
    assert ended([0.1, 0.2, 0.3, 0.4], patience=1) is None
    assert ended([0.1] * 9) is None, "the control"


SLOW = {
    "evaluation": {"every": 1, "samples": 4, "patience": 2, "keep_best": False},
    "optimizer": {"learning_rate": 1e-9},
    "steps": 9,
}


@pytest.mark.slow
def test_a_run_ends_where_an_interrupted_one_does(tmp_path: Path, base_model: Path) -> None:
    """The weights hardly move, so no evaluation is better. The control has no patience."""
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = train(load_config(write_config(tmp_path / "whole", base_model, **SLOW)), quiet=True)
    assert [row["step"] for row in whole.metrics if row.get("evaluation/stopped")] == [2]
    assert whole.metrics[-1]["step"] == 2
    path = write_config(tmp_path / "parts", base_model, **SLOW)
    first = train(load_config(path, ["steps=1"]), quiet=True)
    again = resume(first.run_dir, ["steps=9"], quiet=True)
    assert fingerprint(again.run_dir) == fingerprint(whole.run_dir)
    assert resume(again.run_dir, quiet=True).metrics[-1]["step"] == 2, "it stays finished"
    given = ["evaluation.patience=null", "steps=3", f"run.dir={tmp_path / 'on'}"]
    assert train(load_config(path, given), quiet=True).metrics[-1]["step"] == 3


def test_a_supervised_run_ends_at_a_loss(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    evaluation = {"every": 1, "stop_by": "loss/held_out", "stop_at": 100.0}
    found = train_supervised(load_sft_config(written(tmp_path, evaluation=evaluation)))
    assert found.metrics[-1]["step"] == 1
    assert "ended early: step 1: loss/held_out is" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"patience": 2}, r"evaluation\.patience is looked at every evaluation\.every steps"),
        ({"every": 1, "patience": 0}, r"evaluation\.patience: expected at least 1, got 0"),
        ({"every": 1, "top_p": 0.5}, r"top_p is for samples: set num_samples"),
        ({"every": 1, "num_samples": 2, "top_p": 0}, r"evaluation\.top_p: expected above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(
    evaluation: dict[str, Any], message: str, tmp_path: Path, base_model: Path
) -> None:
    with pytest.raises(IsobitError, match=message):
        load_config(write_config(tmp_path, base_model, evaluation=evaluation))


def test_a_metric_that_no_evaluation_has_is_refused(tmp_path: Path, base_model: Path) -> None:
    evaluation = {"every": 1, "patience": 1, "stop_by": "accuracy/held_ou"}
    path = write_config(tmp_path, base_model, evaluation=evaluation)
    with pytest.raises(IsobitError, match=r"evaluation\.stop_by: .* did you mean"):
        train(load_config(path), quiet=True)
    with pytest.raises(IsobitError, match=r"evaluation\.stop_by: .* did you mean"):
        train_supervised(
            load_sft_config(written(tmp_path / "b", evaluation=evaluation)), quiet=True
        )


def test_samples_are_drawn_as_the_evaluation_says(tmp_path: Path, base_model: Path) -> None:
    """By default as the rollout draws them."""
    path = write_config(tmp_path, base_model, sampling={"top_k": 5})
    own = ["evaluation.num_samples=2", "evaluation.every=1"]
    found = evaluation_plan(load_config(path, own)).sampling
    assert (found.temperature, found.top_p, found.top_k) == (1.0, 1.0, 5)
    changed = ["evaluation.top_p=0.9", "evaluation.top_k=0", "evaluation.temperature=0.6"]
    found = evaluation_plan(load_config(path, [*own, *changed])).sampling
    assert (found.temperature, found.top_p, found.top_k) == (0.6, 0.9, 0)
