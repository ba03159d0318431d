"""Working weights: the tensors that products multiply, made of the masters at each sync for each
distinct flow.

Uses with one flow and one engine share one storage, so neither can be stale. A sync overwrites it
and its packs in place (`remake`), because a captured CUDA graph reads from these addresses. Left
out: how they are made first (`build.py`), when (`transformer.py`), and how a second engine receives
its copy (`sync.py`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from isobit.distributed.weights import Stored, share_rows
from isobit.kernels import (
    Operand,
    Ops,
    Packed,
    Scoring,
    Stacked,
    StoredWeight,
    tensors_of,
)
from isobit.kernels.low_rank.experts import ExpertFactors
from isobit.model.families.family import MlpActivation
from isobit.model.weights.masters import Masters
from isobit.model.weights.stored import LowRank, Vector, Weight, working_vector
from isobit.precision import Flow, PackedFP4, QTensor
from isobit.precision.quantize import largest_of, quantize_part


@dataclass(frozen=True, eq=False)
class Outside:
    """The working weights outside the layers. A tied head is the embedding's storage."""

    embed: Vector
    final_norm: Vector
    head: Weight
    layers: "LayerEmbeddings | None" = None


@dataclass(frozen=True, eq=False)
class LayerEmbeddings:
    """The embeddings of all layers side by side, and a projection of the model's own to as many
    numbers, each layer's normed by itself; in the compute format."""

    table: Vector
    projection: Weight
    norm: Vector


@dataclass(frozen=True, eq=False)
class Embedded:
    """The weights by which a layer adds its embeddings: `gate` of the hidden state, `out` of gate
    times embeddings, and a norm behind it; in the compute format."""

    gate: Weight
    out: Weight
    out_norm: Vector


@dataclass(frozen=True, eq=False)
class Mlp:
    """An MLP, of a layer, or one expert; without a gate `gate_up` is its up projection."""

    gate_up: Weight
    down: Weight
    activation: MlpActivation


class OfRanks(Protocol):
    """Experts that ranks hold together (`divided/experts.py`)."""

    def through(
        self, x: Tensor, gates: Tensor, chosen: Tensor, layer: "Mixture", ops: Ops
    ) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Beside:
    """The norms of experts that run next to an MLP: behind the MLP, before and behind the experts,
    and before the router, and the gates' factors [E], in float32."""

    shared_out_norm: Vector
    experts_norm: Vector
    router_norm: Vector
    experts_out_norm: Vector
    expert_scale: Vector


@dataclass(frozen=True, eq=False)
class Mixture:
    """A router in FP32 and its experts; `per_token` of them serve a token, with gates that sum to 1
    if `normalize`. `shared` serves every token next to them, times the sigmoid of `shared_gate`, if
    there is one. With `scoring` experts are chosen by their scores and `balance`, in float32.
    `beside`: `shared` and the experts have their own norms. `latent`: what projects the experts'
    rows into a latent, and what they give out of it. `divided`: experts are what a rank has of all.

    `gate_up` and `down` store the working weights of all experts; each expert's weights are views
    of them.
    """

    router: Weight
    experts: tuple[Mlp, ...]
    gate_up: Stacked
    down: Stacked
    per_token: int
    normalize: bool
    shared: Mlp | None = None
    shared_gate: Weight | None = None
    scoring: Scoring | None = None
    balance: Vector | None = None
    beside: Beside | None = None
    latent: tuple[Weight, Weight] | None = None
    divided: OfRanks | None = None

    @cached_property
    def up_factors(self) -> tuple[ExpertFactors, ...]:
        """The adapters' factors of the products with `gate_up`."""
        return _together([expert.gate_up for expert in self.experts])

    @cached_property
    def down_factors(self) -> tuple[ExpertFactors, ...]:
        """The adapters' factors of the products with `down`."""
        return _together([expert.down for expert in self.experts])

    def change(self, experts: tuple[Mlp, ...]) -> "Mixture":
        """Return the same with other experts: over the present storages if their working weights
        are there, else over new ones, which are not prepared."""
        if all(
            new.gate_up.working is old.gate_up.working and new.down.working is old.down.working
            for new, old in zip(experts, self.experts)
        ):
            gate_up = replace(
                self.gate_up, prepared=tuple(expert.gate_up.prepared for expert in experts)
            )
            down = replace(self.down, prepared=tuple(expert.down.prepared for expert in experts))
            return replace(self, experts=experts, gate_up=gate_up, down=down)
        gate_up, ups = stack([expert.gate_up for expert in experts])
        down, downs = stack([expert.down for expert in experts])
        moved = tuple(
            replace(expert, gate_up=first, down=second)
            for expert, first, second in zip(experts, ups, downs)
        )
        return replace(self, experts=moved, gate_up=gate_up, down=down)


