"""A model for rollouts that several ranks hold together: each multiplies by its rows of the working
weights (`RowOps`), and attends with its heads.

Engine, scheduler and sampler do not know of it: every rank schedules the same requests and draws the
same tokens. The rows are those that a rank keeps (`weights/divided.py`), or are copied of a model
that is whole on each.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

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
from isobit.model.weights.checksums import Checksums
from isobit.model.weights.divided import DividedWeights
from isobit.model.weights.layout import Mixture, Mlp, map_parts, rows_of, write
from isobit.model.weights.masters import Masters
from isobit.model.weights.stored import FROZEN, LowRank, Vector, Weight
from isobit.precision import Precision, QTensor

if TYPE_CHECKING:
    from isobit.model.model import Model
    from isobit.model.transformer import Transformer

Kept = Callable[[Operand, tuple[Rows, ...]], Operand]
"""Returns some ranges of a weight's rows."""
KeptStack = Callable[[Stacked, range, tuple[Rows, ...]], Stacked]
"""Returns some ranges of rows of some experts, in one storage."""


def model_by_rows(model: "Model", ranks: Ranks) -> "Model":
    """Return a model for rollouts whose weights and heads `ranks` divide among them, of one that is
    whole on each, with its bits. Raises IsobitError, one line, for what cannot be divided."""
    return _with(model, _by_rows(model.transformer, ranks, _kept, _kept_stack))


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
    """Return the layout of a model on `size` ranks. Raises IsobitError for an architecture whose
    attention is not divided."""
    experts = 0 if config.routed is None else config.routed.count
    return Layout(parameter_shapes(config), heads_by_layer(config), size, experts)


def divided_weights(
    config: ModelConfig, precision: Precision, group: Ranks
) -> DividedWeights | None:
    """Return the working weights that a group is to hold together, still none; None for one rank.
    Raises IsobitError for what cannot be divided."""
    if group.size == 1:
        return None
    layout = layout_of(config, group.size)
    layout.check(precision)
    return DividedWeights(layout, group)


def kept_by_rows(base: "Transformer") -> "Transformer | None":
    """Return a transformer for rollouts over the rows that a rank keeps, if the base is divided."""
    if (divided := base.divided) is None:
        return None
    rows, stack = divided.own, divided.own_stack
    return _by_rows(
        base, base.group, lambda weight, _: rows(weight), lambda whole, *_: stack(whole)
    )


def _by_rows(base: "Transformer", ranks: Ranks, kept: Kept, kept_stack: KeptStack) -> "Transformer":
    """Return a transformer for rollouts of the rows that are `kept` of each weight."""
    config, inner = base.config, base.ops["rollout"]
    layout = layout_of(config, ranks.size)
    layout.check(base.precision)
    if base.served is not None:
        raise IsobitError("ranks that hold a model together do not serve several adapters")
    working = base._working["rollout"]
    table = working.outside.embed
    rows = _OwnRows(layout, ranks.rank, inner, kept, kept_stack)
    rows.change(table)  # before a head that shares it
    layers = [replace(layer, mlp=None) for layer in working.layers]
    changed = map_parts(replace(working, layers=tuple(layers)), rows.change)
    mlps = [rows.mlp(layer.mlp) for layer in working.layers]
    layers = [replace(layer, mlp=mlp) for layer, mlp in zip(changed.layers, mlps)]
    clone = copy(base)
    clone.config = local_config(config, layout, ranks.rank)
    clone.group, clone.divided, clone.by_rows = ranks, None, None
    clone.shares = tuple(rows.shares)
    ops = cast(Ops, RowOps(inner, ranks, layout.result(table.name) or ()))
    clone.ops = dict.fromkeys(base.ops, ops)
    clone._working = dict.fromkeys(base.ops, replace(changed, layers=tuple(layers)))
    clone._watches, clone._receiver, clone.adapter = {}, None, None
    clone.masters = Masters({}, {}, inner.device, base.masters.shards.ranks)
    clone.checksums = Checksums(clone._written_by_sync)
    return clone


