"""Verb 6, record: a step's metrics and completions, and when they are due an evaluation and a checkpoint."""

import resource
from collections.abc import Mapping, Sequence

from isobit.config import Config
from isobit.monitor.screen import Shown
from isobit.monitor.trackers.process import Trackers
from isobit.rl import Sample
from isobit.rl.algorithm.credit import StepBatch
from isobit.rl.learner.learner import Learned
from isobit.training.context import Context
from isobit.training.learning import Learning
from isobit.training.measuring.statistics import batch_metrics, staleness_metrics
from isobit.training.objects import OnStep
from isobit.training.policy import Policy
from isobit.training.recording.rows import rows_of
from isobit.training.saving.certificate import Certificate


def evaluated_only_as_the_last(config: Config, step: int) -> bool:
    """Whether a step is evaluated because it is the last, where a run of more steps would not."""
    every = config.evaluation.every
    return bool(every and step == config.steps and step % every)


class Recorder:
    """Counts a step as done, and leaves it in the run directory."""

    def __init__(
        self, context: Context, policy: Policy, learning: Learning, trackers: Trackers, callbacks: Sequence[OnStep]
    ) -> None:
        self._context, self._policy, self._learning = context, policy, learning
        self._trackers, self._callbacks = trackers, callbacks
        self._certificate = Certificate(context.parts.config, context.parts.model)

    def record(self, batch: StepBatch, learned: Learned) -> None:
        """The step that learned from a batch is done. Raises RunFailed after too many steps in a row without a finite
        loss and gradient."""
        parts, run, state = self._context.parts, self._context.run, self._context.state
        every, saver = parts.config.run, self._context.saver
        staleness = [state.step - s.rollout_step for g in (*batch.groups, *batch.replayed) for s in g]
        state.step += 1
        parts.replay.add(batch.groups)
        staled = staleness_metrics(staleness, len(batch.replayed), len(parts.replay.groups))
        measured = batch_metrics(batch) | staled | dict(learned.metrics) | self._measured()
        rollouts = run.write_completions(rows_of(state.step, batch.groups, learned, parts))
        self.certify(rollouts, measured)
        if self._policy.weights.due(state.step, every.quantization_every):
            by_tensor = self._policy.weights.by_tensor() | self._learning.totals.by_tensor()
            run.write_quantization(state.step, by_tensor)
        values = self.finish_step(measured)
        self._context.display.step(values, (self._shown(sample) for group in batch.groups for sample in group))
        due = every.checkpoint_every and state.step % every.checkpoint_every == 0
        if saver.saved_step != state.step and (due or state.step == parts.config.steps):
            saver.save()
        for callback in self._callbacks:
            callback(state.step, dict(values))
        bad = parts.learner.state.bad_steps_in_a_row
        if bad >= parts.config.optimizer.max_bad_steps:
            saver.fail(f"{bad} optimizer steps in a row had a loss or gradient that is not finite")

    def certify(self, rollouts: str | None, measured: Mapping[str, float]) -> None:
        """The row of the present step in the certificate."""
        state = self._context.state
        row = self._certificate.row(state.step, state.head, rollouts, measured)
        state.head = self._context.run.write_certificate(row)

    def _measured(self) -> dict[str, float]:
        """What the verbs counted, and what the step took."""
        context = self._context
        found = dict(context.meter.metrics)
        if "time/rollout" in found:
            prompt_tokens = max(found["rollout/prompt_tokens"], 1)
            found["rollout/prefix_hit_fraction"] = found["rollout/cached_tokens"] / prompt_tokens
            found["throughput/rollout_tokens_per_s"] = found["rollout/tokens"] / max(found["time/rollout"], 1e-9)
        return {
            **self._learning.totals.metrics(),
            **found,
            "prompts/consumed": float(context.state.cursor),
            "weights_version": float(context.parts.model.weights_version),
            "time/step": context.meter.seconds,
            **context.parts.memory_metrics(),
            **context.meter.peaks.metrics(),
            "memory/peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }

    def finish_step(self, measured: dict[str, float]) -> dict[str, float]:
        """Evaluate, if that is due, and write the metrics; a reward function that fails meanwhile leaves a step that
        can be saved, but for its row. A step that is evaluated only at the end is saved before, as such a step: a run
        that is extended goes on as one that was planned longer, in its metrics and its best model too."""
        state, saver = self._context.state, self._context.saver
        state.unrecorded = measured
        saver.keep()
        only_as_the_last = evaluated_only_as_the_last(self._context.parts.config, state.step)
        if only_as_the_last and saver.saved_step != state.step:
            saver.save()
        values = self.evaluate_and_write(measured, state.step == self._context.parts.config.steps)
        state.unrecorded = None
        saver.keep()
        return values

    def evaluate_and_write(self, measured: dict[str, float] | None = None, last: bool = False) -> dict[str, float]:
        """The row of the present step in metrics.jsonl, with an evaluation if it is due; no row if there is nothing."""
        parts, display, saver = self._context.parts, self._context.display, self._context.saver
        step, held_out = self._context.state.step, parts.held_out
        values = {"step": step, **(measured or {})}
        if held_out is not None and (step % parts.config.evaluation.every == 0 or last):
            self._policy.refresh()
            self._context.meter.phase("evaluate")
            with saver.broken_weights_end_the_run():
                found, line = held_out.evaluate()
            parts.learner.check_memory()
            values |= found
            display.note(f"step {step}: {line}")
            saver.best.consider(step, found)
        if len(values) > 1:
            self._context.run.write_metrics(values)
            self._trackers.poll()
        return values

    def _shown(self, sample: Sample) -> Shown:
        return Shown(sample.reward, self._context.parts.model.tokenizer.decode(sample.prompt_ids), sample.completion)
