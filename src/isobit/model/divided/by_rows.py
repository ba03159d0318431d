"""A model for rollouts that several ranks hold together: each multiplies by its rows of the working
weights (`RowOps`), and attends with its heads.

Engine, scheduler and sampler do not know of it: every rank schedules the same requests and draws the
same tokens. The rows are those that a rank keeps (`weights/divided.py`), or are copied of a model
that is whole on each.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from isobit.distributed import Ranks
from isobit.distributed.layout import HeadRows, Layout
from isobit.distributed.shards import Rows
from isobit.errors import IsobitError
from isobit.kernels import Divided, Operand, Ops, Packed, tensors_of
from isobit.kernels.backends.rows import RowOps
from isobit.model.hub.config import ModelConfig
from isobit.model.hub.shapes import parameter_shapes
from isobit.model.weights.checksums import Checksums
from isobit.model.weights.layout import map_parts, rows_of
from isobit.model.weights.masters import Masters
from isobit.model.weights.stored import FROZEN, Vector, Weight
from isobit.precision import PackedFP4, QTensor

if TYPE_CHECKING:
    from isobit.model.model import Model
    from isobit.model.transformer import Transformer

Kept = Callable[[Operand, tuple[Rows, ...]], Operand]
"""Returns some ranges of a weight's rows."""


def model_by_rows(model: "Model", ranks: Ranks) -> "Model":
    """Return a model for rollouts whose weights and heads `ranks` divide among them, of one that is
    whole on each, with its bits. Raises IsobitError, one line, for what cannot be divided."""
    return _with(model, by_rows(model.transformer, ranks, _kept))


def rollout_model(model: "Model") -> "Model":
    """Return the model that rollouts multiply with: of one that ranks hold together, that over the
    rows which this rank keeps; any other itself."""
    rows = rollout_transformer(model.transformer)
    return model if rows is model.transformer else _with(model, rows)


def rollout_transformer(transformer: "Transformer") -> "Transformer":
    """Return that of a `rollout_model`."""
    return transformer if transformer.by_rows is None else transformer.by_rows


def _with(model: "Model", transformer: "Transformer") -> "Model":
    changed = copy(model)
    changed.transformer, changed.config = transformer, transformer.config
    changed.ops = transformer.ops["learner"]
    return changed


def layout_of(config: ModelConfig, size: int) -> Layout:
    """Return the layout of a model on so many ranks. Raises IsobitError for an architecture whose
    attention or experts are not divided yet."""
    layers = range(config.num_layers)
    rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    plain = all(
        config.has_attention(index)
        and config.has_mlp(index)
        and not config.is_linear(index)
        and not config.is_mixture(index)
        and config.qkv_rows(index) == rows
        and config.heads_of(index)[:2] == (config.num_kv_heads, config.head_dim)
        for index in layers
    )
    embedded = config.inputs.embedded
    if not plain or embedded or config.latent or config.sinks or config.norms_all_heads:
        raise IsobitError(
            f"{config.family}: ranks hold a model together whose layers have plain attention and "
            "an MLP; without mixtures, latent or linear attention, sinks, norms across heads, and "
            "embeddings of layers"
        )
    heads = HeadRows(config.num_heads, config.num_kv_heads, config.head_dim)
    return Layout(parameter_shapes(config), {f"layers.{index}": heads for index in layers}, size)


def by_rows(base: "Transformer", ranks: Ranks, kept: Kept) -> "Transformer":
    """Return a transformer for rollouts of the rows that are `kept` of each weight."""
    config, inner = base.config, base.ops["rollout"]
    layout = layout_of(config, ranks.size)
    layout.check(base.precision)

    def widths(name: str) -> tuple[int, ...]:
        return tuple(
            sum(hi - lo for lo, hi in layout.rows(name, rank)) for rank in range(ranks.size)
        )

    def change(piece: Weight | Vector) -> Weight | Vector:
        if not layout.divided(piece.name):
            return piece
        if isinstance(piece, Weight) and (piece.adapters or isinstance(piece.working, PackedFP4)):
            raise IsobitError("ranks do not hold a model with an adapter together yet")
        rows = layout.rows(piece.name, ranks.rank)
        if isinstance(piece, Vector):
            return replace(piece, master=FROZEN, working=own[piece.name])
        shared = own.get(piece.name)
        working = kept(cast(Operand, piece.working), rows) if shared is None else shared
        prepared = inner.prepare(working)
        panels, values = (
            (prepared.panels, prepared.values) if isinstance(prepared, Packed) else (None, None)
        )
        divided = Divided(
            working, panels, values, whole_rows=layout.shapes[piece.name][0],
            operand=layout.columns(piece.name),
            result=None if piece.name.endswith(("qkv", "gate_up")) else widths(piece.name),
        )  # fmt: skip
        bias = None if piece.bias is None else cast(Tensor, kept(piece.bias, rows))
        return replace(piece, master=FROZEN, prepared=divided, bias_master=None, bias=bias)

    working = base._working["rollout"]
    table = working.outside.embed
    own = {table.name: cast(Tensor, kept(table.working, layout.rows(table.name, ranks.rank)))}
    clone, heads = copy(base), layout.local_heads("layers.0", ranks.rank)
    clone.config = replace(config, num_heads=heads.queries, num_kv_heads=heads.kv)
    clone.group, clone.divided, clone.by_rows = ranks, None, None
    ops = cast(Ops, RowOps(inner, ranks, widths(table.name)))
    clone.ops = dict.fromkeys(base.ops, ops)
    clone._working = dict.fromkeys(base.ops, map_parts(working, change))
    clone._watches, clone._receiver, clone.adapter = {}, None, None
    clone.masters = Masters({}, {}, inner.device, base.masters.shards.ranks)
    clone.checksums = Checksums(clone._written_by_sync)
    return clone


def _kept(operand: Operand, ranges: tuple[Rows, ...]) -> Operand:
    """Return a copy of some ranges of rows."""
    pieces = zip(*(tensors_of(rows_of(operand, rows)) for rows in ranges))
    data, *scale = (_below_each_other(piece) for piece in pieces)
    return QTensor(data, scale[0], operand.spec) if isinstance(operand, QTensor) else data


def _below_each_other(tensors: tuple[Tensor, ...]) -> Tensor:
    kind = tensors[0].dtype
    as_copied = torch.uint8 if kind.itemsize == 1 else kind
    return torch.cat([tensor.view(as_copied) for tensor in tensors]).view(kind)
