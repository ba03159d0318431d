"""Whether a run learns at all: for how many steps no completion has had an advantage, and for how
many all have been cut off at the length limit.

A reward that is None, 0 or the same for every completion, and dynamic sampling that drops every
group, leave a run that works on without an error and learns nothing. Pure over rows of
metrics.jsonl, so that a run, the one that goes on with it, `isobit watch` and the report count
alike. Left out: rewards that differ and mean nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

PATIENCE = 20
"""Steps in a row without an advantage after which it is said."""


@dataclass(frozen=True)
class NoProgress:
    """The newest steps of a run in which nothing was learned.

    `steps`: their number, in a row; `taught`: whether any step of the run had a gradient. `lowest`
    and `highest`: mean rewards among them; `deviation`: the largest within one step; infinite
    without a scored step.
    """

    steps: int = 0
    taught: bool = False
    lowest: float = float("inf")
    highest: float = float("-inf")
    deviation: float = 0.0

    def after(self, row: Mapping[str, float | None]) -> "NoProgress":
        """Return the state after one more row of metrics. NaN and None are alike: a file has null
        where a run had NaN."""
        alike = row.get("groups/zero_spread_fraction")
        if alike is None:  # the evaluation before the first step
            return self
        teaching = row.get("advantage/nonzero_fraction")
        if teaching is not None and teaching > 0:  # NaN is not
            return NoProgress(taught=True)
        mean, deviation = row.get("reward/mean"), max(self.deviation, row.get("reward/std") or 0.0)
        if mean is None or mean != mean:
            return replace(self, steps=self.steps + 1, deviation=deviation)
        lowest, highest = min(self.lowest, mean), max(self.highest, mean)
        return NoProgress(self.steps + 1, self.taught, lowest, highest, deviation)

    @property
    def line(self) -> str | None:
        """The warning for a run that goes on, in one line; None before `PATIENCE` such steps."""
        if self.steps < PATIENCE:
            return None
        return f"{self._what()} for {self.steps} steps{self._why()}: nothing is learned"

    @property
    def verdict(self) -> str | None:
        """The closing line for a run that has ended; None for a run that learned to the end, or
        paused for few steps."""
        if not self.steps or (self.taught and self.steps < PATIENCE):
            return None
        when = f"in the last {self.steps} steps" if self.taught else "in any step"
        return f"{self._what()} {when}{self._why()}: nothing was learned"

    def _what(self) -> str:
        return (
            "no group had a spread"
            if self.lowest <= self.highest
            else "no completion could be scored"
        )

    def _why(self) -> str:
        return (
            f" (every reward was {self.lowest:g})"
            if self.lowest == self.highest and not self.deviation
            else ""
        )


@dataclass(frozen=True)
class CutOff:
    """The newest steps of a run in which every completion ran to the length limit. `steps`: their
    number, in a row; `ended`: whether any completion of the run ended before the limit."""

    steps: int = 0
    ended: bool = False

    def after(self, row: Mapping[str, float | None]) -> "CutOff":
        """Return the state after one more row of metrics."""
        cut = row.get("length/truncated_fraction")
        if cut is None or cut != cut:
            return self
        return replace(self, steps=self.steps + 1) if cut == 1 else CutOff(0, True)

    @property
    def line(self) -> str | None:
        """The warning for a run that goes on, in one line; None before `PATIENCE` such steps."""
        return self._what(f"for {self.steps} steps") if self.steps >= PATIENCE else None

    @property
    def verdict(self) -> str | None:
        """The closing line for a run that has ended; None where completions ended, or few steps
        were cut off."""
        if not self.steps or (self.ended and self.steps < PATIENCE):
            return None
        return self._what(f"in the last {self.steps} steps" if self.ended else "in every step")

    def _what(self, when: str) -> str:
        return (
            f"every completion {when} ran to sampling.max_new_tokens and was cut off there: what it "
            "would have said after that was never scored"
        )
