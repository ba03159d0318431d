"""A supervised run: what the loop of `loop.py` works with, put together of the learner, the saver
and the recorder of every run, and a source of given answers. Left out: how it is opened
(`opening.py`)."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from isobit.rl.learner.agreement import Disagreement
from isobit.run import checkpoints
from isobit.run.directory import RunDirectory
from isobit.training.adapting import rank_warning
from isobit.training.learning import Learning
from isobit.training.loop import Rollouts
from isobit.training.policy import Policy
from isobit.training.recording.callbacks import named_callbacks
from isobit.training.recording.evaluating import Evaluating
from isobit.training.recording.recorder import Recorder
from isobit.training.running.cautions import supervised_cautions
from isobit.training.running.machine import ranks_caution
from isobit.training.running.open_run import OpenRun
from isobit.training.sampled_ahead import SampledAhead
from isobit.training.saving.snapshot import State
from isobit.training.sft.batches import LearnedAnswers, SupervisedBatches
from isobit.training.sft.parts import SupervisedParts


class SupervisedRun(OpenRun):
    """Its verbs. `saved_step`: of the checkpoint that it goes on from."""

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
            parts.config,
            parts.trained,
            parts.objective,
            parts.resolved(),
            run,
            state,
            quiet=quiet,
            best_by=None,
            saved_step=saved_step,
            details="supervised, ",
        )
        train = parts.train
        self.policy = Policy(
            self.model, self.trained.calibrator, train, state, self._meter, self.saver
        )
        self.rollouts: Rollouts = SupervisedBatches(
            train, parts.taught, state, self.config.batch_size
        )
        self.learning = self._learning()
        self.recorder = self._recorder()

    def _learning(self) -> Learning:
        """There is nothing to compare: no answer was sampled."""
        learner, state, meter, saver = self.trained.learner, self.state, self._meter, self.saver
        return Learning(
            learner,
            self.trained.calibrator,
            (),
            SampledAhead(
                learner,
                state,
                meter,
                saver,
                share=0.0,
                seed=self.config.seed,
                ahead=0,
                partial=False,
                late=False,
                keeps_weights=False,
            ),
            state,
            meter,
            saver,
            (),
            reference=self.trained.reference,
            quantization_every=self.config.run.quantization_every,
            sleep="never",
            settle=dict,
            failure_of=_never,
            note=self.display.note,
        )

    def _recorder(self) -> Recorder:
        evaluating = Evaluating(
            self.parts.held_out,
            self.policy,
            self.trained.learner,
            self.state,
            self._meter,
            self.saver,
            self.best,
            self.stop,
            self.display.note,
            self.run.write_held_out,
            every=self.config.evaluation.every,
            steps=self.config.steps,
            prompts=len(self.parts.train),
        )
        return Recorder(
            self.config,
            self.run,
            self.state,
            self.trained,
            self.saver,
            LearnedAnswers(self.config.loss),
            evaluating,
            self.memory_metrics,
            self.display,
            self.trackers,
            named_callbacks(self.config.run.callbacks) if self.ranks.first else (),
        )

    def resources(self) -> Sequence[AbstractContextManager[Any]]:
        """What the evaluation opens."""
        return () if self.parts.held_out is None else (self.parts.held_out,)

    def told(self) -> Iterable[str | None]:
        """What computes, and whether an adapter's rank and so many processes are of use."""
        yield f"{self.model.ops.why}; consistency: {self.config.consistency}"
        yield rank_warning(self.config, self.model)
        yield ranks_caution(self.config.ranks)
        yield from supervised_cautions(self.config, self.parts.train)

    def memory_metrics(self) -> dict[str, float]:
        """What is allocated, in MiB."""
        return self.parts.memory_metrics()

    def finish(self) -> None:
        """As of every run; and say where the model is."""
        super().finish()
        what = "model" if self.config.adapter is None else "adapter"
        self.display.note(f"{what} in {checkpoints.all_checkpoints(self.run.checkpoints)[-1]}")


def _never(found: Disagreement, step: int, unlearned: bool) -> NoReturn:
    raise AssertionError("a given answer is compared with no rollout") from found
