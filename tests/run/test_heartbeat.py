"""What `isobit watch` says of a rank is the phase that it is in."""

from itertools import groupby
from pathlib import Path

import pytest

from isobit.config import load_config
from isobit.run import heartbeat
from isobit.run.heartbeat import Heartbeat, beats
from isobit.training.train import train
from tests.runs import write_config


def test_every_change_of_phase_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However soon the next long phase follows a short one; repetitions of one phase are left out
    meanwhile."""
    monkeypatch.setattr(heartbeat, "_EVERY_S", float("inf"))
    steps = iter(range(10))
    rank = Heartbeat(tmp_path, 3, 4, lambda: next(steps))
    for step, phase in enumerate(["rollout", "learn", "rollout"]):
        rank.beat(phase)
        (found,) = beats(tmp_path)
        assert (found["rank"], found["step"], found["phase"]) == (3, step, phase)
    rank.beat("rollout")  # the control: it is not written
    assert beats(tmp_path) == [found]
    assert next(steps) == 3


def test_a_run_of_one_process_writes_none(tmp_path: Path) -> None:
    Heartbeat(tmp_path, 0, 1, lambda: 0).beat("learn")
    assert list(tmp_path.iterdir()) == []


def test_every_verb_of_a_run_is_told(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the heartbeat, and to the ranks that wait: a rank may die or stand still in any."""
    told = list[str]()
    monkeypatch.setattr(Heartbeat, "beat", lambda self, phase: told.append(phase))
    train(
        load_config(
            write_config(tmp_path, base_model, evaluation={"every": 1, "samples": 4}), ["steps=1"]
        )
    )
    step = ["sync", "rollout", "score", "learn", "sync", "evaluate", "save"]
    assert list(dict.fromkeys(told)) == ["sync", "evaluate", "save", "rollout", "score", "learn"]
    assert [name for name, _ in groupby(told)][-len(step) :] == step
