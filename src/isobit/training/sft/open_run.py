"""A supervised run: its batches are given answers, and nothing is compared with a rollout. Left
out: how it is opened (`opening.py`), and the parts of every run (`running/open_run.py`)."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from isobit.run import checkpoints
from isobit.run.directory import RunDirectory
from isobit.training.adapting import model_warning
from isobit.training.learning import Learning
from isobit.training.loop import Rollouts
from isobit.training.running.cautions import supervised_cautions
from isobit.training.running.machine import ranks_caution
from isobit.training.running.open_run import OpenRun
from isobit.training.sampled_ahead import SampledAhead
from isobit.training.saving.snapshot import State
from isobit.training.sft.batches import LearnedAnswers, SupervisedBatches
from isobit.training.sft.parts import SupervisedParts


class SupervisedRun(OpenRun):
    """An open supervised run. `saved_step`: the step of the checkpoint that it goes on from."""

    def __init__(
        self,
        parts: SupervisedParts,
        run: RunDirectory,
        state: State,
        *,
        quiet: bool,
        saved_step: int | None = None,
    ) -> None:
        self.config, self.parts = parts.config, parts
        super().__init__(
            parts,
            run,
            state,
            LearnedAnswers(self.config.loss),
            quiet=quiet,
            saved_step=saved_step,
            details="supervised, ",
        )
        self.rollouts: Rollouts = SupervisedBatches(
            parts.train, parts.taught, state, self.config.batch_size
        )
        meter, saver = self._meter, self.saver
        self.learning = Learning(
            self.trained,
            SampledAhead(self.trained.learner, state, meter, saver),
            state,
            meter,
            saver,
            self.display.warn,
            quantization_every=self.config.run.quantization_every,
        )

    def resources(self) -> Sequence[AbstractContextManager[Any]]:
        """Return the held-out answers, which the evaluation opens, or nothing."""
        return () if self.parts.held_out is None else (self.parts.held_out,)

    def told(self) -> Iterable[str]:
        """Yield a line on the kernels and the consistency."""
        yield f"{self.model.ops.why}; consistency: {self.config.consistency}"

    def warned(self) -> Iterable[str | None]:
        """Yield warnings of what the config probably does not mean."""
        yield model_warning(self.config, self.model)
        yield ranks_caution(self.config.ranks)
        yield from supervised_cautions(self.config, self.parts.train)

    def finish(self) -> None:
        """Finish as every run does, and print where the model or the adapter is."""
        super().finish()
        what = "model" if self.config.adapter is None else "adapter"
        self.display.note(f"{what} in {checkpoints.all_checkpoints(self.run.checkpoints)[-1]}")
