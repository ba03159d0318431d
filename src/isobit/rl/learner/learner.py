"""The learner: one rollout batch in, some optimizer steps, metrics out.

Old log-probabilities are the rollout's own under a unified precision, where they are the learner's bit for bit (the
mismatch metrics of the first optimizer step prove it in every batch), and recomputed before any update otherwise: once,
also where the KL in the reward has asked for them before (`reference_kl`).
Between optimizer steps the working weights are requantized; after the last one that is the training loop's `sync`.

The gradient is that of the whole optimizer batch, however it is split into micro-batches: up to the rounding of sums,
and, where WGrad runs in FP8, up to its scales, which blocks of 128 tokens share (tests/rl/test_learner.py). A
load-balancing loss takes the load of the whole batch, for which several micro-batches have a forward more
(tests/rl/test_router_loss.py).

Samples whose advantage is exactly 0 teach nothing. Micro-batches of them alone are left out where no other term of the
loss needs them (`zero_advantage.py`), but for a few, on which the mismatch is measured all the same.

A step whose loss or gradient is not finite, or whose tokens a correction has all rejected, changes neither weights nor
optimizer; it is counted, and left out of the other metrics, which are NaN if no step was taken.

Left out: rewards and rollouts.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from isobit.errors import NonFiniteError
from isobit.model import Model
from isobit.model.forward.recompute import Recompute
from isobit.rl.algorithm.advantages import Advantage
from isobit.rl.algorithm.functions import loss_function
from isobit.rl.algorithm.loss import kl_penalty
from isobit.rl.algorithm.objective import Objective, shares_prompts
from isobit.rl.algorithm.samples import Sample
from isobit.rl.learner.agreement import Compared, Disagreement, corrected, promises_bits, require_agreement
from isobit.rl.learner.batch import (
    SampleKey,
    TrainingBatch,
    by_key,
    mismatch_of,
    per_token,
    rollout_logprobs,
    sample_key,
    training_batch,
)
from isobit.rl.learner.forward import forward
from isobit.rl.learner.gradient import Differentiation, Gradient, MicroBatch, OptimizerBatch, gather_micro_batches
from isobit.rl.learner.packing import micro_batches, minibatches, pack
from isobit.rl.learner.routing import PolicyForward, RoutingTotals
from isobit.rl.learner.shadow import calibrated_bounds, log_ratios, shadow_metrics
from isobit.rl.learner.totals import Totals
from isobit.rl.learner.zero_advantage import drawn, idle_samples, split, without_teaching
from isobit.rl.optim.adamw import Optimizer
from isobit.rl.optim.schedule import learning_rate


@dataclass(frozen=True)
class Learned:
    """What a rollout batch left. `pairs`: the samples that the mismatch was measured on."""

    metrics: Mapping[str, float]
    pairs: Sequence[Compared] = ()

    @cached_property
    def compared(self) -> Mapping[SampleKey, Sequence[float]]:
        """The learner's log-probabilities of these, one for each completion token (0.0 for given ones)."""
        return by_key(self.pairs)


@dataclass
class LearnerState:
    """What a checkpoint holds of a learner besides weights and optimizer: `clip_bounds` (low, high), the objective's or
    those that the last shadow pass calibrated, and how many optimizer steps were skipped since the last good one."""

    clip_bounds: tuple[float, float]
    bad_steps_in_a_row: int = 0


