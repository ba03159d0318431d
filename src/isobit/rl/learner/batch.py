"""A rollout batch as the learner takes it: the tensors that its loss compares with, and the
distance to the rollout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from isobit.rl.algorithm.advantages import Advantage
from isobit.rl.algorithm.correction import correct, correction_metrics, step_metrics
from isobit.rl.algorithm.loss import token_weights
from isobit.rl.algorithm.mismatch import mismatch_metrics, position_metrics, sequence_metrics
from isobit.rl.algorithm.objective import ResolvedObjective
from isobit.rl.algorithm.samples import Sample
from isobit.rl.learner.agreement import Compared
from isobit.rl.learner.schedule import Cutting, Schedule, zero_advantage_samples

SampleKey = tuple[int, int]


@dataclass(frozen=True, eq=False)
class TrainingBatch:
    """Per sample, [trained tokens] float32: advantages, log-probabilities, the correction's
    importance weights.

    `fresh`: the place among a sample's trained tokens from which on they have to be of the weights
    that learning begins with, so that a difference is a mismatch; None: none has to. `zero`:
    whether it teaches nothing, since its advantage is 0 or it is `masked`: left out of the loss and
    its averages, though it counts as a sequence. `observed`: how many of its tokens are learned
    as what an environment said. `known`: the samples whose `old` are the learner's, not the
    rollout's. `averaged`, bool: the tokens that are averaged over, if not all are.
    `comparable_tokens`: those tokens of all samples.
    """

    objective: ResolvedObjective
    samples: Sequence[Sample]
    advantages: Sequence[Tensor]
    rollout: Sequence[Tensor]
    old: Sequence[Tensor]
    fresh: Sequence[int | None]
    zero: Sequence[bool]
    masked: Sequence[bool]
    observed: Sequence[int]
    comparable_tokens: int
    known: Sequence[int] = ()
    reference: Sequence[Tensor] | None = None
    importance: Sequence[Tensor] | None = None
    averaged: Sequence[Tensor] | None = None

    def given(
        self, old: Mapping[int, Tensor] | None, reference: Sequence[Tensor] | None
    ) -> "tuple[TrainingBatch, dict[str, float]]":
        """Return the batch with the log-probabilities of the reference, and the `old` ones that the
        learner computed, by the index of the sample, at least of all that teach; None: the
        rollout's own serve. A correction weighs the samples that have them: its metrics."""
        known = sorted(old or ())
        rows = [(old or {}).get(i, row) for i, row in enumerate(self.rollout)]
        batch = replace(self, old=rows, known=known, reference=reference)
        rule, lengths = self.objective.rule, [len(self.rollout[i]) for i in known]
        if not rule.active or not any(lengths):
            return batch, {}
        correction = correct(rule, joined(rows, known), joined(self.rollout, known), lengths)
        importance = [torch.ones_like(row) for row in self.rollout]
        masks = [torch.ones_like(row, dtype=torch.bool) for row in self.rollout]
        weights, mask_rows = correction.weights.split(lengths), correction.accepted.split(lengths)
        for row_index, i in enumerate(known):
            importance[i], masks[i] = weights[row_index], mask_rows[row_index]
        averaged = masks if rule.denominator == "kept" else None
        corrected = replace(batch, importance=importance, averaged=averaged)
        everything = range(len(self.samples))
        previous, weighed = (b.weights_of(everything) for b in (batch, corrected))
        sizes = [previous[i] for i in known], [weighed[i] for i in known]
        step = step_metrics(correction, joined(self.advantages, known), lengths, *sizes)
        return corrected, correction_metrics(correction) | step

    def of_high_entropy(self, entropies: Sequence[Tensor]) -> "TrainingBatch":
        """Return the batch with a surrogate loss only of the tokens whose entropy [trained tokens]
        is at or above the quantile that leaves `top_entropy_quantile` of those of the batch (Wang
        et al. 2025, arXiv 2506.01939; TRL's option of this name). Averages and a KL penalty are
        still over all tokens."""
        counted = [row for row, out in zip(entropies, self.masked) if not out and row.numel()]
        if not counted:
            return self
        share = 1 - self.objective.top_entropy_quantile
        least = float(np.quantile(torch.cat(counted).numpy(), share))
        units = [torch.ones_like(row) for row in self.rollout]
        importance = units if self.importance is None else self.importance
        return replace(
            self,
            importance=[w * (row >= least) for w, row in zip(importance, entropies, strict=True)],
        )

    def weights_of(self, part: Sequence[int]) -> list[float]:
        """Return the weight of each sample's tokens in the loss of the optimizer batch `part`."""
        counted = [
            0
            if self.masked[i]
            else len(row)
            if self.averaged is None
            else int(self.averaged[i].sum())
            for i, row in ((i, self.rollout[i]) for i in part)
        ]
        weights = token_weights(
            counted, self.objective.loss_aggregation, self.objective.max_new_tokens
        )
        return [0.0 if self.masked[i] else weight for i, weight in zip(part, weights)]

    def observation_weights_of(self, part: Sequence[int]) -> dict[int, float]:
        """Return, by the index of a sample of the optimizer batch `part`, the weight of each of its
        tokens that are learned as what an environment said: one over all of these. Empty without
        such tokens."""
        counts = [self.observed[i] for i in part]
        weights = token_weights(counts, "token_mean", self.objective.max_new_tokens)
        return {i: weight for i, weight, count in zip(part, weights, counts) if count}

    def cut(self, cutting: Cutting, step: int, unknown: Sequence[int], whole: bool) -> Schedule:
        """Cut the batch into micro-batches, and those samples whose old log-probabilities are
        `unknown`: the `whole` of them, or without those of zero advantage."""
        old_zero = [False] * len(self.samples) if whole else self.zero
        return cutting.schedule(self.samples, self.zero, step, unknown, old_zero)

    def compared(self, found: Mapping[int, Tensor]) -> dict[int, Compared]:
        """Return samples with fresh tokens, by index, with the rollout's log-probabilities of these
        and those that were `found`."""
        return {
            i: (fresh_part(self.samples[i], first), self.rollout[i][first:], row[first:])
            for i, row in found.items()
            if (first := self.fresh[i]) is not None
        }

    def staleness(self) -> dict[str, float]:
        """Return how far tokens of older weights are from the policy of now."""
        stale = [(i, self.fresh[i]) for i in self.known if self.fresh[i] != 0]
        metrics = _mismatch([(self.old[i][:end], self.rollout[i][:end]) for i, end in stale])
        names = ("kl_k3", "token_mult_prob_error")
        return (
            {f"staleness/{name}": metrics[f"mismatch/{name}"] for name in names} if metrics else {}
        )


