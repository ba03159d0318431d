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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    picked,
)
from isobit.kernels.backends.reference import ReferenceOps
from isobit.kernels.delta.definition import Parts, through_parts
from isobit.kernels.head import definition as head
from isobit.kernels.matrices import Gradients, values
from isobit.kernels.product.definition import added_product
from isobit.precision import BLOCK, E4M3, PackedFP4, QTensor, QuantSpec, along_rows

META = torch.device("meta")
_PANEL_ROWS, _PANEL_COLUMNS = 16, 32


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor with a shape and no storage."""
    return torch.empty(shape, dtype=dtype, device=META)


def _halves(gate_up: Tensor) -> Tensor:
    return empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)


def _inputs(
    qkv: Tensor, heads: Heads, store: KVStore, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.split((qkv.shape[1] - 2 * store.k.shape[1], *[store.k.shape[1]] * 2), dim=1)
    return empty(*q.shape, dtype=q.dtype), empty(*k.shape, dtype=k.dtype), v


_like = torch.empty_like
_RESULTS: Mapping[str, Callable[..., Any]] = {
    "rms_norm": lambda x, weight, eps, residual=None: (
        _like(x), x if residual is None else _like(x), empty(len(x))
    ),
    "rms_norm_backward": lambda dy, summed, *_: (_like(summed), empty(summed.shape[1])),
    "rotary": lambda x, *_, **__: empty(*x.shape, dtype=x.dtype),
    "attention_inputs": _inputs,
    "kv_write": lambda *_: None,
    "attention": lambda q, *_: (_like(q), empty(*q.shape[:2])),
    "short_convolution": lambda x, *_: _like(x),
    "short_convolution_backward": lambda dy, x, weight, layout, bias=None: tuple(
        _like(tensor) for tensor in (x, weight, bias) if tensor is not None
    ),
    "delta_rule": lambda qkv, gates, heads, *_: empty(
        len(qkv), heads.value_heads, heads.value_dim, dtype=qkv.dtype
    ),
    "gate_mul": lambda activation, gate_up: _halves(gate_up),
    "gate_mul_backward": lambda activation, dh, gate_up: _like(gate_up),
    "cap_logits": lambda logits, cap: logits,
    "token_logprobs": lambda logits, *_: (empty(len(logits)), empty(len(logits))),
}  # fmt: skip
"""The results of operators that are a single kernel in C++."""


class ShapeOps(ReferenceOps):
    """`Ops` without arithmetic. `packs`: weights are packed for products, as the C++ backend does,
    or, with `separate`, as a second engine does on a CPU."""

    backend, order, why = "shapes", "none", "nothing is computed"

    def __init__(self, packs: bool, separate: bool = False) -> None:
        super().__init__("exact", device=META)
        self.consistency, self._packs, self._separate = "bitwise", packs, separate
        vars(self).update(_RESULTS)

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
            return added_product(self, a, b, out, into)
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
        self, dy: Tensor, x: Operand, offsets: Tensor, gradient: QuantSpec | None, name: str,
        into: Gradients = (),
    ) -> list[Tensor | None]:  # fmt: skip
        """Allocate the gradients of all experts in one storage: a model of experts would take
        minutes else; as in C++ those are added to which there are. Left out: the memory in which
        one expert's rows are quantized and multiplied."""
        if into and self._packs and all(previous is not None for previous in into):
            if dy.dtype == torch.float32:  # one expert's at a time, which is added
                empty(dy.shape[1], x.shape[1])
            return list(into)
        return list(empty(len(offsets) - 1, dy.shape[1], x.shape[1]).unbind(0))

    def by_expert(self, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Divide the rows equally among the experts; `offsets` alone has numbers, on the CPU."""
        rows = chosen.numel()
        offsets = torch.tensor([rows * expert // count for expert in range(count + 1)])
        return empty(rows, dtype=torch.int64), empty(*chosen.shape, dtype=torch.int64), offsets

    def quantize(  # type: ignore[override]
        self, x: Tensor, spec: QuantSpec, name: str = "tensor"
    ) -> QTensor:
        high, wide = spec.block((x.shape[0], x.shape[1]))
        scale = empty(math.ceil(x.shape[0] / high), math.ceil(x.shape[1] / wide))
        return QTensor(empty(*x.shape, dtype=spec.format.dtype), scale, spec)

    def quantize_along_tokens(self, x: Operand, spec: QuantSpec, name: str) -> QTensor:
        if isinstance(x, QTensor) and along_rows(spec).granularity != "128x1":
            x = x.dequantize()
        return self.quantize(
            x if isinstance(x, Tensor) else x.data, along_rows(spec), name
        ).transpose()

    def embedding_backward(self, dy: Tensor, tokens: Tensor, count: int) -> Tensor:
        gradient, rows = empty(count, dy.shape[1]), dy.float()
        del rows
        return gradient

    def rms_norm_quantized(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, spec: QuantSpec,
        name: str,
    ) -> tuple[QTensor, Tensor, Tensor]:  # fmt: skip
        if not _row_by_row(spec, x):
            return super().rms_norm_quantized(x, weight, eps, residual, spec, name)
        return self.quantize(x, spec, name), x if residual is None else _like(x), empty(len(x))

    def gate_mul_quantized(
        self, activation: Activation, gate_up: Tensor, spec: QuantSpec, name: str
    ) -> QTensor:
        gated = gate_up[:, : gate_up.shape[1] // 2]
        return self.quantize(
            gated if _row_by_row(spec, gated) else self.gate_mul(activation, gate_up), spec, name
        )

    def attention_backward(
        self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, store: KVStore, layout: Layout,
        *rest: Any, **named: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        keys = layout.num_rows if layout.keys is None else layout.keys.copies.index.shape[0]
        shape = keys, store.k.shape[1], q.shape[2]
        return torch.empty_like(q), empty(*shape, dtype=q.dtype), empty(*shape, dtype=q.dtype)

    def delta_rule_backward(
        self, dout: Tensor, qkv: Tensor, gates: Tensor, heads: DeltaHeads, layout: Layout
    ) -> tuple[Tensor, ...]:
        def backward(inputs: Parts, dout: Tensor) -> Parts:
            group = heads.value_heads // heads.key_heads
            dq, dk = (empty(len(qkv), heads.key_heads, group, heads.key_dim) for _ in range(2))
            rest = [torch.empty_like(tensor) for tensor in inputs[2:]]
            return Parts(dq.sum(2), dk.sum(2), *rest)

        return through_parts(dout, qkv, gates, heads, backward)

    def head_backward(
        self, dlogprobs: Tensor, hidden: Tensor, weight: Prepared, tokens: Tensor,
        temperature: float, dentropy: Tensor | None = None, into: Tensor | None = None,
        trained: bool = True,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        inputs = hidden, weight, tokens, temperature, dentropy, into
        if self._apart(hidden, dentropy):
            return head.head_backward(self, dlogprobs, *inputs, trained)
        logits = [self.product(hidden, weight, None, torch.float32)]
        return self.head_backward_kept(dlogprobs, logits, *inputs, trained=trained)

    def head_backward_kept(
        self, dlogprobs: Tensor, logits: Sequence[Tensor], hidden: Tensor, weight: Prepared,
        tokens: Tensor, temperature: float, dentropy: Tensor | None = None,
        into: Tensor | None = None, from_zero: bool = False, trained: bool = True,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Write each chunk's gradient of logits into their memory, and the weight's once."""
        inputs = hidden, weight, tokens, temperature
        if self._apart(hidden, dentropy):
            return head.head_backward_kept(
                self, dlogprobs, logits, *inputs, dentropy, into, from_zero, trained
            )
        dhidden = torch.empty_like(hidden)
        for rows, some in head.rows_of(logits):
            dlogits = some.view(torch.bfloat16)[:, : some.shape[1]]
            dhidden[rows] = self.gradient_product(dlogits, values(weight).t(), hidden.dtype)
        if not trained:
            return dhidden, None
        return dhidden, empty(*weight.shape) if into is None else into

    def _apart(self, hidden: Tensor, dentropy: Tensor | None) -> bool:
        """Return whether the gradient of logits has other memory than the logits."""
        return not self._packs or dentropy is not None or hidden.dtype != torch.bfloat16


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
