"""The learner: one rollout batch in, some optimizer steps, metrics out.

Old log-probabilities are the rollout's own under a unified precision, where they are the learner's bit for bit (the
mismatch metrics of the first optimizer step prove it in every batch), and recomputed before any update otherwise.
Between optimizer steps the working weights are requantized; after the last one that is the training loop's `sync`.

A step whose loss or gradient is not finite changes nothing and is counted. Left out: rewards and rollouts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isobit.errors import NonFiniteError
from isobit.model import Model
from isobit.rl.correction import correction_metrics, token_tis
from isobit.rl.loss import kl_penalty, policy_loss, token_weights
from isobit.rl.mismatch import mismatch_metrics
from isobit.rl.objective import Objective
from isobit.rl.optim import Optimizer, learning_rate
from isobit.rl.packing import PackedBatch, Trainable, micro_batches, minibatches, pack
from isobit.rl.samples import Sample


@dataclass(eq=False)
class _Batch:
    """Per sample: fixed log-probabilities [completion tokens] that the loss compares with."""

    samples: Sequence[Sample]
    advantages: Sequence[float]
    rollout: list[Tensor]
    old: list[Tensor]
    reference: list[Tensor] | None = None
    weights: list[Tensor] | None = None


@dataclass(eq=False)
class _Totals:
    """Sums over the tokens of one or more optimizer steps."""

    loss: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    clipped: int = 0
    tokens: int = 0
    norms: list[float] = field(default_factory=list)
    skipped: int = 0
    steps: int = 0


class Learner:
    """Trains `model` on rollout batches. `reference` is the frozen model of the KL penalty, if there is one."""

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

    def learn(self, samples: Sequence[Sample], advantages: Sequence[float], step: int) -> dict[str, float]:
        """Optimizer steps on one rollout batch; `step` counts batches and sets the learning rate. Returns metrics."""
        objective, metrics = self.objective, dict[str, float]()
        batch = self._prepare(samples, advantages, metrics)
        totals, rate = _Totals(), learning_rate(step, self.optimizer.settings)
        first: list[tuple[int, Tensor]] | None = None if objective.recompute_old else []
        for epoch in range(objective.epochs):
            for part in minibatches(len(samples), objective.updates_per_batch, self.seed, step, epoch):
                if totals.steps:
                    self.model.sync()
                    first = None
                self._update(batch, part, rate, totals, first)
                if first is not None:
                    metrics |= _mismatch([(logprobs, batch.rollout[index]) for index, logprobs in first])
        return metrics | _learning_metrics(totals, rate)

    def _prepare(self, samples: Sequence[Sample], advantages: Sequence[float], metrics: dict[str, float]) -> _Batch:
        rollout = [torch.tensor(s.rollout_logprobs, dtype=torch.float32) for s in samples]
        batch = _Batch(samples, advantages, rollout, rollout)
        if self.objective.recompute_old:
            batch.old = self._logprobs(self.model, samples)
            metrics |= _mismatch(list(zip(batch.old, rollout)))
        if self.reference is not None:
            batch.reference = self._logprobs(self.reference, samples)
        if self.objective.correction == "token_tis" and any(len(r) > 0 for r in rollout):
            correction = token_tis(torch.cat(batch.old), torch.cat(rollout), self.objective.tis_cap)
            metrics |= correction_metrics(correction)
            batch.weights = list(correction.weights.split([len(r) for r in rollout]))
        return batch

    @torch.no_grad()
    def _logprobs(self, model: Model, samples: Sequence[Sample]) -> list[Tensor]:
        results: list[Tensor] = []
        for part in micro_batches(samples, self.micro_batch_tokens):
            chosen = [samples[i] for i in part]
            logprobs, _ = forward(model, pack(chosen), self.objective.temperature)
            results += logprobs.split([len(s.completion_ids) for s in chosen])
        return results

    def _update(
        self, batch: _Batch, part: list[int], rate: float, totals: _Totals, first: list[tuple[int, Tensor]] | None
    ) -> None:
        """One optimizer step over the samples `part`; keeps the policy's log-probabilities in `first`, if given."""
        lengths = [len(batch.samples[i].completion_ids) for i in part]
        weights = token_weights(lengths, self.objective.loss_aggregation, self.objective.max_new_tokens)
        self.optimizer.zero_grad()
        loss = 0.0
        try:
            for span in micro_batches([batch.samples[i] for i in part], self.micro_batch_tokens):
                chosen = [part[i] for i in span]
                loss += self._accumulate(batch, chosen, [weights[i] for i in span], totals, first)
            norm = self.optimizer.gradient_norm()
        except NonFiniteError:
            norm = float("inf")
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            self.optimizer.step(rate, norm)
            totals.norms.append(norm)
            totals.loss += loss
            totals.steps += 1
        else:
            totals.skipped += 1
        self.bad_steps_in_a_row = 0 if finite else self.bad_steps_in_a_row + 1
        self.optimizer.zero_grad()

    def _accumulate(
        self,
        batch: _Batch,
        chosen: list[int],
        weights: list[float],
        totals: _Totals,
        first: list[tuple[int, Tensor]] | None,
    ) -> float:
        """Forward and backward of one micro-batch: its part of the loss of the whole optimizer batch."""
        objective = self.objective
        samples = [batch.samples[i] for i in chosen]
        packed = pack(samples)
        if not packed.num_targets:
            return 0.0
        logprobs, entropy = forward(self.model, packed, objective.temperature)
        token_weight = torch.tensor(weights)[packed.sequence]
        surrogate = policy_loss(
            logprobs,
            torch.cat([batch.old[i] for i in chosen]),
            torch.tensor([batch.advantages[i] for i in chosen], dtype=torch.float32)[packed.sequence],
            clip_low=objective.clip_low,
            clip_high=objective.clip_high,
            weights=None if batch.weights is None else torch.cat([batch.weights[i] for i in chosen]),
        )
        loss = (surrogate.loss * token_weight).sum()
        total = loss
        if batch.reference is not None:
            kl = kl_penalty(logprobs, torch.cat([batch.reference[i] for i in chosen]), objective.kl_estimator)
            total = total + objective.kl_coefficient * (kl * token_weight).sum()
            totals.kl += float(kl.detach().double().sum())
        total.backward()
        totals.entropy += float(entropy.double().sum())
        totals.clipped += int(surrogate.clipped.sum())
        totals.tokens += packed.num_targets
        if first is not None:
            first += zip(chosen, logprobs.detach().split([len(s.completion_ids) for s in samples]))
        return float(loss.detach()) if torch.isfinite(total) else float("nan")


