"""The best model of a run, by a held-out metric: `best/`, a Hugging Face directory with `best.json` beside the weights.

A model replaces it if its value is larger; of equal ones the earlier stays. A run that was killed goes on from a
checkpoint that knows the best of its own time, while `best/` may hold a later one. So the best of the last checkpoint's
time stands by in `.best-previous` until the next checkpoint, and comes back when the run goes on from the last: `best/`
is then what it was, and what it becomes is what it would have become (tests/test_best.py).
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from isobit import checkpoints
from isobit.run import BEST

DESCRIPTION = "best.json"
_PREVIOUS = ".best-previous"


class Best:
    """The best value so far, of `metric`, and the step that it is of; `write(folder)` writes the present model. With
    metric None nothing is kept."""

    def __init__(self, run: Path, metric: str | None, write: Callable[[Path], None]) -> None:
        self.directory, self._previous = run / BEST, run / _PREVIOUS
        self.metric, self._write = metric, write
        self.step: int | None = None
        self.value = -math.inf

    def consider(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the present model if its metric is the largest so far. Raises RunFailed if it cannot be written."""
        if self.metric is None or not metrics[self.metric] > self.value:  # NaN, of rewards that failed, is not either
            return
        value = metrics[self.metric]
        description = {"step": step, "metric": self.metric, "value": value}

        def write(folder: Path) -> None:
            self._write(folder)
            (folder / DESCRIPTION).write_text(json.dumps(description) + "\n", encoding="utf-8")

        checkpoints.replace(self.directory, write, None if self._previous.exists() else self._previous)
        self.step, self.value = step, value

    def to_json(self) -> dict[str, Any] | None:
        """For the state of a checkpoint."""
        return None if self.step is None else {"step": self.step, "metric": self.metric, "value": self.value}

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint: its best, and on disk the model of that step, if it is still there."""
        if saved is not None:
            self.step, self.value = saved["step"], saved["value"]
            if _description(self._previous) == saved:
                shutil.rmtree(self.directory, ignore_errors=True)
                self._previous.rename(self.directory)
        self.settle()
        checkpoints.remove_leftovers(self.directory.parent)

    def settle(self) -> None:
        """A checkpoint knows the present best: what stood by is no longer needed."""
        shutil.rmtree(self._previous, ignore_errors=True)

    def line(self, newest_step: int) -> str | None:
        """What the end of a run says if the best model is of an earlier step than its newest checkpoint."""
        if self.step is None or self.step >= newest_step:
            return None
        return (
            f"best {self.metric} {self.value:.4f} at step {self.step}, in {self.directory}; "
            f"the newest checkpoint is of step {newest_step}"
        )


def _description(directory: Path) -> Any:
    """best.json, or None where it cannot be read."""
    try:
        return json.loads((directory / DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
