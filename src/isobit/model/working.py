"""Working weights: the tensors that products multiply, made of the FP32 masters at each sync for each distinct flow.

Uses with one flow and one engine share one storage, so neither can be stale. A sync overwrites it and its packs in
place (`remake`), because a captured CUDA graph reads from these addresses. Left out: when they are made
(`transformer.py`), and how a second engine receives its copy (`weight_sync.py`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from isobit.distributed.weights import Stored, share_rows
from isobit.kernels import Operand, Ops, Packed, Stacked
from isobit.model.autograd import Vector, Weight
from isobit.model.config import ModelConfig
from isobit.model.masters import Masters
from isobit.precision import Flow, Precision, QTensor
from isobit.precision.quantize import largest_of, quantize_part


@dataclass(frozen=True, eq=False)
class Outside:
    """Working weights outside the layers. A tied head is the embedding's storage."""

    embed: Vector
    final_norm: Vector
    head: Weight


@dataclass(frozen=True, eq=False)
class Mlp:
    """A gated MLP: of a layer, or one expert."""

    gate_up: Weight
    down: Weight


@dataclass(frozen=True, eq=False)
class Mixture:
    """A router in FP32 and its experts; `per_token` of them serve a token, with gates that sum to 1 if `normalize`.

    `gate_up` and `down` store the working weights of all experts; each expert's weights are views of them.
    """

    router: Weight
    experts: tuple[Mlp, ...]
    gate_up: Stacked
    down: Stacked
    per_token: int
    normalize: bool

    def change(self, experts: tuple[Mlp, ...]) -> "Mixture":
        """The same with other experts: over the present storages if their working weights are there, else over new
        ones, which are not prepared."""
        if all(
            new.gate_up.working is old.gate_up.working and new.down.working is old.down.working
            for new, old in zip(experts, self.experts)
        ):
            gate_up = replace(self.gate_up, prepared=tuple(expert.gate_up.prepared for expert in experts))
            down = replace(self.down, prepared=tuple(expert.down.prepared for expert in experts))
            return replace(self, experts=experts, gate_up=gate_up, down=down)
        gate_up = Stacked.of((expert.gate_up.working for expert in experts), len(experts))
        down = Stacked.of((expert.down.working for expert in experts), len(experts))
        moved = tuple(
            Mlp(replace(expert.gate_up, prepared=first), replace(expert.down, prepared=second))
            for expert, first, second in zip(experts, gate_up.experts, down.experts)
        )
        return replace(self, experts=moved, gate_up=gate_up, down=down)


@dataclass(frozen=True, eq=False)
class Layer:
    """Working weights of one layer, and the flow that they are for."""

    flow: Flow
    input_norm: Vector
    qkv: Weight
    head_norms: tuple[Vector, Vector] | None
    o: Weight
    post_norm: Vector
    mlp: Mlp | Mixture


@dataclass(frozen=True, eq=False)
class Working:
    """All working weights of one use."""

    outside: Outside
    layers: tuple[Layer, ...]

    def tensors(self) -> Iterator[tuple[str, Operand, Tensor]]:
        """(name, working tensor, master) of each that is stored, once."""
        seen: set[int] = set()
        for part in _parts((self.outside, *self.layers)):
            for name, working, master in _stored(part):
                if id(working) not in seen:
                    seen.add(id(working))
                    yield name, working, master

    def linear_layers(self) -> Iterator[Weight]:
        """The weights of the products inside the layers."""
        return (part for part in _parts(self.layers) if isinstance(part, Weight))

    def packs(self) -> dict[int, Packed]:
        """What the backend packed of the weights, by `id`."""
        parts = (part for part in _parts((self.outside, *self.layers)) if isinstance(part, Weight))
        return {id(part.prepared): part.prepared for part in parts if isinstance(part.prepared, Packed)}


Made = dict[tuple[int | None, Flow], Layer | Outside]
"""The parts made so far, by layer and flow; uses with the same flow share them."""