def forward(model: Model, packed: PackedBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probability, entropy) of every completion token of a packed batch, [C] float32, by the learner's flow."""
    transformer = model.transformer
    hidden = transformer.hidden(packed.tokens, packed.layout, use="learner")
    return transformer.head_logprobs(hidden[packed.rows], packed.targets, temperature, "learner")


def supervised_update(
    model: Model, optimizer: Optimizer, samples: Sequence[Trainable], rate: float, micro_batch_tokens: int
) -> dict[str, float]:
    """One optimizer step of cross-entropy on completion tokens, averaged over all of them. Returns metrics.

    As in RL, a non-finite loss or gradient skips the step (`steps/skipped`).
    """
    optimizer.zero_grad()
    count = max(sum(len(s.completion_ids) for s in samples), 1)
    loss = 0.0
    try:
        for span in micro_batches(samples, micro_batch_tokens):
            logprobs, _ = forward(model, pack([samples[i] for i in span]), 1.0)
            part = -logprobs.sum() / count
            part.backward()
            loss += float(part.detach())
        norm = optimizer.gradient_norm()
    except NonFiniteError:
        norm = float("inf")
    finite = math.isfinite(loss) and math.isfinite(norm)
    if finite:
        optimizer.step(rate, norm)
    optimizer.zero_grad()
    return {"loss/cross_entropy": loss, "grad_norm": norm, "learning_rate": rate, "steps/skipped": float(not finite)}


def _mismatch(pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    if not pairs:
        return mismatch_metrics(torch.empty(0), torch.empty(0))
    return mismatch_metrics(torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs]))


def _learning_metrics(totals: _Totals, rate: float) -> dict[str, float]:
    tokens = max(totals.tokens, 1)
    return {
        "loss/policy": totals.loss / max(totals.steps, 1),
        "loss/kl": totals.kl / tokens,
        "entropy": totals.entropy / tokens,
        "clip_fraction": totals.clipped / tokens,
        "grad_norm": sum(totals.norms) / len(totals.norms) if totals.norms else float("nan"),
        "learning_rate": rate,
        "steps/skipped": float(totals.skipped),
    }
