"""What a phase must compute and move on one GPU: operations of the matrix units, and bytes through
its memory.

A kind of work takes the larger of two times: that of the bytes which must move (each weight, key,
value and saved activation once), and that of the operations at the rate of the unit that does them;
the kinds of a phase follow each other. At a device's full rates that is a lower bound
(`roofline.py`, and the GPU's benchmarks).

Counted: linear layers, experts, output head, attention with its cache, states of linear
attention (read and written once for a sequence's rows, 7 operations a number and row), and the
traffic of norms, gates and quantization between them. Left out: launches, waiting, sampling,
collectives, and that linear attention goes from token to token.
"""

import math
from dataclasses import dataclass

from isobit.model import ModelConfig
from isobit.model.families import FAMILIES
from isobit.precision import Flow, Precision


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


_MATRICES = ("qkv", "o", "gate_up", "down")
"""Of a layer. Left out: those of latent attention."""


def linear_sizes(config: ModelConfig, layer: int | None = None) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of a layer's products, by default of one with attention; of one expert's
    in a mixture."""
    inner = config.intermediate_size if config.routed is None else config.routed.intermediate_size
    hidden, rows = config.hidden_size, config.qkv_rows(layer or 0)
    heads = config.num_heads * config.heads_of(layer or 0).dim
    if config.linear is not None and layer is not None and config.is_linear(layer):
        heads, rows = config.linear.values, config.linear.channels + config.linear.values
    return {
        "qkv": (rows, hidden),
        "o": (hidden, heads),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }


def _elements_of_a_layer(config: ModelConfig) -> dict[str, float]:
    """Of each matrix, on average over the layers."""
    layers = [linear_sizes(config, layer) for layer in range(config.num_layers)]
    return {
        name: sum(n * k for n, k in (own[name] for own in layers)) / len(layers)
        for name in _MATRICES
    }


def elements(config: ModelConfig, tokens: float) -> tuple[float, float]:
    """Weights of the linear layers that (one token multiplies, this many tokens touch between
    them)."""
    sizes = _elements_of_a_layer(config)
    attention, mlp = sizes["qkv"] + sizes["o"], sizes["gate_up"] + sizes["down"]
    used, touched = 1.0, 1.0
    dense = (
        3
        * config.hidden_size
        * config.intermediate_size
        * (config.num_layers - config.num_mixtures)
    )
    mixtures = config.num_layers if config.routed is None else config.num_mixtures
    if config.routed is None:
        dense = 0
    else:
        count, used = config.routed.count, float(config.routed.per_token)
        touched = count * (1 - (1 - used / count) ** tokens)  # of a router that chooses evenly
    outside = config.num_layers * attention + dense
    return outside + mixtures * used * mlp, outside + mixtures * touched * mlp


def attended(config: ModelConfig, keys: float) -> float:
    """Keys that a row attends to, in all layers together, where `keys` stand before it on
    average. Where a layer has a window this is a bound: short rows see fewer."""
    if not config.windows:
        return keys * _attentions(config)
    return sum(keys if window is None else min(keys, window) for window in config.windows)


def _attentions(config: ModelConfig) -> int:
    """Layers with keys and values."""
    layers = range(config.num_layers)
    return sum(config.has_attention(layer) and not config.is_linear(layer) for layer in layers)


def quantized_share(config: ModelConfig, precision: Precision, use: str) -> float:
    """Of the linear layers' weights, the share whose products a use runs in FP8: all but those
    of excepted layers and of the matrices that stay in BF16."""
    found = 0.0
    for layer in range(config.num_layers):
        sizes = {name: n * k for name, (n, k) in linear_sizes(config, layer).items()}
        flow = precision.flow(use, layer, config.num_layers)
        linear = {name: precision.linear_flow(flow, name) for name in _MATRICES}
        low = [
            name
            for name, own in linear.items()
            if own.weight is not None and own.activation is not None
        ]
        found += sum(sizes[name] for name in low) / sum(sizes.values())
    return found / config.num_layers


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
    state = (
        0.0 if config.linear is None else len(config.linear.layers) * math.prod(config.linear.state)
    )
    return {
        "linear": Work((1 - share) * operations, share * operations, touched * weight_bytes),
        "between": Work(bytes=rows * config.num_layers * between),
        "attention": Work(
            4 * rows * seen * config.num_heads * config.head_dim + 7 * rows * state,
            0,
            width * kv_bytes * (sequences * seen + rows * _attentions(config))
            + 2 * 4 * sequences * state,
        ),
    }


def _between(config: ModelConfig, quantized: bool) -> float:
    """Bytes that a token's rows cost in one layer outside the weights: what fused kernels read
    and write. Left out: heads that differ by layer."""
    operand = 1 + 4 / 128 if quantized else 2
    inner = config.intermediate_size
    if config.routed is not None:
        inner = config.routed.per_token * config.routed.intermediate_size
    heads = config.num_heads * config.head_dim
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    norms = 2 * (
        6 * config.hidden_size + 2 * operand * config.hidden_size
    )  # x, residual, sum; y written and read
    norms += (len(FAMILIES[config.family].norms) - 2) * 2 * 2 * config.hidden_size  # read, written
    attention = 2 * 2 * qkv + 2 * heads + (2 + 2 * operand) * heads
    if (
        config.qk_norm and config.norms_all_heads
    ):  # copied out, normed, and put back beside the values
        attention += 2 * 2 * (3 * qkv - 2 * config.num_kv_heads * config.head_dim)
    return norms + attention + 2 * 2 * 2 * inner + 2 * operand * inner + 2 * 2 * config.hidden_size


def _head(config: ModelConfig, rows: float, passes: float = 1) -> Work:
    size = config.vocab_size * config.hidden_size
    return Work(2 * rows * size * passes, 0, 2 * size * passes)
