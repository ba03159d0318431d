"""Makes the working weights of a use for the first time, of masters, or of values that are read and not kept.

Left out: what they are, and their making anew (`working.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from isobit.kernels import Kept, Ops, Stacked
from isobit.model.config import ModelConfig
from isobit.model.low_rank import Adapter
from isobit.model.weights import NO_MASTER, LowRank, Vector, Weight, working_vector
from isobit.model.working import Layer, Mixture, Mlp, Outside, Working, map_parts, with_biases
from isobit.precision import Flow, Format, Nibbles, Precision, QTensor, QuantSpec, nibbles

Made = dict[tuple[int | None, Flow], Layer | Outside]
"""The parts made so far, by layer and flow; uses with the same flow share them."""


@dataclass(frozen=True, eq=False)
class Sources:
    """What working weights are made of. `masters` are the leaves: where these hold no numbers, what is made is
    storage that `remake` fills. With an `adapter`, `masters` are values that nothing trains, which are read one at a
    time and not kept, and `leaves` those of the adapter's masters."""

    masters: Mapping[str, Tensor]
    adapter: Adapter | None = None
    leaves: Mapping[str, Tensor] = field(default_factory=dict)

    def leaf(self, master: Tensor) -> Tensor:
        """That through which the gradient of a master returns."""
        return master if self.adapter is None else NO_MASTER

    def kept(self, quantized: QTensor, master: Tensor, dgrad: str) -> Kept:
        """A quantized weight as it is stored: what nothing writes again in nibbles, where these hold it."""
        frozen = self.adapter is not None and in_nibbles(quantized.spec, quantized.shape, dgrad)
        return nibbles.packed(quantized, master.detach()) if frozen else quantized

    def low_rank(self, name: str, flow: Flow) -> tuple[LowRank, ...]:
        """The adapters of a weight, their working factors in the compute format."""

        def factor(name: str) -> Weight:
            working = self.leaves[name].detach().to(flow.compute.dtype, copy=True)
            return Weight(name, self.leaves[name], working, None, None)

        if self.adapter is None:
            return ()
        return tuple(
            LowRank(factor(one.masters[0]), factor(one.masters[1]), one.lo, one.hi, self.adapter.scale)
            for one in self.adapter.of(name)
        )


def factors(name: str, adapter: Adapter, compute: Format, ops: Ops) -> tuple[LowRank, ...]:
    """An adapter's factors of one weight that nothing trains, prepared for `ops`."""

    def factor(name: str) -> Weight:
        working = adapter.tensors[name].to(ops.device).to(compute.dtype, copy=True)
        return Weight(name, NO_MASTER, ops.prepare(working), None, None)

    pairs = [(one, tuple(map(factor, one.masters))) for one in adapter.of(name)]
    return tuple(LowRank(a, b, one.lo, one.hi, adapter.scale) for one, (a, b) in pairs)


def in_nibbles(spec: QuantSpec, shape: tuple[int, ...], dgrad: str) -> bool:
    """Whether a frozen weight of this shape is stored with two codes to a byte. An FP8 DGrad quantizes the transposed
    weight again, so it needs the whole."""
    return dgrad != "fp8" and nibbles.holds(spec, shape)


def make_working(
    config: ModelConfig,
    precision: Precision,
    ops: Ops,
    sources: Sources,
    use: str,
    made: Made,
    multiplying: Ops,
) -> Working:
    """Working weights of a use. Parts found in `made` are shared, the others are added to it. `ops` quantize; the use
    multiplies with `multiplying`, which prepare the weights."""
    parts: list[Layer | Outside] = []
    for index in (None, *range(config.num_layers)):
        flow = precision.flow(use, index, config.num_layers)
        if (index, flow) not in made:
            part = (
                _make_outside(config, flow, sources)
                if index is None
                else _make_layer(config, precision, ops, sources, index, flow)
            )
            made[index, flow] = _prepared(part, multiplying)
        parts.append(made[index, flow])
    outside, *layers = parts
    assert isinstance(outside, Outside)
    return Working(outside, tuple(layer for layer in layers if isinstance(layer, Layer)))


def _prepared(part: Layer | Outside, ops: Ops) -> Any:
    """The same with every linear layer's weight prepared for `ops`."""

    def change(part: Weight | Vector) -> Weight | Vector:
        if not isinstance(part, Weight) or isinstance(part.working, Nibbles):  # of nibbles there are no packs
            return part
        return replace(part, prepared=ops.prepare(part.working))

    return map_parts(part, change)


