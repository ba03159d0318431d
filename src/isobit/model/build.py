"""Makes the working weights of a use for the first time, of masters, or of values that are read and
not kept.

Left out: what they are, and their making anew (`weights/layout.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from isobit.kernels import Factors, Ops, Stacked, StoredWeight
from isobit.model.adapters.low_rank import Adapter, Projection
from isobit.model.hub.config import ModelConfig
from isobit.model.hub.mamba import Mamba
from isobit.model.weights.divided import DividedWeights
from isobit.model.weights.layout import (
    Attention,
    Beside,
    Delta,
    Embedded,
    LatentAttention,
    Layer,
    LayerEmbeddings,
    Mixture,
    Mlp,
    Outside,
    Working,
    map_parts,
    with_biases,
)
from isobit.model.weights.stored import FROZEN, LowRank, Vector, Weight, working_vector
from isobit.precision import Flow, Format, PackedFP4, Precision, QTensor, QuantSpec, packed_fp4

Made = dict[tuple[int | None, Flow], Layer | Outside]
"""The parts made so far, by layer and flow; uses with the same flow share them."""


@dataclass(frozen=True, eq=False)
class Sources:
    """The sources of working weights. `masters` are the leaves: where these hold no numbers, the
    result is storage that `remake` fills. With an `adapter`, `masters` are frozen values, which are
    read one at a time and released, and `leaves` those of the adapter's masters."""

    masters: Mapping[str, Tensor]
    adapter: Adapter | None = None
    leaves: Mapping[str, Tensor] = field(default_factory=dict)
    _stacks: dict[str, tuple[Stacked, Stacked]] = field(default_factory=dict)

    def leaf(self, master: Tensor) -> Tensor:
        """Return that through which the gradient of a master returns."""
        return master if self.adapter is None else FROZEN

    def kept(self, quantized: QTensor, master: Tensor, dgrad: str) -> StoredWeight:
        """Return a quantized weight in its stored form: in nibbles, if it is never written again
        and fits them."""
        frozen = self.adapter is not None and in_nibbles(quantized.spec, quantized.shape, dgrad)
        return packed_fp4.packed(quantized, master.detach()) if frozen else quantized

    def low_rank(self, name: str, flow: Flow) -> tuple[LowRank, ...]:
        """Return the adapters of a weight, their working factors in the compute format; experts are
        asked for in their order."""
        if self.adapter is None:
            return ()
        dtype = flow.compute.dtype
        return tuple(self._factors_of(proj, self.adapter, dtype) for proj in self.adapter.of(name))

    def _factors_of(self, projection: Projection, adapter: Adapter, dtype: torch.dtype) -> LowRank:
        values = [self.leaves[name].detach() for name in projection.masters]
        expert, together = projection.expert, None
        if expert is None:
            working = [factor.to(dtype, copy=True) for factor in values]
        else:
            group, number = expert
            if number == 0:  # of these uses, which share it
                count = adapter.experts[group]
                sizes = [(count, *factor.shape) for factor in values]
                empty = [factor.new_empty(s, dtype=dtype) for factor, s in zip(values, sizes)]
                self._stacks[group] = Stacked(empty[0]), Stacked(empty[1])
            together = self._stacks[group]
            working = [factor.data[number] for factor in together]
            for into, factor in zip(working, values):
                into.copy_(factor)
        a, b = (
            Weight(name, self.leaves[name], factor, None, None)
            for name, factor in zip(projection.masters, working)
        )
        return LowRank(a, b, projection.lo, projection.hi, adapter.scale, together)


def factors(name: str, adapter: Adapter, compute: Format, ops: Ops) -> Factors | None:
    """Return an adapter's factors of one frozen weight, prepared for `ops`, or None."""

    def working(name: str) -> Tensor:
        return adapter.tensors[name].to(ops.device).to(compute.dtype, copy=True)

    low_rank = []
    for proj in adapter.of(name):
        a, b = map(working, proj.masters)
        low_rank.append((a, b, proj.lo, proj.hi))
    return ops.prepare_factors(low_rank, adapter.scale) if low_rank else None


