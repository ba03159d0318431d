"""Attention in C++ (`attention.cpp`, `attention_backward.cpp`): under `bitwise` the bits of
`attention/float32.py`; under `exact` float64 in another order than the definition's, and under
`fast` a forward in float32."""

import ctypes

import torch
from torch import Tensor

from isobit.kernels.attention.definition import assert_whole
from isobit.kernels.attention.probabilities import boundaries
from isobit.kernels.layout import Layout
from isobit.kernels.native.base import NativeBase
from isobit.kernels.native.interface import ALL_KEYS, KINDS, PLAIN, AttentionArguments, pointer
from isobit.kernels.stores import KVStore
from isobit.precision import Format, QuantSpec


def attention(
    ops: NativeBase,
    q: Tensor,
    store: KVStore,
    layout: Layout,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    probabilities: Format | None = None,
) -> tuple[Tensor, Tensor]:
    if not _supports(q, store):
        return ops.falls_back("attention", store.kv or q.dtype).attention(
            q, store, layout, scale, window, sinks, probabilities
        )
    q = q.contiguous()
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    arguments = _arguments(q, store, layout, scale, window, out, lse)
    arguments.single = ops.single or ops.fast
    arguments.sinks = None if sinks is None else (sinks := sinks.contiguous()).data_ptr()
    arguments.probabilities = _kind_of(ops, probabilities, q)
    arguments.boundaries = boundaries().data_ptr()
    ops.lib.isobit_attention(ctypes.byref(arguments))
    return out, lse


def attention_backward(
    ops: NativeBase,
    dout: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    store: KVStore,
    layout: Layout,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if not _supports(q, store) or dout.dtype != q.dtype:
        return ops.falls_back("attention_backward", store.kv or q.dtype).attention_backward(
            dout, q, out, lse, store, layout, scale, window
        )
    q, out, lse, dout = q.contiguous(), out.contiguous(), lse.contiguous(), dout.contiguous()
    dq = torch.empty_like(q)
    assert_whole(layout)
    keys = layout.num_rows if layout.keys is None else layout.keys.copies.index.shape[0]
    dk = torch.empty((keys, store.k.shape[1], q.shape[2]), dtype=q.dtype)
    dv = torch.empty_like(dk)
    arguments = _arguments(q, store, layout, scale, window, out, lse)
    arguments.dout, arguments.dq = dout.data_ptr(), dq.data_ptr()
    arguments.dk, arguments.dv = dk.data_ptr(), dv.data_ptr()
    arguments.single = ops.single
    ops.lib.isobit_attention_backward(ctypes.byref(arguments))
    return dq, dk, dv


def _kind_of(ops: NativeBase, probabilities: Format | None, q: Tensor) -> int:
    """Return the format that weights are rounded to before they meet values; FP32 where they are
    not."""
    if probabilities is not None:
        return KINDS[probabilities.dtype]
    return KINDS[q.dtype if ops.rounds_probabilities else torch.float32]


def reads(kv: QuantSpec) -> bool:
    """Return whether C++ attends to keys and values in this format."""
    return kv.format.dtype in (torch.float8_e4m3fn, torch.int8)


def _supports(q: Tensor, store: KVStore) -> bool:
    if q.dtype not in PLAIN or not store.k.is_contiguous() or not store.v.is_contiguous():
        return False
    return store.k.dtype in PLAIN if store.kv is None else reads(store.kv)


def _arguments(
    q: Tensor,
    store: KVStore,
    layout: Layout,
    scale: float,
    window: int | None,
    out: Tensor,
    lse: Tensor,
) -> AttentionArguments:
    rows, heads, dim = q.shape
    return AttentionArguments(
        PLAIN[q.dtype], PLAIN[store.k.dtype] if store.kv is None else KINDS[store.kv.format.dtype],
        q.data_ptr(), store.k.data_ptr(), store.v.data_ptr(), pointer(store.k_scale),
        pointer(store.v_scale),
        layout.row_start.data_ptr(), layout.context.data_ptr(), layout.page_table.data_ptr(),
        layout.page_table.shape[1], layout.page_size, layout.context.shape[0], heads,
        store.k.shape[1], dim, scale,
        out.data_ptr(), lse.data_ptr(), None, None, None, None, torch.get_num_threads(), rows,
        False,
        0 if store.calibrated else 1, KINDS[torch.float32], ALL_KEYS if window is None else window,
        None, None,
    )  # fmt: skip
