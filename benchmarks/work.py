"""What a phase must compute and move on one GPU: operations of the matrix units, and bytes through
its memory.

A kind of work takes the larger of two times: that of the bytes which must move (each weight, key,
value and saved activation once), and that of the operations at the rate of the unit that does them;
the kinds of a phase follow each other. At a device's full rates that is a lower bound
(`roofline.py`, and the GPU's benchmarks).

Counted: linear layers, experts, output head, attention with its cache, states of linear
attention (read and written once for a sequence's rows, 7 operations a number and row), and the
traffic of norms, gates and quantization between them. Left out: launches, waiting, sampling,
collectives, routers, and that linear attention goes from token to token.
"""

import math
from dataclasses import dataclass
from functools import cache

from isobit.model import ModelConfig
from isobit.model.families import FAMILIES
from isobit.model.hub.names import layer_and_role
from isobit.model.hub.shapes import parameter_shapes
from isobit.precision import Flow, Precision
from isobit.precision.flow import LINEAR_LAYERS


@dataclass(frozen=True)
class Rates:
    """Of one device, a second: bytes through its memory, operations of its matrix units in BF16
    and in FP8."""

    bandwidth: float
    bf16: float
    fp8: float


@dataclass(frozen=True)
class Work:
    """One kind of work: operations of the matrix units in BF16 and in FP8, and bytes through
    memory."""

    bf16: float = 0.0
    fp8: float = 0.0
    bytes: float = 0.0

    def seconds(self, rates: Rates) -> float:
        return max(self.bf16 / rates.bf16 + self.fp8 / rates.fp8, self.bytes / rates.bandwidth)


Phase = dict[str, Work]
"""Kinds of work by name, one after the other."""


def floor(phase: Phase, rates: Rates) -> float:
    """Seconds."""
    return sum(work.seconds(rates) for work in phase.values())


def decode(config: ModelConfig, precision: Precision, batch: float, context: float) -> Phase:
    """One step: a token for each of `batch` sequences with `context` keys."""
    phase = _forward(config, precision, "rollout", batch, context, batch)
    return phase | {"head": _head(config, batch)}


def prefill(config: ModelConfig, precision: Precision, sequences: float, length: float) -> Phase:
    """Prompts of this length; only their last rows reach the head."""
    phase = _forward(config, precision, "rollout", sequences * length, length / 2, sequences)
    return phase | {"head": _head(config, sequences)}


def learn(config: ModelConfig, precision: Precision, tokens: float, length: float) -> Phase:
    """Forward and backward of packed sequences of this length, and the optimizer's step over
    FP32 masters and moments."""
    forward = _forward(config, precision, "learner", tokens, length / 2, tokens / length)
    linear, attention = forward["linear"], forward["attention"]
    operations = linear.bf16 + linear.fp8
    quantized = linear.fp8 / operations if precision.gradient is not None else 0.0
    low = operations * quantized * ((precision.dgrad == "fp8") + (precision.wgrad == "fp8"))
    _, touched = elements(config, tokens)
    outside = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    return {
        "linear": Work(
            linear.bf16 + 2 * operations - low, linear.fp8 + low, 2 * linear.bytes + 4 * touched
        ),
        "between": Work(bytes=3 * forward["between"].bytes),
        "attention": Work(
            3.5 * attention.bf16, 0, 3 * attention.bytes
        ),  # 2 products forward, 5 backward
        "head": _head(config, tokens, passes=4),  # logits twice, and their two gradients
        # AdamW: gradient, master and moments read; the latter and working weights written
        "optimizer": Work(bytes=(touched + outside) * (4 + 2 * 12 + 2)),
    }


def linear_sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the products of a layer with attention and an MLP; of one expert's in a
    mixture. Left out: those of latent attention, and layers of one part."""
    inner = config.intermediate_size if config.routed is None else config.routed.intermediate_size
    hidden = config.hidden_size
    return {
        "qkv": (config.qkv_rows(0), hidden),
        "o": (hidden, config.num_heads * config.heads_of(0).dim),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }


@cache
def _matrices(config: ModelConfig) -> dict[tuple[int, str], int]:
    """Of each layer and role, as `layer_and_role` names it, the weights of its linear layer, or of
    those of all its experts."""
    found: dict[tuple[int, str], int] = {}
    for name, shape in parameter_shapes(config).items():
        if name.rpartition(".")[2] in LINEAR_LAYERS:
            key = layer_and_role(name)
            found[key] = found.get(key, 0) + math.prod(shape)
    return found


def _of_experts(role: str) -> bool:
    return role.startswith("experts ")


def elements(config: ModelConfig, tokens: float) -> tuple[float, float]:
    """Weights of the linear layers that (one token multiplies, this many tokens touch between
    them)."""
    sizes = _matrices(config)
    experts = sum(size for (_, role), size in sizes.items() if _of_experts(role))
    others = sum(sizes.values()) - experts
    used = _used(config)
    touched = 1 - (1 - used) ** tokens  # of a router that chooses evenly
    return others + used * experts, others + touched * experts


def _used(config: ModelConfig) -> float:
    """The share of the experts that serve a token."""
    return 1.0 if config.routed is None else config.routed.per_token / config.routed.count


def attended(config: ModelConfig, keys: float) -> float:
    """Keys that a row attends to, in all layers together, where `keys` stand before it on
    average. Where a layer has a window this is a bound: short rows see fewer."""
    if not config.windows:
        return keys * attentions(config)
    return sum(keys if window is None else min(keys, window) for window in config.windows)


def attentions(config: ModelConfig) -> int:
    """Layers with keys and values."""
    layers = range(config.num_layers)
    return sum(config.has_attention(layer) and not config.is_linear(layer) for layer in layers)


def state_elements(config: ModelConfig) -> int:
    """Of a sequence's states, in all layers with linear attention together."""
    linear = config.linear
    return 0 if linear is None else len(linear.layers) * math.prod(linear.state)