def with_adapter(
    uses: Mapping[str, Working], precision: Precision, ops: Mapping[str, Ops], sources: Sources
) -> dict[str, Working]:
    """Return the same storage, frozen, with the factors of the `sources`' adapter in the place of
    others; where uses share a weight they share its factors."""
    made: dict[tuple[str, int], tuple[LowRank, ...]] = {}

    def of(use: str, working: Working) -> Working:
        def prepared(factor: Weight | Vector) -> Weight | Vector:
            assert isinstance(factor, Weight)
            assert isinstance(factor.working, Tensor)
            return replace(factor, prepared=ops[use].prepare(factor.working))

        def change(parameter: Weight | Vector) -> Weight | Vector:
            if isinstance(parameter, Vector):
                return replace(parameter, master=FROZEN)
            key = parameter.name, id(parameter.prepared)
            if key not in made:
                made[key] = map_parts(
                    sources.low_rank(parameter.name, precision.flow(use)), prepared
                )
            bias = None if parameter.bias is None else FROZEN
            frozen = replace(
                parameter, master=FROZEN, bias_master=bias, own_copy=False, several=None
            )
            return replace(frozen, adapters=made[key])

        changed: Working = map_parts(working, change)
        return changed

    return {use: of(use, working) for use, working in uses.items()}


def in_nibbles(spec: QuantSpec, shape: tuple[int, ...], dgrad: str) -> bool:
    """Return whether a frozen weight of this shape is stored with two codes to a byte. An FP8 DGrad
    quantizes the transposed weight again, so it needs the whole."""
    return dgrad != "fp8" and packed_fp4.holds(spec, shape)


def make_working(
    config: ModelConfig,
    precision: Precision,
    ops: Ops,
    sources: Sources,
    use: str,
    made: Made,
    multiplying: Ops,
    divided: DividedWeights | None = None,
) -> Working:
    """Make the working weights of a use. Weights in `made` are shared, new ones are added to it.
    `ops` quantize; the use multiplies with `multiplying`, which prepare the weights, if these are
    not `divided`."""
    pieces: list[Layer | Outside] = []
    for index in (None, *range(config.num_layers)):
        flow = precision.flow(use, index, config.num_layers)
        if (index, flow) not in made:
            piece = (
                _make_outside(config, flow, sources)
                if index is None
                else _LayerMaker(config, precision, ops, sources, index, flow).layer()
            )
            made[index, flow] = (
                _prepared(piece, multiplying) if divided is None else divided.take(piece)
            )
        pieces.append(made[index, flow])
    outside, *layers = pieces
    assert isinstance(outside, Outside)
    return Working(outside, tuple(layer for layer in layers if isinstance(layer, Layer)))


def _prepared(weights: Layer | Outside, ops: Ops) -> Any:
    """Return the same with every linear layer's weight prepared for `ops`."""

    def change(parameter: Weight | Vector) -> Weight | Vector:
        if not isinstance(parameter, Weight) or isinstance(
            parameter.working, PackedFP4
        ):  # of nibbles there are no packs
            return parameter
        return replace(parameter, prepared=ops.prepare(parameter.working))

    return map_parts(weights, change)


def _make_outside(config: ModelConfig, flow: Flow, sources: Sources) -> Outside:
    embed = _vector("embed", flow, sources)
    head = embed if config.tie_embeddings else _vector("head", flow, sources)
    final_norm = _vector("final_norm", flow, sources, config.norm_offset)
    output = Weight(head.name, head.master, head.working, None, None)
    if not config.inputs.embedded:
        return Outside(embed, final_norm, output)
    table, norm = (_vector(name, flow, sources) for name in ("embed_layers", "project_layers_norm"))
    projection = _single("project_layers", sources, flow.compute.dtype)
    return Outside(embed, final_norm, output, LayerEmbeddings(table, projection, norm))


