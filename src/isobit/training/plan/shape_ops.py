"""Operators that compute nothing: each returns tensors of the right shape and type, on PyTorch's
`meta` device.

The model's own forward and backward run with them, so what they keep and free is what a run
keeps and frees, for a model of any size, in seconds and without its memory. They make the
tensors that the C++ operators make (`kernels/*/native.py`), one for each result; a product of a
weight that is not packed packs it for its own duration (`packs`), as on a CPU; AMX reads some
where they lie, and takes less. Left out: what an operator takes inside and frees, also where it is
PyTorch's for want of a kernel (NVFP4 on a CPU), and the fused kernels of a GPU, which make fewer
tensors.
"""

import math

import torch
from torch import Tensor

from isobit.kernels import (
    Activation,
    DeltaHeads,
    Heads,
    KVStore,
    Layout,
    Operand,
    Packed,
    Prepared,
    Stacked,
    StateStore,
    picked,
)
from isobit.kernels.backends.composed import Composed
from isobit.kernels.delta.definition import Parts, through_parts
from isobit.kernels.experts import definition as experts
from isobit.kernels.matrices import Gradients
from isobit.kernels.ops import Temperature
from isobit.precision import BLOCK, E4M3, Format, PackedFP4, QTensor, QuantSpec, along_rows

