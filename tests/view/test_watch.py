"""A run seen from outside: its files as they grow, are cut back, or stop growing."""

import fcntl
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isobit.cli import app
from isobit.errors import IsobitError
from isobit.monitor.screen import watch as module
from isobit.monitor.screen.watch import Watched, watch
from isobit.run.completions import COMPLETIONS, Member, lines, pack
from isobit.run.directory import LOCK, RunDirectory


def row(step: int) -> dict[str, float]:
    return {
        "step": step,
        "reward/mean": step / 10,
        "mismatch/differing_tokens": 0,
        "mismatch/compared_tokens": 5,
    }


def completion(step: int, reward: float | None, text: str) -> dict[str, object]:
    return {"step": step, "reward": reward, "prompt": "1+1=", "completion": text}


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "format.txt").write_text("2\n")
    (tmp_path / "config.yaml").write_text("precision: fp8\nconsistency: bitwise\nsteps: 3\n")
    write(tmp_path / "metrics.jsonl", [row(1), row(2)])
    steps = [[completion(1, 1.0, "old")], [completion(2, 0.0, "no"), completion(2, 1.0, "2")]]
    (tmp_path / COMPLETIONS).write_bytes(b"".join(map(pack, steps)))
    return tmp_path


def test_rows_are_read_once_and_as_they_come(run: Path) -> None:
    watched = Watched(run)
    assert watched.look() == 2
    assert watched.history.values("reward/mean") == [0.1, 0.2]
    assert watched.history.best is not None
    assert watched.history.worst is not None
    assert (watched.history.best.completion, watched.history.worst.completion) == ("2", "no")
    assert not watched.finished
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(3)))
        file.flush()
        assert watched.look() == 0  # half a line
        file.write("\n")
    assert watched.look() == 1
    assert watched.finished
    assert watched.look() == 0


def test_a_resumed_run_that_was_cut_back_starts_over(run: Path) -> None:
    watched = Watched(run)
    watched.look()
    write(run / "metrics.jsonl", [row(1)])
    watched.look()
    assert watched.history.values("reward/mean") == [0.1]
    assert watched.history.step == 1


def test_only_the_last_step_of_the_completions_is_unpacked(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a resume that cut the file back; of a sampled run those with a text."""
    unpacked = []

    def counted(path: Path, member: Member) -> list[bytes]:
        unpacked.append(member)
        return lines(path, member)

    def end() -> str:
        watched.look()
        assert watched.history.best is not None
        return watched.history.best.completion

    monkeypatch.setattr(module, "lines", counted)
    steps = [
        pack([completion(1, 1.0, f"text {i}") for i in range(50)]),
        pack([completion(2, 0.5, "end")]),
    ]
    (run / COMPLETIONS).write_bytes(b"".join(steps))
    watched = Watched(run)
    assert end() == "end"
    assert unpacked == [Member(len(steps[0]), len(steps[1]))]
    with (run / COMPLETIONS).open("ab") as file:
        file.write(pack([completion(3, 0.5, "3"), {"step": 3, "reward": 1.0, "prompt": "p"}]))
    write(run / "metrics.jsonl", [row(1), row(2), row(3)])
    assert end() == "3"
    (run / COMPLETIONS).write_bytes(steps[0][:-1])  # half a step
    write(run / "metrics.jsonl", [row(1)])
    watched.look()
    (run / COMPLETIONS).write_bytes(pack([completion(1, 1.0, "again")]))
    write(run / "metrics.jsonl", [row(1), row(2)])
    assert end() == "again"


def test_a_run_is_worked_on_while_its_lock_is_held(run: Path) -> None:
    watched = Watched(run)
    assert not watched.worked_on
    opened = RunDirectory(run, {})
    assert watched.worked_on
    opened.__exit__()
    assert not watched.worked_on
    # looking does not lock the run's own process out
    with Watched(run).directory.joinpath(".lock").open("r") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_lines_where_there_is_no_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch(run)
    captured = capsys.readouterr()
    assert captured.out == "step 2/3  reward 0.200  differing tokens 0\n"
    assert f"go on with: isobit train --resume {run}" in captured.err


def test_once(run: Path) -> None:
    done = CliRunner().invoke(app, ["watch", str(run), "--once"])
    assert done.exit_code == 0, done.output
    assert "step 2 of 3" in done.stdout
    assert "exactly zero" in done.stdout


def test_what_cannot_be_watched_is_said(
    run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(IsobitError, match="not a run directory"):
        watch(tmp_path_factory.mktemp("empty"))
    write(run / "metrics.jsonl", [])
    with pytest.raises(
        IsobitError, match="no step has been recorded yet, and no process works on it"
    ):
        watch(run, once=True)
    (run / "config.yaml").write_text("steps: many\n")
    with pytest.raises(IsobitError, match="is not the config that a run writes"):
        watch(run)


def test_ranks_have_a_line_each(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While the run is at work; the one that the others may wait for is marked."""
    (run / "logs").mkdir()
    for rank, (phase, since) in enumerate((("rollout", 1e9), ("score", 1e9 - 40), ("score", 1e9))):
        beat = {
            "rank": rank,
            "host": "node\x1b[1m",
            "pid": 1,
            "step": 7,
            "phase": phase,
            "since": since,
            "memory_mib": 2048,
        }
        (run / "logs" / f"rank-{rank:05d}.json").write_text(json.dumps(beat))
    (run / "logs" / "rank-00003.json").write_text("{")  # being written
    with (run / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        watch(run, once=True)
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rank ")]
    assert [line.split()[1] for line in lines] == ["0", "1", "2"]
    assert ["longest" in line for line in lines] == [False, True, False]
    assert "\x1b" not in "".join(lines)
    watch(run, once=True)
    assert not any(line.startswith("rank ") for line in capsys.readouterr().out.splitlines())
