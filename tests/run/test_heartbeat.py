"""What `isobit watch` says of a rank is the phase that it is in."""

from pathlib import Path

import pytest

from isobit.run import heartbeat
from isobit.run.heartbeat import Heartbeat, beats


def test_every_change_of_phase_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However soon the next long phase follows a short one; repetitions of one phase are left out meanwhile."""
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
