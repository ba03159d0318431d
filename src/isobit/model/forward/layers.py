"""One forward of the model over rows: its layers, and `Pass`, which is all that they share.

Left out: the operators with their gradients (`autograd.py`), experts (`moe.py`), and state that
outlives a forward (`transformer.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit.kernels import Heads, KVStore, Layout, Ops, StateStore, Store, unwatched
from isobit.model.families.family import RELU2
from isobit.model.families.rope import Table, Tables
from isobit.model.forward import autograd
from isobit.model.forward.attend import Attended, attend, attend_linear
from isobit.model.forward.delta import Recurrent, linear_attention
from isobit.model.forward.kv_scales import KVScales, scales_of
from isobit.model.forward.latent import expanded_heads
from isobit.model.forward.layer_inputs import Keys, layer_embeddings, with_embedding
from isobit.model.forward.linear_backward import GradientCodes
from isobit.model.forward.mamba import mamba
from isobit.model.forward.moe import RouteTape, mixture
from isobit.model.forward.recompute import Recompute, recomputed
from isobit.model.forward.storage import new_store
from isobit.model.hub.config import ModelConfig
from isobit.model.hub.layer_heads import LayerHeads
from isobit.model.hub.mamba import Mamba
from isobit.model.images.bank import Bank
from isobit.model.images.given_rows import with_added, with_embeddings
from isobit.model.weights.divided import DividedWeights, opened, reopened
from isobit.model.weights.layout import (
    Attention,
    Delta,
    LatentAttention,
    Layer,
    Mixture,
    Mlp,
    Working,
)
from isobit.model.weights.permute_heads import arranged, arranged_norm
from isobit.model.weights.stored import Vector, Weight
from isobit.precision import QuantSpec

Watch = Callable[[Ops, int | None], Any]
"""Called with the operators and the index of the layer that uses them (None outside the layers);
returns the operators to use instead. These return the same results, and may look at them
(`isobit.kernels.Watching`)."""


@dataclass(frozen=True, eq=False)
class Pass:
    """The state that the layers of one forward share.

    `masters` receive gradients. `stores` hold keys and values or states, one per layer; without
    them each layer has a temporary one, and states are not kept. `scales` are those of a calibrated
    cache. `embedded` are the layers' own embeddings of the tokens, `keys` the keys and values that
    other layers read; both come up in the forward. `tape` follows the routers of a mixture of
    experts, `watch` the operators. With `recompute` the backward computes each layer's activations
    again, or those of its MLP, and the forward keeps none (`recompute.py`). `images`: those that
    tokens may name. While `calibrating`,
    queries with calibrated scales stay in the compute format. Weights that ranks keep `divided` are
    opened before they are used.
    """

    config: ModelConfig
    ops: Ops
    layout: Layout
    tables: Tables
    masters: Mapping[str, Tensor]
    stores: Sequence[Store] | None = None
    scales: KVScales | None = None
    tape: RouteTape | None = None
    watch: Watch | None = None
    recompute: Recompute = False
    calibrating: bool = False
    divided: DividedWeights | None = None
    embedded: Mapping[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Keys] = field(default_factory=dict)
    images: Bank | None = None

    def ops_of(self, layer: int | None) -> Ops:
        """Return the operators of a layer, or outside the layers."""
        return self.ops if self.watch is None else self.watch(self.ops, layer)

    def table_of(self, index: int) -> Table:
        """Return the rotary table of a layer."""
        return self.tables[self.config.rope_of(index), self.config.heads_of(index).dim]

    def store_of(self, index: int, layer: Layer) -> KVStore:
        """Return the store of a layer's keys and values."""
        if self.stores is None:
            return self.temporary_store(index, layer)
        store = self.stores[index]
        assert isinstance(store, KVStore)
        return store

    def states_of(self, index: int) -> StateStore | None:
        """Return the store of a layer's states, if it has one."""
        store = None if self.stores is None else self.stores[index]
        assert store is None or isinstance(store, StateStore)
        return store

    def temporary_store(self, index: int, layer: Layer) -> KVStore:
        """Return an empty one for a layer's keys and values of this forward alone."""
        flow, layout = layer.flow, self.layout
        scales = scales_of(self.scales)[index, :2] if flow.calibrated else None
        pages, device = layout.num_slots // layout.page_size, layout.positions.device
        store = new_store(
            self.config, index, flow, pages, layout.page_size, device, flow.kv, scales
        )
        assert isinstance(store, KVStore)
        return store


