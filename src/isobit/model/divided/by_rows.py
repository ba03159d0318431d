"""A model for rollouts that several ranks hold together: each multiplies by its rows of the working
weights (`RowOps`), and attends with its heads.

Engine, scheduler and sampler do not know of it: every rank schedules the same requests and draws the
same tokens. The rows are copied of a model that is whole on each rank. Left out: a learner by rows,
and what is made by rows from the start.
"""

from copy import copy
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from isobit.distributed import Ranks
from isobit.distributed.layout import Layout
from isobit.distributed.shards import Rows
from isobit.errors import IsobitError
from isobit.kernels import Divided, Operand, Ops, Packed, Stacked, tensors_of
from isobit.kernels.backends.rows import RowOps
from isobit.model.divided.adapters import JoinedRows, own_rows_of
from isobit.model.divided.experts import ExpertsOfRanks
from isobit.model.divided.heads import heads_by_layer, local_config
from isobit.model.hub.config import ModelConfig
from isobit.model.hub.shapes import parameter_shapes
from isobit.model.model import Model
from isobit.model.transformer import USES, Transformer
from isobit.model.weights.checksums import Checksums
from isobit.model.weights.layout import Mixture, Mlp, map_parts, rows_of
from isobit.model.weights.masters import Masters
from isobit.model.weights.stored import FROZEN, LowRank, Vector, Weight
from isobit.precision import QTensor


def model_by_rows(model: Model, ranks: Ranks) -> Model:
    """Return a model for rollouts whose weights and heads `ranks` divide among them, of one that is
    whole on each, with its bits. Raises IsobitError, one line, for what cannot be divided."""
    by_rows = Model(_by_rows(model.transformer, ranks), model.tokenizer)
    by_rows.generation, by_rows.directory = model.generation, model.directory
    return by_rows


def layout_of(config: ModelConfig, size: int) -> Layout:
    """Return the layout of a model on `size` ranks. Raises IsobitError for an architecture whose
    attention is not divided."""
    experts = 0 if config.routed is None else config.routed.count
    return Layout(parameter_shapes(config), heads_by_layer(config), size, experts)


def _by_rows(base: Transformer, ranks: Ranks) -> Transformer:
    config, inner = base.config, base.ops["rollout"]
    layout = layout_of(config, ranks.size)
    layout.check(base.precision)
    if base.served is not None:
        raise IsobitError("ranks do not hold a model together that serves several adapters")
    working = base._working["rollout"]
    table = working.outside.embed
    own = _OwnRows(layout, ranks.rank, inner)
    own.change(table)  # before a head that shares it
    layers = [replace(layer, mlp=None) for layer in working.layers]
    changed = map_parts(replace(working, layers=tuple(layers)), own.change)
    mlps = [own.mlp(layer.mlp) for layer in working.layers]
    layers = [replace(layer, mlp=mlp) for layer, mlp in zip(changed.layers, mlps)]
    clone = copy(base)
    clone.config = local_config(config, layout, ranks.rank)
    clone.group = ranks
    ops = cast(Ops, RowOps(inner, ranks, layout.result(table.name) or ()))
    clone.ops = dict.fromkeys(USES, ops)
    clone._working = dict.fromkeys(USES, replace(changed, layers=tuple(layers)))
    clone._watches, clone._receiver, clone.adapter = {}, None, None
    clone.masters = Masters({}, {}, inner.device, base.masters.shards.ranks)
    clone.checksums = Checksums(clone._written_by_sync)
    return clone


