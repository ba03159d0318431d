"""Verb 5, learn: the learner's optimizer steps on one batch, what is compared of the batches that
are ahead of it, and what a run does about samples that disagree."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from isobit.engine.engine import Engine
from isobit.errors import RunFailed
from isobit.rl import Sample
from isobit.rl.algorithm.advantages import Advantage
from isobit.rl.algorithm.correction import small_step
from isobit.rl.algorithm.given import GIVEN
from isobit.rl.learner.agreement import Disagreement
from isobit.rl.learner.batch import SampleKey, mismatch_of
from isobit.rl.learner.learner import Learned
from isobit.training.context import RunContext
from isobit.training.measuring.agreement import warning_of
from isobit.training.measuring.quantization import LearnerTotals
from isobit.training.measuring.statistics import recorded
from isobit.training.objects import Measure, measured
from isobit.training.sampled_ahead import AheadCompared, SampledAhead


@dataclass(frozen=True, eq=False)
class Lesson:
    """The results of a step's learning.

    `metrics`: the learner's; `took`: seconds, counts and a user's measures from outside the
    learner; `compared`: the learner's log-probabilities of the samples that were compared, one for
    each completion token; `activations`: how activations and output gradients were quantized.
    """

    metrics: Mapping[str, float]
    took: Mapping[str, float]
    compared: Mapping[SampleKey, Sequence[float]]
    activations: LearnerTotals


def _never(found: Disagreement, step: int, unlearned: bool) -> NoReturn:
    raise AssertionError("what was not sampled is compared with no rollout") from found


class Learning:
    """A reference of what is `trained`, if it follows the policy, may move once the policy has
    learned. Of a run that samples: `engines` are put to sleep first, where `sleep` (always, auto or
    never) says so; `settle` waits for what is sampled meanwhile, and returns what that took;
    `failure_of(disagreement, step, unlearned)` is how a run ends that may not learn from tokens
    that differ."""

    def __init__(
        self,
        context: RunContext,
        ahead: SampledAhead,
        *,
        quantization_every: int,
        engines: Sequence[Engine] = (),
        measures: Sequence[Measure] = (),
        sleep: str = "never",
        settle: Callable[[], Mapping[str, float]] = dict,
        failure_of: Callable[[Disagreement, int, bool], RunFailed] = _never,
    ) -> None:
        trained, self._state, self._meter = context.trained, context.state, context.meter
        self._learner, self._calibrator = trained.learner, trained.calibrator
        self._reference, self._saver = trained.reference, context.saver
        self._note = context.display.warn
        self._engines, self._ahead, self._measures = engines, ahead, measures
        self._quantization_every, self._sleep = quantization_every, sleep
        self._settle, self._failure_of = settle, failure_of
        self._warned = False
        self._crediting: dict[str, float] = {}  # what credit took of the step that comes

    def logit_norms(self, samples: Sequence[Sample]) -> Sequence[Sequence[float]]:
        """Return the logits' norms for an advantage that weighs places (`Learner.logit_norms`)."""
        with (
            self._meter.timed(self._crediting, "learn"),
            self._saver.broken_weights_end_the_run(),
        ):
            return self._learner.logit_norms(samples)

    def learn(self, samples: Sequence[Sample], advantages: Sequence[Advantage]) -> Lesson:
        """Learn from the samples and return the lesson. Raises RunFailed, before anything was
        learned from them, for rollouts that differ from the learner where the flow promises that
        they do not."""
        step, took, self._crediting = self._state.step + 1, self._crediting, {}
        for measure in self._measures:
            took |= measured(measure, samples, advantages)
        for engine in self._engines:
            self._put_to_sleep(engine)
        activations = LearnerTotals(self._learner.model)
        due = recorded(step, self._quantization_every)
        with self._differing_bits_end_the_run(step):
            compared = self._ahead.before_learning(took)
            with (
                self._meter.timed(took, "learn", peak=True),
                activations.watching(due),
                self._saver.learning(unchanged=Disagreement),
            ):
                learned = self._learner.learn(samples, advantages, self._state.step)
                if self._reference is not None:
                    with self._saver.broken_weights_end_the_run():
                        self._reference.after(step)
        self._calibrator.learned_from([tokens for s in samples for tokens in s.contexts])
        tokens = sum(len(s.prompt_ids) + len(s.completion_ids) for s in samples)
        took["throughput/learn_tokens_per_s"] = tokens / max(took["time/learn"], 1e-9)
        if self._learner.objective.advantage != GIVEN:
            nonzero = sum(a != 0 if isinstance(a, float) else any(a) for a in advantages)
            took["advantage/nonzero_fraction"] = nonzero / (len(advantages) or math.nan)
        settled = self._settle()
        with self._differing_bits_end_the_run(step):
            compared = self._ahead.after_learning(took) or compared
        metrics = _with_those_ahead(learned, compared)
        self._warn(metrics, step)
        return Lesson(metrics, {**took, **settled}, learned.compared, activations)

    def _put_to_sleep(self, engine: Engine) -> None:
        """Free the memory of its cache, where `engine.sleep` says so."""
        idle = self._learner.model.ops.device.type == "cuda" and not engine.captures
        if self._sleep == "always" or (self._sleep == "auto" and idle):
            engine.sleep()

    @contextmanager
    def _differing_bits_end_the_run(self, step: int) -> Iterator[None]:
        try:
            yield
        except Disagreement as found:
            failed = self._failure_of(found, step, self._saver.unlearned)
            self._learner.model.ranks.raise_on_all(failed)  # which every rank has found
            raise failed from None

    def _warn(self, metrics: Mapping[str, float], step: int) -> None:
        if (line := warning_of(metrics, self._learner, step)) is not None:
            self._note(line)
        warning = small_step(self._learner.objective.rule, metrics)
        if warning is not None and not self._warned:
            self._warned = True
            self._note(f"step {step}: {warning}")


def _with_those_ahead(learned: Learned, ahead: AheadCompared) -> dict[str, float]:
    """Return the learner's metrics, with the mismatch of all samples that were compared in this
    step."""
    metrics = dict(learned.metrics)
    if ahead.tokens:
        comparable = metrics.get("mismatch/comparable_tokens", 0.0)
        metrics["mismatch/comparable_tokens"] = comparable + ahead.tokens
    if ahead.pairs:
        metrics |= mismatch_of([*learned.pairs, *ahead.pairs])
        if "mismatch/corrected" in metrics and metrics["mismatch/differing_tokens"]:
            metrics["mismatch/corrected"] = 1.0
    return metrics
