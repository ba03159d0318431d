"""The native backend: the operators in C++ (`*.cpp` beside this file), called through ctypes with data pointers.

Same definitions and signatures as the reference backend. FP8 products, quantization, keys and values and sampled tokens
are its bits; elsewhere sums run in another fixed order in float64, and results differ by at most a unit in the last
place (`tests/kernels/test_native.py`). `prepare` packs a weight for the inner loop; without it every product does so
anew. What C++ does not cover (E5M2, scales along K in blocks other than 128 or a whole row, routing) goes to the
reference operators.

Left out: the library (`build.py`) and the C interface (`interface.py`).
"""

import ctypes
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from isobit.errors import NonFiniteError
from isobit.kernels.composed import Composed
from isobit.kernels.matrices import Operand, Packed, Prepared, values, weight_of
from isobit.kernels.native.build import BuildFailed, library, origin
from isobit.kernels.native.interface import AttentionArguments, ProductArguments
from isobit.kernels.native.ordered import OrderedProducts, is_packed
from isobit.kernels.reference import ReferenceOps
from isobit.kernels.reference.tdp32 import computes
from isobit.kernels.types import KVStore, Layout, Temperature
from isobit.precision import BLOCK, E4M3, QTensor, QuantSpec, nonfinite_message

_E4M3, _BF16, _FP32 = 0, 1, 2
_KINDS = {torch.float8_e4m3fn: _E4M3, torch.bfloat16: _BF16, torch.float32: _FP32}
_PLAIN = {torch.bfloat16: _BF16, torch.float32: _FP32}
_FEW_ROWS = 256

mkldnn = torch.ops.mkldnn
_ONEDNN_PACKS = hasattr(mkldnn, "_linear_pointwise") and mkldnn._is_mkldnn_bf16_supported()


@cache
def available() -> tuple[bool, str]:
    """(whether the backend works here, why): loads or compiles it at the first call."""
    try:
        return True, origin()
    except BuildFailed as error:
        return False, str(error)


