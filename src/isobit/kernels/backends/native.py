"""The native backend: the operators in C++ (`*.cpp` in the operators' rooms), called through ctypes with data pointers.

Same definitions and signatures as the reference backend. Products, norms, gates and attention under `bitwise`, FP8
products under `exact`, linear attention, quantization, keys and values and sampled tokens are its bits; elsewhere sums
run in another fixed order in float64, and results differ by at most a unit in the last place
(`tests/kernels/test_native.py`), gradients of linear attention in float32 (`test_delta.py`). `prepare` packs a weight
for the inner loop; without it every product does so anew. What C++ does not cover (E5M2, scales along K in blocks other
than 128 or a whole row, routing) goes to the reference operators.

Left out: the library (`native/build.py`), the C interface (`native/interface.py`), norms and gates (`norms/native.py`).
"""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional

from isobit.kernels.attention.definition import assert_whole
from isobit.kernels.attention.probabilities import boundaries
from isobit.kernels.backends.reference import ReferenceOps
from isobit.kernels.matrices import Operand, Packed, Prepared, Stacked, by_rows, picked, values, weight_of
from isobit.kernels.native.interface import (
    ALL_KEYS,
    KINDS,
    PLAIN,
    AttentionArguments,
    grid,
    nibble_arguments,
    pointer,
    product_arguments,
)
from isobit.kernels.norms.native import RowOperators, check_rows
from isobit.kernels.ops import Layout, Temperature
from isobit.kernels.optim.definition import check_stochastic
from isobit.kernels.product.native import OrderedProducts, is_packed
from isobit.kernels.product.ordered import computes
from isobit.kernels.stores import KVStore
from isobit.precision import BLOCK, Format, Nibbles, QTensor
from isobit.precision.nibbles import GROUP

_KINDS = {torch.float8_e4m3fn: KINDS[torch.float8_e4m3fn], **PLAIN}
_CODES = (torch.float8_e4m3fn, torch.int8)
"""Of keys and values."""
_FEW_ROWS = 256

mkldnn = torch.ops.mkldnn
_ONEDNN_PACKS = hasattr(mkldnn, "_linear_pointwise") and mkldnn._is_mkldnn_bf16_supported()


