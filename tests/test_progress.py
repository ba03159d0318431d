"""What a run shows."""

import pytest

from isobit.progress import Display, summary

METRICS = {
    "reward/mean": 0.5,
    "mismatch/differing_tokens": 0.0,
    "throughput/rollout_tokens_per_s": 12345.6,
    "time/step": 1.0,
}


def test_a_step_in_a_line() -> None:
    assert summary(METRICS) == "reward 0.500  differing tokens 0  12,346 tokens/s"
    assert summary({"loss/cross_entropy": 1.25}) == "loss 1.2500"
    assert summary({}) == ""


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(3) as display:
        for _ in range(3):
            display.step(METRICS)
        display.note("a [bold]note[/bold]")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("step 1/3  reward 0.500  differing tokens 0")
    assert "left" in lines[0]
    assert lines[-2].startswith("step 3/3")
    assert lines[-1] == "a [bold]note[/bold]"


def test_a_resumed_run_counts_from_where_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(10, done=8) as display:
        display.step(METRICS)
        assert display.left_s >= 0
    assert capsys.readouterr().err.startswith("step 9/10")


def test_quiet_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(1, quiet=True) as display:
        display.step(METRICS)
        display.note("nothing")
    captured = capsys.readouterr()
    assert captured.err + captured.out == ""
