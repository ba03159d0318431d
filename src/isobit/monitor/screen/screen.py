"""The screen of a run: a header, sparklines of the main metrics, time by phase, memory, and two
completions.

A pure function of a `History`, a width and a height: the same in the run's own terminal and in
`isobit watch`. Text that a model wrote is shown without control characters.
"""

import time
from collections.abc import Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from isobit.monitor.screen.history import History, Shown

BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 32
_NOTES_FROM = 76  # columns: a narrower terminal has no room beside the sparklines
_PHASE_STYLES = {
    "rollout": "blue",
    "score": "yellow",
    "learn": "green",
    "sync": "magenta",
    "calibrate": "cyan",
}
_SOFT = "bright_black"


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """The values as bars between their smallest and largest; more than `width` are averaged in even
    parts."""
    if not values:
        return ""
    if len(values) > width:
        edges = [i * len(values) // width for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    if high == low:
        return (BARS[0] if high == 0 else BARS[3]) * len(values)
    return "".join(
        BARS[min(int((v - low) / (high - low) * len(BARS)), len(BARS) - 1)] for v in values
    )


def clock(seconds: float | None) -> str:
    """3:07, or 2:03:07 from an hour on."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def plain(text: str) -> str:
    """One line without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else "⏎" if c == "\n" else " " for c in text)


def screen(history: History, width: int, height: int) -> RenderableType:
    """The whole view, at most `width` columns and `height` lines; what matters least is left out
    first."""
    header = _header(history, width)
    rows = _metrics(history, min(SPARK_WIDTH, max(width - 26, 8)), notes=width >= _NOTES_FROM)
    parts: list[RenderableType] = [header, _progress(history, width)]
    warning = history.no_progress.line
    if warning is not None:
        parts.append(Text(warning, style="bold yellow", no_wrap=True, overflow="ellipsis"))
    parts += [Text(""), rows]
    lines = (_phases(history, width), _tools(history, width), _memory(history, width))
    foot = [line for line in lines if line is not None]
    samples = [_sample(label, shown, width) for label, shown in _samples(history)]
    room = height - (len(parts) - 1 + rows.row_count)
    for block in (_ranks(history, width), foot, samples):
        if block and len(block) < room:
            parts += [Text(""), *block]
            room -= len(block) + 1
    return Group(*parts)


def _ranks(history: History, width: int) -> list[Text]:
    """A line for each of several ranks; the one that has been longest in its phase is marked: the
    others may wait for it."""
    if not history.ranks:
        return []
    now, oldest = time.time(), min(beat["since"] for beat in history.ranks)
    lines = []
    for beat in history.ranks:
        style = _PHASE_STYLES.get(beat["phase"], "")
        line = Text(
            f"rank {beat['rank']:<5} {plain(str(beat['host']))[:12]:<12} step {beat['step']:<7} ",
            no_wrap=True,
        )
        line.append(f"{plain(str(beat['phase'])):<10}", style=style)
        seconds = max(now - beat["since"], 0)
        line.append(f" {seconds:6.0f} s {beat['memory_mib'] / 1024:7.1f} GiB")
        if beat["since"] == oldest and len({each["since"] for each in history.ranks}) > 1:
            line.append("  longest", style=_SOFT)
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return lines


def summary(history: History) -> str:
    """The few numbers worth a glance, in one line."""
    parts = [f"step {history.step}/{history.total}"]
    for name, text in (
        ("reward/mean", "reward {:.3f}"),
        ("loss/cross_entropy", "loss {:.4f}"),
        ("preference/margin", "margin {:.4f}"),
        ("accuracy/held_out", "accuracy {:.3f}"),
        ("mismatch/differing_tokens", _differing(history)),
        ("throughput/rollout_tokens_per_s", "{:,.0f} tokens/s"),
    ):
        value = history.last(name)
        if value is not None:
            parts.append(text.format(value))
    if history.seconds_left is not None:
        parts.append(f"{clock(history.seconds_left)} left")
    return "  ".join(parts)


