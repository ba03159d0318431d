"""Bytes of one token in the learner: what the forward keeps of it, and what the backward of a layer takes besides.

A layer's backward takes most at one of three moments (`_of_a_layer`): at the gradient of its gates, at that of its
experts' inputs, or at that of queries, keys and values, when what the MLP saved is gone. Tensors are those that the
operators of a CPU make (`isobit.model.forward.autograd`, `experts`; `isobit.kernels`); a fused kernel makes
fewer.
"""

import math
from functools import lru_cache

from isobit.config.sections import AdapterConfig
from isobit.model import ModelConfig
from isobit.model.adapters.targets import targeted
from isobit.model.forward.recompute import Recompute
from isobit.model.hub.linear_attention import LinearAttention
from isobit.precision import Precision
from isobit.precision.flow import LINEAR_LAYERS

_SUMMED = 12
"""Bytes of a channel of a token while rows of several experts are added: two sums and a row, in float32."""


def gate_bytes(config: ModelConfig) -> float:
    """The inputs of a layer's gates, or their gradient, of one token."""
    if config.routed is None:
        return 2.0 * 2 * config.intermediate_size
    return 2.0 * 2 * config.routed.intermediate_size * config.routed.per_token


@lru_cache
def kept_bytes(
    config: ModelConfig, precision: Precision, level: Recompute, adapter: AdapterConfig | None = None
) -> float:
    """What all layers keep of a token from forward to backward, under a level of activation checkpointing."""
    if level is True:
        return 2.0 * precision.learner.compute.itemsize * config.hidden_size * config.num_layers
    return sum(saved_bytes(config, precision, layer, adapter, level == "mlp") for layer in range(config.num_layers))


@lru_cache
def backward_bytes(
    config: ModelConfig, precision: Precision, level: Recompute, adapter: AdapterConfig | None = None
) -> float:
    """What the backward of the layer that takes most takes of a token besides what is kept."""
    return max(_of_a_layer(config, precision, layer, level, adapter) for layer in range(config.num_layers))


def _of_a_layer(
    config: ModelConfig, precision: Precision, layer: int, level: Recompute, adapter: AdapterConfig | None
) -> float:
    hidden = precision.learner.compute.itemsize * config.hidden_size
    saved = saved_bytes(config, precision, layer, adapter)
    kept = 2 * hidden if level is True else saved_bytes(config, precision, layer, adapter, level == "mlp")
    most = max(
        _through_mlp(config, precision, layer, adapter),
        _through_attention(config, precision, layer, adapter) - _of_the_mlp(config, precision, layer),
    )
    # two gradients of the residual stream; of a layer that is computed again its two results
    return saved - kept + most + (4 if level is True else 2) * hidden


def _through_mlp(config: ModelConfig, precision: Precision, layer: int, adapter: AdapterConfig | None) -> float:
    """The gradients of the gates' results and inputs; in a mixture those of experts' results, and either of the gates'
    results or of experts' inputs."""
    size, hidden = precision.learner.compute.itemsize, config.hidden_size
    if config.routed is None or not config.is_mixture(layer):
        adding = 0.0 if adapter is None else adding_bytes(config, precision, adapter, ("gate_up", "down"))
        return 3.0 * size * config.intermediate_size + adding
    inner, slots = config.routed.intermediate_size, config.routed.per_token
    codes = 2 * inner * slots if precision.backward(layer, config.num_layers)[0] == "fp8" else 0
    of_inputs = slots * size * hidden + max(codes, _SUMMED * hidden)
    return slots * size * (hidden + 2.0 * inner) + max(slots * size * inner, of_inputs)


def _through_attention(config: ModelConfig, precision: Precision, layer: int, adapter: AdapterConfig | None) -> float:
    """The gradient of attention's result; queries, keys and values again, and their gradients; those of before the
    rotation, and of before the norms, or of qkv."""
    flow = precision.flow("learner", layer, config.num_layers)
    size, queries = flow.compute.itemsize, config.num_heads * config.head_dim
    if config.linear is not None and config.is_linear(layer):
        adding = 0.0 if adapter is None else adding_bytes(config, precision, adapter, ("qkv", "o"))
        return max(_through_recurrence(config.linear, size) - 4 * size * config.hidden_size, adding)
    keys = config.num_kv_heads * config.head_dim
    again = size * 2.0 * queries + 2 * keys * (size if flow.kv is None else 1)
    normed = config.qk_norm and not config.norms_all_heads
    turned = size * (4 * (queries + keys) if normed else queries + keys + config.qkv_size)
    adding = 0.0 if adapter is None else adding_bytes(config, precision, adapter, ("qkv", "o"))
    return size * config.qkv_size + max(again + turned, adding)


