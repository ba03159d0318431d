"""When a run ends before its last step: a held-out metric has reached a value, or was not better for
some evaluations in a row.

It knows only the evaluations of the run, which metrics.jsonl keeps: a run that goes on reads them
again, and ends where it would have ended. Losses are better when they are smaller, all else when it
is larger. Left out: which model is kept (`best.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from isobit.errors import IsobitError, brief, did_you_mean
from isobit.options.declare import at_least

STOPPED = "evaluation/stopped"
"""The metric of the step at which a run ended so."""


@dataclass(frozen=True)
class StopConfig:
    """When a run ends before its last step."""

    stop_by: Annotated[str, "the metric that stop_at and patience look at"] = "accuracy/held_out"
    stop_at: Annotated[
        float | None,
        "the run ends as soon as an evaluation reaches this value; a loss reaches it from "
        "above. The evaluation before the first step does not count",
    ] = None
    patience: Annotated[
        int | None,
        at_least(1),
        "the run ends after this many evaluations in a row without a new best",
    ] = None

    @property
    def stops(self) -> bool:
        """Whether the run may end early."""
        return self.stop_at is not None or self.patience is not None

    def check_stop(self, every: int) -> None:
        """Raise IsobitError where nothing is evaluated while the run goes on."""
        if self.stops and not every:
            key = "stop_at" if self.stop_at is not None else "patience"
            raise IsobitError(
                f"evaluation.{key} is looked at every evaluation.every steps; set that too"
            )

    def check_metrics(self, known: Sequence[str]) -> None:
        """Raise IsobitError unless an evaluation, which has the `known` metrics, has the one that
        ends the run."""
        if self.stops:
            check_metric("stop_by", self.stop_by, known)


def check_metric(key: str, name: str, known: Sequence[str]) -> None:
    """Raise IsobitError unless the metric that `evaluation.KEY` names is known."""
    if name not in known:
        raise IsobitError(
            f"evaluation.{key}: the evaluation has no metric {brief(name)!r}; "
            f"{did_you_mean(name, known)}"
        )


class EarlyStop:
    """`reason`: why the run ends, in words; None while it goes on."""

    def __init__(self, config: StopConfig) -> None:
        self._config = config
        self._sign = -1.0 if config.stop_by.startswith("loss/") else 1.0
        self._best, self._worse = -math.inf, 0
        self.reason: str | None = None

    def consider(self, step: int, metrics: Mapping[str, float | None]) -> bool:
        """Count an evaluation after `step`, and return whether it ends the run. The one before the
        first step is a value to be better than, and ends nothing."""
        config, value = self._config, metrics.get(self._config.stop_by)
        if not config.stops or self.reason is not None or config.stop_by not in metrics:
            return False
        score = -math.inf if value is None or math.isnan(value) else self._sign * value
        better = score > self._best
        self._best = max(self._best, score)
        self._worse = 0 if better else self._worse + 1
        summary = f"step {step}: {config.stop_by} is {math.nan if value is None else value:.4g}"
        if step == 0:
            self._worse = 0
        elif config.stop_at is not None and score >= self._sign * config.stop_at:
            self.reason = f"{summary}, which reaches evaluation.stop_at {config.stop_at:g}"
        elif config.patience is not None and self._worse >= config.patience:
            self.reason = (
                f"{summary}, and the best was {self._sign * self._best:.4g}: not better for "
                f"{self._worse} evaluations (evaluation.patience)"
            )
        return self.reason is not None
