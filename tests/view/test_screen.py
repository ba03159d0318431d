"""What is shown: the right numbers, at any size of the terminal, and nothing that a terminal would
obey."""

import io
import math
import typing
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from isobit.config import SftConfig
from isobit.monitor.screen import History, Shown
from isobit.monitor.screen.screen import BARS, clock, plain, screen, sparkline, summary
from isobit.options.declare import OneOf
from isobit.run.metrics import SUPERVISED_LOSSES
from isobit.training.train import TrainResult


def history(steps: int = 12, differing: float = 0.0, total: int = 40, **more: float) -> History:
    found = History("quickstart", total, "fp8, bitwise")
    for step in range(1, steps + 1):
        found.add(
            {
                "step": step,
                "reward/mean": 0.05 * step,
                "reward/std": 0.4,
                "mismatch/differing_tokens": differing,
                "mismatch/compared_tokens": 100,
                "mismatch/kl_k3": 1e-4 * differing * step,
                "throughput/rollout_tokens_per_s": 2000.0 + step,
                "length/mean": 5.0,
                "length/truncated_fraction": 0.25,
                "entropy": None,
                "time/step": 2.0,
                "time/rollout": 1.0,
                "time/learn": 0.9,
                "memory/peak_rss_mib": 389.4,
                "memory/weights_mib": 12.0,
                **({"accuracy/held_out": 0.5} if step == 10 else {}),
                **more,
            }
        )
    found.show([Shown(1.0, "12+30=", "42"), Shown(0.0, "9+9=", "19"), Shown(None, "1+1=", "?")])
    return found


def drawn(view: History, width: int = 100, height: int = 40) -> list[str]:
    console = Console(
        width=width, height=height, force_terminal=True, color_system=None, file=io.StringIO()
    )
    with console.capture() as capture:
        console.print(screen(view, width, height))
    return capture.get().splitlines()


def test_how_many_tokens_were_compared_is_said() -> None:
    """Where that is not all of them; and none is not zero. The control: all of them."""
    some = history(**{"mismatch/comparable_tokens": 1600})
    text = "\n".join(drawn(some))
    assert "exactly zero" in text
    assert "1,200 of 19,200 tokens" in text
    assert "differing tokens 0 of 1,200 compared" in summary(some)
    none = History("run", 40)
    for step in (1, 2):
        none.add({"step": step, "time/step": 1.0, "mismatch/comparable_tokens": 1600})
    text = "\n".join(drawn(none))
    assert "not compared" in text
    assert "0 of 3,200 tokens" in text
    assert "exactly zero" not in text
    every = history(**{"mismatch/comparable_tokens": 100})
    assert " of 1,200" not in "\n".join(drawn(every)) + summary(every)


def test_the_screen_says_what_a_run_does() -> None:
    view = history()
    view.phase = "learn"
    text = "\n".join(drawn(view))
    assert "isobit  quickstart" in text
    assert "fp8, bitwise" in text
    assert "step 12 of 40   0:56 left   learn" in text  # 28 steps of 2 s
    for label, value in (
        ("reward", "0.600"),
        ("accuracy", "0.500"),
        ("tokens/s", "2,012"),
        ("length", "5.0"),
    ):
        assert any(line.split()[:2] == [label, value] for line in text.splitlines()), label
    assert "± 0.400" in text
    assert "25% truncated" in text
    assert "exactly zero" in text
    assert "1,200 tokens" in text
    assert "2.00 s a step" in text
    assert "rollout 50%" in text
    assert "other 5%" in text
    assert "peak 389 MiB" in text
    assert "best      1  12+30= → 42" in text
    assert "worst     0  9+9= → 19" in text
    assert "entropy" not in text  # there was no finite value


def test_what_is_left_out_of_learning_is_shown() -> None:
    """Where anything is: a run that leaves nothing out has no such line."""
    view = history()
    view.add({"step": 13, "learn/skipped_share": 0.0, "advantage/nonzero_fraction": 1.0})
    assert "left out" not in "\n".join(drawn(view))
    view.add({"step": 14, "learn/skipped_share": 0.375, "advantage/nonzero_fraction": 0.5})
    line = next(line for line in drawn(view) if line.startswith("left out"))
    assert "38%" in line
    assert "50% of the samples teach" in line