def _through_recurrence(linear: LinearAttention, size: int) -> float:
    """All in float32: what goes in, if it was BF16; and either gradients of queries and keys for each head of values,
    beside queries, keys and values as the recurrence takes them; or those as they go back through lengths."""
    keys, each = linear.key_heads * linear.key_dim, linear.value_heads // linear.key_heads
    inside = 4.0 * (3 * keys + 3 * linear.values) + 8 * keys * each
    return (4.0 * linear.channels if size < 4 else 0.0) + max(inside, 4.0 * (10 * keys + 3 * linear.values))


def _of_the_mlp(config: ModelConfig, precision: Precision, layer: int) -> float:
    """What was saved of an MLP, with its norm, and is gone when attention's backward begins."""
    size, hidden = precision.learner.compute.itemsize, config.hidden_size
    if config.routed is None or not config.is_mixture(layer):
        return size * (2.0 * config.intermediate_size + hidden)
    return size * (config.routed.per_token * (2.0 * config.routed.intermediate_size + hidden) + 2 * hidden)


def _saved_of_a_recurrence(config: ModelConfig, linear: LinearAttention, size: int) -> float:
    """Of linear attention, beside what norms of the layer take: the normed rows, what goes into the convolution and
    comes out, gates, what states give with its scales, and that again, normed, beside z."""
    kept = size * (config.hidden_size + 2.0 * linear.channels + 3 * linear.values)
    return kept + 4 * 2 * linear.value_heads + 4 * linear.value_heads


def saved_bytes(
    config: ModelConfig, precision: Precision, layer: int, adapter: AdapterConfig | None = None, but_mlp: bool = False
) -> float:
    """What a layer's forward keeps of a token for its backward (`isobit.model.forward`: `autograd`, `experts`);
    `but_mlp`: what the activation checkpointing of that name keeps."""
    flow = precision.flow("learner", layer, config.num_layers)
    size = flow.compute.itemsize
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    kept = float(len(config.norms) * (size * hidden + 4))  # what norms take, and their scales
    for name, norm in (("qkv", "input_norm"), ("gate_up", "post_norm")):
        if norm in config.norms:
            continue  # it makes the product's input again
        spec = precision.linear_flow(flow, name).activation
        kept += 0 if spec is None else hidden + 4 * math.ceil(hidden / spec.block((1 << 20, hidden))[1])
        kept += size * hidden if spec is None or (but_mlp and name == "gate_up") else 0
    if config.linear is not None and config.is_linear(layer):
        kept += _saved_of_a_recurrence(config, config.linear, size)
    else:
        if config.qk_norm and config.norms_all_heads:
            kept += size * (config.qkv_size - config.num_kv_heads * config.head_dim) + 8
        kept += size * config.qkv_size + size * heads + 4 * config.num_heads  # attention's inputs, output, normalizer
        kept += 2 * size * heads if config.gated_attention else 0
    if adapter is not None:  # what each A gives
        weights = (one.weight for one in targeted(config, adapter.targets))
        kept += size * adapter.rank * sum(name.startswith(f"layers.{layer}.") for name in weights)
    if config.routed is None or not config.is_mixture(layer):
        return kept + (0 if but_mlp else 2 * size * config.intermediate_size)
    inner, slots = config.routed.intermediate_size, config.routed.per_token
    kept += 0 if adapter is not None else size * hidden  # what router and experts take
    kept += 4 * config.routed.count + 8 * slots  # its probabilities and choices
    kept += slots * (4 + 8 + 8)  # gates, rows, places
    if but_mlp:
        return kept + (0 if adapter is None else size * hidden)
    return kept + slots * (2 * size * inner + size * hidden)


def adding_bytes(
    config: ModelConfig, precision: Precision, adapter: AdapterConfig, matrices: tuple[str, ...] = LINEAR_LAYERS
) -> float:
    """What adding adapters to a matrix's result takes of a token: the sum and one part in float32, and the inputs
    dequantized; of the widest of the `matrices`."""
    flow = precision.learner
    projections = [one for one in targeted(config, adapter.targets) if one.weight.rpartition(".")[2] in matrices]
    found = 0.0
    for one in projections:
        outputs = max(other.hi for other in projections if other.weight == one.weight)
        quantized = precision.linear_flow(flow, one.weight.rpartition(".")[2]).activation is not None
        found = max(found, 4.0 * outputs + 4 * (one.hi - one.lo) + (6 * one.inputs if quantized else 0))
    return found
