"""Metrics that describe a step: rewards, lengths and groups, and the quantization of the
weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch

from isobit.data.episodes import EpisodeRecord
from isobit.distributed import Ranks
from isobit.model import Model
from isobit.model.hub.names import layer_and_role
from isobit.model.weights.layout import made_like, rows_of
from isobit.precision import QTensor, QuantTotals
from isobit.rl.algorithm.advantages import has_spread
from isobit.rl.algorithm.credit import StepBatch
from isobit.rl.algorithm.samples import Sample
from isobit.run.metrics import member


def batch_metrics(batch: StepBatch) -> dict[str, float]:
    """Return the metrics of rewards, lengths and spread over everything that was scored in the
    step, so that dynamic sampling does not flatter them."""
    groups = batch.scored or batch.groups
    samples = [sample for group in groups for sample in group]
    rewards = [s.reward for s in samples if s.reward is not None]
    lengths = [s.num_sampled for s in samples]
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/std": _deviation(rewards),
        "groups/zero_spread_fraction": _mean(
            [float(not has_spread([s.reward for s in group])) for group in groups]
        ),
        "groups/resampled": float(batch.dropped),
        "groups/unscored": float(len(samples) - len(rewards)),
        "length/mean": _mean(lengths),
        "length/truncated_fraction": _mean([float(s.truncated) for s in samples]),
    }
    for name in sorted({name for s in samples for name in s.rewards}):
        values = [value for s in samples if (value := s.rewards.get(name)) is not None]
        metrics[f"reward/function/{name}"] = _mean(values)
    distances = [math.fsum(s.reference_kl) for s in samples if s.reference_kl is not None]
    if distances:
        metrics["reward/reference_kl"] = _mean(distances)
    return metrics | _episode_metrics([s.episode for s in samples if s.episode is not None])


def _episode_metrics(episodes: Sequence[EpisodeRecord]) -> dict[str, float]:
    """Return the metrics of turns and tool calls, in total and by the tool's name; empty without
    environments. Fractions have TRL's names and meaning."""
    if not episodes:
        return {}
    calls = [use for episode in episodes for use in episode.uses]
    metrics = {
        "env/turns": _mean([float(episode.turns) for episode in episodes]),
        "env/problems": _mean([float(episode.problem is not None) for episode in episodes]),
        "tools/call_frequency": len(calls) / len(episodes),
        "tools/failure_frequency": _failing(calls),
    }
    for name in sorted({name for name, _ in calls}):
        uses = [use for use in calls if use[0] == name]
        metrics[f"tools/call_frequency/{member(name)}"] = len(uses) / len(episodes)
        metrics[f"tools/failure_frequency/{member(name)}"] = _failing(uses)
    return metrics


def _failing(calls: Sequence[tuple[str, str | None]]) -> float:
    """Return the fraction of calls (name, error or None) that failed; 0 without calls."""
    return _mean([float(error is not None) for _, error in calls] or [0.0])


def staleness_metrics(staleness: Sequence[int], replayed: int, buffered: int) -> dict[str, float]:
    """Return the metrics of the age of a step's samples in steps, its replayed groups and the
    groups in the replay buffer; empty where all are 0."""
    if not any(staleness) and not buffered:
        return {}
    return {
        "staleness/mean": _mean(staleness),
        "staleness/max": float(max(staleness, default=0)),
        "replay/groups": float(replayed),
        "replay/buffer_groups": float(buffered),
    }


