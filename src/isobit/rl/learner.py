"""The learner: one rollout batch in, some optimizer steps, metrics out.

Old log-probabilities are the rollout's own under a unified precision, where they are the learner's bit for bit (the
mismatch metrics of the first optimizer step prove it in every batch), and recomputed before any update otherwise.
Between optimizer steps the working weights are requantized; after the last one that is the training loop's `sync`.

The gradient is that of the whole optimizer batch, however it is split into micro-batches: up to the rounding of sums,
and, where WGrad runs in FP8, up to its scales, which blocks of 128 tokens share (tests/rl/test_learner.py).

A step whose loss or gradient is not finite, or whose tokens a correction has all rejected, changes neither weights nor
optimizer; it is counted, and left out of the other metrics, which are NaN if no step was taken.

Left out: rewards and rollouts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from isobit.errors import NonFiniteError
from isobit.model import Model
from isobit.model.kv_scales import AmaxRecorder
from isobit.model.moe import RouteTape, decode_routes
from isobit.rl.correction import correct, correction_metrics, step_metrics
from isobit.rl.forward import forward
from isobit.rl.loss import kl_penalty, policy_loss, token_weights
from isobit.rl.mismatch import mismatch_metrics, sequence_metrics
from isobit.rl.objective import Objective
from isobit.rl.optim import Optimizer, learning_rate
from isobit.rl.packing import PackedBatch, micro_batches, minibatches, pack
from isobit.rl.routing import RoutingTotals
from isobit.rl.samples import Sample
from isobit.rl.shadow import calibrated_bounds, log_ratios, shadow_metrics


@dataclass(eq=False)
class _Batch:
    """Per sample: fixed log-probabilities [completion tokens] that the loss compares with; `fresh`: it has to be of the
    weights that learning begins with, so that a difference is a mismatch."""

    samples: Sequence[Sample]
    advantages: Sequence[float]
    rollout: list[Tensor]
    old: list[Tensor]
    fresh: list[bool]
    reference: list[Tensor] | None = None
    weights: list[Tensor] | None = None


@dataclass(eq=False)
class _Totals:
    """Sums over the tokens of one or more optimizer steps, and the norm of each step's gradient."""

    loss: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    clipped: int = 0
    tokens: int = 0
    norms: list[float] = field(default_factory=list)
    skipped: int = 0

    def add(self, other: "_Totals") -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