def _together(weights: Sequence[Weight]) -> tuple[ExpertFactors, ...]:
    """Return, for each adapter, the factors of all experts of a layer together."""
    factors = []
    for index, low in enumerate(weights[0].adapters):
        assert low.together is not None
        members = [weight.adapters[index] for weight in weights]
        a, b = low.together
        a = replace(a, prepared=tuple(item.a.prepared for item in members))
        b = replace(b, prepared=tuple(item.b.prepared for item in members))
        factors.append(ExpertFactors(a, b, low.lo, low.hi, low.scale))
    return tuple(factors)


def stack(weights: Sequence[Weight]) -> tuple[Stacked, list[Weight]]:
    """Return a layer's experts' working weights and biases in one storage, and views of it."""
    stacked = Stacked.of((weight.working for weight in weights), len(weights))
    stacked_weights = [
        replace(weight, prepared=matrix) for weight, matrix in zip(weights, stacked.experts)
    ]
    return with_biases(stacked, stacked_weights)


def with_biases(stacked: Stacked, weights: Sequence[Weight]) -> tuple[Stacked, list[Weight]]:
    """Return a stack with the biases of its weights, if they have any, and the weights with their
    rows of these."""
    biases = [weight.bias for weight in weights if weight.bias is not None]
    if not biases:
        return stacked, list(weights)
    bias = torch.stack(biases)
    return replace(stacked, bias=bias), [
        replace(weight, bias=row) for weight, row in zip(weights, bias.unbind(0))
    ]


@dataclass(frozen=True, eq=False)
class Attention:
    """The weights of attention: of queries and keys, whose heads are normed in some architectures,
    and `sinks` in float32 in some. A layer that reads another's keys has queries and their norm
    alone."""

    qkv: Weight
    head_norms: tuple[Vector, Vector | None] | None
    sinks: Vector | None
    o: Weight


@dataclass(frozen=True, eq=False)
class Delta:
    """Linear attention by the gated delta rule: `qkv` has z, the gate of the result, too; `gates`,
    in FP32, give the rule's b and a. All vectors are float32, but the norm of what states give.
    Mamba-2 has a `skip`, a bias of its convolution, and no gates: its steps are rows of `qkv`."""

    qkv: Weight
    gates: Weight | None
    conv: Vector
    decay: Vector
    step_bias: Vector
    state_norm: Vector
    o: Weight
    conv_bias: Vector | None = None
    skip: Vector | None = None


@dataclass(frozen=True, eq=False)
class LatentAttention:
    """Multi-head latent attention (`hub/latent.py`): `qkv_a` gives the latents of queries, or
    queries themselves where `q_b` is None, those of keys and values, and what all keys share."""

    qkv_a: Weight
    q_a_norm: Vector | None
    q_b: Weight | None
    kv_a_norm: Vector
    kv_b: Weight
    o: Weight


@dataclass(frozen=True, eq=False)
class Layer:
    """Working weights of one layer, and the flow that they are for. Norms are before attention
    (`input_norm`) and MLP (`post_norm`), and after them (`attention_out_norm`, `mlp_out_norm`),
    where the architecture has them, as it may have the number [1] that the sum is multiplied by
    (`scalar`), and embeddings of the layer. A layer of one part has attention or an MLP."""

    flow: Flow
    input_norm: Vector | None
    attention: Attention | Delta | LatentAttention | None
    attention_out_norm: Vector | None
    post_norm: Vector | None
    mlp: Mlp | Mixture | None
    mlp_out_norm: Vector | None
    scalar: Vector | None = None
    embedded: Embedded | None = None


