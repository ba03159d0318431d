"""Series of metrics over steps: read from rows, smoothed, and thinned to what a figure can show.

A thinned series keeps the lowest and the highest point of every stretch, so that a peak, or an
exact zero, is never lost. Left out: drawing (`charts.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

MetricRows = Sequence[Mapping[str, float | None]]
MOST_POINTS = 360
"""Points of a line at most: about one a pixel."""
SMOOTHED_FROM = 80
"""A series of at least this many points also gets its running mean."""


@dataclass(frozen=True)
class Series:
    """A run: its name and the rows of its metrics.jsonl."""

    name: str
    rows: MetricRows


@dataclass(frozen=True)
class Line:
    """Values over steps, and the ends of a band around them, or none."""

    steps: list[float]
    values: list[float]
    low: list[float]
    high: list[float]

    def chosen(self, indices: Sequence[int]) -> "Line":
        """Return the line with only the points at these indices."""
        lists = (self.steps, self.values, self.low, self.high)
        return Line(*([values[i] for i in indices] if values else [] for values in lists))

    def thinned(self) -> "Line":
        """Return the line with at most MOST_POINTS points."""
        return self.chosen(thin(self.values))

    def positive(self) -> "Line":
        """Return the line with only the points above 0, without its band, whose ends need not be
        above 0."""
        positive = self.chosen([i for i, value in enumerate(self.values) if value > 0])
        return Line(positive.steps, positive.values, [], [])

    def smoothed(self, log: bool = False) -> "Line":
        """Return the running means (geometric ones with `log`) at no more than MOST_POINTS / 2
        points."""
        width = smoothing_width(len(self.values))
        lists = (self.values, self.low, self.high)
        if log:
            means = [
                [math.exp(m) for m in running_mean([math.log(v) for v in values], width)]
                for values in lists
            ]
        else:
            means = [running_mean(values, width) for values in lists]
        return Line(self.steps, *means).chosen(_even(len(self.steps), MOST_POINTS // 2))


def points(rows: MetricRows, metric: str) -> tuple[list[float], list[float]]:
    """Return (steps, values) where the metric has a finite value."""
    pairs = [(row["step"], row.get(metric)) for row in rows]
    finite = [
        (float(s), float(v))
        for s, v in pairs
        if s is not None and v is not None and math.isfinite(v)
    ]
    return [s for s, _ in finite], [v for _, v in finite]


def line(rows: MetricRows, metric: str) -> Line:
    """Return a metric, with the band from `metric:low` to `metric:high` if there is one."""
    steps, values = points(rows, metric)
    low, high = (dict(zip(*points(rows, f"{metric}:{end}"))) for end in ("low", "high"))
    if not low:
        return Line(steps, values, [], [])
    return Line(
        steps, values, *([end.get(s, v) for s, v in zip(steps, values)] for end in (low, high))
    )


def smoothing_width(count: int) -> int:
    """Return the number of points of a running mean over a series of `count`: odd; 1 for a short
    series."""
    return 1 if count < SMOOTHED_FROM else 2 * (count // 80) + 1


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Return centred means over `width` points (odd), over fewer towards the ends."""
    sums, half = [0.0, *accumulate(values)], width // 2
    ends = [(max(i - half, 0), min(i + half + 1, len(values))) for i in range(len(values))]
    return [(sums[high] - sums[low]) / (high - low) for low, high in ends]


def thin(values: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """Return the indices to keep, ascending: all, or the lowest and the highest value of each of
    `most` / 2 stretches, and both ends."""
    count = len(values)
    if count <= most:
        return list(range(count))
    indices = {0, count - 1}
    borders = [round(i * count / (most // 2 - 1)) for i in range(most // 2)]
    for begin, end in pairwise(borders):
        stretch = range(begin, end)
        indices |= {min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)}
    return sorted(indices)


def _even(count: int, most: int) -> list[int]:
    """Return at most `most` indices, evenly spread, both ends among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