def quantized_share(config: ModelConfig, precision: Precision, use: str) -> float:
    """Of the weights of linear layers that one token multiplies, the share whose products a use
    runs in FP8: all but those of excepted layers and of the matrices that stay in BF16."""
    low = whole = 0.0
    for (layer, role), size in _matrices(config).items():
        size = size * _used(config) if _of_experts(role) else size
        flow = precision.flow(use, layer, config.num_layers)
        linear = precision.linear_flow(flow, role.rpartition(" ")[2])
        whole += size
        if linear.weight is not None and linear.activation is not None:
            low += size
    return low / whole


def _forward(
    config: ModelConfig, precision: Precision, use: str, rows: float, keys: float, sequences: float
) -> Phase:
    """`rows` tokens, each attending to `keys` on average, of `sequences` whose caches are read
    once for all rows."""
    flow: Flow = getattr(precision, use)
    active, touched = elements(config, rows)
    share = quantized_share(config, precision, use)
    operations = 2 * rows * active
    low = 1 + 4 / 128**2 if flow.weight is not None else flow.compute.itemsize
    stored = share if flow.activation is not None else float(flow.weight is not None)
    weight_bytes = stored * low + (1 - stored) * flow.compute.itemsize
    kv_bytes = flow.compute.itemsize if flow.kv is None else 1 + 4 / config.head_dim
    width = 2 * config.num_kv_heads * config.head_dim
    seen = attended(config, keys)
    between = share * _between(config, True) + (1 - share) * _between(config, False)
    state = state_elements(config)
    return {
        "linear": Work((1 - share) * operations, share * operations, touched * weight_bytes),
        "between": Work(bytes=rows * between),
        "attention": Work(
            4 * rows * seen * config.num_heads * config.head_dim + 7 * rows * state,
            0,
            width * kv_bytes * (sequences * seen + rows * attentions(config))
            + 2 * 4 * sequences * state,
        ),
    }


def _between(config: ModelConfig, quantized: bool) -> float:
    """Bytes that a token's rows cost in all layers outside the weights: what fused kernels read
    and write. Left out: heads that differ by layer."""
    operand = 1 + 4 / 128 if quantized else 2
    hidden, total = config.hidden_size, 0.0
    norm = 6 * hidden + 2 * operand * hidden  # x, residual, sum; y written and read
    more = len(FAMILIES[config.family].norms) - 2
    for layer in range(config.num_layers):
        if config.has_attention(layer):
            linear = config.is_linear(layer)
            total += _linear_attention(config, operand) if linear else _attention(config, operand)
        if config.has_mlp(layer):
            total += _mlp(config, layer, operand)
        parts = config.has_attention(layer) + config.has_mlp(layer)
        total += parts * (norm + 2 * hidden)  # what the part gives, written
        total += more * 2 * 2 * hidden  # read, written
    return total


def _attention(config: ModelConfig, operand: float) -> float:
    heads, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = heads + 2 * keys
    total = 2 * 2 * qkv + 2 * heads + (2 + 2 * operand) * heads
    if (
        config.qk_norm and config.norms_all_heads
    ):  # copied out, normed, and put back beside the values
        total += 2 * 2 * (3 * qkv - 2 * keys)
    return total


def _linear_attention(config: ModelConfig, operand: float) -> float:
    """Projected, convolved, recalled; gated and normed."""
    sizes = config.linear
    assert sizes is not None
    projected = sum(sizes.heights)
    written = projected + sizes.channels + sizes.values
    return 2 * 2 * written + 2 * operand * sizes.values


def _mlp(config: ModelConfig, layer: int, operand: float) -> float:
    """Gates and up projections, and their product; in a mixture of all experts of a token, with what
    goes into a latent and comes out of it."""
    inner, latent = config.inner_of(layer), 0
    if config.is_mixture(layer) and config.experts is not None:
        beside, latent = config.experts.shared, config.experts.latent
        inner = config.experts.per_token * config.experts.intermediate_size + beside
    inside = 2 * (2 * 2 + 2 * operand) * latent  # both are written, read, quantized
    return 2 * 2 * (2 if config.gated else 1) * inner + 2 * operand * inner + inside


def _head(config: ModelConfig, rows: float, passes: float = 1) -> Work:
    size = config.vocab_size * config.hidden_size
    return Work(2 * rows * size * passes, 0, 2 * size * passes)