@dataclass(frozen=True, eq=False)
class _OwnRows:
    """The rows that a rank computes with, of weights and vectors that are whole. `_tables` are those
    that several weights may share."""

    layout: Layout
    rank: int
    ops: Ops
    _tables: dict[str, Tensor] = field(default_factory=dict)

    def change(self, piece: Weight | Vector) -> Weight | Vector:
        name, shapes = piece.name, self.layout.shapes
        if name not in shapes:  # an adapter's, which what it is added to takes its rows of
            return piece
        rows = self.layout.used(name, self.rank)
        if rows == ((0, shapes[name][0]),) and not self.layout.divided(name):
            return piece
        if isinstance(piece, Vector):
            if name not in self._tables:
                self._tables[name] = cast(Tensor, _kept(piece.working, rows))
            return replace(piece, master=FROZEN, working=self._tables[name])
        kept: Operand | None = self._tables.get(name)
        if kept is None:
            kept = _kept(cast(Operand, piece.working), rows)
        result = self.layout.result(name)
        prepared = self.prepared(kept, shapes[name][0], self.layout.columns(name), result)
        bias = None if piece.bias is None else cast(Tensor, _kept(piece.bias, rows))
        factors = tuple(
            replace(low, a=low.a, b=self.factor(low.b, own), lo=lo, hi=hi)
            for low in piece.adapters
            for own, lo, hi in own_rows_of(low, rows)
        )
        weight = replace(
            piece, master=FROZEN, prepared=prepared, bias_master=None, bias=bias, adapters=factors
        )
        return JoinedRows.of(weight, prepared) if factors and result is not None else weight

    def mlp(self, whole: Mlp | Mixture | None) -> Mlp | Mixture | None:
        """Return an MLP, or a mixture with the rank's experts, or its rows of all."""
        if not isinstance(whole, Mixture):
            return cast(Mlp | None, map_parts(whole, self.change))
        around = cast(Mixture, map_parts(replace(whole, experts=()), self.change))
        (gate_up, ups), (down, downs) = (
            self.stacked(getattr(whole, role), [getattr(expert, role) for expert in whole.experts])
            for role in ("gate_up", "down")
        )
        activation, ranks = whole.experts[0].activation, range(self.layout.size)
        experts = tuple(Mlp(first, second, activation) for first, second in zip(ups, downs))
        counts = tuple(len(self.layout.local_experts(rank)) for rank in ranks)
        together = ExpertsOfRanks(counts, self.layout.result(whole.experts[0].down.name))
        return replace(around, experts=experts, gate_up=gate_up, down=down, divided=together)

    def stacked(self, stack: Stacked, weights: list[Weight]) -> tuple[Stacked, list[Weight]]:
        """Return the rank's rows of a matrix of its experts, in one storage, and each expert's."""
        local, name = self.layout.local_experts(self.rank), weights[0].name
        weights = weights[local.start : local.stop]
        rows = self.layout.used(weights[0].name, self.rank)
        operand, count = self.layout.columns(name), self.layout.shapes[name][0]
        kept = _kept_stack(stack, local, rows)
        prepared = tuple(self.prepared(cast(Operand, m), count, operand) for m in kept.experts)
        factors: list[tuple[LowRank, ...]] = [()] * len(weights)
        for index, low in enumerate(weights[0].adapters):
            assert low.together is not None
            a, b = low.together
            own_a = _kept_stack(a, local, ((0, a.shape[1]),))
            for own, lo, hi in own_rows_of(low, rows):
                own_b = _kept_stack(b, local, (own,))
                for place, weight in enumerate(weights):
                    pair, together = weight.adapters[index], (own_a, own_b)
                    of_a = replace(
                        pair.a, master=FROZEN,
                        prepared=self.prepared(own_a.data[place], a.shape[1], operand),
                    )  # fmt: skip
                    of_b = replace(
                        pair.b, master=FROZEN,
                        prepared=self.prepared(own_b.data[place], b.shape[1]),
                    )  # fmt: skip
                    low_ = replace(pair, a=of_a, b=of_b, lo=lo, hi=hi, together=together)
                    factors[place] += (low_,)
        biases = [None] * len(weights) if kept.bias is None else kept.bias.unbind(0)
        return replace(kept, prepared=prepared), [
            replace(weight, master=FROZEN, prepared=p, bias_master=None, bias=bias, adapters=own)
            for weight, p, bias, own in zip(weights, prepared, biases, factors)
        ]

    def factor(self, whole: Weight, rows: Rows) -> Weight:
        """Return the rows of a factor B."""
        kept = _kept(cast(Operand, whole.working), (rows,))
        return replace(whole, master=FROZEN, prepared=self.prepared(kept, whole.working.shape[0]))

    def prepared(
        self,
        kept: Operand,
        whole_rows: int,
        operand: tuple[int, ...] | None = None,
        result: tuple[int, ...] | None = None,
    ) -> Divided:
        """Return rows of a weight of `whole_rows`, prepared for products."""
        prepared = self.ops.prepare(kept)
        panels, values = (
            (prepared.panels, prepared.values) if isinstance(prepared, Packed) else (None, None)
        )
        return Divided(kept, panels, values, whole_rows=whole_rows, operand=operand, result=result)


def _kept_stack(stack: Stacked, experts: range, ranges: tuple[Rows, ...]) -> Stacked:
    """Return a copy of some ranges of rows of some experts."""
    matrices = (cast(Operand, stack.experts[number]) for number in experts)
    kept = Stacked.of((_kept(matrix, ranges) for matrix in matrices), len(experts))
    if stack.bias is None:
        return kept
    biases = [cast(Tensor, _kept(stack.bias[number], ranges)) for number in experts]
    return replace(kept, bias=torch.stack(biases))


def _kept(operand: Operand, ranges: tuple[Rows, ...]) -> Operand:
    """Return a copy of some ranges of rows."""
    pieces = zip(*(tensors_of(rows_of(operand, rows)) for rows in ranges))
    data, *scale = (_below_each_other(piece) for piece in pieces)
    return QTensor(data, scale[0], operand.spec) if isinstance(operand, QTensor) else data


def _below_each_other(tensors: tuple[Tensor, ...]) -> Tensor:
    kind = tensors[0].dtype
    as_copied = torch.uint8 if kind.itemsize == 1 else kind
    return torch.cat([tensor.view(as_copied) for tensor in tensors]).view(kind)