def forward(tokens: Tensor, working: Working, ctx: Pass) -> Tensor:
    """Hidden states [T, hidden] after the final norm, for tokens [T] int64 on the operators'
    device."""
    ops, outside, divided = ctx.ops_of(None), working.outside, ctx.divided
    opened(divided, outside.embed.name)
    given = None
    if ctx.images is not None:
        given, tokens = ctx.images.given(tokens), ctx.images.text(tokens)
        tables, layout = ctx.images.turned(ctx.tables, ctx.layout)
        ctx = replace(ctx, tables=tables, layout=layout)
    x, residual = autograd.embedding(tokens, outside.embed, ctx.config.embedding_scale, ops), None
    x = with_embeddings(x, given)
    if outside.layers is not None:
        ctx = replace(ctx, embedded=layer_embeddings(tokens, x, outside.layers, ctx.config, ops))
    compute = _recomputed_layer if ctx.recompute is True else _layer
    for index, layer in enumerate(working.layers):
        opened(divided, part := f"layers.{index}")
        x, residual = reopened(divided, part, *compute(x, residual, index, layer, ctx))
        x = with_added(x, given, index)
    normed = autograd.rms_norm(x, residual, outside.final_norm, ctx.config.rms_eps, ops)[0]
    multipliers = ctx.config.multipliers
    return normed if multipliers is None else normed * (1 / multipliers.logits)


def _layer(
    x: Tensor, residual: Tensor | None, index: int, layer: Layer, ctx: Pass
) -> tuple[Tensor, Tensor | None]:
    """Return (what the layer adds, the residual stream that it is added to), both [T, hidden]; or
    their sum times the layer's number, and None."""
    ops = ctx.ops_of(index)
    if layer.attention is not None:
        x, residual = _attention(x, residual, index, layer, layer.attention, ctx, ops)
        x = _added(x, layer.attention_out_norm, ctx, ops)
    if layer.mlp is not None:
        x, residual = _mlp(x, residual, layer, layer.mlp, ctx, ops)
        x = _added(x, layer.mlp_out_norm, ctx, ops)
    if layer.embedded is not None:
        assert residual is not None
        embeddings = ctx.embedded[index], layer.embedded, ctx.config, ops
        x, residual = with_embedding(x, residual, *embeddings)
    if layer.scalar is None:
        return x, residual
    assert residual is not None
    return (x + residual) * layer.scalar.working, None


def _attention(
    x: Tensor,
    residual: Tensor | None,
    index: int,
    layer: Layer,
    own: Attention | Delta | LatentAttention,
    ctx: Pass,
    ops: Ops,
) -> tuple[Tensor, Tensor]:
    """Return (what a layer's attention gives, the sum x + residual), both [T, hidden]."""
    if isinstance(own, Delta):
        return _linear_attention(x, residual, index, layer, own, ctx, ops)
    first = own.qkv_a if isinstance(own, LatentAttention) else own.qkv
    rows, residual = _norm_then_project(
        x, residual, layer.input_norm, first, ctx.config.rms_eps, ops
    )
    if isinstance(own, LatentAttention):
        return _attend_latent(rows, index, layer, own, ctx, ops), residual
    return _attend(rows, index, layer, own, ctx, ops), residual


def _mlp(
    x: Tensor, residual: Tensor | None, layer: Layer, own: Mlp | Mixture, ctx: Pass, ops: Ops
) -> tuple[Tensor, Tensor]:
    """Return (what a layer's MLP or experts give, the sum x + residual), both [T, hidden]."""
    norm, eps, again = layer.post_norm, ctx.config.rms_eps, ctx.recompute == "mlp"
    if isinstance(own, Mixture):
        assert norm is not None
        normed, residual = autograd.rms_norm(x, residual, norm, eps, ops)
        return mixture(normed, residual, own, eps, ops, ctx.tape, again), residual
    weight, codes = own.gate_up, GradientCodes() if own.activation != RELU2 else None
    gate_up, residual = _norm_then_project(x, residual, norm, weight, eps, ops, codes)
    arguments = residual.detach(), None, norm, weight, eps, unwatched(ops)
    run = partial(_norm_then_project, *arguments) if again else None
    return autograd.gated_linear(gate_up, own.activation, own.down, ops, run, codes), residual


