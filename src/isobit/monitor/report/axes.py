"""Axes of a chart: where a value stands, and which values are named.

A logarithmic axis has no zero: where there are exact zeros, they have their own row under it,
named 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_ZERO_ROW = 20.0  # pixels between the row of exact zeros and the lowest positive value
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """A mapping of values from `low` to `high` to pixels from `start` to `end`; logarithmic with a
    row for zeros, if `zeros`, and with labels at powers of two, if `doubling`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    zeros: bool = False
    doubling: bool = False

    @property
    def lowest(self) -> float:
        """The pixel of the value `low`."""
        return (
            self.start + math.copysign(_ZERO_ROW, self.end - self.start)
            if self.zeros
            else self.start
        )

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        if self.log:
            if value <= 0:
                return self.start
            share = (math.log10(value) - math.log10(self.low)) / (
                math.log10(self.high) - math.log10(self.low)
            )
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.lowest + share * (self.end - self.lowest)

    def ticks(self) -> list[tuple[float, str]]:
        """Return the values to label on the axis, with their labels."""
        if not self.log:
            return [(value, label(value)) for value in nice_values(self.low, self.high)]
        if self.doubling:
            powers = range(round(math.log2(self.low)), round(math.log2(self.high)) + 1)
            return [(2.0**power, label(2.0**power)) for power in powers[:: -(-len(powers) // 8)]]
        first, last = round(math.log10(self.low)), round(math.log10(self.high))
        every = max(1, math.ceil((last - first) / 4))
        named = [(10.0**power, power_of_ten(power)) for power in range(last, first - 1, -every)]
        if last - first <= 2:  # few decades: 2 and 5 of each as well
            values = [f * 10.0**power for power in range(first, last) for f in (1, 2, 5)]
            named = [(value, label(value)) for value in (*values, self.high)]
        return [*named, (0.0, "0")] if self.zeros else named

    def data(self) -> dict[str, float | bool]:
        """Return the values by which a script places a point on the axis."""
        ends = {"low": self.low, "high": self.high, "start": self.lowest, "end": self.end}
        return {**ends, "log": self.log, "zero": self.start}


def linear_axis(values: Sequence[float], start: float, end: float, fraction: bool = False) -> Axis:
    """Return an axis from a little below the lowest to a little above the highest value; from 0
    where no value is far above the others."""
    if fraction:
        return Axis(0.0, 1.0, start, end)
    low, high = min(values), max(values)
    if low >= 0 and low < 0.6 * high:
        low = 0.0
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Axis(low if low == 0 else low - room, high + room, start, end)


def log_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """Return an axis of whole decades around the positive values; 10⁻⁸ to 1 if all are zero."""
    positive = [v for v in values if v > 0]
    first = math.floor(math.log10(min(positive))) if positive else -8
    last = math.ceil(math.log10(max(positive))) if positive else 0
    return Axis(
        10.0 ** min(first, last - 1), 10.0**last, start, end, True, any(v <= 0 for v in values)
    )


def doubling_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """Return an axis of powers of two at equal distances."""
    low = min(values)
    return Axis(low, max(*values, 2 * low), start, end, log=True, doubling=True)


def nice_values(low: float, high: float, most: int = 5) -> list[float]:
    """Return at most `most` round values inside [low, high]."""
    span = high - low
    unit = 10.0 ** math.floor(math.log10(span))
    steps = (unit * factor for factor in (0.1, 0.2, 0.25, 0.5, 1, 2, 2.5, 5, 10))
    step = next(s for s in steps if math.floor(high / s) - math.ceil(low / s) < most)
    return [
        i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def label(value: float) -> str:
    """Return a tick's name: `0.25`, `12k`, `1.5M`."""
    for least, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}" if value == 0 or abs(value) >= 1e-4 else power_text(value)


def power_of_ten(power: int) -> str:
    """Return a power of ten as text: 1 to 1000 in digits, others such as 10⁻³."""
    return str(10**power) if 0 <= power <= 3 else "10" + str(power).translate(_SUPERSCRIPTS)


def power_text(value: float) -> str:
    """Return a small number as text, such as 2.5·10⁻⁶."""
    mantissa, power = f"{value:.1e}".split("e")
    exact = power_of_ten(int(power))
    return exact if mantissa == "1.0" else f"{float(mantissa):g}·{exact}"
