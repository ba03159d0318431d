"""Verb 6, record: the records of a step. These are its metrics, completions and row of the
certificate, and where they are due an evaluation, which may end the run, and a checkpoint; screen,
trackers and callbacks receive the metrics. Also the records that are due before the first step, or
before the next step of a run that goes on."""

import resource
import time
from collections.abc import Callable, Mapping, Sequence

from isobit.config import Config, SftConfig
from isobit.evaluation.early_stop import STOPPED, EarlyStop
from isobit.monitor.trackers.process import Trackers
from isobit.rl.algorithm.credit import StepBatch
from isobit.run.directory import METRICS, read_jsonl
from isobit.run.metrics import of_an_evaluation
from isobit.run.rows import warn
from isobit.training.context import RunContext
from isobit.training.learning import Lesson
from isobit.training.measuring.meter import added
from isobit.training.measuring.statistics import rollout_rates
from isobit.training.objects import OnStep
from isobit.training.policy import Synced
from isobit.training.recording.evaluating import Evaluating, evaluated_only_as_the_last
from isobit.training.recording.rollouts import LearnedAnswers, LearnedRollouts
from isobit.training.saving.certificate import Certificate


class Recorder:
    """The recorder of a run: counts a step as done, and writes it to the run directory. `memory`:
    returns the metrics of allocated memory; `learned`: the metrics and rows of a batch, by the
    kind of run."""

    def __init__(
        self,
        config: Config | SftConfig,
        context: RunContext,
        learned: LearnedRollouts | LearnedAnswers,
        evaluating: Evaluating,
        memory: Callable[[], dict[str, float]],
        trackers: Trackers,
        callbacks: Sequence[OnStep],
    ) -> None:
        self._config, self._run, self._state = config, context.run, context.state
        self._trained, self._saver, self._display = context.trained, context.saver, context.display
        self._learned, self._evaluating, self._memory = learned, evaluating, memory
        self._trackers, self._callbacks = trackers, callbacks
        self._certificate = Certificate(config, context.trained.model)
        self._stop = EarlyStop(config.evaluation)

    @property
    def ended(self) -> str | None:
        """Why the run ends before its last step, in words; None while it goes on."""
        return self._stop.reason

    def begin(self) -> None:
        """Read the metrics of the steps that a run that goes on has done. Record the state before
        the first step, or the step whose evaluation had failed."""
        state, saver, first = self._state, self._saver, self._trained.ranks.first
        for row in read_jsonl(self._run.directory / METRICS, warn if first else lambda line: None):
            self._stop.consider(int(row["step"]), row)
            if first:
                self._display.history.add(row)
        if saver.saved_step is None:
            self._certify(None, {})
            self._display.history.add(self._evaluate_and_write())
            saver.save()
        elif state.unrecorded is not None:
            only_as_the_last = evaluated_only_as_the_last(self._config, state.step)
            measured = {**state.unrecorded, **self._memory()}  # memory is in no checkpoint
            self._display.history.add(self._finish_step(measured))
            if not only_as_the_last:
                saver.save()
        saver.keep()

    def record(
        self, synced: Synced, batch: StepBatch, took: Mapping[str, float], lesson: Lesson
    ) -> None:
        """Record the step that learned from `batch` as done; `took`: the metrics of sampling and
        scoring. Raises RunFailed after too many steps in a row without a finite loss and
        gradient."""
        state = self._state
        every = self._config.run
        saver = self._saver
        state.step += 1
        self._trained.replay.add(batch.groups)
        measured = self._learned.metrics(batch, lesson) | self._measured(synced, took, lesson)
        rows = self._learned.rows(state.step, batch, lesson)
        self._certify(self._run.write_completions(rows), measured)
        if synced.weights.due(state.step, every.quantization_every):
            by_tensor = synced.weights.by_tensor() | lesson.activations.by_tensor()
            self._run.write_quantization(state.step, by_tensor)
        values = self._finish_step(measured)
        self._display.step(values, self._learned.shown(batch))
        due = every.checkpoint_every and state.step % every.checkpoint_every == 0
        if saver.saved_step != state.step and (due or state.step == self._config.steps):
            saver.save()
        for callback in self._callbacks:
            callback(state.step, dict(values))
        bad = self._trained.learner.bad_steps_in_a_row
        if bad >= self._config.optimizer.max_bad_steps:
            saver.fail(f"{bad} optimizer steps in a row had a loss or gradient that is not finite")

    def _certify(self, rollouts: str | None, measured: Mapping[str, float]) -> None:
        """Write the row of the present step to the certificate."""
        state = self._state
        row = self._certificate.row(state.step, state.head, rollouts, measured)
        state.head = self._run.write_certificate(row)

    def _measured(
        self, synced: Synced, took: Mapping[str, float], lesson: Lesson
    ) -> dict[str, float]:
        """Return the metrics that the verbs counted, and the time and memory of the step."""
        totals = added(synced.metrics, took, lesson.took)
        return {
            **lesson.activations.metrics(),
            **totals,
            **rollout_rates(totals),
            "prompts/consumed": float(self._state.cursor),
            "weights_version": float(self._trained.model.weights_version),
            "time/step": time.perf_counter() - synced.began,
            **self._memory(),
            "memory/peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }

    def _finish_step(self, measured: dict[str, float]) -> dict[str, float]:
        """Evaluate, if that is due, write the metrics, and return them. If a reward function fails
        in the evaluation, the step can still be saved, without its row. A step that is evaluated
        only because it is the last is saved before the evaluation: so a run that is extended goes
        on like a run that was planned longer, in its metrics and its best model too."""
        state, saver = self._state, self._saver
        state.unrecorded = measured
        saver.keep()
        only_as_the_last = evaluated_only_as_the_last(self._config, state.step)
        if only_as_the_last and saver.saved_step != state.step:
            saver.save()
        values = self._evaluate_and_write(measured, state.step == self._config.steps)
        state.unrecorded = None
        saver.keep()
        return values

    def _evaluate_and_write(
        self, measured: dict[str, float] | None = None, last: bool = False
    ) -> dict[str, float]:
        """Write the row of the present step to metrics.jsonl, with an evaluation if it is due, and
        return it; without any metric no row is written."""
        step, measured = self._state.step, measured or {}
        evaluated = self._evaluating.metrics(last)
        if self._stop.consider(step, evaluated):
            evaluated[STOPPED] = 1.0
        assert all(map(of_an_evaluation, evaluated)), f"not in EVALUATED: {list(evaluated)}"
        assert not any(map(of_an_evaluation, measured)), "the certificate would not hold them"
        values = {"step": step, **measured, **evaluated}
        if len(values) > 1:
            self._run.write_metrics(values)
            self._trackers.poll()
        return values
