"""Verb 5, learn: the learner's optimizer steps on one batch, what is compared of the batches that are ahead of it, and
what a run does about samples that disagree."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from isobit.rl import Sample
from isobit.rl.algorithm.advantages import Advantage
from isobit.rl.algorithm.correction import small_step
from isobit.rl.learner.agreement import Disagreement
from isobit.rl.learner.batch import mismatch_of
from isobit.rl.learner.learner import Learned
from isobit.training.context import Context
from isobit.training.measuring.agreement import failure, warning_of
from isobit.training.measuring.quantization import LearnerTotals
from isobit.training.measuring.statistics import recorded
from isobit.training.objects import Measure, measured
from isobit.training.sampled_ahead import SampledAhead


class Learning:
    """`from_rollouts`: the run learns from what another one recorded. `settle` waits for what is sampled meanwhile."""

    def __init__(
        self,
        context: Context,
        measures: Sequence[Measure],
        from_rollouts: bool,
        settle: Callable[[], None],
        ahead: SampledAhead,
    ) -> None:
        self._context, self._measures, self._from_rollouts = context, measures, from_rollouts
        self._settle, self._ahead = settle, ahead
        self._warned = False
        self.totals: LearnerTotals
        """How activations and gradients of the present step are quantized."""

    def learn(self, samples: Sequence[Sample], advantages: Sequence[Advantage]) -> Learned:
        """What the learner leaves. Raises RunFailed, before anything was learned from them, for rollouts that differ
        from the learner where the flow promises that they do not."""
        parts, state, saver = self._context.parts, self._context.state, self._context.saver
        meter, step = self._context.meter, state.step + 1
        for measure in self._measures:
            meter.metrics |= measured(measure, samples, advantages)
        parts.sleep()
        self.totals = LearnerTotals(parts.model)
        due = recorded(step, parts.config.run.quantization_every)
        with self._differing_bits_end_the_run(step):
            self._ahead.before_learning()
            with meter.timed("learn", peak=True), self.totals.watching(due), saver.learning(unchanged=Disagreement):
                learned = parts.learner.learn(samples, advantages, state.step)
        state.synced = False
        parts.calibrator.learned_from([(*s.prompt_ids, *s.completion_ids) for s in samples])
        self._count(samples, advantages)
        self._settle()
        with self._differing_bits_end_the_run(step):
            self._ahead.after_learning()
        learned = self._with_those_ahead(learned)
        self._warn(learned.metrics, step)
        return learned

    @contextmanager
    def _differing_bits_end_the_run(self, step: int) -> Iterator[None]:
        try:
            yield
        except Disagreement as found:
            parts, directory = self._context.parts, self._context.run.directory
            kept = self._context.saver.unlearned
            failed = failure(found, parts.learner, step, directory, self._from_rollouts, kept)
            parts.ranks.raise_on_all(failed)  # which every rank has found
            raise failed from None

    def _with_those_ahead(self, learned: Learned) -> Learned:
        """The mismatch of all that was compared in this step."""
        pairs, metrics = self._ahead.compared, dict(learned.metrics)
        if self._ahead.tokens:
            before = metrics.get("mismatch/comparable_tokens", 0.0)
            metrics["mismatch/comparable_tokens"] = before + self._ahead.tokens
        if pairs:
            metrics |= mismatch_of([*learned.pairs, *pairs])
            if "mismatch/corrected" in metrics and metrics["mismatch/differing_tokens"]:
                metrics["mismatch/corrected"] = 1.0
        return replace(learned, metrics=metrics)

    def _count(self, samples: Sequence[Sample], advantages: Sequence[Advantage]) -> None:
        nonzero = sum(advantage != 0 if isinstance(advantage, float) else any(advantage) for advantage in advantages)
        metrics = self._context.meter.metrics
        metrics["advantage/nonzero_fraction"] = nonzero / len(advantages) if advantages else math.nan
        tokens = sum(len(s.prompt_ids) + len(s.completion_ids) for s in samples)
        seconds = max(metrics["time/learn"], 1e-9)
        metrics["throughput/learn_tokens_per_s"] = tokens / seconds

    def _warn(self, learned: Mapping[str, float], step: int) -> None:
        if (line := warning_of(learned, self._context.parts.learner, step)) is not None:
            self._context.display.note(line)
        warning = small_step(self._context.parts.objective.rule, learned)
        if warning is not None and not self._warned:
            self._warned = True
            self._context.display.note(f"step {step}: {warning}")
