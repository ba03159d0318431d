"""The native backend: `isobit.kernels.types.Ops` over the C++ kernels.

Equal to the reference bit for bit in FP8 products, quantization, keys and values; equal up to one unit in the last
place elsewhere (`tests/kernels/test_native.py`). Every sum has an order that depends on the row alone, so here the
independence of a row's bits from its batch is proven for all operators. `fast` hands products to PyTorch, over BF16
operands.
"""

import ctypes
from ctypes import byref, c_double, c_float, c_int, c_long, c_void_p
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from isobit.errors import NonFiniteError
from isobit.kernels.native.build import load
from isobit.kernels.reference import product as reference_product
from isobit.kernels.types import KVStore, Layout, Operand
from isobit.precision import E4M3, E5M2, QTensor, QuantSpec, nonfinite_message, quantize

_PLAIN = {torch.bfloat16: 1, torch.float32: 2}


class _Operand(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("row_stride", c_long),
        ("column_stride", c_long),
        ("type", c_int),
        ("scale", c_void_p),
        ("scale_row_stride", c_long),
        ("scale_column_stride", c_long),
        ("rows_per_scale", c_long),
        ("k_scales", c_long),
    ]


class _Store(ctypes.Structure):
    _fields_ = [("k", c_void_p), ("v", c_void_p), ("k_scale", c_void_p), ("v_scale", c_void_p), ("type", c_int)]


class _Layout(ctypes.Structure):
    _fields_ = [
        ("row_start", c_void_p),
        ("context", c_void_p),
        ("page_table", c_void_p),
        ("sequences", c_long),
        ("pages", c_long),
        ("page_size", c_long),
    ]


class _Gradients(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in ("dout", "q", "out", "lse", "dq", "dk", "dv")]


