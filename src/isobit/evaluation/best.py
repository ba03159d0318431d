"""The best model of a run, by a held-out metric: `best/`, a Hugging Face directory with `best.json`
next to the weights.

A model replaces it if its value is larger; of equal ones the earlier stays. By `auto` the value is
the greedy accuracy, or for equal accuracies the greedy reward: rewards that stay below 1 have an
accuracy of 0 throughout.

A run that was killed goes on from a checkpoint that knows the best of its own time, while `best/`
may hold a later one. So the best of the last checkpoint's time stands by in `.best-previous` until
the next checkpoint, and comes back when the run goes on from the last: `best/` is then what it was,
and what it becomes is what it would have become (tests/evaluation/test_best.py).
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from isobit.distributed import ALONE, Ranks
from isobit.run import checkpoints
from isobit.run.directory import BEST, object_in

DESCRIPTION = "best.json"
AUTO = "auto"
_AUTO_METRICS = ("accuracy/held_out", "reward/held_out")
_PREVIOUS = ".best-previous"


class Best:
    """The best values so far, of `metric` (AUTO: of two, the second decides where the first is
    equal), and the step that they are of; `write(folder)` writes the present model. With metric
    None nothing is kept. All ranks call the methods, the first one has the directories."""

    def __init__(
        self, run: Path, metric: str | None, write: Callable[[Path], None], ranks: Ranks = ALONE
    ) -> None:
        self.directory, self._previous = run / BEST, run / _PREVIOUS
        self._metrics: tuple[str, ...] = (
            () if metric is None else _AUTO_METRICS if metric == AUTO else (metric,)
        )
        self._write, self._ranks = write, ranks
        self.step: int | None = None
        self.values = [-math.inf for _ in self._metrics]

    def consider(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the present model if its metric is the largest so far. Raises RunFailed if it cannot
        be written."""
        # NaN, of rewards that failed, is never the best
        values = [
            -math.inf if math.isnan(metrics[name]) else metrics[name] for name in self._metrics
        ]
        if not values > self.values or values[_decisive(values)] == -math.inf:
            return
        description = self._description(step, values)

        def write(folder: Path) -> None:
            self._write(folder)
            text = json.dumps(description) + "\n"
            self._ranks.on_first(lambda: (folder / DESCRIPTION).write_text(text, encoding="utf-8"))

        keep = None if self._previous.exists() else self._previous
        checkpoints.replace(self.directory, write, keep, self._ranks)
        self.step, self.values = step, values

    def _description(self, step: int, values: Sequence[float]) -> dict[str, Any]:
        """Return the content of best.json: the metric that told the models apart, and its value;
        with several metrics all their values."""
        decisive = _decisive(values)
        best = {"step": step, "metric": self._metrics[decisive], "value": values[decisive]}
        return best | ({"values": dict(zip(self._metrics, values))} if len(values) > 1 else {})

    def to_json(self) -> dict[str, Any] | None:
        """Return the best model's description for the state of a checkpoint."""
        return None if self.step is None else self._description(self.step, self.values)

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint: its best, and on disk the model of that step, if it is still
        there."""
        if saved is not None:
            self._know(saved)
        self._ranks.on_first(lambda: self._bring_back(saved))

    def _bring_back(self, saved: Mapping[str, Any] | None) -> None:
        if saved is not None and _description(self._previous) == saved:
            shutil.rmtree(self.directory, ignore_errors=True)
            self._previous.rename(self.directory)
        shutil.rmtree(self._previous, ignore_errors=True)
        checkpoints.remove_leftovers(self.directory.parent)

    def stay(self) -> None:
        """Keep `best/` and its predecessor as they are at the end of a run, for a longer run."""
        if (description := _description(self.directory)) is not None:
            self._know(description)

    def problem(self, saved: Mapping[str, Any] | None) -> str | None:
        """Return a warning where `best/` is not whole, or differs from what a checkpoint has
        `saved` of it."""
        if not self._metrics or (saved is None and not self.directory.exists()):
            return None
        damage = checkpoints.damage(self.directory)
        if damage is None and saved is not None and _description(self.directory) != saved:
            damage = f"its {DESCRIPTION} is not the checkpoint's"
        return damage and (
            f"warning: {self.directory} is damaged ({damage}): the best model so far is lost, and a "
            "better one takes its place"
        )

    def _know(self, saved: Mapping[str, Any]) -> None:
        values = saved.get("values", {saved["metric"]: saved["value"]})
        self.step = saved["step"]
        self.values = [values.get(name, -math.inf) for name in self._metrics]

    def settle(self) -> None:
        """Delete the predecessor: a checkpoint has recorded the present best."""
        self._ranks.on_first(lambda: shutil.rmtree(self._previous, ignore_errors=True))

    def line(self, newest_step: int) -> str | None:
        """Return the last line of a run if the best model is of an earlier step than its newest
        checkpoint."""
        if self.step is None or self.step >= newest_step:
            return None
        description = self._description(self.step, self.values)
        why = ""
        if len(self.values) > 1:
            first, second = self._metrics
            comparison = (
                f"{first} is 0 throughout"
                if description["metric"] == second
                else f"{second} {self.values[1]:.4f}"
            )
            why = f" ({comparison})"
        return (
            f"best {description['metric']} {description['value']:.4f}{why} at step {self.step}, in "
            f"{self.directory}; the newest checkpoint is of step {newest_step}"
        )


def _decisive(values: Sequence[float]) -> int:
    """Return the index of the value that decides: the second where the first is 0, which of the
    largest means that it never was more."""
    return -1 if values[0] == 0 else 0


def is_description(value: object) -> bool:
    """Return whether a value has the form of best.json: a step, a metric and its value, and where
    there are several their values."""
    if (
        not isinstance(value, dict)
        or type(value.get("step")) is not int
        or not isinstance(value.get("metric"), str)
    ):
        return False
    values = value.get("values", {})
    numbers = [value.get("value"), *(values.values() if isinstance(values, dict) else [None])]
    return all(
        isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers
    )


def _description(directory: Path) -> dict[str, Any] | None:
    """Read the best.json of a directory; None where it is missing or malformed."""
    content = object_in(directory / DESCRIPTION)
    return content if is_description(content) else None
