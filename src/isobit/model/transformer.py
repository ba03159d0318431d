"""One transformer for rollout, learner and reference: Llama, Qwen2 and Qwen3 in the same forward.

FP32 masters are the parameters. `sync` makes *working* weights of them, once per flow: quantized, or in the compute
format. Where rollout and learner have one flow, the working weights are one storage, and cannot be stale. The forward
takes rows and a layout, so that decoding, chunked prefill and the learner's packed sequences are the same code.

Query, key and value projections are one matrix, and so are gate and up. Left out: where weights come from (`model.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from isobit.kernels import KVStore, Layout, Operand, Ops
from isobit.model import autograd
from isobit.model.autograd import Vector, Weight
from isobit.model.config import ModelConfig
from isobit.precision import Flow, Precision, QTensor

USES = ("rollout", "learner")
_HEAD_ELEMENTS = 1 << 22  # logits held at a time by head_logprobs


@dataclass(frozen=True, eq=False)
class _Outside:
    """Working weights outside the layers. A tied head is the embedding's storage."""

    embed: Vector
    final_norm: Vector
    head: Weight


@dataclass(frozen=True, eq=False)
class _Layer:
    flow: Flow
    input_norm: Vector
    qkv: Weight
    q_norm: Vector | None
    k_norm: Vector | None
    o: Weight
    post_norm: Vector
    gate_up: Weight
    down: Weight


@dataclass(frozen=True, eq=False)
class _Working:
    """All working weights of one use."""

    outside: _Outside
    layers: tuple[_Layer, ...]

    def operands(self) -> dict[int, Operand]:
        """Every working tensor, by identity."""
        found: list[Operand | None] = []
        for part in (self.outside, *self.layers):
            for value in vars(part).values():
                if isinstance(value, (Weight, Vector)):
                    found.append(value.working)
                if isinstance(value, Weight):
                    found.append(value.bias)
        return {id(operand): operand for operand in found if operand is not None}