def make_working(
    config: ModelConfig,
    precision: Precision,
    ops: Ops,
    masters: Mapping[str, Tensor],
    use: str,
    made: Made,
    multiplying: Ops,
) -> Working:
    """Working weights of a use. Parts found in `made` are shared, the others are added to it. `ops` quantize; the use
    multiplies with `multiplying`, which prepare the weights. `masters` are the leaves: where ranks share the masters,
    what is made is storage that `remake` fills."""
    parts: list[Layer | Outside] = []
    for index in (None, *range(config.num_layers)):
        flow = precision.flow(use, index, config.num_layers)
        if (index, flow) not in made:
            part = (
                _make_outside(config, flow, masters)
                if index is None
                else _make_layer(config, precision, ops, masters, index, flow)
            )
            made[index, flow] = _prepared(part, multiplying)
        parts.append(made[index, flow])
    outside, *layers = parts
    assert isinstance(outside, Outside)
    return Working(outside, tuple(layer for layer in layers if isinstance(layer, Layer)))


def remake(
    uses: Iterable[Working], ops: Ops, masters: Masters, names: Collection[str], put: "Put | None" = None
) -> None:
    """Overwrite the working weights of these masters, and then their packs, in place; shared ones once.

    Every rank makes the rows that it keeps, by `put` (default: `write`), and gets the others'. Raises NonFiniteError
    on all ranks if one finds NaN or infinity.
    """
    uses = list(uses)
    targets = {id(t): (name, t) for use in uses for name, t, _ in use.tensors() if name in names}
    shards = masters.shards
    largest = _largest(targets.values(), masters)

    def make() -> None:
        for name, target in targets.values():
            if shards.owned(name):
                made = made_like(target, masters.parameters[name], ops, name, largest.get(name))
                (put or write)(rows_of(target, shards.own(name)), made)
        if shards.ranks.size > 1:
            ops.raise_faults()

    shards.ranks.together(make)
    share_rows([each for name, target in targets.values() for each in _stored_rows(name, target)], shards)
    packed_again = set[int]()
    for working in uses:
        for key, packed in working.packs().items():
            if id(packed.weight) in targets and key not in packed_again:
                packed_again.add(key)
                ops.prepare(packed.weight, packed)


Put = Callable[[Operand, Operand], None]
"""Overwrites an operand by another."""


def made_like(target: Operand, master: Tensor, ops: Ops, name: str, largest: float | None = None) -> Operand:
    """Rows of a master in the format of a working tensor; `largest`: the largest magnitude of the whole master, where
    the scales of its rows depend on it."""
    master = master.detach()
    if not isinstance(target, QTensor):
        return master.to(target.dtype)
    if largest is None:
        return ops.quantize(master, target.spec, name)
    return quantize_part(master, target.spec, largest, name)


def _largest(targets: Iterable[tuple[str, Operand]], masters: Masters) -> dict[str, float]:
    """The largest magnitude of each master whose scales need that of all rows; none where one rank has all rows."""
    ranks = masters.shards.ranks
    if ranks.size == 1:
        return {}
    needed = sorted({name for name, t in targets if isinstance(t, QTensor) and not t.spec.rows_independent})
    if not needed:
        return {}
    mine = {name: float(p.detach().abs().max()) for name, p in masters.parameters.items() if name in needed}
    found = ranks.gather(mine)
    return {name: largest_of(values[name] for values in found if name in values) for name in needed}


def rows_of(target: Operand, rows: tuple[int, int]) -> Operand:
    """The rows of a working tensor that are made of a master's `rows`."""
    if rows == (0, target.shape[0]):
        return target
    if not isinstance(target, QTensor):
        return target[slice(*rows)]
    data, scale = (each.rows(rows) for each in _stored_rows("", target))
    return QTensor(data, scale, target.spec)


def _stored_rows(name: str, target: Operand) -> list[Stored]:
    if not isinstance(target, QTensor):
        return [Stored(name, target)]
    return [Stored(name, target.data), Stored(name, target.scale, target.block[0])]


def write(target: Operand, values: Operand) -> None:
    """Overwrite a working tensor."""
    for into, source in zip(tensors_of(target), tensors_of(values), strict=True):
        assert into.shape == source.shape
        into.copy_(source)


def map_parts(value: Any, change: Callable[[Weight | Vector], Weight | Vector]) -> Any:
    """The same structure with every weight and vector changed."""
    if isinstance(value, (Weight, Vector)):
        return change(value)
    if isinstance(value, tuple):
        return tuple(map_parts(item, change) for item in value)
    if isinstance(value, Mixture):
        experts = map_parts(value.experts, change)
        return replace(value.change(experts), router=map_parts(value.router, change))
    if isinstance(value, (Working, Outside, Layer, Mlp)):
        return replace(value, **{f.name: map_parts(getattr(value, f.name), change) for f in fields(value)})
    return value


