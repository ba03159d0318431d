"""Queries, keys and values before attention in C++ (`heads.cpp`): their norms, rotary embedding,
and the write into the cache."""

import ctypes

import torch
from torch import Tensor

from isobit.errors import NonFiniteError
from isobit.kernels.heads import definition
from isobit.kernels.layout import Layout
from isobit.kernels.native.base import NativeBase
from isobit.kernels.native.interface import KINDS, PLAIN, HeadInputArguments, pointer
from isobit.kernels.ops import Heads
from isobit.kernels.stores import KVStore
from isobit.precision import E4M3, INT8, QuantSpec, nonfinite_message


def rotary(
    ops: NativeBase, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool = False
) -> Tensor:
    kind = PLAIN.get(x.dtype)
    if kind is None or cos.dtype != torch.float32 or sin.dtype != torch.float32:
        return ops.falls_back("rotary", x.dtype).rotary(x, cos, sin, positions, inverse)
    x, stride = _token_rows(x)
    tokens, heads, dim = x.shape
    cos, sin, positions = cos.contiguous(), sin.contiguous(), positions.contiguous()
    out = torch.empty((tokens, heads, dim), dtype=x.dtype)
    ops.lib.isobit_rotary(
        kind, x.data_ptr(), stride, cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), tokens,
        heads, dim,
        inverse, out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out


def kv_write(ops: NativeBase, store: KVStore, k: Tensor, v: Tensor, layout: Layout) -> None:
    kind = _kind_of_write(k, v, store)
    if kind is None:
        ops.falls_back("kv_write", store.kv or k.dtype).kv_write(store, k, v, layout)
        return
    (k, k_stride), (v, v_stride) = _token_rows(k), _token_rows(v)
    failed = ops.lib.isobit_kv_write(
        kind, k.data_ptr(), v.data_ptr(), k_stride, v_stride, layout.slots.data_ptr(), *k.shape,
        *_coding(store), store.k.data_ptr(), store.v.data_ptr(),
        pointer(store.k_scale), pointer(store.v_scale),
    )  # fmt: skip
    _raise_if(failed, store)


def attention_inputs(
    ops: NativeBase, qkv: Tensor, heads: Heads, store: KVStore, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads, dim = store.k.shape[1:]
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    kind = _kind_of_write(k, v, store)
    if kind is None or any(table.dtype != torch.float32 for table in heads.tables):
        return definition.attention_inputs(ops, qkv, heads, store, layout)
    norms = None if heads.norms is None else [w.contiguous() for w in heads.norms]
    if norms is not None and not (ops.norms_heads and all(w.dtype in PLAIN for w in norms)):
        pairs = zip((q, k), norms)
        q, k = (ops.rms_norm(x.reshape(-1, dim), w, heads.eps)[0].view(x.shape) for x, w in pairs)
        norms = None
    (q, q_stride) = _token_rows(q)
    (k, k_stride) = _token_rows(k)
    (values, v_stride) = _token_rows(v)
    cos, sin = (table.contiguous() for table in heads.tables)
    rotated_q, rotated_k = torch.empty(q.shape, dtype=q.dtype), torch.empty(k.shape, dtype=k.dtype)
    arguments = HeadInputArguments(
        kind, *q.shape[:2], kv_heads, dim, q.data_ptr(), k.data_ptr(), values.data_ptr(), q_stride,
        k_stride,
        v_stride, *((None, None, 0) if norms is None else (*(w.data_ptr() for w in norms),
            PLAIN[norms[0].dtype])),
        heads.eps, ops.single, cos.data_ptr(), sin.data_ptr(), layout.rotated.data_ptr(),
        layout.slots.data_ptr(), store.k.data_ptr(), store.v.data_ptr(), pointer(store.k_scale),
        pointer(store.v_scale),
        *_coding(store), rotated_q.data_ptr(), rotated_k.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    _raise_if(ops.lib.isobit_head_inputs(ctypes.byref(arguments)), store)
    return rotated_q, rotated_k, v


def writes(kv: QuantSpec) -> bool:
    """Return whether C++ stores keys and values in this format."""
    return kv.format in (E4M3, INT8) and kv.granularity == "row"


def _kind_of_write(k: Tensor, v: Tensor, store: KVStore) -> int | None:
    """Return the kind of keys and values that C++ writes into this store, or None."""
    native = store.k.dtype == k.dtype if store.kv is None else writes(store.kv)
    return PLAIN.get(k.dtype) if native and v.dtype == k.dtype else None


def _coding(store: KVStore) -> tuple[int, bool]:
    """Return (kind of the codes, whether their scales are powers of two); neither is read where
    there are none."""
    return (
        (0, False)
        if store.kv is None
        else (KINDS[store.kv.format.dtype], store.kv.scale == "ue8m0")
    )


def _raise_if(failed: int, store: KVStore) -> None:
    if failed and store.kv is not None:
        raise NonFiniteError(nonfinite_message("keys and values", store.kv))


def _token_rows(x: Tensor) -> tuple[Tensor, int]:
    """Return x [T, heads, D] with heads and D contiguous, and the distance between tokens: a slice
    of a wider row may stay."""
    if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
        x = x.contiguous()
    return x, x.stride(0)