class NativeOps(RowOperators):
    """`isobit.kernels.ops.Ops` in C++."""

    backend = "native"
    rounds_probabilities = False
    """To BF16, before P·V, where they have no format of their own."""

    def __init__(self, consistency: str = "bitwise", why: str = "") -> None:
        super().__init__()
        self._reference = reference = ReferenceOps(consistency, why)
        self.consistency, self.order, sums = reference.consistency, reference.order, reference.sums
        self.why = why
        self._fast = consistency == "fast"
        self._ordered = None if sums is None else OrderedProducts(sums)
        self._single = sums is not None
        if self._single:
            check_rows()

    def prepare(self, weight: Operand, into: Prepared | None = None) -> Prepared:
        kept = into if isinstance(into, Packed) else None
        if self._fast:
            return self._fast_prepare(weight, kept)
        if self._ordered is not None and is_packed(weight):
            return self._ordered.prepare(weight, kept)
        data = weight.data if isinstance(weight, QTensor) else weight
        if data.dtype not in _KINDS or (isinstance(weight, QTensor) and not _blocks_are_native(weight)):
            return weight
        panels = self._pack(data, None if kept is None else kept.panels)
        return kept or Packed(weight, panels)

    def product(self, a: Operand, b: Prepared, bias: Tensor | None = None, out: torch.dtype = torch.bfloat16) -> Tensor:
        if isinstance(b, Nibbles):
            return self._nibble_product(a, b, bias, out)
        if self._fast:
            return self._fast_product(a, b, bias, out)
        if self._ordered is not None:
            if computes(a, weight_of(b)):
                return self._ordered.product(a, b, bias, out)
            b = weight_of(b) if is_packed(weight_of(b)) else b
        panels, b = b.panels if isinstance(b, Packed) else None, weight_of(b)
        if isinstance(a, QTensor) and isinstance(b, QTensor):
            if not (_blocks_are_native(a) and _blocks_are_native(b)):
                return self._reference.product(a, b, bias, out)
            return self._product(a.data, a, b.data, b, panels, bias, out)
        return self._product(values(a), None, values(b), None, None if isinstance(b, QTensor) else panels, bias, out)

    def grouped_product(
        self, a: Operand, weights: Stacked, offsets: Tensor, out: torch.dtype, rows: Tensor | None = None
    ) -> Tensor:
        a = a if rows is None else picked(a, rows)
        bounds, first = offsets.tolist(), weights.experts[0]
        if self._ordered is None or not bounds[-1] or isinstance(first, Nibbles) or not computes(a, first):
            return super().grouped_product(a, weights, offsets, out)
        return self._ordered.grouped_product(a, weights, bounds, out)

    def _product(
        self, a: Tensor, scales_a: QTensor | None, b: Tensor, scales_b: QTensor | None, panels: Tensor | None,
        bias: Tensor | None, out: torch.dtype,
    ) -> Tensor:  # fmt: skip
        plain = [out] if bias is None else [out, bias.dtype]
        if a.dtype not in _KINDS or b.dtype not in _KINDS or any(dtype not in PLAIN for dtype in plain):
            return self._reference.product(scales_a or a, scales_b or b, bias, out)
        result = torch.empty((a.shape[0], b.shape[0]), dtype=out)
        panels = self._pack(b) if panels is None else panels
        bias = None if bias is None else bias.contiguous()
        arguments = product_arguments(a, b, panels, bias, result)
        if scales_a is not None and scales_b is not None:
            assert _blocks_are_native(scales_a)
            assert _blocks_are_native(scales_b)
            arguments.scaled = 1
            arguments.scale_a[:], arguments.scale_b[:] = grid(scales_a), grid(scales_b)
        self._lib.isobit_product(ctypes.byref(arguments))
        return result

    def _nibble_product(self, a: Operand, b: Nibbles, bias: Tensor | None, out: torch.dtype) -> Tensor:
        """With b decoded where it is read, in the order of the same codes a byte each; by parts where they have others:
        against scales that are not for 16 columns, and under `fast`."""
        data = a.data if isinstance(a, QTensor) else a
        plain = [out] if bias is None else [out, bias.dtype]
        fits = a.block[1] == GROUP if isinstance(a, QTensor) else True
        if self._fast or not fits or data.dtype not in _KINDS or any(dtype not in PLAIN for dtype in plain):
            return by_rows(self.product, a, b, bias, out)
        result = torch.empty((a.shape[0], b.shape[0]), dtype=out)
        bias = None if bias is None else bias.contiguous()
        arguments = nibble_arguments(data, b, bias, result)
        if isinstance(a, QTensor):
            arguments.scaled = 1
            arguments.scale_a[:] = grid(a)
        self._lib.isobit_product(ctypes.byref(arguments))
        return result

    def _pack(self, b: Tensor, into: Tensor | None = None) -> Tensor:
        """Panels [N / 16][K][16] of a matrix [N, K]."""
        columns, inner = b.shape
        panels = torch.empty(-(-columns // 16) * inner * 16, dtype=b.dtype) if into is None else into
        self._lib.isobit_pack(
            _KINDS[b.dtype], b.data_ptr(), columns, inner, *b.stride(), panels.data_ptr(), torch.get_num_threads()
        )
        return panels

    def _fast_prepare(self, weight: Operand, kept: Packed | None) -> Prepared:
        """With BF16 values where the weight is quantized, and with oneDNN's blocked layout, which saves a quarter of
        the time of decoding."""
        found = self.dequantize(weight) if isinstance(weight, QTensor) else weight
        if found.dtype != torch.bfloat16 or (found is weight and not _ONEDNN_PACKS):
            return weight
        panels = _reordered(found) if _ONEDNN_PACKS else None
        if kept is None:
            return Packed(weight, panels, None if found is weight else found)
        for old, new in ((kept.panels, panels), (kept.values, found)):
            if old is not None and new is not None:
                old.copy_(new)
        return kept

    def _fast_product(self, a: Operand, b: Operand | Packed, bias: Tensor | None, out: torch.dtype) -> Tensor:
        left = self.dequantize(a) if isinstance(a, QTensor) else a
        packed, b = b if isinstance(b, Packed) else None, weight_of(b)
        if packed is not None and packed.values is not None:
            right = packed.values
        else:
            right = self.dequantize(b) if isinstance(b, QTensor) else b
        if left.dtype != right.dtype:
            left, right = left.bfloat16(), right.bfloat16()
        bias = None if bias is None else bias.to(left.dtype)
        if left.dtype == torch.bfloat16 and left.shape[0] <= _FEW_ROWS and _ONEDNN_PACKS:
            panels = _reordered(right) if packed is None else packed.panels
            return mkldnn._linear_pointwise(left.contiguous(), panels, bias, "none", [], "").to(out)
        return functional.linear(left, right, bias).to(out)

    def route(
        self, logits: Tensor, count: int, normalize: bool, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._reference.route(logits, count, normalize, given)

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
        if not _attention_is_native(q, store):
            return self._reference.attention(q, store, layout, scale, window, sinks, probabilities)
        q = q.contiguous()
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        arguments = _attention_arguments(q, store, layout, scale, window, out, lse)
        arguments.single = self._single or self._fast
        arguments.sinks = None if sinks is None else (sinks := sinks.contiguous()).data_ptr()
        arguments.probabilities = self._kind_of(probabilities, q)
        arguments.boundaries = boundaries().data_ptr()
        self._lib.isobit_attention(ctypes.byref(arguments))
        return out, lse

    def _kind_of(self, probabilities: Format | None, q: Tensor) -> int:
        """What weights are rounded to before they meet values; FP32 where they are not."""
        if probabilities is not None:
            return KINDS[probabilities.dtype]
        return KINDS[q.dtype if self.rounds_probabilities else torch.float32]

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
        if not _attention_is_native(q, store) or dout.dtype != q.dtype:
            return self._reference.attention_backward(dout, q, out, lse, store, layout, scale, window)
        q, out, lse, dout = q.contiguous(), out.contiguous(), lse.contiguous(), dout.contiguous()
        dq = torch.empty_like(q)
        assert_whole(layout)
        keys = layout.num_rows if layout.keys is None else layout.keys.copies.index.shape[0]
        dk = torch.empty((keys, store.k.shape[1], q.shape[2]), dtype=q.dtype)
        dv = torch.empty_like(dk)
        arguments = _attention_arguments(q, store, layout, scale, window, out, lse)
        arguments.dout, arguments.dq = dout.data_ptr(), dq.data_ptr()
        arguments.dk, arguments.dv = dk.data_ptr(), dv.data_ptr()
        arguments.single = self._single
        self._lib.isobit_attention_backward(ctypes.byref(arguments))
        return dq, dk, dv

    def token_logprobs(self, logits: Tensor, tokens: Tensor, temperature: Temperature) -> tuple[Tensor, Tensor]:
        if logits.dtype != torch.float32:
            return self._reference.token_logprobs(logits, tokens, temperature)
        logits, tokens = logits.contiguous(), tokens.contiguous()
        assert not tokens.numel() or (int(tokens.min()) >= 0 and int(tokens.max()) < logits.shape[1])
        logprobs, entropy, each = torch.empty(logits.shape[0]), torch.empty(logits.shape[0]), _each(temperature)
        self._lib.isobit_token_logprobs(
            logits.data_ptr(), tokens.data_ptr(), *logits.shape, each.data_ptr(), int(each.ndim), logprobs.data_ptr(),
            entropy.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return logprobs, entropy

    def sample(self, logits: Tensor, keys: Tensor, temperature: Temperature) -> Tensor:
        if logits.dtype != torch.float32:
            return self._reference.sample(logits, keys, temperature)
        logits, keys = logits.contiguous(), keys.contiguous()
        tokens, each = torch.empty(logits.shape[0], dtype=torch.int64), _each(temperature)
        self._lib.isobit_sample(
            logits.data_ptr(), keys.data_ptr(), *logits.shape, each.data_ptr(), int(each.ndim), tokens.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return tokens

    def square_sums(self, x: Tensor) -> Tensor:
        assert x.ndim == 2
        x = x.contiguous()
        sums = torch.empty(x.shape[0], dtype=torch.float64)
        self._lib.isobit_square_sums(x.data_ptr(), *x.shape, sums.data_ptr(), torch.get_num_threads())
        return sums

    def round_stochastically(self, x: Tensor, seed: int, step: int, first: int) -> Tensor:
        check_stochastic(x, first)
        x = x.contiguous()
        out = torch.empty_like(x, dtype=torch.bfloat16)
        self._lib.isobit_round_stochastically(
            x.data_ptr(), out.data_ptr(), len(x), first, seed, step, torch.get_num_threads()
        )
        return out


def _reordered(weight: Tensor) -> Tensor:
    """A BF16 matrix in oneDNN's layout for few rows."""
    return mkldnn._reorder_linear_weight(weight.contiguous(), _FEW_ROWS)


def _each(temperature: Temperature) -> Tensor:
    """As C++ reads it, one step of `ndim` numbers a row: a lone number for all rows, or one number for each."""
    return temperature.float().contiguous() if isinstance(temperature, Tensor) else torch.tensor(float(temperature))


def _blocks_are_native(x: QTensor) -> bool:
    return x.block[1] in (BLOCK, x.shape[1])


def _attention_is_native(q: Tensor, store: KVStore) -> bool:
    if q.dtype not in PLAIN or not store.k.is_contiguous() or not store.v.is_contiguous():
        return False
    return store.k.dtype in PLAIN if store.kv is None else store.kv.format.dtype in _CODES


def _attention_arguments(
    q: Tensor, store: KVStore, layout: Layout, scale: float, window: int | None, out: Tensor, lse: Tensor
) -> AttentionArguments:
    rows, heads, dim = q.shape
    return AttentionArguments(
        PLAIN[q.dtype], PLAIN[store.k.dtype] if store.kv is None else KINDS[store.kv.format.dtype],
        q.data_ptr(), store.k.data_ptr(), store.v.data_ptr(), pointer(store.k_scale), pointer(store.v_scale),
        layout.row_start.data_ptr(), layout.context.data_ptr(), layout.page_table.data_ptr(),
        layout.page_table.shape[1], layout.page_size, layout.context.shape[0], heads, store.k.shape[1], dim, scale,
        out.data_ptr(), lse.data_ptr(), None, None, None, None, torch.get_num_threads(), rows, False,
        0 if store.calibrated else 1, KINDS[torch.float32], ALL_KEYS if window is None else window, None, None,
    )  # fmt: skip