def nbytes(operand: Operand) -> int:
    """Bytes of a working tensor, scales included."""
    return operand.nbytes if isinstance(operand, QTensor) else operand.numel() * operand.element_size()


def tensors_of(operand: Operand) -> tuple[Tensor, ...]:
    """The tensors of an operand: itself, or codes and scales."""
    return (operand.data, operand.scale) if isinstance(operand, QTensor) else (operand,)


def _parts(value: object) -> Iterator[Weight | Vector]:
    """Every weight and vector in a structure, in order."""
    if isinstance(value, (Weight, Vector)):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _parts(item)
    elif isinstance(value, (Outside, Layer, Mlp, Mixture)):
        yield from _parts(tuple(vars(value).values()))


def _stored(value: Weight | Vector) -> Iterator[tuple[str, Operand, Tensor]]:
    yield value.name, value.working, value.master
    if isinstance(value, Weight) and value.bias is not None and value.bias_master is not None:
        yield f"{value.name}_bias", value.bias, value.bias_master


def _prepared(part: Layer | Outside, ops: Ops) -> Any:
    """The same with every linear layer's weight prepared for `ops`."""

    def change(part: Weight | Vector) -> Weight | Vector:
        return replace(part, prepared=ops.prepare(part.working)) if isinstance(part, Weight) else part

    return map_parts(part, change)


def _make_outside(config: ModelConfig, flow: Flow, masters: Mapping[str, Tensor]) -> Outside:
    embed = _vector("embed", flow, masters)
    head = embed if config.tie_embeddings else _vector("head", flow, masters)
    final_norm = _vector("final_norm", flow, masters)
    return Outside(embed, final_norm, Weight(head.name, head.master, head.working, None, None))


def _make_layer(
    config: ModelConfig, precision: Precision, ops: Ops, masters: Mapping[str, Tensor], index: int, flow: Flow
) -> Layer:
    prefix = f"layers.{index}."
    dgrad, wgrad = precision.backward(index, config.num_layers)

    def vector(name: str) -> Vector:
        return _vector(prefix + name, flow, masters)

    def working(name: str) -> Operand:
        master, spec = masters[prefix + name].detach(), precision.linear_flow(flow, name.rpartition(".")[2]).weight
        if spec is not None:
            return ops.quantize(master, spec, prefix + name)
        return master.to(flow.compute.dtype, copy=True)

    def weight(name: str, made: Operand | None = None) -> Weight:
        master, bias = masters[prefix + name], masters.get(f"{prefix}{name}_bias")
        rounded = None if bias is None else bias.detach().to(flow.compute.dtype, copy=True)
        operand = working(name) if made is None else made
        activation = precision.linear_flow(flow, name.rpartition(".")[2]).activation
        if activation is None:
            return Weight(prefix + name, master, operand, bias, rounded)
        gradient = precision.gradient
        own_copy = precision.wgrad_activation == "own-copy"
        return Weight(prefix + name, master, operand, bias, rounded, activation, gradient, dgrad, wgrad, own_copy)

    def mixture() -> Mixture:
        assert config.experts is not None
        router, count = masters[prefix + "router"], config.experts.count
        kept = Weight(prefix + "router", router, router.detach().clone(), None, None)
        names = [f"experts.{number}." for number in range(count)]
        gate_up = Stacked.of((working(name + "gate_up") for name in names), count)
        down = Stacked.of((working(name + "down") for name in names), count)
        experts = tuple(
            Mlp(weight(name + "gate_up", first), weight(name + "down", second))
            for name, first, second in zip(names, gate_up.experts, down.experts)
        )
        return Mixture(kept, experts, gate_up, down, config.experts.per_token, config.experts.normalize)

    return Layer(
        flow=flow,
        input_norm=vector("input_norm"),
        qkv=weight("qkv"),
        head_norms=(vector("q_norm"), vector("k_norm")) if config.qk_norm else None,
        o=weight("o"),
        post_norm=vector("post_norm"),
        mlp=mixture() if config.is_mixture(index) else Mlp(weight("gate_up"), weight("down")),
    )


def _vector(name: str, flow: Flow, masters: Mapping[str, Tensor]) -> Vector:
    master = masters[name]
    return Vector(name, master, master.detach().to(flow.compute.dtype, copy=True))
