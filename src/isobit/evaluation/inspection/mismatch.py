"""The distance between rollout and learner of a precision flow, measured on a rollout, and its
sources.

`decompose` breaks the gap of a flow down, on the same tokens: with only one source switched on over
a rollout that is otherwise the learner, and with only one switched off. The sources interact, so
they do not add up; hence two columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isobit.engine.calibration import calibrate_after
from isobit.engine.engine import Engine
from isobit.engine.prompts import Prompt
from isobit.engine.types import Completion, Sampling
from isobit.model import Model
from isobit.precision import Precision
from isobit.rl.algorithm.mismatch import mismatch_metrics, sequence_metrics

_PROMISED_ERROR, _PROMISED_KL = 1.03, 1e-3
_BEARABLE_ERROR = 1.05
_SOURCES = {
    "weights": ("weight",),
    "activations": ("activation",),
    "KV cache": ("kv",),
    "queries": ("query",),
    "probabilities": ("probabilities",),
    "layers in BF16": ("bf16_first_layers", "bf16_last_layers"),
}
"""Of a gap, with the fields of a `Flow` that each is."""


@dataclass(frozen=True)
class Gap:
    """The mismatch metrics of one flow, and a verdict."""

    preset: str
    metrics: dict[str, float]

    @property
    def verdict(self) -> str:
        """By the field's thresholds: token_mult_prob_error below 1.03 to 1.05, kl_k3 below 1e-3
        (NeMo RL)."""
        error, kl = self.metrics["token_mult_prob_error"], self.metrics["kl_k3"]
        if self.metrics["differing_tokens"] == 0:
            return "exact: rollout and learner compute the same bits; nothing to correct"
        if error < _PROMISED_ERROR and kl < _PROMISED_KL:
            return "healthy: small enough for most runs; keep token TIS on and watch it"
        if error < _BEARABLE_ERROR:
            return "borderline: train with token TIS, and watch the tail of the weights"
        return (
            "unhealthy: the rollout is another policy than the one that learns; prefer a "
            "unified flow"
        )


def roll_out(
    model: Model, prompts: Sequence[Prompt], sampling: Sampling
) -> tuple[list[Completion], dict[str, float]]:
    """Return completions of the prompts by the model's rollout flow, and the metrics of its cache.
    Where scales are of the batch that was learned from, that is a first rollout."""
    engine = Engine.sized_for(model, prompts, len(prompts) * sampling.n, sampling.max_new_tokens)
    engine.calibrate(prompts)
    completions = [c for group in engine.generate(prompts, sampling) for c in group]
    if model.precision.calibrated and model.precision.calibration.data == "batch":
        calibrate_after(model, prompts, [c.prompt_token_ids + c.token_ids for c in completions])
        completions = [c for group in engine.generate(prompts, sampling) for c in group]
    return completions, engine.cache_metrics()


def measure_gap(model: Model, name: str, prompts: Sequence[Prompt], sampling: Sampling) -> Gap:
    """Roll out, and compare with the learner's log-probabilities of the same tokens."""
    completions, cache = roll_out(model, prompts, sampling)
    logprobs = model.logprobs(
        [c.prompt_token_ids + c.token_ids for c in completions], sampling.temperature
    )
    learner = [row[-len(c.logprobs) :] for row, c in zip(logprobs, completions)]
    gap = _gap(name, learner, [torch.tensor(c.logprobs) for c in completions])
    return replace(
        gap, metrics={**gap.metrics, "kv_saturated": cache.get("quant/kv_saturated_fraction", 0.0)}
    )


def decompose(
    model: Model,
    precision: Precision,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    stale: Model | None = None,
) -> list[tuple[str, Gap, Gap | None]]:
    """Return (source, the gap with it alone, the gap without it) of each source that the flow has;
    the first is all of them.

    The learner's flow is compared with variants of the rollout's, on tokens that the flow itself
    sampled. `stale`: the model some steps before, with the weights that a late sync would leave in
    the rollout.
    """
    completions, _ = roll_out(model.under(precision), prompts, sampling)
    sequences = [c.prompt_token_ids + c.token_ids for c in completions]
    counts = [len(c.token_ids) for c in completions]
    learner = _tail(
        model.under(precision), sequences, counts, sampling.temperature, "learner", prompts
    )

    def gap(sources_used: set[str]) -> Gap:
        base = stale if stale is not None and "staleness" in sources_used else model
        variant = base.under(_variant(precision, sources_used))
        rollout = _tail(variant, sequences, counts, sampling.temperature, "rollout", prompts)
        return _gap(", ".join(sorted(sources_used)), learner, rollout)

    sources = _sources(precision) + (["staleness"] if stale is not None else [])
    every = set(sources)
    return [
        ("all", gap(every), None),
        *((source, gap({source}), gap(every - {source})) for source in sources),
    ]


def _sources(precision: Precision) -> list[str]:
    rollout, learner = precision.rollout, precision.learner
    sources = [
        name
        for name, roles in _SOURCES.items()
        if any(getattr(rollout, role) != getattr(learner, role) for role in roles)
    ]
    return sources if precision.shared else [*sources, "kernels"]


def _variant(precision: Precision, names: set[str]) -> Precision:
    """Return the learner's flow with the named sources taken from the rollout's."""
    rollout, learner = precision.rollout, precision.learner

    taken = {
        role: getattr(rollout if name in names else learner, role)
        for name, roles in _SOURCES.items()
        for role in roles
    }
    flow = replace(learner, **taken)
    return replace(precision, rollout=flow, engines="separate" if "kernels" in names else "shared")


def _tail(
    model: Model,
    sequences: Sequence[Sequence[int]],
    counts: Sequence[int],
    temperature: float,
    use: str,
    prompts: Sequence[Prompt],
) -> list[Tensor]:
    calibrate_after(model, prompts, sequences)
    return [row[-count:] for row, count in zip(model.logprobs(sequences, temperature, use), counts)]


def _gap(name: str, learner: list[Tensor], rollout: list[Tensor]) -> Gap:
    metrics = mismatch_metrics(torch.cat(learner), torch.cat(rollout)) | sequence_metrics(
        learner, rollout
    )
    return Gap(name, {key.removeprefix("mismatch/"): value for key, value in metrics.items()})
