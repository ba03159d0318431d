"""Verb 5, learn: the learner's optimizer steps on one batch, and what a run does about a batch that disagrees."""

import math
from collections.abc import Callable, Mapping, Sequence

from isobit.rl import Sample
from isobit.rl.advantages import Advantage
from isobit.rl.agreement import Disagreement
from isobit.rl.correction import small_step
from isobit.rl.learner import Learned
from isobit.training.agreement import failure, warning_of
from isobit.training.context import Context
from isobit.training.objects import Measure, measured
from isobit.training.quantization import LearnerTotals
from isobit.training.statistics import recorded


class Learning:
    """`from_rollouts`: the run learns from what another one recorded. `settle` waits for what is sampled meanwhile."""

    def __init__(
        self, context: Context, measures: Sequence[Measure], from_rollouts: bool, settle: Callable[[], None]
    ) -> None:
        self._context, self._measures, self._from_rollouts = context, measures, from_rollouts
        self._settle = settle
        self._warned = False
        self.totals: LearnerTotals
        """How activations and gradients of the present step are quantized."""

    def learn(self, samples: Sequence[Sample], advantages: Sequence[Advantage]) -> Learned:
        """What the learner leaves. Raises RunFailed, before anything has changed, for rollouts that differ from
        the learner where the flow promises that they do not."""
        parts, state, saver = self._context.parts, self._context.state, self._context.saver
        meter, step = self._context.meter, state.step + 1
        for measure in self._measures:
            meter.metrics |= measured(measure, samples, advantages)
        parts.sleep()
        self.totals = LearnerTotals(parts.model)
        due = recorded(step, parts.config.run.quantization_every)
        with meter.timed("learn", peak=True), self.totals.watching(due):
            try:
                with saver.learning(unchanged=Disagreement):
                    learned = parts.learner.learn(samples, advantages, state.step)
            except Disagreement as found:
                directory = self._context.run.directory
                failed = failure(found, parts.learner, step, directory, self._from_rollouts)
                parts.ranks.agree(failed)  # which every rank has found
                raise failed from None
        state.synced = False
        parts.calibrator.learned_from([(*s.prompt_ids, *s.completion_ids) for s in samples])
        self._count(samples, advantages)
        self._warn(learned.metrics, step)
        self._settle()
        return learned

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