def _norm_then_project(
    x: Tensor,
    residual: Tensor | None,
    norm: Vector | None,
    weight: Weight,
    eps: float,
    ops: Ops,
    codes: GradientCodes | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (the sum x + residual, normed if there is a norm, times the weight [T, N]; the sum
    itself [T, hidden]). `codes` as of `norm_linear`."""
    if norm is not None:
        return autograd.norm_linear(x, residual, norm, eps, weight, ops, codes)
    summed = x if residual is None else x + residual
    return autograd.linear(summed, weight, ops), summed


def _added(x: Tensor, norm: Vector | None, ctx: Pass, ops: Ops) -> Tensor:
    """Return what attention or MLP adds, normed if it is, times the architecture's number."""
    x = x if norm is None else autograd.rms_norm(x, None, norm, ctx.config.rms_eps, ops)[0]
    multipliers = ctx.config.multipliers
    return x if multipliers is None else x * multipliers.residual


def _linear_attention(
    x: Tensor, residual: Tensor | None, index: int, layer: Layer, own: Delta, ctx: Pass, ops: Ops
) -> tuple[Tensor, Tensor]:
    """Return (linear attention, projected, the sum x + residual), both [T, hidden]."""
    assert layer.input_norm is not None
    assert ctx.config.linear is not None
    sizes, eps = ctx.config.linear, ctx.config.rms_eps
    recurrent = Recurrent(sizes, eps, ctx.layout, ctx.states_of(index))
    if own.gates is None:
        assert isinstance(sizes, Mamba)
        rows, residual = _norm_then_project(x, residual, layer.input_norm, own.qkv, eps, ops)
        return mamba(rows, own, sizes, recurrent, ops), residual
    normed, residual = autograd.rms_norm(x, residual, layer.input_norm, eps, ops)
    qkvz = autograd.linear(normed, own.qkv, ops, kept=True)
    gates = autograd.linear(normed, own.gates, ops, kept=True, dtype=torch.float32)
    return linear_attention(qkvz, gates, own, recurrent, ops), residual


def _attend(qkv: Tensor, index: int, layer: Layer, own: Attention, ctx: Pass, ops: Ops) -> Tensor:
    """Attention and its output projection: qkv [T, (H + 2 KV) · D], with gates [T, (2 H + 2 KV) ·
    D], or [T, (H + KV) · D] where keys are values, or [T, H · D] where keys are another layer's, to
    [T, hidden]."""
    config, sizes = ctx.config, ctx.config.heads_of(index)
    rope, dim = config.rope_of(index), sizes.dim
    qkv, norms = _with_keys(qkv, index, layer, own, ctx, ops)
    if norms is not None and config.norms_all_heads:
        qkv, norms = _normed_heads(qkv, norms, config.rms_eps, ops), None
    rotated = dim if rope is None else rope.rotated(dim)
    qkv, gate = arranged(qkv, config, sizes, rotated)
    if norms is not None:
        norms = arranged_norm(norms[0], config, rotated), arranged_norm(norms[1], config, rotated)
    heads = qkv.view(len(qkv), qkv.shape[1] // dim, dim)
    masters = None if norms is None else (norms[0].master, norms[1].master)
    attended = _attended(norms, own.sinks, index, layer, ctx)
    heads = _grown(heads, config.num_heads, index, ctx)
    if gate is None:
        return attend_linear(heads, masters, attended, own.o, ops)
    out = attend(heads, masters, attended, ops)
    return autograd.gated_linear(torch.cat((gate, out.flatten(1)), 1), "sigmoid", own.o, ops)


def _with_keys(
    qkv: Tensor, index: int, layer: Layer, own: Attention, ctx: Pass, ops: Ops
) -> tuple[Tensor, tuple[Vector, Vector] | None]:
    """Return (queries, keys and values [T, (H + 2 KV) · D] of the projection's result, values
    normed where the architecture does that; the norms of queries and keys, if there are any). Keys
    and values may be another layer's, or for others to read."""
    config, sizes = ctx.config, ctx.config.heads_of(index)
    k_norm = None if own.head_norms is None else own.head_norms[1]
    if (source := config.keys_of(index)) != index:
        shared_keys = ctx.keys[source]
        qkv, k_norm = torch.cat((qkv, shared_keys.rows), dim=1), shared_keys.norm
    elif config.norms_values:
        qkv = _with_normed_values(qkv, sizes, config.rms_eps, ops)
    if config.is_read(index):
        ctx.keys[index] = Keys(qkv[:, -2 * sizes.width :], k_norm, layer)
    if own.head_norms is None or k_norm is None:
        return qkv, None
    return qkv, (own.head_norms[0], k_norm)


def _attend_latent(
    rows: Tensor, index: int, layer: Layer, own: LatentAttention, ctx: Pass, ops: Ops
) -> Tensor:
    """Latent attention and its output projection: rows of `qkv_a` [T, first + kv_rank + rotated] to
    [T, hidden]."""
    sizes = ctx.config.latent
    assert sizes is not None
    heads = expanded_heads(rows, own, sizes, ctx.config.num_heads, ops)
    heads = _grown(heads, ctx.config.num_heads, index, ctx)
    out = attend(heads, None, _attended(None, None, index, layer, ctx), ops)
    whole = sizes.value == sizes.head_dim
    return autograd.linear(out[..., : sizes.value].flatten(1), own.o, ops, kept=whole)


def _attended(
    norms: tuple[Vector, Vector] | None,
    sinks: Vector | None,
    index: int,
    layer: Layer,
    ctx: Pass,
) -> Attended:
    """Return what a layer's attention takes besides its rows."""
    config, table = ctx.config, ctx.table_of(index)
    working = None if norms is None else (norms[0].working, norms[1].working)
    source = config.keys_of(index)
    stored = source, layer if source == index else ctx.keys[source].layer
    query, query_scale = _rounding_of_queries(index, layer, ctx)
    return Attended(
        heads=Heads(working, config.rms_eps, (table.cos, table.sin)),
        store=partial(ctx.store_of, *stored),
        temporary=partial(ctx.temporary_store, *stored),
        layout=ctx.layout,
        scale=config.attention_scale,
        window=config.window(index),
        query=query,
        query_scale=query_scale,
        sinks=sinks,
        probabilities=layer.flow.probabilities,
    )


def _grown(heads: Tensor, count: int, index: int, ctx: Pass) -> Tensor:
    """Heads [T, H + 2 KV, D], whose first `count`, the queries, are multiplied by a float32 number
    for each position where the layer's rotation has one, each product rounded once. Rotation is
    linear, so this is a multiplication of rotated queries, as long as they are not normed."""
    growth = ctx.table_of(index).growth
    if growth is None:
        return heads
    queries, keys_and_values = heads.tensor_split((count,), dim=1)
    factors = growth[ctx.layout.positions]
    return torch.cat(((queries.float() * factors).to(heads.dtype), keys_and_values), dim=1)


def _rounding_of_queries(
    index: int, layer: Layer, ctx: Pass
) -> tuple[QuantSpec | None, Tensor | None]:
    """Return (how queries are rounded, if they are; their scale [1] where it is calibrated)."""
    if not layer.flow.calibrated_queries:
        return layer.flow.query, None
    if ctx.calibrating:
        return None, None
    return layer.flow.query, scales_of(ctx.scales)[index, 2:]


def _normed_heads(qkv: Tensor, norms: tuple[Vector, Vector], eps: float, ops: Ops) -> Tensor:
    """Return qkv [T, (H + 2 KV) · D], its queries normed as one row, its keys as one."""
    width, kv_width = (norm.working.shape[0] for norm in norms)
    q, k, v = qkv.split((width, kv_width, kv_width), dim=1)
    q, k = (
        autograd.rms_norm(x.contiguous(), None, norm, eps, ops)[0] for x, norm in zip((q, k), norms)
    )
    return torch.cat((q, k, v), dim=1)


def _with_normed_values(qkv: Tensor, sizes: LayerHeads, eps: float, ops: Ops) -> Tensor:
    """Return qkv [T, (H + 2 KV) · D] with its values normed, each head by itself and without a
    weight; where keys are values [T, (H + KV) · D] with values behind them."""
    queries_and_keys, values = qkv.split((qkv.shape[1] - sizes.width, sizes.width), dim=1)
    normed = autograd.unweighted_norm(values, sizes.dim, eps, ops)
    return torch.cat((qkv if sizes.joint else queries_and_keys, normed), dim=1)


def _recomputed_layer(
    x: Tensor, residual: Tensor | None, index: int, layer: Layer, ctx: Pass
) -> tuple[Tensor, Tensor | None]:
    """Return `_layer`, computed again in the backward. The tape records the first forward only; a
    router's probabilities have a gradient, so they are among the results, as keys are that others
    read."""
    tape = ctx.tape if isinstance(layer.mlp, Mixture) else None
    routes = (
        tape.given[:, len(tape.chosen)] if tape is not None and tape.given is not None else None
    )
    chosen: list[Tensor] = []
    source = ctx.config.keys_of(index)
    read = None if source == index else ctx.keys[source]

    def run(
        x: Tensor, residual: Tensor | None, embedded: Tensor | None, rows: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        layer_tape = (
            None if tape is None else RouteTape(None if routes is None else routes.unsqueeze(1))
        )
        keys = {} if read is None or rows is None else {source: read._replace(rows=rows)}
        inside = {} if embedded is None else {index: embedded}
        again = replace(ctx, tape=layer_tape, embedded=inside, keys=keys)
        x, residual = _layer(x, residual, index, layer, again)
        handed = again.keys[index].rows if index in again.keys else None
        if layer_tape is None:
            return x, residual, None, handed
        chosen[:] = layer_tape.chosen
        return x, residual, layer_tape.probabilities[0], handed

    prefixes = f"layers.{index}.", f"layers.{source}.k_norm"
    masters = [master for name, master in ctx.masters.items() if name.startswith(prefixes)]
    inputs = x, residual, ctx.embedded.get(index), None if read is None else read.rows
    x, residual, probabilities, handed = recomputed(run, inputs, masters)
    if handed is not None:
        assert isinstance(layer.attention, Attention)
        norms = layer.attention.head_norms
        ctx.keys[index] = Keys(handed, None if norms is None else norms[1], layer)
    if tape is not None:
        tape.chosen += chosen
        tape.probabilities.append(probabilities)
    return x, residual
