"""The metrics of a run that are shown next to its progress: declared once, for the screen, for the
line that a run without a terminal prints, and for a result in a notebook. A kind of run shows the
lines whose metrics it has.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from isobit.monitor.screen.history import History
from isobit.run.metrics import SUPERVISED_LOSSES


@dataclass(frozen=True)
class Line:
    """A line with the newest value of a metric. `names`: metrics, of which the first that the run
    has is shown; `note`: the format of the note next to the value, and the metric that the note
    shows; `said`: the format of the value in a line of text, None if the line leaves it out.
    `zero`: whether a metric that is 0 throughout is shown; the name of a metric: it is shown if the
    run does not have that metric."""

    label: str
    names: tuple[str, ...]
    form: str
    note: tuple[str, str] | None = None
    said: str | None = None
    zero: bool | str = True

    def name(self, history: History) -> str | None:
        """Return the name of the metric that is shown of a run, or None."""
        name = next((name for name in self.names if history.values(name)), None)
        if name is None or any(history.values(name)):
            return name
        zero = not history.values(self.zero) if isinstance(self.zero, str) else self.zero
        return name if zero else None

    def note_of(self, history: History, name: str) -> str:
        """Return the note next to the metric `name`; empty if the line has no note, or the run does
        not have the note's metric, or the note's metric is `name` itself."""
        value = None if self.note is None or self.note[1] == name else history.last(self.note[1])
        return "" if value is None or self.note is None else self.note[0].format(value)


LINES = (
    # a distillation has no rewards
    Line(
        "reward",
        ("reward/mean",),
        "{:.3f}",
        ("± {:.3f}", "reward/std"),
        "reward {:.3f}",
        zero="reward/reference_kl",
    ),
    Line(
        "KL",
        ("reward/reference_kl", "loss/kl"),
        "{:.4f}",
        ("loss {:.4f}", "loss/policy"),
        "KL {:.4f}",
        zero=False,
    ),
    Line(
        "loss",
        SUPERVISED_LOSSES,
        "{:.4f}",
        None,
        "loss {:.4f}",
    ),
    Line("held out", ("loss/held_out",), "{:.4f}", None, "held-out loss {:.4f}"),
    Line(
        "margin",
        ("preference/margin",),
        "{:.4f}",
        ("{:.0%} preferred", "preference/accuracy"),
        "margin {:.4f}",
    ),
    Line("preferred", ("preference/held_out_accuracy",), "{:.0%}"),
    Line(
        "accuracy",
        ("accuracy/held_out",),
        "{:.3f}",
        ("held-out reward {:.3f}", "reward/held_out"),
        "accuracy {:.3f}",
    ),
)
"""The lines about the aim of a run, the most important first."""
WORK = (
    Line(
        "tokens/s",
        ("throughput/rollout_tokens_per_s", "throughput/learn_tokens_per_s"),
        "{:,.0f}",
        ("{:,.0f} learning", "throughput/learn_tokens_per_s"),
        "{:,.0f} tokens/s",
    ),
    Line("length", ("length/mean",), "{:,.1f}", ("{:.0%} truncated", "length/truncated_fraction")),
    Line("entropy", ("entropy",), "{:.3f}", ("gradient norm {:.3g}", "grad_norm")),
    Line(
        "left out",
        ("learn/skipped_share",),
        "{:.0%}",
        ("{:.0%} of the samples teach", "advantage/nonzero_fraction"),
        zero=False,
    ),
)
"""The lines about the work of a run of any kind."""


def lines_of(
    history: History, lines: tuple[Line, ...] = (*LINES, *WORK)
) -> Iterator[tuple[Line, str]]:
    """Yield the lines that a run has, each with the name of its metric."""
    for line in lines:
        if (name := line.name(history)) is not None:
            yield line, name


def said(history: History, lines: tuple[Line, ...]) -> list[str]:
    """Return the newest values of the run's metrics in words, for a line of text."""
    return [
        line.said.format(history.last(name))
        for line, name in lines_of(history, lines)
        if line.said is not None
    ]
