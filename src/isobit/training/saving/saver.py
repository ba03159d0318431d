"""When a run is saved: at its end, every n steps, and when an error ends it.

After an error the newest whole step is saved, whose weights are still there as long as the next
step has not begun to learn (`snapshot.py`). Weights that are not finite, or that changed in memory,
are never saved. Left out: what a checkpoint holds (`checkpoint.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from isobit.errors import Corruption, IsobitError, NonFiniteError, RankLost, RunFailed
from isobit.evaluation.best import Best
from isobit.run import checkpoints
from isobit.run.directory import RunDirectory
from isobit.training.measuring.meter import Meter
from isobit.training.saving.checkpoint import Trained, not_finite
from isobit.training.saving.snapshot import Snapshot, State


class Saver:
    """Saves a run's checkpoints, and its `best` model next to them. `saved_step` is the step of the
    newest checkpoint, None before the first; `keep_last`: how many are kept."""

    def __init__(
        self,
        trained: Trained,
        run: RunDirectory,
        state: State,
        best: Best,
        meter: Meter,
        keep_last: int,
        saved_step: int | None,
    ) -> None:
        self._trained, self._run, self._state, self._best = trained, run, state, best
        self._meter, self._keep_last, self._saved_step = meter, keep_last, saved_step
        self._whole: Snapshot | None = None  # what the weights belong to, until a step learns

    @property
    def saved_step(self) -> int | None:
        return self._saved_step

    @property
    def unlearned(self) -> bool:
        """Whether the newest whole step can be saved: no step has begun to learn since."""
        return self._whole is not None

    def keep(self) -> None:
        """Take a snapshot of a whole step: until the next one learns, an error saves this one."""
        self._whole = self._now()

    @contextmanager
    def learning(self, unchanged: type[Exception]) -> Iterator[None]:
        """Drop the snapshot inside this context, where the weights change; after an `unchanged`
        error it is valid again."""
        whole, self._whole = self._whole, None
        try:
            yield
        except unchanged:
            self._whole = whole
            raise

    def save(self, whole: Snapshot | None = None) -> None:
        """Write a checkpoint of the present state, or of the snapshot `whole`."""
        self._meter.phase("save")
        if (name := not_finite(self._trained.model)) is not None:
            self.fail(f"{name} is not finite")
        whole = whole or self._now()
        self._trained.ranks.run_on_all(self._run.flush)
        state, head, folder = whole.to_json(), whole.state.head, self._run.checkpoints
        self._trained.save(folder, state, whole.scales, head, self._keep_last)
        self._best.settle()
        self._saved_step = whole.state.step

    def _now(self) -> Snapshot:
        return Snapshot.take(self._state, self._trained, self._run.written(), self._best.to_json())

    def after(self, error: BaseException | None) -> None:
        """End a run. On an error, save the newest whole step and raise RunFailed that says how to
        go on.

        After Corruption nothing in memory is worth saving; after RankLost, or an error that the
        other ranks do not have, no rank is there to save with.
        """
        again = f"; go on with: isobit train --resume {self._run.directory}"
        if isinstance(error, IsobitError) and self._trained.ranks.size > 1 and not error.shared:
            kind = RankLost if isinstance(error, RankLost) else RunFailed
            raise kind(f"{error}{'' if '--resume' in str(error) else again}") from None
        if isinstance(error, Corruption):
            self.fail(error)
        if (
            self._whole is None
            or not isinstance(error, IsobitError)
            or isinstance(error, NonFiniteError)
        ):
            return
        if self._whole.state.step != self._saved_step:
            with suppress(
                RunFailed
            ):  # what ends the run is the first error, of a full disk also this one
                self.save(self._whole)
        if self._saved_step is None or "--resume" in str(error):
            return
        raise RunFailed(f"{error}; step {self._saved_step} is saved{again}") from None

    @contextmanager
    def broken_weights_end_the_run(self) -> Iterator[None]:
        """End the run inside this context where weights are not finite: the learner skips a step
        that is not finite, but cannot repair weights that a finite step broke."""
        try:
            yield
        except NonFiniteError as error:
            self.fail(f"the run diverged: {error}")

    def fail(self, reason: str | Corruption) -> NoReturn:
        """End the run without saving its weights. Where a bit changed in memory, that is the
        reason."""
        self._whole = None
        saved = checkpoints.all_checkpoints(self._run.checkpoints)
        last, step, again = saved[-1] if saved else "missing", f"step {self._state.step}", ""
        try:
            self._trained.learner.check_memory()
        except Corruption as found:
            reason = found
        if isinstance(reason, Corruption):
            step = f"after {step}"
            again = f"; go on with: isobit train --resume {self._run.directory}"
        raise RunFailed(f"{step}: {reason}; the last good checkpoint is {last}{again}") from None