def test_turns_and_tools_are_shown() -> None:
    """Where there are environments: the control has none. Only tools that the last step called, the
    slowest first, and names without control characters."""
    assert "turns" not in "\n".join(drawn(history()))
    view = history(**{"env/turns": 1.0})
    view.add({"step": 13, "env/turns": 2.5, "tools/call_frequency/gone": 1.0})
    row = {"step": 14, "env/turns": 2.5, "tools/call_frequency": 1.5, "env/problems": 0.125}
    calls = {"add": 1.25, "look_\x1bup": 0.25}
    row |= {f"tools/call_frequency/{name}": count for name, count in calls.items()}
    row |= {"tools/failure_frequency": 0.1, "tools/failure_frequency/add": 0.08}
    view.add(row | {"time/tools/add": 0.25, "time/tools/look_\x1bup": 3.0})
    line = next(line for line in drawn(view) if line.startswith("turns"))
    assert "2.5" in line
    assert "1.5 calls, 10% failed, 12% with problems" in line
    line = next(line for line in drawn(view) if line.startswith("tools"))
    assert line.split() == [
        "tools",
        "look_",
        "up",
        "3.00",
        "s",
        "add",
        "0.25",
        "s",
        "(8%",
        "failed)",
    ]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_beside_long_notes_no_value_is_cut(width: int) -> None:
    """Of a run with tools: the sparklines give room. The control: without notes they have theirs."""
    view = history(
        **{
            "env/turns": 12.5,
            "env/problems": 0.05,
            "tools/call_frequency": 11.0,
            "tools/failure_frequency": 0.05,
            "mismatch/compared_tokens": 123_456,
            "throughput/learn_tokens_per_s": 35_354.0,
            "length/mean": 12_345.6,
        }
    )
    view.add({"step": 13, "throughput/rollout_tokens_per_s": 1_234_567.0})
    text = "\n".join(drawn(view, width))
    for value in ("0.600", "0.500", "1,234,567", "12,345.6", "12.5", "exactly zero"):
        assert f" {value} " in text, value
    for note in ("11.0 calls, 5% failed, 5% with problems", "25% truncated", "1,481,472 tokens"):
        assert note in text, note
    assert "…" not in text
    few = [line for line in drawn(history(), width) if line.startswith("length")]
    assert few[0].split()[2] == sparkline([5.0] * 12)