META = torch.device("meta")
_PANEL_ROWS, _PANEL_COLUMNS = 16, 32


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor with a shape and no storage."""
    return torch.empty(shape, dtype=dtype, device=META)


class ShapeOps(Composed):
    """`Ops` without arithmetic. `packs`: weights are packed for products, as the C++ backend does,
    or, with `separate`, as a second engine does on a CPU."""

    backend, order, why = "shapes", "none", "nothing is computed"
    device = META

    def __init__(self, packs: bool, separate: bool = False) -> None:
        self.consistency, self._packs, self._separate = "bitwise", packs, separate

    def prepare(self, weight: Operand, into: Prepared | None = None) -> Prepared:
        if into is not None or not self._packs:
            return into or weight
        if isinstance(weight, QTensor) and not _in_order(weight):
            return weight
        if self._separate and isinstance(weight, Tensor):  # oneDNN's, of BF16 alone
            return (
                Packed(weight, torch.empty_like(weight))
                if weight.dtype == torch.bfloat16
                else weight
            )
        return Packed(weight, _panels(weight))

    def product(
        self, a: Operand, b: Prepared, bias: Tensor | None = None, out: torch.dtype = torch.bfloat16
    ) -> Tensor:
        result = empty(a.shape[0], b.shape[0], dtype=out)
        if self._packs and not isinstance(b, Packed | PackedFP4):
            _panels(b)
        return result

    def gradient_product(
        self, a: Operand, b: Operand, out: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        """Return `into` where the C++ products add to it as they go, so that no result is
        allocated; float32 is multiplied by PyTorch."""
        plain = isinstance(a, Tensor) and a.dtype == torch.float32
        if into is None or not self._packs or plain:
            return super().gradient_product(a, b, out, into)
        return into

    def grouped_product(
        self,
        a: Operand,
        weights: Stacked,
        offsets: Tensor,
        out: torch.dtype,
        rows: Tensor | None = None,
    ) -> Tensor:
        a = a if rows is None else picked(a, rows)
        shape = a.shape[0], weights.shape[1]
        apart = (
            isinstance(a, Tensor) and a.dtype == torch.float32
        )  # expert by expert, and then put together
        packed = weights.data[0] if apart else weights.data
        storage = empty(*shape, dtype=out) if apart else None
        result = empty(*shape, dtype=out)
        del storage
        if self._packs and weights.prepared is None and weights.common is None:
            empty(packed.numel(), dtype=packed.dtype)
        return result

    def grouped_weight_gradient(
        self,
        dy: Tensor,
        x: Operand,
        offsets: Tensor,
        gradient: QuantSpec | None,
        name: str,
        into: Gradients = (),
    ) -> list[Tensor | None]:
        """Allocate the gradients of all experts in one storage: a model of experts would take
        minutes else. Left out: the memory in which one expert's rows are quantized and
        multiplied."""
        return list(empty(len(offsets) - 1, dy.shape[1], x.shape[1]).unbind(0))

    def by_expert(self, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Divide the rows equally among the experts; `offsets` alone has numbers, on the CPU."""
        rows = chosen.numel()
        offsets = torch.tensor([rows * expert // count for expert in range(count + 1)])
        return empty(rows, dtype=torch.int64), empty(*chosen.shape, dtype=torch.int64), offsets

    def route(
        self, logits: Tensor, count: int, normalize: bool, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return experts.route(logits, count, normalize, given)

    def quantize(self, x: Tensor, spec: QuantSpec, name: str = "tensor") -> QTensor:
        high, wide = spec.block((x.shape[0], x.shape[1]))
        scale = empty(math.ceil(x.shape[0] / high), math.ceil(x.shape[1] / wide))
        return QTensor(empty(*x.shape, dtype=spec.format.dtype), scale, spec)

    def quantize_along_tokens(self, x: Operand, spec: QuantSpec, name: str) -> QTensor:
        if isinstance(x, QTensor) and along_rows(spec).granularity != "128x1":
            x = x.dequantize()
        return self.quantize(
            x if isinstance(x, Tensor) else x.data, along_rows(spec), name
        ).transpose()

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        summed = x if residual is None else torch.empty_like(x)
        return torch.empty_like(x), summed, empty(x.shape[0])

    def rms_norm_quantized(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None,
        spec: QuantSpec,
        name: str,
    ) -> tuple[QTensor, Tensor, Tensor]:
        if not _row_by_row(spec, x):
            return super().rms_norm_quantized(x, weight, eps, residual, spec, name)
        summed = x if residual is None else torch.empty_like(x)
        return self.quantize(x, spec, name), summed, empty(x.shape[0])

    def rms_norm_backward(
        self, dy: Tensor, summed: Tensor, weight: Tensor, rstd: Tensor
    ) -> tuple[Tensor, Tensor]:
        return torch.empty_like(summed), empty(summed.shape[1])

    def rotary(
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool = False
    ) -> Tensor:
        return empty(*x.shape, dtype=x.dtype)

    def attention_inputs(
        self, qkv: Tensor, heads: Heads, store: KVStore, layout: Layout
    ) -> tuple[Tensor, Tensor, Tensor]:
        kv_heads = store.k.shape[1]
        q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
        return empty(*q.shape, dtype=q.dtype), empty(*k.shape, dtype=k.dtype), v

    def embedding_backward(self, dy: Tensor, tokens: Tensor, count: int) -> Tensor:
        gradient, rows = empty(count, dy.shape[1]), dy.float()
        del rows
        return gradient

    def kv_write(self, store: KVStore, k: Tensor, v: Tensor, layout: Layout) -> None:
        """Do nothing: the store exists."""

    def attention(
        self,
        q: Tensor,
        store: KVStore,
        layout: Layout,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
        probabilities: Format | None = None,
    ) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), empty(*q.shape[:2])

    def attention_backward(
        self,
        dout: Tensor,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        store: KVStore,
        layout: Layout,
        scale: float,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys = layout.num_rows if layout.keys is None else layout.keys.copies.index.shape[0]
        shape = keys, store.k.shape[1], q.shape[2]
        return torch.empty_like(q), empty(*shape, dtype=q.dtype), empty(*shape, dtype=q.dtype)

    def short_convolution(
        self,
        x: Tensor,
        weight: Tensor,
        store: StateStore | None,
        layout: Layout,
        bias: Tensor | None = None,
    ) -> Tensor:
        return torch.empty_like(x)

    def short_convolution_backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, layout: Layout, bias: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        gradients = torch.empty_like(x), torch.empty_like(weight)
        return gradients if bias is None else (*gradients, torch.empty_like(bias))

    def delta_rule(
        self,
        qkv: Tensor,
        gates: Tensor,
        heads: DeltaHeads,
        store: StateStore | None,
        layout: Layout,
    ) -> Tensor:
        return empty(len(qkv), heads.value_heads, heads.value_dim, dtype=qkv.dtype)

    def delta_rule_backward(
        self, dout: Tensor, qkv: Tensor, gates: Tensor, heads: DeltaHeads, layout: Layout
    ) -> tuple[Tensor, ...]:
        def backward(inputs: Parts, dout: Tensor) -> Parts:
            group = heads.value_heads // heads.key_heads
            dq, dk = (empty(len(qkv), heads.key_heads, group, heads.key_dim) for _ in range(2))
            rest = [torch.empty_like(tensor) for tensor in inputs[2:]]
            return Parts(dq.sum(2), dk.sum(2), *rest)

        return through_parts(dout, qkv, gates, heads, backward)

    def gate_mul(self, activation: Activation, gate_up: Tensor) -> Tensor:
        return empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)

    def gate_mul_quantized(
        self, activation: Activation, gate_up: Tensor, spec: QuantSpec, name: str
    ) -> QTensor:
        gated = gate_up[:, : gate_up.shape[1] // 2]
        return self.quantize(
            gated if _row_by_row(spec, gated) else self.gate_mul(activation, gate_up), spec, name
        )

    def gate_mul_backward(self, activation: Activation, dh: Tensor, gate_up: Tensor) -> Tensor:
        return torch.empty_like(gate_up)

    def cap_logits(self, logits: Tensor, cap: float) -> Tensor:
        return logits

    def sample(self, logits: Tensor, keys: Tensor, temperature: Temperature) -> Tensor:
        return empty(logits.shape[0], dtype=torch.int64)

    def round_stochastically(self, x: Tensor, seed: int, step: int, first: int) -> Tensor:
        return torch.empty_like(x, dtype=torch.bfloat16)

    def token_logprobs(
        self, logits: Tensor, tokens: Tensor, temperature: Temperature
    ) -> tuple[Tensor, Tensor]:
        return empty(logits.shape[0]), empty(logits.shape[0])


def _panels(weight: Operand) -> Tensor:
    """Return a matrix in the order in which a CPU's products read it, in whole panels."""
    data = weight.data if isinstance(weight, QTensor) else weight
    depth = 1 if data.dtype == torch.float32 else _PANEL_COLUMNS
    rows, columns = (math.ceil(n / to) * to for n, to in zip(data.shape, (_PANEL_ROWS, depth)))
    return empty(rows * columns, dtype=data.dtype)


def _in_order(weight: QTensor) -> bool:
    """Return whether the C++ products read codes with a weight's scales."""
    return weight.spec.scale == "ue8m0" or weight.block[1] in (BLOCK, weight.shape[1])


def _row_by_row(spec: QuantSpec, x: Tensor) -> bool:
    """Return whether a row is quantized when it is computed, and never stored otherwise."""
    return (
        spec.format is E4M3
        and spec.scale != "nvfp4"
        and spec.block((x.shape[0], x.shape[1]))[0] == 1
    )