def _make_outside(config: ModelConfig, flow: Flow, sources: Sources) -> Outside:
    embed = _vector("embed", flow, sources)
    head = embed if config.tie_embeddings else _vector("head", flow, sources)
    final_norm = _vector("final_norm", flow, sources, config.norm_offset)
    return Outside(embed, final_norm, Weight(head.name, head.master, head.working, None, None))


def _make_layer(config: ModelConfig, precision: Precision, ops: Ops, sources: Sources, index: int, flow: Flow) -> Layer:
    prefix, masters, leaf = f"layers.{index}.", sources.masters, sources.leaf
    dgrad, wgrad = precision.backward(index, config.num_layers)

    def made_of(name: str, master: Tensor) -> Kept:
        spec = precision.linear_flow(flow, name.rpartition(".")[2]).weight
        if spec is None:
            return master.detach().to(flow.compute.dtype, copy=True)
        return sources.kept(ops.quantize(master.detach(), spec, prefix + name), master, dgrad)

    def weight(name: str, master: Tensor, working: Kept | None = None) -> Weight:
        bias = masters.get(f"{prefix}{name}_bias")
        rounded = None if bias is None else bias.detach().to(flow.compute.dtype, copy=True)
        operand = made_of(name, master) if working is None else working
        adapters, kept = sources.low_rank(prefix + name, flow), None if bias is None else leaf(bias)
        found = Weight(prefix + name, leaf(master), operand, kept, rounded, adapters=adapters)
        activation = precision.linear_flow(flow, name.rpartition(".")[2]).activation
        if activation is None:
            return found
        own, gradient = precision.wgrad_activation == "own-copy" and sources.adapter is None, precision.gradient
        return replace(found, activation=activation, gradient=gradient, dgrad=dgrad, wgrad=wgrad, own_copy=own)

    def made(name: str) -> Weight:
        return weight(name, masters[prefix + name])

    def mixture() -> Mixture:
        assert config.experts is not None
        count = config.experts.count

        def stacked(role: str) -> tuple[Stacked, list[Weight]]:
            names, leaves = [f"experts.{number}.{role}" for number in range(count)], []

            def matrices() -> Iterator[Kept]:
                for name in names:
                    master = masters[prefix + name]
                    leaves.append(leaf(master))
                    yield made_of(name, master)

            stack = Stacked.of(matrices(), count)
            return with_biases(stack, [weight(*each) for each in zip(names, leaves, stack.experts)])

        (gate_up, ups), (down, downs) = stacked("gate_up"), stacked("down")
        experts = tuple(Mlp(first, second, config.activation) for first, second in zip(ups, downs))
        router = _router(prefix + "router", sources)
        return Mixture(router, experts, gate_up, down, config.experts.per_token, config.experts.normalize)

    vectors = (*config.norms, *(("q_norm", "k_norm") if config.qk_norm else ()))
    norms = {name: _vector(prefix + name, flow, sources, config.norm_offset) for name in vectors}
    return Layer(
        flow=flow,
        input_norm=norms.get("input_norm"),
        qkv=made("qkv"),
        head_norms=(norms["q_norm"], norms["k_norm"]) if config.qk_norm else None,
        sinks=_vector(prefix + "sinks", flow, sources, dtype=torch.float32) if config.sinks else None,
        o=made("o"),
        attention_out_norm=norms.get("attention_out_norm"),
        post_norm=norms.get("post_norm"),
        mlp=mixture() if config.is_mixture(index) else Mlp(made("gate_up"), made("down"), config.activation),
        mlp_out_norm=norms.get("mlp_out_norm"),
    )


def _router(name: str, sources: Sources) -> Weight:
    master, bias = sources.masters[name], sources.masters.get(f"{name}_bias")
    values = master.detach().to(torch.float32, copy=True)
    if bias is None:
        return Weight(name, sources.leaf(master), values, None, None)
    return Weight(name, sources.leaf(master), values, sources.leaf(bias), bias.detach().to(torch.float32, copy=True))


def _vector(name: str, flow: Flow, sources: Sources, offset: float = 0.0, dtype: torch.dtype | None = None) -> Vector:
    """`dtype`: of the working copy, by default the compute format."""
    master = sources.masters[name]
    return Vector(name, sources.leaf(master), working_vector(master, dtype or flow.compute.dtype, offset), offset)