class NativeOps(Composed):
    """`isobit.kernels.types.Ops` in C++."""

    backend = "native"

    def __init__(self, consistency: str = "bitwise", why: str = "") -> None:
        self.consistency = consistency
        self.why = why
        self._lib = library()
        self._reference = ReferenceOps(consistency, why)
        self.order = self._reference.order
        self._fast = consistency == "fast"
        self._ordered: OrderedProducts | None = None
        if consistency == "bitwise":
            self._ordered = OrderedProducts()

    def quantize(self, x: Tensor, spec: QuantSpec, name: str = "tensor") -> QTensor:
        kind = _PLAIN.get(x.dtype)
        if kind is None or spec.format is not E4M3 or spec.scale not in ("fp32", "ue8m0") or x.numel() == 0:
            return self._reference.quantize(x, spec, name)
        assert x.ndim == 2, f"quantize expects a matrix, got shape {tuple(x.shape)}"
        x = x.contiguous()
        rows, columns = x.shape
        block_rows, block_columns = spec.block((rows, columns))
        data = torch.empty((rows, columns), dtype=torch.float8_e4m3fn)
        scale = torch.empty((-(-rows // block_rows), -(-columns // block_columns)))
        failed = self._lib.isobit_quantize(
            kind, x.data_ptr(), rows, columns, block_rows, block_columns, spec.scale == "ue8m0",
            data.data_ptr(), scale.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise NonFiniteError(nonfinite_message(name, spec))
        return QTensor(data, scale, spec)

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

    def _product(
        self, a: Tensor, scales_a: QTensor | None, b: Tensor, scales_b: QTensor | None, panels: Tensor | None,
        bias: Tensor | None, out: torch.dtype,
    ) -> Tensor:  # fmt: skip
        kind_a, kind_b, out_kind = _KINDS.get(a.dtype), _KINDS.get(b.dtype), _PLAIN.get(out)
        if kind_a is None or kind_b is None or out_kind is None or (bias is not None and bias.dtype not in _PLAIN):
            return self._reference.product(scales_a or a, scales_b or b, bias, out)
        (rows, inner), columns = a.shape, b.shape[0]
        assert b.shape[1] == inner, f"product of {tuple(a.shape)} and {tuple(b.shape)}"
        result = torch.empty((rows, columns), dtype=out)
        panels = self._pack(b) if panels is None else panels
        bias = None if bias is None else bias.contiguous()
        arguments = ProductArguments(
            kind_a, rows, columns, inner, a.data_ptr(), *a.stride(), kind_b, panels.data_ptr(),
            bias.data_ptr() if bias is not None else None, _PLAIN[bias.dtype] if bias is not None else 0,
            result.data_ptr(), out_kind, torch.get_num_threads(), scales_a is not None,
        )  # fmt: skip
        if scales_a is not None and scales_b is not None:
            arguments.scale_a[:] = _grid(scales_a)
            arguments.scale_b[:] = _grid(scales_b)
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
        found = self._dequantize(weight) if isinstance(weight, QTensor) else weight
        if found.dtype != torch.bfloat16 or (found is weight and not _ONEDNN_PACKS):
            return weight
        panels = _reordered(found) if _ONEDNN_PACKS else None
        if kept is None:
            return Packed(weight, panels, None if found is weight else found)
        for old, new in ((kept.panels, panels), (kept.values, found)):
            if old is not None and new is not None:
                old.copy_(new)
        return kept

    def _fast_product(self, a: Operand, b: Prepared, bias: Tensor | None, out: torch.dtype) -> Tensor:
        left = self._dequantize(a) if isinstance(a, QTensor) else a
        packed, b = b if isinstance(b, Packed) else None, weight_of(b)
        if packed is not None and packed.values is not None:
            right = packed.values
        else:
            right = self._dequantize(b) if isinstance(b, QTensor) else b
        if left.dtype != right.dtype:
            left, right = left.bfloat16(), right.bfloat16()
        bias = None if bias is None else bias.to(left.dtype)
        if left.dtype == torch.bfloat16 and left.shape[0] <= _FEW_ROWS and _ONEDNN_PACKS:
            panels = _reordered(right) if packed is None else packed.panels
            return mkldnn._linear_pointwise(left.contiguous(), panels, bias, "none", [], "").to(out)
        return functional.linear(left, right, bias).to(out)

    def _dequantize(self, x: QTensor) -> Tensor:
        """The values in bfloat16; exact where scales are powers of two."""
        if not _dequantizes_natively(x):
            return x.dequantize().bfloat16()
        out = torch.empty(x.data.shape, dtype=torch.bfloat16)
        self._lib.isobit_dequantize(
            x.data.data_ptr(), *x.data.shape, x.scale.data_ptr(), *x.block, out.data_ptr(), torch.get_num_threads()
        )
        return out

    def route(
        self, logits: Tensor, count: int, normalize: bool, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._reference.route(logits, count, normalize, given)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind = _PLAIN.get(x.dtype)
        if kind is None or weight.dtype != x.dtype or (residual is not None and residual.dtype != x.dtype):
            return self._reference.rms_norm(x, weight, eps, residual)
        x, weight = x.contiguous(), weight.contiguous()
        rows, columns = x.shape
        y, rstd = torch.empty_like(x), torch.empty(rows)
        summed = x
        if residual is not None:
            residual, summed = residual.contiguous(), torch.empty_like(x)
        self._lib.isobit_rms_norm(
            kind, x.data_ptr(), residual.data_ptr() if residual is not None else None, weight.data_ptr(),
            rows, columns, eps, y.data_ptr(), summed.data_ptr(), rstd.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return y, summed, rstd

    def rms_norm_backward(self, dy: Tensor, summed: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        kind = _PLAIN.get(summed.dtype)
        if kind is None or dy.dtype != summed.dtype or weight.dtype != summed.dtype:
            return self._reference.rms_norm_backward(dy, summed, weight, rstd)
        dy, summed, weight, rstd = dy.contiguous(), summed.contiguous(), weight.contiguous(), rstd.contiguous()
        rows, columns = summed.shape
        dx, dweight = torch.empty_like(summed), torch.empty(columns)
        self._lib.isobit_rms_norm_backward(
            kind, dy.data_ptr(), summed.data_ptr(), weight.data_ptr(), rstd.data_ptr(), rows, columns,
            dx.data_ptr(), dweight.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return dx, dweight

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
        kind = _PLAIN.get(x.dtype)
        if kind is None or cos.dtype != torch.float32 or sin.dtype != torch.float32:
            return self._reference.rotary(x, cos, sin, positions, inverse)
        x, stride = _token_rows(x)
        tokens, heads, dim = x.shape
        cos, sin, positions = cos.contiguous(), sin.contiguous(), positions.contiguous()
        out = torch.empty((tokens, heads, dim), dtype=x.dtype)
        self._lib.isobit_rotary(
            kind, x.data_ptr(), stride, cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), tokens, heads, dim,
            inverse, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def kv_write(self, store: KVStore, k: Tensor, v: Tensor, layout: Layout) -> None:
        kind, spec = _PLAIN.get(k.dtype), store.kv
        if spec is None:
            native = store.k.dtype == k.dtype
        else:
            native = spec.format.dtype == torch.float8_e4m3fn and spec.granularity == "row"
        if kind is None or v.dtype != k.dtype or not native:
            self._reference.kv_write(store, k, v, layout)
            return
        (k, k_stride), (v, v_stride) = _token_rows(k), _token_rows(v)
        failed = self._lib.isobit_kv_write(
            kind, k.data_ptr(), v.data_ptr(), k_stride, v_stride, layout.slots.data_ptr(), *k.shape,
            spec is not None and spec.scale == "ue8m0", store.k.data_ptr(), store.v.data_ptr(),
            _pointer(store.k_scale), _pointer(store.v_scale),
        )  # fmt: skip
        if failed and spec is not None:
            raise NonFiniteError(nonfinite_message("keys and values", spec))

    def attention(self, q: Tensor, store: KVStore, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
        if not _attention_is_native(q, store):
            return self._reference.attention(q, store, layout, scale)
        q = q.contiguous()
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        arguments = _attention_arguments(q, store, layout, scale, out, lse)
        arguments.single = self._fast
        self._lib.isobit_attention(ctypes.byref(arguments))
        return out, lse

    def attention_backward(
        self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, store: KVStore, layout: Layout, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not _attention_is_native(q, store) or dout.dtype != q.dtype:
            return self._reference.attention_backward(dout, q, out, lse, store, layout, scale)
        q, out, lse, dout = q.contiguous(), out.contiguous(), lse.contiguous(), dout.contiguous()
        dq = torch.empty_like(q)
        dk = torch.empty((q.shape[0], store.k.shape[1], q.shape[2]), dtype=q.dtype)
        dv = torch.empty_like(dk)
        arguments = _attention_arguments(q, store, layout, scale, out, lse)
        arguments.dout, arguments.dq = dout.data_ptr(), dq.data_ptr()
        arguments.dk, arguments.dv = dk.data_ptr(), dv.data_ptr()
        self._lib.isobit_attention_backward(ctypes.byref(arguments))
        return dq, dk, dv

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        kind = _PLAIN.get(gate_up.dtype)
        if kind is None:
            return self._reference.silu_mul(gate_up)
        gate_up = gate_up.contiguous()
        rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, inner), dtype=gate_up.dtype)
        self._lib.isobit_silu_mul(kind, gate_up.data_ptr(), rows, inner, out.data_ptr(), torch.get_num_threads())
        return out

    def silu_mul_backward(self, dh: Tensor, gate_up: Tensor) -> Tensor:
        kind = _PLAIN.get(gate_up.dtype)
        if kind is None or dh.dtype != gate_up.dtype:
            return self._reference.silu_mul_backward(dh, gate_up)
        dh, gate_up = dh.contiguous(), gate_up.contiguous()
        out = torch.empty_like(gate_up)
        self._lib.isobit_silu_mul_backward(
            kind, dh.data_ptr(), gate_up.data_ptr(), *dh.shape, out.data_ptr(), torch.get_num_threads()
        )
        return out

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


def _reordered(weight: Tensor) -> Tensor:
    """A BF16 matrix in oneDNN's layout for few rows."""
    return mkldnn._reorder_linear_weight(weight.contiguous(), _FEW_ROWS)


def _each(temperature: Temperature) -> Tensor:
    """As C++ reads it, one step of `ndim` numbers a row: a lone number for all rows, or one number for each."""
    return temperature.float().contiguous() if isinstance(temperature, Tensor) else torch.tensor(float(temperature))


def _dequantizes_natively(x: QTensor) -> bool:
    return x.data.dtype == torch.float8_e4m3fn and x.data.is_contiguous() and x.scale.is_contiguous()


def _blocks_are_native(x: QTensor) -> bool:
    return x.block[1] in (BLOCK, x.shape[1])


def _grid(x: QTensor) -> tuple[int, ...]:
    """A grid of scales as C++ reads it: pointer, rows and columns of a block, strides."""
    block_rows, block_columns = x.block
    assert block_columns in (BLOCK, x.shape[1]), f"scales along K in blocks of {block_columns}"
    return (x.scale.data_ptr(), block_rows, block_columns, *x.scale.stride())


def _token_rows(x: Tensor) -> tuple[Tensor, int]:
    """x [T, heads, D] with heads and D contiguous, and the distance between tokens: a slice of a wider row may stay."""
    if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
        x = x.contiguous()
    return x, x.stride(0)


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _attention_is_native(q: Tensor, store: KVStore) -> bool:
    if q.dtype not in _PLAIN or not store.k.is_contiguous() or not store.v.is_contiguous():
        return False
    return store.k.dtype in _PLAIN if store.kv is None else store.kv.format.dtype == torch.float8_e4m3fn


def _attention_arguments(
    q: Tensor, store: KVStore, layout: Layout, scale: float, out: Tensor, lse: Tensor
) -> AttentionArguments:
    rows, heads, dim = q.shape
    return AttentionArguments(
        _PLAIN[q.dtype], _E4M3 if store.kv is not None else _PLAIN[store.k.dtype],
        q.data_ptr(), store.k.data_ptr(), store.v.data_ptr(), _pointer(store.k_scale), _pointer(store.v_scale),
        layout.row_start.data_ptr(), layout.context.data_ptr(), layout.page_table.data_ptr(),
        layout.page_table.shape[1], layout.page_size, layout.context.shape[0], heads, store.k.shape[1], dim, scale,
        out.data_ptr(), lse.data_ptr(), None, None, None, None, torch.get_num_threads(), rows, False,
        0 if store.calibrated else 1,
    )  # fmt: skip