class Learner:
    """Trains `model` on rollout batches. `reference` is the frozen model of the KL penalty, if there is one.

    `bad_steps_in_a_row` counts skipped optimizer steps since the last good one; a resumed run sets it again. `kv_amax`
    [layers, 2] is that of keys and values in the last batch, where a KV cache is calibrated from it. `clip_bounds` are
    the objective's, or those that the last shadow pass calibrated. `compared` holds the learner's log-probabilities of
    the last batch's completion tokens, of those samples that the mismatch was measured on, by (prompt_index,
    sample_index).
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        objective: Objective,
        *,
        reference: Model | None = None,
        micro_batch_tokens: int = 16384,
        seed: int = 0,
    ) -> None:
        assert (reference is not None) == (objective.kl_coefficient > 0)
        self.model, self.optimizer, self.objective, self.reference = model, optimizer, objective, reference
        self.micro_batch_tokens = micro_batch_tokens
        self.seed = seed
        self.bad_steps_in_a_row = 0
        self.kv_amax: Tensor | None = None
        self.compared: dict[tuple[int, int], list[float]] = {}
        self.clip_bounds = (objective.clip_low, objective.clip_high)
        self._routing = RoutingTotals()

    def learn(self, samples: Sequence[Sample], advantages: Sequence[float], step: int) -> dict[str, float]:
        """`optimize`, recording the amax of keys and values where they are calibrated from it."""
        precision, transformer = self.model.precision, self.model.transformer
        if not (precision.calibrated and precision.calibration.side == "learner"):
            return self.optimize(samples, advantages, step)
        transformer.recorder = recorder = AmaxRecorder(self.model.config.num_layers)
        try:
            return self.optimize(samples, advantages, step)
        finally:
            transformer.recorder = None
            if recorder.batches:
                self.kv_amax = recorder.amax(precision.calibration.percentile)

    def optimize(self, samples: Sequence[Sample], advantages: Sequence[float], step: int) -> dict[str, float]:
        """Optimizer steps on one rollout batch; `step` counts batches and sets the learning rate. Returns metrics.

        The working weights must be those that sampled. Mismatch is measured with them: over all samples where old
        log-probabilities are recomputed, else over those of the first optimizer step. Where samples of older weights
        are meant to be there, they have no part in it, and how far they are is told apart.
        """
        objective, metrics = self.objective, dict[str, float]()
        self._routing, self.compared = RoutingTotals(), {}
        totals, rate = _Totals(), learning_rate(step, self.optimizer.settings)
        try:
            batch = self._prepare(samples, advantages, metrics)
        except NonFiniteError:
            self._count_bad(totals)
            return metrics | _learning_metrics(totals, rate)
        due = objective.shadow_every > 0 and step % objective.shadow_every == 0
        shadow = self._shadow(samples) if due and any(s.completion_ids for s in samples) else None
        first: list[tuple[int, Tensor]] | None = None if objective.recompute_old else []
        for epoch in range(objective.epochs):
            for part in minibatches(len(samples), objective.updates_per_batch, self.seed, step, epoch):
                if totals.norms:  # the weights have changed
                    self.model.sync(rollout=False)
                    first = None
                self._update(batch, part, rate, totals, first)
                if first is not None:
                    metrics |= self._compare(batch, first)
        if shadow is not None:
            metrics |= self._compare_with_shadow(batch, shadow)
        return metrics | _learning_metrics(totals, rate) | self._routing.metrics()

    def _compare(self, batch: _Batch, found: Sequence[tuple[int, Tensor]]) -> dict[str, float]:
        """The mismatch over samples of the present weights, by index, which are kept in `compared`."""
        fresh = [(i, logprobs) for i, logprobs in found if batch.fresh[i]]
        for i, logprobs in fresh:
            sample = batch.samples[i]
            self.compared[sample.prompt_index, sample.sample_index] = logprobs.tolist()
        return _mismatch([(logprobs, batch.rollout[i]) for i, logprobs in fresh])

    def reference_kl(self, samples: Sequence[Sample]) -> list[float]:
        """Per sample, the sum over its tokens of log π_rollout - log π_reference: k1, for the reward."""
        assert self.reference is not None
        found = self._logprobs(self.reference, samples)
        rollout = [torch.tensor(s.rollout_logprobs, dtype=torch.float32) for s in samples]
        return [float((old.double() - new.double()).sum()) for old, new in zip(rollout, found)]

    def _shadow(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Log-probabilities of the masters as they are, in BF16."""
        return self._logprobs(self.model.under("bf16"), samples)

    def _compare_with_shadow(self, batch: _Batch, before: list[Tensor]) -> dict[str, float]:
        """Once the weights have moved: the ratio's noise, and bounds of the clip that allow for it."""
        objective = self.objective
        moved = self.model.under(self.model.precision)
        moved.transformer.kv_scales = self.model.transformer.kv_scales
        try:
            noisy = log_ratios(self._logprobs(moved, batch.samples), batch.old)
        except NonFiniteError:
            return {}  # the next step will find it too, and counts it
        clean = log_ratios(self._shadow(batch.samples), before)
        if not bool(torch.isfinite(noisy).all() & torch.isfinite(clean).all()):
            return {}
        lengths = torch.tensor([len(s.completion_ids) for s in batch.samples])
        advantages = torch.repeat_interleave(torch.tensor(batch.advantages, dtype=torch.float32), lengths)
        arguments = (noisy, clean, advantages, objective.clip_low, objective.clip_high)
        metrics = shadow_metrics(*arguments)
        if objective.shadow_calibrates_clip:
            self.clip_bounds = calibrated_bounds(*arguments)
            metrics |= {"shadow/clip_low": self.clip_bounds[0], "shadow/clip_high": self.clip_bounds[1]}
        return metrics

    def _count_bad(self, totals: _Totals) -> None:
        totals.skipped += 1
        self.bad_steps_in_a_row += 1

    def _prepare(self, samples: Sequence[Sample], advantages: Sequence[float], metrics: dict[str, float]) -> _Batch:
        rollout = [torch.tensor(s.rollout_logprobs, dtype=torch.float32) for s in samples]
        version, stale = self.model.weights_version, self.objective.stale_samples
        fresh = [not stale or s.weights_version == version for s in samples]
        batch = _Batch(samples, advantages, rollout, rollout, fresh)
        if self.objective.recompute_old:
            batch.old = self._logprobs(self.model, samples)
            metrics |= self._compare(batch, list(enumerate(batch.old)))
            metrics |= _staleness([pair for pair, new in zip(zip(batch.old, rollout), fresh) if not new])
        if self.reference is not None and not self.objective.kl_in_reward:
            batch.reference = self._logprobs(self.reference, samples)
        lengths = [len(r) for r in rollout]
        if self.objective.correction.active and any(lengths):
            correction = correct(self.objective.correction, torch.cat(batch.old), torch.cat(rollout), lengths)
            credit = torch.repeat_interleave(torch.tensor(advantages, dtype=torch.float32), torch.tensor(lengths))
            metrics |= correction_metrics(correction) | step_metrics(correction, credit, lengths)
            batch.weights = list(correction.weights.split(lengths))
        return batch

    @torch.no_grad()
    def _logprobs(self, model: Model, samples: Sequence[Sample]) -> list[Tensor]:
        results: list[Tensor] = []
        for part in micro_batches(samples, self.micro_batch_tokens):
            chosen = [samples[i] for i in part]
            logprobs, _ = self._forward(model, pack(chosen), chosen, compare=model is self.model)[:2]
            results += logprobs.split([len(s.completion_ids) for s in chosen])
        return results

    def _forward(
        self, model: Model, packed: PackedBatch, samples: Sequence[Sample], compare: bool
    ) -> tuple[Tensor, Tensor, RouteTape | None]:
        """`forward`, following the policy's routers, which may have to repeat the rollout's choices; `compare`: its
        weights are those of the rollout."""
        experts = model.config.experts
        if experts is None or model is not self.model:
            return *forward(model, packed, self.objective.temperature), None
        recorded = None
        if all(s.routes is not None for s in samples):
            layers = model.config.num_mixtures
            compare &= all(s.weights_version == model.weights_version for s in samples)
            recorded = torch.cat([decode_routes(s.routes or "", layers, experts.per_token) for s in samples])
        assert recorded is not None or not self.objective.router_replay, "the rollout did not record its routes"
        given = recorded.to(model.ops.device) if recorded is not None and self.objective.router_replay else None
        tape = RouteTape(given)
        found = forward(model, packed, self.objective.temperature, tape)
        self._routing.see(tape, experts.count, recorded if compare else None)
        return *found, tape

    def _update(
        self, batch: _Batch, part: list[int], rate: float, totals: _Totals, first: list[tuple[int, Tensor]] | None
    ) -> None:
        """One optimizer step over the samples `part`; keeps the policy's log-probabilities in `first`, if given."""
        lengths = [len(batch.samples[i].completion_ids) for i in part]
        if not any(lengths):
            return  # nothing to learn from is no reason to decay the weights
        if batch.weights is not None and not any(bool(batch.weights[i].any()) for i in part):
            totals.skipped += 1  # all of it was rejected
            return
        weights = token_weights(lengths, self.objective.loss_aggregation, self.objective.max_new_tokens)
        self.optimizer.zero_grad()
        own = _Totals()
        try:
            for span in micro_batches([batch.samples[i] for i in part], self.micro_batch_tokens):
                chosen = [part[i] for i in span]
                self._accumulate(batch, chosen, [weights[i] for i in span], sum(lengths), own, first)
            norm = self.optimizer.gradient_norm()
            self.model.ops.raise_faults()  # of the backwards
        except NonFiniteError:
            norm = float("inf")
        if math.isfinite(own.loss) and math.isfinite(own.kl) and math.isfinite(norm):
            self.optimizer.step(rate, norm)
            own.norms.append(norm)
            totals.add(own)
            self.bad_steps_in_a_row = 0
        else:
            self._count_bad(totals)
        self.optimizer.zero_grad()

    def _accumulate(
        self,
        batch: _Batch,
        chosen: list[int],
        weights: list[float],
        batch_tokens: int,
        totals: _Totals,
        first: list[tuple[int, Tensor]] | None,
    ) -> None:
        """Forward and backward of one micro-batch: its part of the loss of the whole optimizer batch."""
        objective = self.objective
        samples = [batch.samples[i] for i in chosen]
        packed = pack(samples)
        if not packed.num_targets:
            return
        logprobs, entropy, tape = self._forward(self.model, packed, samples, compare=first is not None)
        token_weight = torch.tensor(weights)[packed.sequence]
        surrogate = policy_loss(
            logprobs,
            torch.cat([batch.old[i] for i in chosen]),
            torch.tensor([batch.advantages[i] for i in chosen], dtype=torch.float32)[packed.sequence],
            clip_low=self.clip_bounds[0],
            clip_high=self.clip_bounds[1],
            weights=None if batch.weights is None else torch.cat([batch.weights[i] for i in chosen]),
            surrogate=objective.surrogate,
            dual_clip=objective.dual_clip,
            sequence=packed.sequence if objective.ratio == "sequence" else None,
        )
        loss = (surrogate.loss * token_weight).sum()
        share = packed.num_targets / max(batch_tokens, 1)
        total = loss
        if tape is not None and objective.router_aux_coefficient > 0:
            total = total + objective.router_aux_coefficient * torch.stack(tape.auxiliary).mean().cpu() * share
        if batch.reference is not None:
            kl = kl_penalty(logprobs, torch.cat([batch.reference[i] for i in chosen]), objective.kl_estimator)
            total = total + objective.kl_coefficient * (kl * token_weight).sum()
            totals.kl += float(kl.detach().double().sum())
        total.backward()
        totals.loss += float(loss.detach())
        totals.entropy += float(entropy.double().sum())
        totals.clipped += int(surrogate.clipped.sum())
        totals.tokens += packed.num_targets
        if first is not None:
            first += zip(chosen, logprobs.detach().split([len(s.completion_ids) for s in samples]))


def _mismatch(pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Nothing if no token was compared: that is not agreement."""
    measured = [pair for pair in pairs if pair[0].numel()]
    if not measured:
        return {}
    learner, rollout = [pair[0] for pair in measured], [pair[1] for pair in measured]
    return mismatch_metrics(torch.cat(learner), torch.cat(rollout)) | sequence_metrics(learner, rollout)


def _staleness(pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """How far samples of older weights are from the policy of now."""
    found = _mismatch(pairs)
    names = ("kl_k3", "token_mult_prob_error")
    return {f"staleness/{name}": found[f"mismatch/{name}"] for name in names} if found else {}


def _learning_metrics(totals: _Totals, rate: float) -> dict[str, float]:
    tokens, steps = totals.tokens or math.nan, len(totals.norms) or math.nan
    return {
        "loss/policy": totals.loss / steps,
        "loss/kl": totals.kl / tokens,
        "entropy": totals.entropy / tokens,
        "clip_fraction": totals.clipped / tokens,
        "grad_norm": sum(totals.norms) / steps,
        "learning_rate": rate,
        "steps/skipped": float(totals.skipped),
    }
