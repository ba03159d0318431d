"""Metrics that describe a step: its rewards, lengths and groups, and the quantization of its weights."""

import math
from collections.abc import Sequence

import torch

from isobit.model import Model
from isobit.precision import QTensor, QuantTotals
from isobit.rl import has_spread
from isobit.rl.collect import StepBatch


def batch_metrics(batch: StepBatch) -> dict[str, float]:
    """Rewards, lengths and spread; of all that was scored in the step, so that dynamic sampling does not flatter
    them."""
    groups = batch.scored or batch.groups
    samples = [sample for group in groups for sample in group]
    rewards = [s.reward for s in samples if s.reward is not None]
    lengths = [len(s.completion_ids) for s in samples]
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/std": _deviation(rewards),
        "groups/zero_spread_fraction": _mean([float(not has_spread([s.reward for s in group])) for group in groups]),
        "groups/resampled": float(batch.dropped),
        "groups/unscored": float(len(samples) - len(rewards)),
        "length/mean": _mean(lengths),
        "length/truncated_fraction": _mean([float(s.truncated) for s in samples]),
    }
    for name in sorted({name for s in samples for name in s.rewards}):
        values = [value for s in samples if (value := s.rewards.get(name)) is not None]
        metrics[f"reward/function/{name}"] = _mean(values)
    distances = [s.reference_kl for s in samples if s.reference_kl is not None]
    if distances:
        metrics["reward/reference_kl"] = _mean(distances)
    return metrics


def staleness_metrics(staleness: Sequence[int], replayed: int, kept: int) -> dict[str, float]:
    """How many steps old the samples of a step were, how many of its groups were replayed, and how many are kept."""
    if not any(staleness) and not kept:
        return {}
    return {
        "staleness/mean": _mean(staleness),
        "staleness/max": float(max(staleness, default=0)),
        "replay/groups": float(replayed),
        "replay/buffer_groups": float(kept),
    }


@torch.no_grad()
def weight_metrics(model: Model) -> dict[str, float]:
    """Quantization of the rollout's weights against the masters as they were at the last sync; empty without FP8."""
    totals = QuantTotals()
    for weight in model.transformer.rollout_weights():
        if isinstance(weight.working, QTensor):
            totals.add(weight.master, weight.working)
    if not totals.count:
        return {}
    found = totals.stats()
    return {
        "quant/weight_flushed_fraction": found.flushed,
        "quant/weight_saturated_fraction": found.saturated,
        "quant/weight_relative_error": found.relative_error,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _deviation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