def _differing(history: History) -> str:
    """Of the step, if all of its tokens are compared, else of the run, with how many that were."""
    differing, compared, comparable = _compared(history)
    if compared >= comparable:
        return "differing tokens {:,.0f}"
    return f"differing tokens {differing:,.0f} of {compared:,.0f} compared"


def _compared(history: History) -> tuple[float, float, float]:
    """Tokens that differ, of those compared, of those that could have been."""
    differing, compared, comparable = (
        history.total_of(f"mismatch/{name}_tokens")
        for name in ("differing", "compared", "comparable")
    )
    return differing, compared, comparable


def _header(history: History, width: int) -> RenderableType:
    grid = Table.grid(expand=False, padding=(0, 2))
    grid.width = width
    grid.add_column(no_wrap=True, overflow="ellipsis")
    grid.add_column(justify="right", no_wrap=True, overflow="ellipsis", ratio=1)
    grid.add_row(
        Text(f"isobit  {plain(history.name)}", style="bold"),
        Text(plain(history.details), style=_SOFT),
    )
    return grid


def _progress(history: History, width: int) -> Text:
    fraction = min(history.step / history.total, 1.0) if history.total else 0.0
    left = "done" if history.step >= history.total else f"{clock(history.seconds_left)} left"
    words = f"  step {history.step} of {history.total}   {left}"
    doing = f"   {history.phase}" if history.phase and fraction < 1 else ""
    room = max(width - len(words) - 12, 8)
    filled = round(fraction * room)
    bar = Text("━" * filled, style="green" if fraction == 1 else "blue")
    return bar.append("━" * (room - filled), style=_SOFT).append(words).append(doing, style=_SOFT)


def _metrics(history: History, spark: int, notes: bool) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style=_SOFT, no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(no_wrap=True, width=spark)
    if notes:
        grid.add_column(style=_SOFT, no_wrap=True, overflow="ellipsis")
    left_out = any(history.values("learn/skipped_share"))
    for label, name, form, note in (*_LINES, _LEFT_OUT) if left_out else _LINES:
        if (value := history.last(name)) is not None:
            line = Text(sparkline(history.values(name), spark), style="blue")
            grid.add_row(*(label, form.format(value), line, _note(history, note))[: 3 + notes])
    for row in (_turns(history, spark), _mismatch(history, spark)):
        if row is not None:
            grid.add_row(*row[: 3 + notes])
    return grid


_LINES = (
    ("reward", "reward/mean", "{:.3f}", ("± {:.3f}", "reward/std")),
    ("accuracy", "accuracy/held_out", "{:.3f}", None),
    ("loss", "loss/cross_entropy", "{:.4f}", None),
    ("margin", "preference/margin", "{:.4f}", ("{:.0%} preferred", "preference/accuracy")),
    (
        "tokens/s",
        "throughput/rollout_tokens_per_s",
        "{:,.0f}",
        ("{:,.0f} learning", "throughput/learn_tokens_per_s"),
    ),
    ("length", "length/mean", "{:.1f}", ("{:.0%} truncated", "length/truncated_fraction")),
    ("entropy", "entropy", "{:.3f}", ("gradient norm {:.3g}", "grad_norm")),
)
_LEFT_OUT = (
    "left out",
    "learn/skipped_share",
    "{:.0%}",
    ("{:.0%} of the samples teach", "advantage/nonzero_fraction"),
)


def _note(history: History, note: tuple[str, str] | None) -> str:
    value = history.last(note[1]) if note is not None else None
    return "" if note is None or value is None else note[0].format(value)


def _turns(history: History, spark: int) -> tuple[str, str, Text, str] | None:
    """Of episodes with environments."""
    if (turns := history.last("env/turns")) is None:
        return None
    calls, failed = (history.last(f"tools/{name}_frequency") for name in ("call", "failure"))
    note = f"{calls:.1f} calls, {failed or 0.0:.0%} failed" if calls else ""
    if problems := history.last("env/problems"):
        note = ", ".join([*([note] if note else []), f"{problems:.0%} with problems"])
    line = Text(sparkline(history.values("env/turns"), spark), style="blue")
    return "turns", f"{turns:.1f}", line, note