def partial_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics of samples drawn by several versions of the weights: their fraction, the
    most versions of one, and the fraction of tokens too old to learn from; empty without such
    samples."""
    if not any(sample.segments for sample in samples):
        return {}
    tokens = sum(sample.num_sampled for sample in samples)
    masked = sum(sample.num_sampled - sample.num_trained for sample in samples)
    return {
        "partial/completions_fraction": _mean([float(bool(s.segments)) for s in samples]),
        "partial/versions_max": float(max(len(sample.drawn) for sample in samples)),
        "partial/masked_fraction": masked / max(tokens, 1),
    }


def rollout_rates(took: Mapping[str, float]) -> dict[str, float]:
    """Return the rates of a step's sampling (tokens per second, cache and draft hits); empty where
    nothing was sampled."""
    if "time/rollout" not in took:
        return {}
    prompt_tokens, seconds = max(took["rollout/prompt_tokens"], 1), max(took["time/rollout"], 1e-9)
    rates = {"throughput/rollout_tokens_per_s": took["rollout/tokens"] / seconds}
    if "rollout/cached_tokens" in took:
        rates["rollout/prefix_hit_fraction"] = took["rollout/cached_tokens"] / prompt_tokens
    if "spec_decode/num_drafts" in took:
        accepted, drafted = (
            took[f"spec_decode/num_{kind}_tokens"] for kind in ("accepted", "draft")
        )
        rates["spec_decode/draft_acceptance_rate"] = accepted / drafted
        length = 1 + accepted / took["spec_decode/num_drafts"]
        rates["spec_decode/mean_acceptance_length"] = length
    return rates


class WeightTotals:
    """Quantization of the rollout's weights against the masters as they are now, by layer and
    tensor; the experts of a layer together. Empty where the weights are not quantized, or frozen:
    these have no masters."""

    @torch.no_grad()
    def __init__(self, model: Model) -> None:
        self._whole, self._layers = QuantTotals(), model.config.num_layers
        mine: dict[tuple[int, str], QuantTotals] = {}
        masters, shards = model.named_parameters(), model.transformer.masters.shards
        divided = model.transformer.divided
        for weight in model.transformer.rollout_weights():
            if isinstance(weight.working, QTensor) and weight.name in masters:
                master = masters[weight.name]
                if divided is not None and divided.has(weight.working):  # those of its last sync
                    rows = made_like(weight.working, master, model.ops, weight.name)
                else:
                    rows = rows_of(weight.working, shards.own(weight.name))
                assert isinstance(rows, QTensor)
                mine.setdefault(layer_and_role(weight.name), QuantTotals()).add(
                    model.ops.error_sums(master, rows)
                )
        self._parts = gathered(mine, shards.ranks)
        for totals in self._parts.values():
            self._whole.merge(totals)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all weights together."""
        if not self._whole.count:
            return {}
        stats = self._whole.stats()
        return {
            "quant/weight_flushed_fraction": stats.flushed,
            "quant/weight_saturated_fraction": stats.saturated,
            "quant/weight_relative_error": stats.relative_error,
        }

    def by_tensor(self) -> dict[str, dict[str, list[float | None]]]:
        """Return a mapping from tensors to `relative_error`, `saturated` and `flushed` (fractions),
        each a list over layers; None where a layer is not quantized."""
        return listed_by_tensor(self._parts, self._layers)

    def due(self, step: int, every: int) -> bool:
        """Return whether a step's `by_tensor` is to be recorded."""
        return bool(self._parts) and recorded(step, every)


def recorded(step: int, every: int) -> bool:
    """Return whether quantization is recorded by tensor in a step: in the first, and in each
    `every`-th. (Not in the last: a run that is extended would then differ from one that was planned
    longer.)"""
    return every > 0 and (step == 1 or step % every == 0)


def gathered(
    mine: Mapping[tuple[int, str], QuantTotals], ranks: Ranks
) -> dict[tuple[int, str], QuantTotals]:
    """Return the totals of all ranks, merged by (layer, tensor)."""
    if ranks.size == 1:
        return dict(mine)
    merged: dict[tuple[int, str], QuantTotals] = {}
    for entries in ranks.all_gather_json(
        [[*key, totals.to_json()] for key, totals in mine.items()]
    ):
        for layer, role, values in entries:
            merged.setdefault((layer, role), QuantTotals()).merge(QuantTotals.from_json(values))
    return merged


def listed_by_tensor(
    totals_by_tensor: Mapping[tuple[int, str], QuantTotals], num_layers: int
) -> dict[str, dict[str, list[float | None]]]:
    """Return totals by (layer, tensor) as lists over layers, by tensor and figure; None for a layer
    without the tensor."""
    listed: dict[str, dict[str, list[float | None]]] = {}
    for (layer, role), totals in sorted(totals_by_tensor.items()):
        for name, value in asdict(totals.stats()).items():
            lists = listed.setdefault(role, {}).setdefault(name, [None] * num_layers)
            lists[layer] = float(f"{value:.6g}")
    return listed


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _deviation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
