"""What is handed to a tracker: each whole row once, in order, after the last that it has."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from isobit.errors import IsobitError
from isobit.monitor.trackers.base import Opened, TrackedRun
from isobit.monitor.trackers.follow import Follower, State, Tail
from isobit.run.completions import COMPLETIONS, pack

REQUEST = {"project": "p", "name": "n", "group": None, "config": {}, "limit_s": 1.0}


class Recorder:
    """A tracker that keeps what it is given. `claims`: the last step that it says it has; None
    believes isobit."""

    def __init__(self, claims: int | None = None, fails_at: int | None = None) -> None:
        self.claims, self.fails_at = claims, fails_at
        self.place: TrackedRun | None = None
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.tables: list[tuple[int, list[str]]] = []

    def check(self, settings: Mapping[str, Any]) -> None:
        pass

    def open(self, place: TrackedRun) -> Opened:
        self.place = place
        return Opened(
            place.last if self.claims is None else self.claims, place.kept or {"id": "abc"}, "here"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("gone")
        self.rows.append((step, dict(metrics)))

    def log_completions(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        self.tables.append((step, [row[2] for row in rows]))

    def close(self, exit_code: int) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "tracking").mkdir()
    return tmp_path


def write(run: Path, steps: Sequence[int], name: str = "metrics.jsonl", **values: Any) -> None:
    with (run / name).open("a") as file:
        for step in steps:
            file.write(
                json.dumps({"step": step, "loss/policy": step / 2, "entropy": None} | values) + "\n"
            )


def follow(run: Path, tracker: Recorder, completions: int = 0) -> Follower:
    follower = Follower(tracker, "recorder", run, completions, State(run))
    assert follower.open(REQUEST, {}) == "here"
    follower.catch_up()
    return follower


def test_rows_are_handed_over_as_they_come_and_without_what_is_not_finite(run: Path) -> None:
    tracker = Recorder()
    follower = follow(run, tracker)  # before the file is there
    write(run, [0, 1])
    follower.catch_up()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss/po')
    follower.catch_up()
    assert [step for step, _ in tracker.rows] == [0, 1]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('licy": 1.0}\n')
    follower.catch_up()
    assert tracker.rows == [
        (0, {"loss/policy": 0.0}),
        (1, {"loss/policy": 0.5}),
        (2, {"loss/policy": 1.0}),
    ]


def test_another_process_goes_on_after_the_last_step(run: Path) -> None:
    write(run, [1, 2, 3])
    follow(run, Recorder())
    assert State(run).of("recorder") == {"last": 3, "kept": {"id": "abc"}}
    write(run, [4])
    second = Recorder()
    follow(run, second)
    assert second.place is not None
    assert second.place.kept == {"id": "abc"}
    assert [step for step, _ in second.rows] == [4]


@pytest.mark.parametrize(("claims", "steps"), [(1, [2, 3, 4]), (4, [])])
def test_the_tracker_knows_best_what_it_has(run: Path, claims: int, steps: list[int]) -> None:
    write(run, [1, 2, 3])
    follow(run, Recorder())
    write(run, [4])
    second = Recorder(claims)
    follow(run, second)
    assert [step for step, _ in second.rows] == steps


def test_a_row_that_was_refused_is_given_again(run: Path) -> None:
    write(run, [1, 2, 3])
    with pytest.raises(ConnectionError):
        follow(run, Recorder(fails_at=2))
    assert State(run).of("recorder")["last"] == 1
    second = Recorder()
    follow(run, second)
    assert [step for step, _ in second.rows] == [2, 3]


def test_the_first_completions_of_each_step(run: Path) -> None:
    for step in (1, 2, 4):
        texts: list[dict[str, str]] = [
            {},
            *({"completion": f"{text}{step}"} for text in "abc"),
        ]  # one not whole
        rows = [
            {"step": step, "prompt": "p", "reward": 1.0, "truncated": False, **text}
            for text in texts
        ]
        with (run / COMPLETIONS).open("ab") as file:
            file.write(pack(rows))
    write(run, [0, 1])
    tracker = Recorder()
    follower = follow(run, tracker, completions=2)
    write(run, [2, 3, 4])
    follower.catch_up()
    assert tracker.tables == [(1, ["a1", "b1"]), (2, ["a2", "b2"]), (4, ["a4", "b4"])]


def test_a_tail_stops_at_what_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    tail = Tail(path)
    assert list(tail) == []
    path.write_text('{"step": 1}\n{"st')
    assert list(tail) == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert list(tail) == [{"step": 2}]


def test_two_trackers_have_one_state_file_and_their_own_steps(run: Path) -> None:
    write(run, [1, 2, 3])
    state = State(run)
    slow = Follower(Recorder(fails_at=2), "slow", run, 0, state)
    slow.open(REQUEST, {})
    with pytest.raises(ConnectionError):
        slow.catch_up()
    fast = Follower(Recorder(), "fast", run, 0, state)
    fast.open(REQUEST, {})
    fast.catch_up()
    assert [State(run).of(name)["last"] for name in ("slow", "fast")] == [1, 3]
    assert State(run).of("other") == {}
    assert [path.name for path in (run / "tracking").iterdir()] == ["state.json"]


@pytest.mark.parametrize("text", ["{", "[1]", '{"recorder": 1}', '{"recorder": {"last": 1}}'])
def test_a_damaged_state_is_said(run: Path, text: str) -> None:
    (run / "tracking/state.json").write_text(text)
    with pytest.raises(IsobitError, match=r"state\.json"):
        follow(run, Recorder())