@dataclass(frozen=True, eq=False)
class _LayerMaker:
    """Makes the working weights of one layer."""

    config: ModelConfig
    precision: Precision
    ops: Ops
    sources: Sources
    index: int
    flow: Flow

    def layer(self) -> Layer:
        config = self.config
        norms = {name: self.norm(name) for name in config.norms_of(self.index)}
        return Layer(
            flow=self.flow,
            input_norm=norms.get("input_norm"),
            attention=self.attention() if config.has_attention(self.index) else None,
            attention_out_norm=norms.get("attention_out_norm"),
            post_norm=norms.get("post_norm"),
            mlp=self.mlp() if config.has_mlp(self.index) else None,
            mlp_out_norm=norms.get("mlp_out_norm"),
            scalar=_vector(self.named("layer_scalar"), self.flow, self.sources)
            if config.layer_scalars
            else None,
            embedded=self.embedded() if config.inputs.embedded else None,
        )

    def embedded(self) -> Embedded:
        gate, out = (
            _single(self.named(name), self.sources, self.flow.compute.dtype)
            for name in ("embedded_gate", "embedded_out")
        )
        return Embedded(gate, out, self.norm("embedded_out_norm"))

    def mlp(self) -> Mlp | Mixture:
        if self.config.is_mixture(self.index):
            return self.mixture()
        return Mlp(self.made("gate_up"), self.made("down"), self.config.activation)

    def attention(self) -> Attention | Delta | LatentAttention:
        if self.config.is_linear(self.index):
            return self.delta()
        if self.config.latent is not None:
            return self.latent(whole=self.config.latent.q_rank is None)
        norms = None
        if self.config.qk_norm:
            has_keys = self.config.keys_of(self.index) == self.index
            norms = self.norm("q_norm"), self.norm("k_norm") if has_keys else None
        return Attention(
            self.made("qkv"),
            norms,
            self.single("sinks") if self.config.sinks else None,
            self.made("o"),
        )

    def latent(self, whole: bool) -> LatentAttention:
        """Return the weights of latent attention. `whole`: queries have no latent."""
        return LatentAttention(
            self.made("qkv_a"),
            None if whole else self.norm("q_a_norm"),
            None if whole else self.made("q_b"),
            self.norm("kv_a_norm"),
            self.made("kv_b"),
            self.made("o"),
        )

    def delta(self) -> Delta:
        vectors = (
            self.single("conv"),
            self.single("decay"),
            self.single("step_bias"),
            self.norm("state_norm"),
        )
        if isinstance(self.config.linear, Mamba):
            more = self.single("conv_bias"), self.single("skip")
            return Delta(self.made("qkv"), None, *vectors, self.made("o"), *more)
        return Delta(
            self.made("qkv"), _single(self.named("gates"), self.sources), *vectors, self.made("o")
        )

    def mixture(self) -> Mixture:
        config = self.config
        assert config.experts is not None
        (gate_up, ups), (down, downs) = self.stacked("gate_up"), self.stacked("down")
        experts = tuple(Mlp(first, second, config.activation) for first, second in zip(ups, downs))
        router = _single(self.named("router"), self.sources)
        shared = gate = None
        if config.experts.shared:
            shared = Mlp(self.made("shared.gate_up"), self.made("shared.down"), config.activation)
        if config.shared_gate:
            gate = _single(self.named("shared_gate"), self.sources)
        count, normalize = config.experts.per_token, config.experts.normalize
        latent = None
        if config.experts.latent:
            latent = self.made("experts_in"), self.made("experts_out")
        mixture = Mixture(
            router, experts, gate_up, down, count, normalize, shared, gate, latent=latent
        )
        if config.experts_beside:
            norms = {field.name: self.norm(field.name) for field in fields(Beside)[:-1]}
            beside = Beside(**norms, expert_scale=self.single("expert_scale"))
            return replace(mixture, beside=beside)
        if (scoring := config.experts.scoring) is None:
            return mixture
        return replace(mixture, scoring=scoring, balance=self.single("balance"))

    def stacked(self, role: str) -> tuple[Stacked, list[Weight]]:
        """Yield a matrix of all experts in one storage, and each expert's."""
        assert self.config.experts is not None
        count = self.config.experts.count
        names, leaves = [f"experts.{number}.{role}" for number in range(count)], []

        def matrices() -> Iterator[StoredWeight]:
            for name in names:
                master = self.sources.masters[self.named(name)]
                leaves.append(self.sources.leaf(master))
                yield self.made_of(name, master)

        stack = Stacked.of(matrices(), count)
        return with_biases(
            stack, [self.weight(*sources) for sources in zip(names, leaves, stack.experts)]
        )

    def named(self, name: str) -> str:
        return f"layers.{self.index}.{name}"

    def norm(self, name: str) -> Vector:
        return _vector(self.named(name), self.flow, self.sources, self.config.offset_of(name))

    def single(self, name: str) -> Vector:
        return _vector(self.named(name), self.flow, self.sources, dtype=torch.float32)

    def made(self, name: str) -> Weight:
        return self.weight(name, self.sources.masters[self.named(name)])

    def made_of(self, name: str, master: Tensor) -> StoredWeight:
        """Return a matrix as the flow stores it."""
        spec = self.precision.linear_flow(self.flow, name.rpartition(".")[2]).weight
        if spec is None:
            return master.detach().to(self.flow.compute.dtype, copy=True)
        dgrad, _ = self.precision.backward(self.index, self.config.num_layers)
        return self.sources.kept(
            self.ops.quantize(master.detach(), spec, self.named(name)), master, dgrad
        )

    def weight(self, name: str, master: Tensor, working: StoredWeight | None = None) -> Weight:
        """Return a linear layer, of the `working` matrix if there is one, else of a new one."""
        precision, sources, compute = self.precision, self.sources, self.flow.compute.dtype
        bias = sources.masters.get(f"{self.named(name)}_bias")
        rounded = None if bias is None else bias.detach().to(compute, copy=True)
        operand = self.made_of(name, master) if working is None else working
        bias_leaf = None if bias is None else sources.leaf(bias)
        adapters = sources.low_rank(self.named(name), self.flow)
        weight = Weight(
            self.named(name), sources.leaf(master), operand, bias_leaf, rounded, adapters=adapters
        )
        activation = precision.linear_flow(self.flow, name.rpartition(".")[2]).activation
        if activation is None:
            return weight
        dgrad, wgrad = precision.backward(self.index, self.config.num_layers)
        copied = precision.wgrad_activation == "own-copy" and sources.adapter is None
        gradient = precision.gradient
        return replace(
            weight,
            activation=activation,
            gradient=gradient,
            dgrad=dgrad,
            wgrad=wgrad,
            own_copy=copied,
        )


def _single(name: str, sources: Sources, dtype: torch.dtype = torch.float32) -> Weight:
    """Return a linear layer that is not quantized: in FP32 a router, or the gates of linear
    attention; in the compute format what belongs to embeddings of layers."""
    master, bias = sources.masters[name], sources.masters.get(f"{name}_bias")
    values = master.detach().to(dtype, copy=True)
    if bias is None:
        return Weight(name, sources.leaf(master), values, None, None)
    return Weight(
        name,
        sources.leaf(master),
        values,
        sources.leaf(bias),
        bias.detach().to(torch.float32, copy=True),
    )


def _vector(
    name: str, flow: Flow, sources: Sources, offset: float = 0.0, dtype: torch.dtype | None = None
) -> Vector:
    """Return a vector's leaf and working copy, this in `dtype`, by default the compute format."""
    master = sources.masters[name]
    return Vector(
        name,
        sources.leaf(master),
        working_vector(master, dtype or flow.compute.dtype, offset),
        offset,
    )