_PARTS = Outside, LayerEmbeddings, Layer, Attention, Delta, LatentAttention, Mlp, Beside, Embedded
"""What holds weights and vectors, or parts of parts."""


@dataclass(frozen=True, eq=False)
class Working:
    """The working weights of one use; an adapter's weights come after the weights that they are
    added to."""

    outside: Outside
    layers: tuple[Layer, ...]

    @cached_property
    def _all(self) -> tuple[Weight | Vector, ...]:
        """Every weight and vector, which stay what they are: a sync writes into their tensors."""
        return tuple(_parts((self.outside, *self.layers)))

    def tensors(self) -> Iterator[tuple[str, StoredWeight, Tensor]]:
        """Yield (name, working tensor, master) of each that is stored, once."""
        seen: set[int] = set()
        for name, working, master in stored_in(self._all):
            if id(working) not in seen:
                seen.add(id(working))
                yield name, working, master

    def written(self, names: Collection[str]) -> Iterator[tuple[str, Operand]]:
        """Yield (name, working tensor) of each that a sync makes of these masters; nibbles are
        frozen."""
        for name, working, _ in self.tensors():
            if name in names:
                assert not isinstance(working, PackedFP4)
                yield name, working

    @cached_property
    def offsets(self) -> Mapping[str, float]:
        """The constants that are added to masters in their working copies, by name."""
        return {
            piece.name: piece.offset
            for piece in self._all
            if isinstance(piece, Vector) and piece.offset
        }

    def linear_layers(self) -> Iterator[Weight]:
        """Return the weights of the products inside the layers."""
        return (piece for piece in _parts(self.layers) if isinstance(piece, Weight))

    def packs(self) -> dict[int, Packed]:
        """Return what the backend packed of the weights, by `id`."""
        weights = (weight for weight in self._all if isinstance(weight, Weight))
        return {
            id(weight.prepared): weight.prepared
            for weight in weights
            if isinstance(weight.prepared, Packed)
        }


def remake(
    uses: Iterable[Working],
    ops: Ops,
    masters: Masters,
    names: Collection[str],
    put: "Put | None" = None,
    multiplying: Ops | None = None,
) -> None:
    """Overwrite the working weights of these masters, and then their packs, in place; shared ones
    once.

    `ops` quantize; `multiplying`, by default the same, multiply with the weights and pack them.
    Every rank makes the rows that it keeps, by `put` (default: `write`), and gets the others'.
    Raises NonFiniteError on all ranks if one finds NaN or infinity.
    """
    uses = list(uses)
    targets = {id(t): (name, t) for use in uses for name, t in use.written(names)}
    shards = masters.shards
    largest = _largest(targets.values(), masters)
    offsets = {name: offset for use in uses for name, offset in use.offsets.items()}

    def make() -> None:
        for name, target in targets.values():
            if not shards.owned(name):
                continue
            master, offset = masters.parameters[name], offsets.get(name, 0.0)
            into = rows_of(target, shards.own(name))
            if put is None and isinstance(target, Tensor) and not offset:
                write(into, master.detach())  # which rounds, without a second copy
            else:
                made = made_like(target, master, ops, name, largest.get(name), offset)
                (put or write)(into, made)
        if shards.ranks.size > 1:
            ops.raise_faults()

    shards.ranks.run_on_all(make)
    share_rows(
        [rows for name, target in targets.values() for rows in stored_rows(name, target)], shards
    )
    packed_again = set[int]()
    for working in uses:
        for key, packed in working.packs().items():
            if id(packed.weight) in targets and key not in packed_again:
                packed_again.add(key)
                (multiplying or ops).prepare(packed.weight, packed)


Put = Callable[[Operand, Operand], None]
"""Overwrites an operand by another."""


def made_like(
    target: Operand,
    master: Tensor,
    ops: Ops,
    name: str,
    largest: float | None = None,
    offset: float = 0.0,
) -> Operand:
    """Return rows of a master in the format of a working tensor, an `offset` added; `largest`: the
    largest magnitude of the whole master, where the scales of its rows depend on it."""
    master = master.detach()
    if not isinstance(target, QTensor):
        return working_vector(master, target.dtype, offset)
    if largest is None:
        return ops.quantize(master, target.spec, name)
    return quantize_part(master, target.spec, largest, name)