KINDS: dict[str, tuple[dict[str, float], dict[str, str], str]] = {
    "distillation": (
        {"reward/mean": 0.0, "reward/std": 0.0, "reward/reference_kl": 1.25, "loss/policy": 0.5},
        {"KL": "1.2500"},
        "KL 1.2500",
    ),
    "distillation, with rewards": (
        {"reward/mean": 0.5, "reward/reference_kl": 1.25},
        {"reward": "0.500", "KL": "1.2500"},
        "reward 0.500  KL 1.2500",
    ),
    "rewards that stay 0": (
        {"reward/mean": 0.0, "loss/policy": 0.5, "loss/kl": 0.0},
        {"reward": "0.000"},
        "reward 0.000",
    ),
    "a penalty": ({"reward/mean": 0.5, "loss/kl": 0.01}, {"reward": "0.500", "KL": "0.0100"}, "KL"),
    "sft": (
        {"loss/cross_entropy": 2.5, "loss/held_out": 2.25, "throughput/learn_tokens_per_s": 900},
        {"loss": "2.5000", "held": "out", "tokens/s": "900"},
        "loss 2.5000  held-out loss 2.2500  900 tokens/s",
    ),
    "kto": (
        {"loss/kto": 0.5, "preference/margin": 0.25, "preference/held_out_accuracy": 0.75},
        {"loss": "0.5000", "margin": "0.2500", "preferred": "75%"},
        "loss 0.5000  margin 0.2500",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_run_shows_what_it_is_made_for(kind: str) -> None:
    """On the screen, in a line, and in a notebook; and nothing that it does not have."""
    row, wanted, line = KINDS[kind]
    view = History("run", 2)
    view.add({"step": 1, **row})
    for width in (40, 80):
        lines = drawn(view, width)[3:]
        found = {words[0]: words[1] for words in map(str.split, lines) if len(words) > 1}
        assert found == wanted
    assert line in summary(view)
    first = next(iter(wanted.values()))
    assert float(repr(TrainResult(Path("run"), [{"step": 1, **row}], 0)).split()[-2][:-1]) == float(
        first
    )


def test_every_supervised_loss_is_one_of_the_metrics() -> None:
    hint = typing.get_type_hints(SftConfig, include_extras=True)["loss"]
    (choices,) = (known.names for known in hint.__metadata__ if isinstance(known, OneOf))
    assert tuple(f"loss/{name}" for name in choices) == SUPERVISED_LOSSES


def test_a_mismatch_is_not_called_zero() -> None:
    text = "\n".join(drawn(history(differing=7.0)))
    assert "exactly zero" not in text
    assert "84 of 1,200 tokens differ" in text
    assert "8.4e-03" in text


def test_a_finished_run_and_one_that_has_not_begun() -> None:
    assert "step 40 of 40   done" in "\n".join(drawn(history(40)))
    text = "\n".join(drawn(History("new", 10)))
    assert "step 0 of 10   -:-- left" in text


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
@pytest.mark.parametrize("height", [14, 24, 50])
def test_it_fits(width: int, height: int) -> None:
    view = history()
    view.show(
        [Shown(1.0, "a long question " * 40, "an answer " * 60), Shown(0.0, "q", "漢字" * 80)]
    )
    lines = drawn(view, width, height)
    assert len(lines) <= height
    assert max(cell_len(line) for line in lines) <= width
    assert any("reward" in line for line in lines)
    assert sum(line.startswith("memory") for line in lines) == 1
    assert all(
        line == "" or line[0] in "i━ramtlebw" for line in lines
    )  # nothing wraps into a line of its own


def test_text_of_a_model_cannot_drive_the_terminal() -> None:
    view = history()
    view.show(
        [
            Shown(1.0, "\x1b[2Jclear\u202e", "two\nlines\x07\x9b31m[bold]red[/bold]"),
            Shown(0.0, "q", "a"),
        ]
    )
    text = "".join(drawn(view))
    assert not any(ord(c) < 32 or c in "\u202e\x9b" for c in text)
    assert "two⏎lines" in text
    assert "[bold]red[/bold]" in text
    assert plain("a\tb") == "a b"


def test_sparklines() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.0, 0.0]) == BARS[0] * 2
    assert sparkline([3.0]) == BARS[3]
    assert sparkline(list(range(8))) == BARS
    assert sparkline([1.0, 0.0, 1.0]) == BARS[7] + BARS[0] + BARS[7]
    long = sparkline([float(i) for i in range(1000)], 16)
    assert len(long) == 16
    assert list(long) == sorted(long, key=BARS.index)


def test_times() -> None:
    assert (clock(None), clock(7.9), clock(187), clock(7387)) == ("-:--", "0:07", "3:07", "2:03:07")


def test_a_run_in_one_line() -> None:
    assert summary(history()) == (
        "step 12/40  reward 0.600  accuracy 0.500  differing tokens 0  2,012 tokens/s  0:56 left"
    )
    assert summary(History("", 3)) == "step 0/3"


def test_what_is_not_finite_leaves_no_point() -> None:
    view = History("", 2)
    view.add({"step": 1, "reward/mean": math.nan, "loss/cross_entropy": 1.5})
    assert view.values("reward/mean") == []
    assert summary(view) == "step 1/2  loss 1.5000"


def test_all_alike_and_unscored_completions() -> None:
    view = history()
    view.show([Shown(0.5, "p", "x"), Shown(0.5, "p", "y")])
    assert "all alike 0.5" in "\n".join(drawn(view))
    before = view.best
    view.show([Shown(None, "p", "z")])
    assert view.best == before
