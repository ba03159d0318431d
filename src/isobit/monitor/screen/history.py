"""What the live view knows about a run: the values of each metric so far, and the last step's best
and worst completion.

Fed with rows of metrics.jsonl and with completions, by the run itself or from its files. Left out:
how it is drawn.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from isobit.run.no_progress import CutOff, NoProgress

RECENT = 20  # steps behind a time per step, a share of a phase, and an estimate of the time left
PHASES = ("rollout", "score", "learn", "sync", "calibrate")


class Shown(NamedTuple):
    """A completion: its reward (None: unscored), its prompt, its text."""

    reward: float | None
    prompt: str
    completion: str


@dataclass
class History:
    """The metrics and completions of a run, as the screen shows them. `total` steps are planned;
    `details` says in a few words what kind of run it is; `phase` is what it does now. `ranks`: what
    each of several processes does (`isobit.run.heartbeat`)."""

    name: str
    total: int
    details: str = ""
    step: int = 0
    phase: str = ""
    ranks: Sequence[Mapping[str, Any]] = ()
    best: Shown | None = None
    worst: Shown | None = None
    no_progress: NoProgress = field(default_factory=NoProgress)
    cut_off: CutOff = field(default_factory=CutOff)
    _values: dict[str, list[float]] = field(default_factory=dict)
    _newest: Sequence[str] = ()

    def add(self, metrics: Mapping[str, float | None]) -> None:
        """Add a row of metrics; values that are not finite leave no point."""
        if (step := metrics.get("step")) is not None:
            self.step = int(step)
        self.no_progress = self.no_progress.after(metrics)
        self.cut_off = self.cut_off.after(metrics)
        self._newest = tuple(metrics)
        for name, value in metrics.items():
            if value is not None and math.isfinite(value):
                self._values.setdefault(name, []).append(value)

    def show(self, completions: Iterable[Shown]) -> None:
        """Set the completions of the last step."""
        scored = [shown for shown in completions if shown.reward is not None]
        if scored:
            self.best = max(scored, key=lambda shown: shown.reward or 0.0)
            self.worst = min(scored, key=lambda shown: shown.reward or 0.0)

    def values(self, name: str) -> list[float]:
        """Return all values of a metric."""
        return self._values.get(name, [])

    def last(self, name: str) -> float | None:
        """Return the newest value of a metric."""
        values = self.values(name)
        return values[-1] if values else None

    def members(self, family: str) -> list[str]:
        """Return the names that a family of metrics, as `time/tools/`, had in the newest step."""
        return [name.removeprefix(family) for name in self._newest if name.startswith(family)]

    def total_of(self, name: str) -> float:
        """Return the sum of a metric over the run."""
        return sum(self.values(name))

    @property
    def seconds_per_step(self) -> float | None:
        """Mean of the last steps; of the first, in which kernels are compiled, only until there is
        another."""
        steps = self.values("time/step")
        recent = (steps[1:] or steps)[-RECENT:]
        return sum(recent) / len(recent) if recent else None

    @property
    def seconds_left(self) -> float | None:
        """For the steps that remain, at the pace of the last ones; evaluations and checkpoints are
        not in it."""
        pace = self.seconds_per_step
        return None if pace is None else pace * max(self.total - self.step, 0)

    def phase_shares(self) -> list[tuple[str, float]]:
        """Return (phase, fraction of the last steps' time) from half a percent on; what no timer
        names is `other`."""
        whole = sum(self.values("time/step")[-RECENT:])
        if not whole:
            return []
        shares = [(name, sum(self.values(f"time/{name}")[-RECENT:]) / whole) for name in PHASES]
        rest = 1.0 - sum(share for _, share in shares)
        return [(name, share) for name, share in (*shares, ("other", rest)) if share >= 0.005]