def _largest(targets: Iterable[tuple[str, Operand]], masters: Masters) -> dict[str, float]:
    """Return the largest magnitude of each master whose scales need that of all rows; none where
    one rank has all rows."""
    ranks = masters.shards.ranks
    if ranks.size == 1:
        return {}
    needed = sorted(
        {name for name, t in targets if isinstance(t, QTensor) and not t.spec.rows_independent}
    )
    if not needed:
        return {}
    mine = {
        name: float(p.detach().abs().max())
        for name, p in masters.parameters.items()
        if name in needed
    }
    maxima = ranks.all_gather_json(mine)
    return {
        name: largest_of(values[name] for values in maxima if name in values) for name in needed
    }


def rows_of(target: Operand, rows: tuple[int, int]) -> Operand:
    """Return the rows of a working tensor that are made of a master's `rows`."""
    if rows == (0, target.shape[0]):
        return target
    if not isinstance(target, QTensor):
        return target[slice(*rows)]
    data, scale = (tensor.rows(rows) for tensor in stored_rows("", target))
    return QTensor(data, scale, target.spec)


def stored_rows(name: str, target: Operand) -> list[Stored]:
    """Return the tensors of a working tensor."""
    if not isinstance(target, QTensor):
        return [Stored(name, target)]
    return [Stored(name, target.data), Stored(name, target.scale, target.block[0])]


def write(target: Operand, values: Operand) -> None:
    """Copy values into a working tensor, scales included."""
    for into, source in zip(tensors_of(target), tensors_of(values), strict=True):
        assert into.shape == source.shape
        into.copy_(source)


def map_parts(value: Any, change: Callable[[Weight | Vector], Weight | Vector]) -> Any:
    """Return the same structure with every weight and vector changed; an adapter's factors before
    what they are added to."""
    if isinstance(value, Weight) and value.adapters:
        return change(replace(value, adapters=map_parts(value.adapters, change)))
    if isinstance(value, (Weight, Vector)):
        return change(value)
    if isinstance(value, LowRank):
        return replace(value, a=map_parts(value.a, change), b=map_parts(value.b, change))
    if isinstance(value, tuple):
        return tuple(map_parts(item, change) for item in value)
    if isinstance(value, Mixture):
        experts = map_parts(value.experts, change)
        names = ("router", "shared", "shared_gate", "balance", "beside", "latent")
        changed = {name: map_parts(getattr(value, name), change) for name in names}
        return replace(value.change(experts), **changed)
    if isinstance(value, (Working, *_PARTS)):
        return replace(
            value, **{f.name: map_parts(getattr(value, f.name), change) for f in fields(value)}
        )
    return value


def nbytes(operand: StoredWeight) -> int:
    """Return bytes of a working tensor, scales included."""
    return (
        operand.numel() * operand.element_size() if isinstance(operand, Tensor) else operand.nbytes
    )


def _parts(value: object) -> Iterator[Weight | Vector]:
    """Yield every weight and vector in a structure, in order."""
    if isinstance(value, (Weight, Vector)):
        yield value
        if isinstance(value, Weight):
            yield from _parts(
                tuple(factor for factors in value.adapters for factor in (factors.a, factors.b))
            )
    elif isinstance(value, tuple):
        for item in value:
            yield from _parts(item)
    elif isinstance(value, (*_PARTS, Mixture)):
        yield from _parts(tuple(vars(value).values()))


def stored_in(piece: object) -> Iterator[tuple[str, StoredWeight, Tensor]]:
    """Yield (name, working tensor, master) of each that a structure stores, in order."""
    for value in _parts(piece):
        yield from _stored(value)


def _stored(value: Weight | Vector) -> Iterator[tuple[str, StoredWeight, Tensor]]:
    yield value.name, value.working, value.master
    if isinstance(value, Weight) and value.bias is not None and value.bias_master is not None:
        yield f"{value.name}_bias", value.bias, value.bias_master
