"""The view in the run's own process: live in a terminal, plain lines elsewhere, silent with
`quiet`."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from isobit.monitor.screen import Display, Shown

from ..runs import write_config

METRICS = {"reward/mean": 0.5, "mismatch/differing_tokens": 0.0, "time/step": 1.0}


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(3) as display:
        for _ in range(3):
            display.step(METRICS)
        display.note("a [bold]note[/bold]")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "step 1/3  reward 0.500  differing tokens 0  0:02 left"
    assert lines[-2].startswith("step 3/3")
    assert lines[-1] == "a [bold]note[/bold]"
    assert len(lines) == 3  # the second step came within ten seconds of the first


def test_a_resumed_run_counts_from_where_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(10, done=8) as display:
        display.step(METRICS)
    assert capsys.readouterr().err.startswith("step 9/10")


def test_a_step_without_times_of_its_own_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(2) as display:
        display.step({"loss/cross_entropy": 1.25})
        assert display.history.seconds_left is not None
    assert capsys.readouterr().err.startswith("step 1/2  loss 1.2500  0:00 left")


def test_quiet_is_silent_and_does_not_look_at_completions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def completions():  # type: ignore[no-untyped-def]
        raise AssertionError("nobody sees them")
        yield Shown(1.0, "", "")

    with Display(1, quiet=True) as display:
        display.step(METRICS, completions())
        display.note("nothing")
    captured = capsys.readouterr()
    assert captured.err + captured.out == ""


def in_a_terminal(words: list[str], folder: Path) -> str:
    """What a command writes to a terminal of 100 x 30."""
    leader, follower = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm-256color"}
    line = [sys.executable, "-m", "isobit", *words]
    process = subprocess.Popen(
        line, stdin=follower, stdout=follower, stderr=follower, cwd=folder, env=variables
    )
    os.close(follower)
    written = bytearray()
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # the terminal is closed when the process has ended
            break
        if not part:
            break
        written += part
    os.close(leader)
    assert process.wait() == 0, written.decode(errors="replace")
    return written.decode()


@pytest.mark.slow
def test_the_live_screen_of_a_real_run(tmp_path: Path, base_model: Path) -> None:
    config = write_config(tmp_path, base_model, evaluation={"every": 2, "samples": 8})
    text = in_a_terminal(["train", str(config)], tmp_path)
    assert "\x1b[2K" in text  # lines are redrawn
    last = text[text.rindex("isobit  ") :]
    assert "step 4 of 4   done" in last
    for word in ("reward", "accuracy", "exactly zero", "tokens/s", "s a step", "peak", "best"):
        assert word in last, word
    assert "held-out greedy accuracy" in text
    watched = in_a_terminal(["watch", str(tmp_path / "run")], tmp_path)
    assert "step 4 of 4   done" in watched
    assert "finished: isobit report" in watched
    assert "\x1b[2K" not in in_a_terminal(
        ["train", str(config), "run.dir=quiet", "--quiet"], tmp_path
    )
