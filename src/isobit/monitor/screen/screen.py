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
from isobit.monitor.screen.lines import LINES, WORK, lines_of, said

BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 32
_NOTES_FROM = 76  # columns: a narrower terminal has no room next to the sparklines
_PHASE_STYLES = {
    "rollout": "blue",
    "score": "yellow",
    "learn": "green",
    "sync": "magenta",
    "calibrate": "cyan",
}
_SOFT = "bright_black"
_LEAST_SPARK = len("exactly zero")
_GAP = 2
_Row = tuple[str, str | Text, str | Text, str]
"""A label, its value, the metric of the sparkline or a text in its place, and a note."""


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """Return the values as bars between the smallest and the largest value; more than `width`
    values are averaged in even parts."""
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
    """Return seconds as text: 3:07, 2:03:07 from an hour on, or -:-- for None."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def plain(text: str) -> str:
    """Return a text as one line without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else "⏎" if c == "\n" else " " for c in text)


def screen(history: History, width: int, height: int) -> RenderableType:
    """Return the whole view, at most `width` columns and `height` lines; the least important lines
    are left out first."""
    header = Table.grid(expand=False, padding=(0, 2))
    header.width = width
    header.add_column(no_wrap=True, overflow="ellipsis")
    header.add_column(justify="right", no_wrap=True, overflow="ellipsis", ratio=1)
    header.add_row(
        Text(f"isobit  {plain(history.name)}", style="bold"),
        Text(plain(history.details), style=_SOFT),
    )
    rows = _metrics(history, width)
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
    """Return a line for each of several ranks. The rank that has been in its phase for the longest
    time is marked, since the others may wait for it."""
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
    """Return the most important numbers of a run in one line."""
    differing = history.last("mismatch/differing_tokens")
    parts = [
        f"step {history.step}/{history.total}",
        *said(history, LINES),
        *([] if differing is None else [_differing(history).format(differing)]),
        *said(history, WORK),
    ]
    if history.seconds_left is not None:
        parts.append(f"{clock(history.seconds_left)} left")
    return "  ".join(parts)


def _differing(history: History) -> str:
    """Return a format for the tokens that differ: those of the step if all tokens are compared,
    else those of the run with the number of compared tokens."""
    differing, compared, comparable = _compared(history)
    if compared >= comparable:
        return "differing tokens {:,.0f}"
    return f"differing tokens {differing:,.0f} of {compared:,.0f} compared"


def _compared(history: History) -> tuple[float, float, float]:
    """Return the numbers of tokens of a run that differ, that were compared, and that could have
    been compared."""
    differing, compared, comparable = (
        history.total_of(f"mismatch/{name}_tokens")
        for name in ("differing", "compared", "comparable")
    )
    return differing, compared, comparable


def _progress(history: History, width: int) -> Text:
    fraction = min(history.step / history.total, 1.0) if history.total else 0.0
    left = "done" if history.step >= history.total else f"{clock(history.seconds_left)} left"
    words = f"  step {history.step} of {history.total}   {left}"
    doing = f"   {history.phase}" if history.phase and fraction < 1 else ""
    room = max(width - len(words) - 12, 8)
    filled = round(fraction * room)
    bar = Text("━" * filled, style="green" if fraction == 1 else "blue")
    return bar.append("━" * (room - filled), style=_SOFT).append(words).append(doing, style=_SOFT)


def _metrics(history: History, width: int) -> Table:
    """Return a table with a row for each line. Values are never cut; a sparkline gives room to the
    notes, which are cut only when the sparkline is shortest."""
    rows: list[_Row] = [
        (line.label, line.form.format(history.last(name)), name, line.note_of(history, name))
        for line, name in lines_of(history)
    ]
    rows += [row for row in (_turns(history), _mismatch(history)) if row is not None]
    label, value, note = (max((len(row[i]) for row in rows), default=0) for i in (0, 1, 3))
    notes = width >= _NOTES_FROM
    room = width - label - value - (3 if notes else 2) * _GAP
    spark = min(max(room - note * notes, _LEAST_SPARK), SPARK_WIDTH)
    grid = Table.grid(padding=(0, _GAP))
    grid.add_column(style=_SOFT, no_wrap=True, min_width=label)
    grid.add_column(justify="right", no_wrap=True, min_width=value)
    grid.add_column(no_wrap=True, width=spark)
    if notes:
        grid.add_column(style=_SOFT, no_wrap=True, overflow="ellipsis", max_width=room - spark)
    for name, number, drawn, beside in rows:
        if isinstance(drawn, str):
            drawn = Text(sparkline(history.values(drawn), spark), style="blue")
        grid.add_row(*(name, number, drawn, beside)[: 3 + notes])
    return grid


def _turns(history: History) -> _Row | None:
    """Return the row about turns, calls of tools and problems of episodes with environments; None
    without such episodes."""
    if (turns := history.last("env/turns")) is None:
        return None
    calls, failed = (history.last(f"tools/{name}_frequency") for name in ("call", "failure"))
    note = f"{calls:.1f} calls, {failed or 0.0:.0%} failed" if calls else ""
    if problems := history.last("env/problems"):
        note = ", ".join([*([note] if note else []), f"{problems:.0%} with problems"])
    return "turns", f"{turns:.1f}", "env/turns", note


def _mismatch(history: History) -> _Row | None:
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
    value = f"{kl:.1e}" if kl is not None else f"{differing:,.0f}"
    return "mismatch k3", value, "mismatch/kl_k3", f"{total:,.0f} of {compared:,.0f} tokens differ"


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
    """Return a line with each tool's seconds and share of failed calls in the last step, the tool
    that took longest first; None without tools."""
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