def _signatures(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, size, number = c_void_p, c_long, c_int
    for name, result, arguments in (
        ("product", None, (pointer, pointer, size, size, size, pointer, pointer, number, number)),
        ("quantize", number, (pointer, number, *(size,) * 5, number, pointer, pointer, number)),
        ("rms_norm", None, (*(pointer,) * 3, number, c_double, size, size, *(pointer,) * 3, number)),
        ("rms_norm_backward", None, (*(pointer,) * 4, number, size, size, pointer, pointer, number)),
        ("rotary", None, (pointer, number, size, *(pointer,) * 3, size, size, size, number, pointer, number)),
        ("silu_mul", None, (pointer, number, size, size, pointer, number)),
        ("silu_mul_backward", None, (pointer, pointer, number, size, size, pointer, number)),
        ("kv_write", number, (pointer, number, *(size,) * 4, pointer, number, number, pointer, pointer)),
        ("attention", None, (pointer, number, pointer, pointer, c_double, *(size,) * 3, pointer, pointer, number)),
        ("attention_backward", None, (pointer, number, pointer, pointer, c_double, *(size,) * 3, number)),
        ("token_logprobs", None, (pointer, pointer, size, size, c_float, pointer, pointer, number)),
        ("sample", None, (pointer, pointer, size, size, c_float, pointer, number)),
    ):
        function = getattr(library, f"isobit_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def available() -> tuple[bool, str]:
    """Whether the kernels can be built and loaded here, and the compiler or the reason why not."""
    library, reason = load()
    return library is not None, reason


class NativeOps:
    """`Ops` in C++. Rows may be strided; the last dimension must be contiguous."""

    backend = "native"

    def __init__(self, consistency: str = "bitwise", why: str = "") -> None:
        library, reason = load()
        assert library is not None, reason
        self._library = _signatures(library)
        self.consistency = consistency
        self.why = why
        self._dequantized: WeakKeyDictionary[Tensor, Tensor] = WeakKeyDictionary()

    def quantize(self, x: Tensor, spec: QuantSpec, name: str = "tensor") -> QTensor:
        if spec.format is not E4M3 or x.dtype not in _PLAIN or not x.numel():
            return quantize(x, spec, name)
        x = _rows(x)
        (rows, columns), block = x.shape, spec.block((x.shape[0], x.shape[1]))
        data = torch.empty((rows, columns), dtype=torch.float8_e4m3fn)
        scale = torch.empty((-(-rows // block[0]), -(-columns // block[1])))
        if self._library.isobit_quantize(
            x.data_ptr(),
            x.dtype is torch.bfloat16,
            x.stride(0),
            rows,
            columns,
            *block,
            spec.scale == "ue8m0",
            data.data_ptr(),
            scale.data_ptr(),
            torch.get_num_threads(),
        ):
            raise NonFiniteError(nonfinite_message(name, spec))
        return QTensor(data, scale, spec)

    def product(self, a: Operand, b: Operand, bias: Tensor | None = None, out: torch.dtype = torch.bfloat16) -> Tensor:
        if self.consistency == "fast":
            return reference_product.fast_product(self._fast(a), self._fast(b), bias, out)
        if isinstance(a, QTensor) != isinstance(b, QTensor):
            a, b = reference_product.values(a), reference_product.values(b)
        (rows, depth), columns = a.shape, b.shape[0]
        result = torch.empty((rows, columns), dtype=out)
        bias = None if bias is None else bias.float()
        self._library.isobit_product(
            byref(_operand(a)),
            byref(_operand(b)),
            rows,
            columns,
            depth,
            None if bias is None else bias.data_ptr(),
            result.data_ptr(),
            out is torch.bfloat16,
            torch.get_num_threads(),
        )
        return result

    def _fast(self, operand: Operand) -> Tensor:
        """BF16 values; those of weights are kept as long as the codes live."""
        if not isinstance(operand, QTensor):
            return operand
        known = self._dequantized.get(operand.data)
        if known is None or known.shape != operand.data.shape:
            known = operand.dequantize().bfloat16()
            self._dequantized[operand.data] = known
        return known

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = x.contiguous()
        y, rstd = torch.empty_like(x), torch.empty(x.shape[0])
        summed = x if residual is None else torch.empty_like(x)
        self._library.isobit_rms_norm(
            x.data_ptr(),
            None if residual is None else residual.contiguous().data_ptr(),
            weight.data_ptr(),
            x.dtype is torch.bfloat16,
            eps,
            *x.shape,
            y.data_ptr(),
            summed.data_ptr(),
            rstd.data_ptr(),
            torch.get_num_threads(),
        )
        return y, summed, rstd

    def rms_norm_backward(self, dy: Tensor, summed: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        dx, dweight = torch.empty_like(summed), torch.empty(summed.shape[1])
        self._library.isobit_rms_norm_backward(
            dy.data_ptr(),
            summed.data_ptr(),
            weight.data_ptr(),
            rstd.data_ptr(),
            summed.dtype is torch.bfloat16,
            *summed.shape,
            dx.data_ptr(),
            dweight.data_ptr(),
            torch.get_num_threads(),
        )
        return dx, dweight

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
        x = _heads(x)
        y = torch.empty(x.shape, dtype=x.dtype)
        self._library.isobit_rotary(
            x.data_ptr(),
            x.dtype is torch.bfloat16,
            x.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            positions.data_ptr(),
            *x.shape,
            inverse,
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y

    def kv_write(self, store: KVStore, k: Tensor, v: Tensor, layout: Layout) -> None:
        power_of_two = store.kv is not None and store.kv.scale == "ue8m0"
        for data, scale, rows in ((store.k, store.k_scale, k), (store.v, store.v_scale, v)):
            rows = _heads(rows)
            bad = self._library.isobit_kv_write(
                rows.data_ptr(),
                rows.dtype is torch.bfloat16,
                rows.stride(0),
                *rows.shape,
                layout.slots.data_ptr(),
                scale is not None,
                power_of_two,
                data.data_ptr(),
                None if scale is None else scale.data_ptr(),
            )
            if bad and store.kv is not None:
                raise NonFiniteError(nonfinite_message("keys and values", store.kv))

    def attention(self, q: Tensor, store: KVStore, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
        q = q.contiguous()
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        self._library.isobit_attention(
            q.data_ptr(),
            q.dtype is torch.bfloat16,
            byref(_store(store)),
            byref(_layout(layout)),
            scale,
            q.shape[1],
            *store.k.shape[1:],
            out.data_ptr(),
            lse.data_ptr(),
            torch.get_num_threads(),
        )
        return out, lse

    def attention_backward(
        self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, store: KVStore, layout: Layout, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq = torch.empty_like(q)
        dk, dv = (torch.empty((q.shape[0], *store.k.shape[1:]), dtype=q.dtype) for _ in range(2))
        gradients = _Gradients(*(t.data_ptr() for t in (dout, q, out, lse, dq, dk, dv)))
        self._library.isobit_attention_backward(
            byref(gradients),
            q.dtype is torch.bfloat16,
            byref(_store(store)),
            byref(_layout(layout)),
            scale,
            q.shape[1],
            *store.k.shape[1:],
            torch.get_num_threads(),
        )
        return dq, dk, dv

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, half = gate_up.shape[0], gate_up.shape[1] // 2
        h = torch.empty((rows, half), dtype=gate_up.dtype)
        self._library.isobit_silu_mul(
            gate_up.data_ptr(), gate_up.dtype is torch.bfloat16, rows, half, h.data_ptr(), torch.get_num_threads()
        )
        return h

    def silu_mul_backward(self, dh: Tensor, gate_up: Tensor) -> Tensor:
        out = torch.empty_like(gate_up)
        self._library.isobit_silu_mul_backward(
            dh.data_ptr(),
            gate_up.data_ptr(),
            dh.dtype is torch.bfloat16,
            *dh.shape,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def token_logprobs(self, logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits, tokens = logits.contiguous(), tokens.contiguous()
        logprobs, entropy = torch.empty(logits.shape[0]), torch.empty(logits.shape[0])
        self._library.isobit_token_logprobs(
            logits.data_ptr(),
            tokens.data_ptr(),
            *logits.shape,
            temperature,
            logprobs.data_ptr(),
            entropy.data_ptr(),
            torch.get_num_threads(),
        )
        return logprobs, entropy

    def sample(self, logits: Tensor, keys: Tensor, temperature: float) -> Tensor:
        logits, keys = logits.contiguous(), keys.contiguous()
        tokens = torch.empty(logits.shape[0], dtype=torch.int64)
        self._library.isobit_sample(
            logits.data_ptr(), keys.data_ptr(), *logits.shape, temperature, tokens.data_ptr(), torch.get_num_threads()
        )
        return tokens


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _heads(x: Tensor) -> Tensor:
    """[T, heads, D] whose heads stand together; only the row stride is free."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _operand(x: Operand) -> _Operand:
    if isinstance(x, QTensor):
        code = 3 if x.spec.format is E5M2 else 0
        scale = x.scale
        strides = scale.stride()
        return _Operand(
            x.data.data_ptr(), *x.data.stride(), code, scale.data_ptr(), *strides, x.block[0], scale.shape[1]
        )
    return _Operand(x.data_ptr(), *x.stride(), _PLAIN[x.dtype], None, 0, 0, 1, 1)


def _store(store: KVStore) -> _Store:
    scales = (None, None) if store.k_scale is None or store.v_scale is None else _pointers(store)
    code = 0 if store.kv is not None else _PLAIN[store.k.dtype]
    return _Store(store.k.data_ptr(), store.v.data_ptr(), *scales, code)


def _pointers(store: KVStore) -> tuple[int, int]:
    assert store.k_scale is not None
    assert store.v_scale is not None
    return store.k_scale.data_ptr(), store.v_scale.data_ptr()


def _layout(layout: Layout) -> _Layout:
    table = layout.page_table
    pointers = (layout.row_start.data_ptr(), layout.context.data_ptr(), table.data_ptr())
    return _Layout(*pointers, table.shape[0], table.stride(0), layout.page_size)