def _mismatch(history: History, spark: int) -> tuple[str, str | Text, Text, str] | None:
    differing = history.last("mismatch/differing_tokens")
    total, compared, comparable = _compared(history)
    of = (
        f"{compared:,.0f} tokens"
        if compared >= comparable
        else f"{compared:,.0f} of {comparable:,.0f} tokens"
    )
    if differing is None:
        return (
            None if not comparable else ("mismatch", "", Text("not compared", style="yellow"), of)
        )
    if total == 0:
        return "mismatch", Text("0", style="green"), Text("exactly zero", style="green"), of
    kl = history.last("mismatch/kl_k3")
    line = Text(sparkline(history.values("mismatch/kl_k3"), spark), style="yellow")
    value = f"{kl:.1e}" if kl is not None else f"{differing:,.0f}"
    return "mismatch k3", value, line, f"{total:,.0f} of {compared:,.0f} tokens differ"


def _phases(history: History, width: int) -> Text | None:
    shares = history.phase_shares()
    pace = history.seconds_per_step
    if not shares or pace is None:
        return None
    legend = Text(f"{pace:.2f} s a step  " if pace < 100 else f"{pace:.0f} s a step  ")
    for name, share in shares:
        legend.append("■ ", style=_PHASE_STYLES.get(name, _SOFT)).append(
            f"{name} {share:.0%}  ", style=_SOFT
        )
    line = Text(f"{'time':<10}", style=_SOFT)
    room = min(width - len(line) - len(legend) - 2, SPARK_WIDTH)
    if room >= 8:
        for name, share in shares:
            line.append("█" * round(share * room), style=_PHASE_STYLES.get(name, _SOFT))
        line.append("  ")
    line.append_text(legend)
    line.rstrip()
    line.truncate(width, overflow="ellipsis")
    return line


def _tools(history: History, width: int) -> Text | None:
    """Of each tool the calls and failures an episode in the last step, and its seconds; those that
    took longest first."""
    tools = history.members("tools/call_frequency/")
    if not tools:
        return None
    took = {name: history.last(f"time/tools/{name}") or 0.0 for name in tools}
    line = Text(f"{'tools':<10}", style=_SOFT)
    for name in sorted(tools, key=lambda name: -took[name]):
        failed = history.last(f"tools/failure_frequency/{name}") or 0.0
        line.append(f"{plain(name)} ").append(f"{took[name]:.2f} s", style="default")
        line.append(f" ({failed:.0%} failed)  " if failed else "  ", style=_SOFT)
    line.rstrip()
    line.truncate(width, overflow="ellipsis")
    return line


def _memory(history: History, width: int) -> Text | None:
    peak = history.last("memory/peak_rss_mib")
    if peak is None:
        return None
    parts = [("weights", "weights"), ("optimizer", "optimizer"), ("cache", "kv_cache")]
    known = [(label, history.last(f"memory/{name}_mib")) for label, name in parts]
    rest = "  ".join(f"{label} {value:,.0f}" for label, value in known if value is not None)
    line = (
        Text(f"{'memory':<10}", style=_SOFT)
        .append(f"peak {peak:,.0f} MiB  ", style="default")
        .append(rest)
    )
    line.truncate(width, overflow="ellipsis")
    return line


def _samples(history: History) -> list[tuple[str, Shown]]:
    if history.best is None or history.worst is None:
        return []
    if history.best.reward == history.worst.reward:
        return [("all alike", history.best)]
    return [("best", history.best), ("worst", history.worst)]


def _sample(label: str, shown: Shown, width: int) -> Text:
    line = Text(f"{label:<10}", style=_SOFT).append(f"{shown.reward:.3g}  ")
    room = max(width - len(line) - 4, 20)
    prompt, completion = plain(shown.prompt), plain(shown.completion)
    half = room // 2
    if len(prompt) > half:
        prompt = "…" + prompt[-(half - 1) :]  # the end of a prompt is the question
    line.append(prompt, style=_SOFT).append(" → ", style=_SOFT).append(completion, style="default")
    line.truncate(width, overflow="ellipsis")
    return line