@dataclass(frozen=True, eq=False)
class _OwnRows:
    """The rows that a rank computes with, of weights and vectors that are whole. `shares` are copies
    of what each rank has whole, to be made again when that was written; `_tables` what several
    weights may share."""

    layout: Layout
    rank: int
    ops: Ops
    rows_of: Kept
    stack_of: KeptStack
    shares: list[Callable[[], None]] = field(default_factory=list)
    _tables: dict[str, Tensor] = field(default_factory=dict)

    def change(self, piece: Weight | Vector) -> Weight | Vector:
        name, shapes = piece.name, self.layout.shapes
        if name not in shapes:  # an adapter's, which what it is added to takes its rows of
            return piece
        rows, divided = self.layout.used(name, self.rank), self.layout.divided(name)
        if rows == ((0, shapes[name][0]),) and not divided:
            return piece
        take = self.rows_of if divided else self.copied
        if isinstance(piece, Vector):
            if name not in self._tables:
                self._tables[name] = cast(Tensor, take(piece.working, rows))
            return replace(piece, master=FROZEN, working=self._tables[name])
        working: Operand | None = self._tables.get(name)
        if working is None:
            working = take(cast(Operand, piece.working), rows)
        result = self.layout.result(name)
        prepared = self.prepared(working, shapes[name][0], self.layout.columns(name), result)
        bias = None if piece.bias is None else cast(Tensor, take(piece.bias, rows))
        factors = tuple(
            replace(low, b=self.factor(low.b, rows_of_b), lo=lo, hi=hi)
            for low in piece.adapters
            for rows_of_b, lo, hi in own_rows_of(low, rows)
        )
        weight = replace(self.frozen(piece, prepared, bias), adapters=factors)
        return JoinedRows.of(weight, prepared) if factors and result is not None else weight

    @staticmethod
    def frozen(weight: Weight, prepared: Divided, bias: Tensor | None) -> Weight:
        """Return a weight of these rows, which is not trained."""
        master = None if bias is None else FROZEN
        return replace(weight, master=FROZEN, prepared=prepared, bias_master=master, bias=bias)

    def copied(self, whole: Operand, rows: tuple[Rows, ...]) -> Operand:
        """Return a copy of some ranges of rows, which is a share."""
        share = _kept(whole, rows)
        self.shares.append(lambda: write(share, _kept(whole, rows)))
        return share

    def copied_stack(self, whole: Stacked, experts: range, rows: tuple[Rows, ...]) -> Stacked:
        """Return a copy of some rows of some experts' factors, which is a share."""
        share = _kept_stack(whole, experts, rows)
        self.shares.append(lambda: write(share.data, _kept_stack(whole, experts, rows).data))
        return share

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
        matrices = self.stack_of(stack, local, rows)
        prepared = tuple(self.prepared(cast(Operand, m), count, operand) for m in matrices.experts)
        factors = self.factors(weights, rows, operand)
        biases = [None] * len(weights) if matrices.bias is None else matrices.bias.unbind(0)
        return replace(matrices, prepared=prepared), [
            replace(self.frozen(weight, matrix, bias), adapters=adapters)
            for weight, matrix, bias, adapters in zip(weights, prepared, biases, factors)
        ]

    def factors(
        self, weights: list[Weight], rows: tuple[Rows, ...], operand: tuple[int, ...] | None
    ) -> list[tuple[LowRank, ...]]:
        """Return the adapters of each of the rank's experts, whose A multiplies an `operand` that is
        divided as the weight's."""
        local = self.layout.local_experts(self.rank)
        factors: list[tuple[LowRank, ...]] = [()] * len(weights)
        for index, low in enumerate(weights[0].adapters):
            assert low.together is not None
            a, b = low.together
            own_a = self.copied_stack(a, local, ((0, a.shape[1]),))
            for rows_of_b, lo, hi in own_rows_of(low, rows):
                own_b = self.copied_stack(b, local, (rows_of_b,))
                for number, weight in enumerate(weights):
                    pair = weight.adapters[index]
                    of_a = self.prepared(own_a.data[number], a.shape[1], operand)
                    of_b = self.prepared(own_b.data[number], b.shape[1])
                    pair = replace(
                        pair, lo=lo, hi=hi, together=(own_a, own_b),
                        a=replace(pair.a, master=FROZEN, prepared=of_a),
                        b=replace(pair.b, master=FROZEN, prepared=of_b),
                    )  # fmt: skip
                    factors[number] += (pair,)
        return factors

    def factor(self, whole: Weight, rows: Rows) -> Weight:
        """Return the rows of a factor B."""
        share = self.copied(cast(Operand, whole.working), (rows,))
        return replace(whole, master=FROZEN, prepared=self.prepared(share, whole.working.shape[0]))

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
    rows = Stacked.of((_kept(matrix, ranges) for matrix in matrices), len(experts))
    if stack.bias is None:
        return rows
    biases = [cast(Tensor, _kept(stack.bias[number], ranges)) for number in experts]
    return replace(rows, bias=torch.stack(biases))


def _kept(operand: Operand, ranges: tuple[Rows, ...]) -> Operand:
    """Return a copy of some ranges of rows."""
    pieces = zip(*(tensors_of(rows_of(operand, rows)) for rows in ranges))
    data, *scale = (_below_each_other(piece) for piece in pieces)
    return QTensor(data, scale[0], operand.spec) if isinstance(operand, QTensor) else data


def _below_each_other(tensors: tuple[Tensor, ...]) -> Tensor:
    kind = tensors[0].dtype
    as_copied = torch.uint8 if kind.itemsize == 1 else kind
    return torch.cat([tensor.view(as_copied) for tensor in tensors]).view(kind)