def training_batch(
    objective: ResolvedObjective,
    samples: Sequence[Sample],
    advantages: Sequence[Advantage],
    weights_version: int,
) -> TrainingBatch:
    """Return the batch, whose old log-probabilities are the rollout's own; the present weights are
    of `weights_version`."""
    rollout = rollout_logprobs(samples)
    stale = objective.stale_samples
    fresh = [_fresh_from(sample, weights_version) if stale else 0 for sample in samples]
    credit = [
        _per_token(sample, advantage) for sample, advantage in zip(samples, advantages, strict=True)
    ]
    masked = [objective.mask_truncated and sample.truncated for sample in samples]
    learned = objective.observation_coefficient > 0
    observed = [
        len(sample.observed) if learned and not out else 0 for sample, out in zip(samples, masked)
    ]
    zero = zero_advantage_samples(objective, credit, masked, observed)
    comparable = sum(len(row[first:]) for row, first in zip(rollout, fresh) if first is not None)
    return TrainingBatch(
        objective, samples, credit, rollout, rollout, fresh, zero, masked, observed, comparable
    )


def _fresh_from(sample: Sample, weights_version: int) -> int | None:
    """Return the place among a sample's trained tokens from which on this version drew them. One
    that older weights began is compared only if it has such a token."""
    if sample.weights_version != weights_version:
        return None
    start = sample.drawn[-1].start
    older = sum(position < start for position in sample.trained)
    return None if older and older == sample.num_trained else older


def fresh_part(sample: Sample, first: int) -> Sample:
    """Return a sample of which only the trained tokens from number `first` on are targets."""
    return sample.trained_from(sample.trained[first]) if first else sample


def rollout_logprobs(samples: Sequence[Sample]) -> list[Tensor]:
    """Return what the engine recorded, [trained tokens] float32 of each sample."""
    return [
        torch.tensor([s.rollout_logprobs[i] for i in s.trained], dtype=torch.float32)
        for s in samples
    ]


def sample_key(sample: Sample) -> SampleKey:
    """Return (prompt_index, sample_index), which names a sample within a step."""
    return sample.prompt_index, sample.sample_index


def _per_token(sample: Sample, advantage: Advantage) -> Tensor:
    if isinstance(advantage, (int, float)):
        return torch.full((sample.num_trained,), advantage, dtype=torch.float32)
    assert len(advantage) == sample.num_trained
    return torch.tensor(list(advantage), dtype=torch.float32)


def joined(rows: Sequence[Tensor] | Mapping[int, Tensor], chosen: Sequence[int]) -> Tensor:
    """Return the rows of the chosen samples, one after the other."""
    return torch.cat([rows[i] for i in chosen])


def by_key(compared: Sequence[Compared]) -> dict[SampleKey, list[float]]:
    """Return the learner's log-probabilities: one for each completion token, 0.0 for given ones. A
    completion of which older weights drew a part is not there: not all of it was compared."""
    return {
        sample_key(sample): _spread(sample, row)
        for sample, _, row in compared
        if not sample.segments
    }


def mismatch_of(compared: Sequence[Compared]) -> dict[str, float]:
    """Return the metrics of the compared tokens; none if there were no tokens."""
    some = [entry for entry in compared if len(entry[2])]
    if not some:
        return {}
    positions = torch.tensor([position for sample, _, _ in some for position in sample.trained])
    rollout = torch.cat([row for _, row, _ in some])
    learner = torch.cat([row for _, _, row in some])
    by_position = position_metrics(learner, rollout, positions)
    return _mismatch([(learner, rollout) for _, rollout, learner in some]) | by_position


def _spread(sample: Sample, logprobs: Tensor) -> list[float]:
    values = [0.0] * len(sample.completion_ids)
    for position, value in zip(sample.trained, logprobs.tolist(), strict=True):
        values[position] = value
    return values


def _mismatch(pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Compute the mismatch of learner and rollout; {} if no token was compared, which is not
    agreement."""
    measured = [pair for pair in pairs if pair[0].numel()]
    if not measured:
        return {}
    learner, rollout = [pair[0] for pair in measured], [pair[1] for pair in measured]
    return mismatch_metrics(torch.cat(learner), torch.cat(rollout)) | sequence_metrics(
        learner, rollout
    )