class Transformer:
    """Masters, working weights and the forward.

    `parameters` maps names such as `layers.0.qkv` to FP32 masters, in a fixed order.
    """

    def __init__(self, config: ModelConfig, precision: Precision, ops: Ops, masters: dict[str, Tensor]) -> None:
        shapes = parameter_shapes(config)
        assert {name: tuple(t.shape) for name, t in masters.items()} == shapes
        self.config, self.precision, self.ops = config, precision, ops
        self.parameters = {name: nn.Parameter(masters[name].float()) for name in shapes}
        self.weights_version = -1
        self._tables = config.rope.tables(0, config.head_dim)
        self._working: dict[str, _Working] = {}
        self.sync()

    @torch.no_grad()
    def sync(self) -> None:
        """Make working weights of the masters; both uses change at once, and the version with them."""
        made: dict[tuple[int | None, Flow], _Layer | _Outside] = {}  # so that what has one flow has one storage
        self._working = {use: self._make_working(use, made) for use in USES}
        self.weights_version += 1

    def hidden(
        self, tokens: Tensor, layout: Layout, stores: Sequence[KVStore] | None = None, use: str = "learner"
    ) -> Tensor:
        """Hidden states [T, hidden] after the final norm, for tokens [T] int64.

        `stores` hold the keys and values of earlier rows and receive the new ones, one per layer; without them the rows
        are whole packed sequences, and temporary stores serve.
        """
        working, eps, ops = self._working[use], self.config.rms_eps, self.ops
        tables, outside = self._rope_tables(layout), working.outside
        x, residual = autograd.embedding(tokens, outside.embed), None
        for index, layer in enumerate(working.layers):
            normed, residual = autograd.rms_norm(x, residual, layer.input_norm, eps, ops)
            store = stores[index] if stores is not None else self._temporary_store(layout, layer.flow)
            x = self._attend(normed, layer, tables, store, layout)
            normed, residual = autograd.rms_norm(x, residual, layer.post_norm, eps, ops)
            gate_up = autograd.linear(normed, layer.gate_up, ops)
            x = autograd.linear(autograd.silu_mul(gate_up, ops), layer.down, ops)
        return autograd.rms_norm(x, residual, outside.final_norm, eps, ops)[0]

    def logits(self, hidden: Tensor, use: str = "learner") -> Tensor:
        """Logits [T, vocabulary] float32, without gradient."""
        return self.ops.product(hidden, self._working[use].outside.head.working, None, torch.float32)

    def head_logprobs(
        self, hidden: Tensor, targets: Tensor, temperature: float = 1.0, use: str = "learner", chunk: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """(log-probability of `targets`, entropy) [T] float32, in chunks of rows: never [T, vocabulary] at once."""
        rows = chunk if chunk is not None else max(16, _HEAD_ELEMENTS // self.config.vocab_size)
        return autograd.head_logprobs(hidden, self._working[use].outside.head, targets, temperature, rows, self.ops)

    def rollout_weights(self) -> list[Weight]:
        """The linear layers as the rollout multiplies them."""
        return [w for layer in self._working["rollout"].layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)]

    def working_bytes(self) -> tuple[int, int]:
        """Bytes of the rollout's working weights, and of those of the learner that are not the rollout's."""
        rollout, learner = (self._working[use].operands() for use in USES)
        own = [operand for key, operand in learner.items() if key not in rollout]
        return sum(map(_nbytes, rollout.values())), sum(map(_nbytes, own))

    def _attend(
        self, normed: Tensor, layer: _Layer, tables: tuple[Tensor, Tensor], store: KVStore, layout: Layout
    ) -> Tensor:
        config, ops = self.config, self.ops
        rows, dim = normed.shape[0], config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = autograd.linear(normed, layer.qkv, ops).view(rows, heads + 2 * kv_heads, dim)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = autograd.rms_norm(q.reshape(-1, dim), None, layer.q_norm, config.rms_eps, ops)[0].view(q.shape)
            k = autograd.rms_norm(k.reshape(-1, dim), None, layer.k_norm, config.rms_eps, ops)[0].view(k.shape)
        q = autograd.rotary(q, tables, layout.positions, ops)
        k = autograd.rotary(k, tables, layout.positions, ops)
        out = autograd.attention(q, k, v, store, layout, dim**-0.5, ops)
        return autograd.linear(out.view(rows, heads * dim), layer.o, ops)

    def _rope_tables(self, layout: Layout) -> tuple[Tensor, Tensor]:
        needed = int(layout.positions.max()) + 1 if layout.num_rows else 0
        if needed > self._tables[0].shape[0]:
            size = min(max(needed, 2 * self._tables[0].shape[0], 64), max(needed, self.config.max_positions))
            self._tables = self.config.rope.tables(size, self.config.head_dim)
        return self._tables

    def _temporary_store(self, layout: Layout, flow: Flow) -> KVStore:
        slots, config = layout.num_slots_needed, self.config
        return KVStore.allocate(slots, config.num_kv_heads, config.head_dim, flow.kv, flow.compute)

    def _make_working(self, use: str, made: "dict[tuple[int | None, Flow], _Layer | _Outside]") -> _Working:
        parts: list[_Layer | _Outside] = []
        for index in (None, *range(self.config.num_layers)):
            flow = self.precision.flow(use, index, self.config.num_layers)
            if (index, flow) not in made:
                made[index, flow] = self._make_outside(flow) if index is None else self._make_layer(index, flow)
            parts.append(made[index, flow])
        outside, *layers = parts
        assert isinstance(outside, _Outside)
        return _Working(outside, tuple(layer for layer in layers if isinstance(layer, _Layer)))

    def _make_outside(self, flow: Flow) -> _Outside:
        embed = self._vector("embed", flow)
        head = embed if self.config.tie_embeddings else self._vector("head", flow)
        return _Outside(embed, self._vector("final_norm", flow), Weight("head", head.master, head.working, None, None))

    def _make_layer(self, index: int, flow: Flow) -> _Layer:
        config, prefix = self.config, f"layers.{index}."
        dgrad, wgrad = self.precision.backward(index, config.num_layers)
        gradient = self.precision.gradient if flow.activation is not None else None

        def weight(name: str) -> Weight:
            master, bias = self.parameters[prefix + name], self.parameters.get(f"{prefix}{name}_bias")
            working: Operand = (
                self.ops.quantize(master.detach(), flow.weight, prefix + name)
                if flow.weight is not None
                else master.detach().to(flow.compute.dtype, copy=True)
            )
            rounded = None if bias is None else bias.detach().to(flow.compute.dtype, copy=True)
            return Weight(prefix + name, master, working, bias, rounded, flow.activation, gradient, dgrad, wgrad)

        return _Layer(
            flow=flow,
            input_norm=self._vector(prefix + "input_norm", flow),
            qkv=weight("qkv"),
            q_norm=self._vector(prefix + "q_norm", flow) if config.qk_norm else None,
            k_norm=self._vector(prefix + "k_norm", flow) if config.qk_norm else None,
            o=weight("o"),
            post_norm=self._vector(prefix + "post_norm", flow),
            gate_up=weight("gate_up"),
            down=weight("down"),
        )

    def _vector(self, name: str, flow: Flow) -> Vector:
        master = self.parameters[name]
        return Vector(master, master.detach().to(flow.compute.dtype, copy=True))


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of every master, in order."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        prefix = f"layers.{index}."
        shapes[prefix + "input_norm"] = (hidden,)
        shapes[prefix + "qkv"] = (config.qkv_size, hidden)
        if config.qkv_bias:
            shapes[prefix + "qkv_bias"] = (config.qkv_size,)
        if config.qk_norm:
            shapes[prefix + "q_norm"] = shapes[prefix + "k_norm"] = (config.head_dim,)
        shapes[prefix + "o"] = (hidden, config.num_heads * config.head_dim)
        if config.o_bias:
            shapes[prefix + "o_bias"] = (hidden,)
        shapes[prefix + "post_norm"] = (hidden,)
        shapes[prefix + "gate_up"] = (2 * inner, hidden)
        shapes[prefix + "down"] = (hidden, inner)
        if config.mlp_bias:
            shapes |= {prefix + "gate_up_bias": (2 * inner,), prefix + "down_bias": (hidden,)}
    shapes["final_norm"] = (hidden,)
    if not config.tie_embeddings:
        shapes["head"] = (config.vocab_size, hidden)
    return shapes


def _nbytes(operand: Operand) -> int:
    return operand.nbytes if isinstance(operand, QTensor) else operand.numel() * operand.element_size()