class Learner:
    """Trains `model` on rollout batches. `reference` is the frozen model of the KL penalty, if there is one.

    `on_mismatch` (stop, warn or correct) is what a differing token does where the flow has `promised` that there is
    none. Every `check_gradients_every` steps, if it is not 0, the first micro-batch is differentiated twice. The
    mismatch is measured on `measured_idle` of the samples of a step that teach nothing and are left out.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        objective: Objective,
        *,
        reference: Model | None = None,
        micro_batch_tokens: int = 16384,
        recompute: Recompute = False,
        seed: int = 0,
        on_mismatch: str = "warn",
        check_gradients_every: int = 0,
        measured_idle: int = 0,
    ) -> None:
        assert (reference is not None) == (objective.kl_coefficient > 0)
        self.model, self.optimizer, self.objective, self.reference = model, optimizer, objective, reference
        loss = loss_function(objective.loss)
        self.differentiation = Differentiation(optimizer, model.transformer.masters.leaves, loss)
        self._ranks = optimizer.shards.ranks
        self.micro_batch_tokens, self.recompute = micro_batch_tokens, recompute
        self.seed, self.check_gradients_every, self.measured_idle = seed, check_gradients_every, measured_idle
        self.on_mismatch, self.promised = on_mismatch, promises_bits(model)
        self.state = LearnerState((objective.clip_low, objective.clip_high))
        mixture, recurrent = model.config.routed is not None, model.config.linear is not None
        wanted = optimizer.settings.share_prompts
        self.share_prompts = shares_prompts(wanted, objective, mixture=mixture, recurrent=recurrent)
        self._old: dict[SampleKey, Tensor] = {}  # of the weights of this version
        self._old_version = model.weights_version

    def learn(self, samples: Sequence[Sample], advantages: Sequence[Advantage], step: int) -> Learned:
        """Optimizer steps on one rollout batch; `step` counts batches and sets the learning rate.

        The working weights must be those that sampled. Mismatch is measured with them: over all samples whose old
        log-probabilities are recomputed, else over those of the first optimizer step that are not left out, and some
        that are. Samples that are known to be of older weights have no part in it; their distance is reported as
        `staleness/*`.

        Raises Disagreement, before anything has changed, if tokens differ that must not, under on_mismatch: stop. Under
        correct such a batch is learned from with an objective that corrects it.
        """
        strict = self.promised and self.on_mismatch != "warn"
        if not strict or self.on_mismatch == "stop":
            return self._learn(samples, advantages, step, self.objective, strict)
        try:
            learned, weighed = self._learn(samples, advantages, step, self.objective, strict), 0.0
        except Disagreement:
            learned, weighed = self._learn(samples, advantages, step, corrected(self.objective), strict=False), 1.0
        return replace(learned, metrics={**learned.metrics, "mismatch/corrected": weighed})

    def compare(self, samples: Sequence[Sample]) -> list[Compared]:
        """Samples of the present working weights that are learned from later, by other weights. Raises Disagreement as
        `learn`, and under on_mismatch: correct too where no correction will weigh them."""
        policy = PolicyForward(self.model, self.objective, RoutingTotals())
        spans = list(map(list, micro_batches(samples, self.micro_batch_tokens, self.share_prompts)))
        found, _ = self._forwards(self.model, samples, spans, policy)
        compared = [(sample, row, found[i]) for i, (sample, row) in enumerate(zip(samples, rollout_logprobs(samples)))]
        weighed = self.on_mismatch == "correct" and self.objective.rule.active
        if self.promised and self.on_mismatch != "warn" and not weighed:
            require_agreement(compared, samples)
        return compared

    def reference_kl(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        """Per sample and trained token, the estimate of KL(policy ‖ reference) that is charged to the reward.

        Of the old log-probabilities, as verl's `apply_kl_penalty` takes them, not of the rollout's where those are
        another flow's: a reference that is the policy costs exactly nothing (tests/rl/test_reference_kl.py).
        """
        assert self.reference is not None
        reference, old = self._logprobs(self.reference, samples), rollout_logprobs(samples)
        if self.objective.recompute_old:
            policy = PolicyForward(self.model, self.objective, RoutingTotals())
            old = list(self._old_logprobs(samples, [False] * len(samples), policy, 0).values())
        return [
            tuple(kl_penalty(mine.double(), other.double(), self.objective.estimator).tolist())
            for mine, other in zip(old, reference)
        ]

    def _learn(
        self, samples: Sequence[Sample], advantages: Sequence[Advantage], step: int, objective: Objective, strict: bool
    ) -> Learned:
        """`strict`: raise Disagreement for tokens that differ."""
        rate = learning_rate(step, self.optimizer.settings)
        totals, routing, seen = Totals(), RoutingTotals(), dict[int, Tensor]()
        try:
            batch, metrics = self._prepare(samples, advantages, PolicyForward(self.model, objective, routing), step)
        except NonFiniteError:
            self._skip(totals)
            return Learned(totals.metrics(rate))
        if objective.recompute_old:
            seen = {i: batch.old[i] for i in batch.known}
            if strict:
                batch.require_agreement(seen, range(len(samples)))
            metrics |= batch.staleness()
        shadow = self._shadow(batch) if objective.shadow_every > 0 and step % objective.shadow_every == 0 else None
        for part in self._optimizer_batches(len(samples), step):
            if not batch.has_tokens(part):
                continue  # nothing to learn from is no reason to decay the weights
            if batch.rejected(part):
                totals.skipped += 1
                continue
            moved = bool(totals.norms)
            if moved:
                self.model.sync(rollout=False)
            policy = PolicyForward(self.model, objective, routing, sampled=not moved, recompute=self.recompute)
            checked = not moved and self.check_gradients_every > 0 and step % self.check_gradients_every == 0
            apart = self.optimizer.settings.idle_apart
            bounds, tokens = self.state.clip_bounds, self.micro_batch_tokens
            one = OptimizerBatch.of(batch, part, bounds, tokens, apart, self.share_prompts)
            gradient = self.differentiation.gradient(one, policy, checked)
            if not moved and not objective.recompute_old:
                gradient = self._with_idle(gradient, one, policy, step)
                seen |= gradient.logprobs
            if gradient.finite:
                if strict and not moved and not objective.recompute_old:
                    batch.require_agreement(gradient.logprobs, part)
                self.check_memory()
                self.optimizer.step(rate, gradient.norm)
                totals.add(gradient.totals, gradient.norm)
                self.state.bad_steps_in_a_row = 0
            else:
                self._skip(totals)
            self.optimizer.zero_grad()
        if not totals.norms:
            self.check_memory()
        compared = batch.compared(seen)
        metrics |= mismatch_of(compared) | {"mismatch/comparable_tokens": float(batch.comparable_tokens)}
        if shadow is not None:
            metrics |= self._compare_with_shadow(batch, shadow)
        return Learned(metrics | totals.metrics(rate) | routing.metrics(), compared)

    def _prepare(
        self, samples: Sequence[Sample], advantages: Sequence[Advantage], policy: PolicyForward, step: int
    ) -> tuple[TrainingBatch, dict[str, float]]:
        """The batch with its old and reference log-probabilities and its correction, and the correction's metrics."""
        objective = policy.objective
        old = None
        if objective.recompute_old:
            idle = idle_samples(objective, per_token(samples, advantages))
            if objective.rule.of_batch or objective.shadow_every or policy.model.config.routed is not None:
                idle = [False] * len(samples)
            old = self._old_logprobs(samples, idle, policy, step)
        penalized = self.reference is not None and not objective.kl_in_reward
        reference = self._logprobs(self.reference, samples) if penalized and self.reference is not None else None
        return training_batch(objective, samples, advantages, self.model.weights_version, old, reference)

    def _optimizer_batches(self, count: int, step: int) -> Iterator[list[int]]:
        for epoch in range(self.objective.epochs):
            for part in minibatches(count, self.objective.updates_per_batch, self.seed, step, epoch):
                yield sorted(part) if self.share_prompts else part  # the completions of a prompt together

    def check_memory(self) -> None:
        """Raise Corruption, on every rank, if on one of them working weights, masters or moments have changed since
        they were written; only once their checksums are kept (`Parts.keep_checksums`)."""

        def compare() -> None:
            self.model.transformer.checksums.compare()
            self.optimizer.checksums.compare()

        self._ranks.run_on_all(compare)

    def _skip(self, totals: Totals) -> None:
        self.check_memory()
        totals.skipped += 1
        self.state.bad_steps_in_a_row += 1

    def _old_logprobs(
        self, samples: Sequence[Sample], idle: Sequence[bool], policy: PolicyForward, step: int
    ) -> dict[int, Tensor]:
        """Of the working weights, by index, computed once for as long as they last. Micro-batches of `idle` samples
        alone are left out, but for the samples on which the mismatch is measured."""
        if self._old_version != self.model.weights_version:
            self._old, self._old_version = {}, self.model.weights_version
        keys = [sample_key(sample) for sample in samples]
        missing = [i for i, key in enumerate(keys) if key not in self._old]
        spans = self._split(samples, missing, idle)
        unneeded = without_teaching(spans, idle)
        left_out = [i for number in sorted(unneeded) for i in spans[number]]
        wanted = [span for number, span in enumerate(spans) if number not in unneeded]
        wanted += self._split(samples, drawn(left_out, self.measured_idle, self.seed, step), idle)
        found, _ = self._forwards(self.model, samples, wanted, policy)
        self._old |= {keys[i]: row for i, row in found.items()}
        return {i: self._old[key] for i, key in enumerate(keys) if key in self._old}

    def _split(self, samples: Sequence[Sample], chosen: Sequence[int], idle: Sequence[bool]) -> list[list[int]]:
        apart = self.optimizer.settings.idle_apart
        return split(samples, chosen, idle, self.micro_batch_tokens, apart, self.share_prompts)

    def _with_idle(self, gradient: Gradient, one: OptimizerBatch, policy: PolicyForward, step: int) -> Gradient:
        """With the log-probabilities of some of the samples that are left out, and their entropy."""
        left_out = [i for i in one.idle_samples if i not in gradient.logprobs]  # experts: none, they have a forward
        chosen = drawn(left_out, self.measured_idle, self.seed, step)
        if not chosen:
            return gradient
        spans = self._split(one.batch.samples, chosen, one.batch.idle)
        try:
            logprobs, totals = self._forwards(self.model, one.batch.samples, spans, policy)
        except NonFiniteError:
            return replace(gradient, norm=math.inf)
        gradient.totals.merge(totals)
        return replace(gradient, logprobs={**gradient.logprobs, **logprobs})

    def _logprobs(self, model: Model, samples: Sequence[Sample]) -> list[Tensor]:
        """Of each sample, [trained tokens]."""
        spans = list(map(list, micro_batches(samples, self.micro_batch_tokens, self.share_prompts)))
        return list(self._forwards(model, samples, spans)[0].values())

    @torch.no_grad()
    def _forwards(
        self,
        model: Model,
        samples: Sequence[Sample],
        spans: Sequence[Sequence[int]],
        policy: PolicyForward | None = None,
    ) -> tuple[dict[int, Tensor], Totals]:
        """Of the samples of these micro-batches, by index, log-probabilities [trained tokens]; and sums over all of
        them. Every rank computes some. `policy`: the model is the policy, whose routers may follow the rollout's."""
        mine: dict[int, MicroBatch] = {}

        def compute() -> None:
            for index in range(self._ranks.rank, len(spans), self._ranks.size):
                chosen, routing, totals = [samples[i] for i in spans[index]], RoutingTotals(), Totals()
                packed = pack(chosen, self.share_prompts)
                if policy is None:
                    logprobs, entropy = forward(model, packed, self.objective.temperature)
                else:
                    logprobs, entropy, _ = replace(policy, totals=routing)(packed, chosen)
                totals.see(entropy)
                mine[index] = MicroBatch(totals, routing, logprobs)

        self._ranks.run_on_all(compute)
        results, sums = dict[int, Tensor](), Totals()
        for index, micro in sorted(gather_micro_batches(self._ranks, mine).items()):
            sums.merge(micro.totals)
            if policy is not None:
                policy.totals.merge(micro.routing)
            results |= zip(spans[index], micro.logprobs.split([samples[i].num_trained for i in spans[index]]))
        return results, sums

    def _shadow(self, batch: TrainingBatch) -> list[Tensor] | None:
        """Log-probabilities of the masters as they are, in BF16."""
        everything = range(len(batch.samples))
        return self._logprobs(self.model.under("bf16"), batch.samples) if batch.has_tokens(everything) else None

    def _compare_with_shadow(self, batch: TrainingBatch, before: list[Tensor]) -> dict[str, float]:
        """Once the weights have moved: the ratio's noise, and bounds of the clip that allow for it."""
        objective = batch.objective
        moved = self.model.under(self.model.precision)
        moved.transformer.calibrate(self.model.transformer.kv_scales)
        try:
            noisy = log_ratios(self._logprobs(moved, batch.samples), batch.old)
        except NonFiniteError:
            return {}  # the next step will find it too, and counts it
        clean = log_ratios(self._logprobs(self.model.under("bf16"), batch.samples), before)
        if not bool(torch.isfinite(noisy).all() & torch.isfinite(clean).all()):
            return {}
        arguments = (noisy, clean, torch.cat(list(batch.advantages)), objective.clip_low, objective.clip_high)
        metrics = shadow_metrics(*arguments)
        if objective.shadow_calibrates_clip:
            low, high = self.state.clip_bounds = calibrated_bounds(*arguments)
            metrics |= {"shadow/clip_low": low, "shadow/clip_high": high}
        return metrics
