"""Linear attention by the gated delta rule, and Mamba-2's recurrence, in C++ (`convolution.cpp`,
`delta.cpp`): the bits of `kernels/delta/definition.py`, which defines them for every `consistency`.
Gradients (`delta_backward.cpp`) are float32 in their own order, the same for any number of
threads. Inputs of other types than bfloat16 and float32 go to the reference operators."""

import ctypes

import torch
from torch import Tensor

from isobit.kernels.delta import definition as delta
from isobit.kernels.layout import Layout
from isobit.kernels.native.base import NativeBase
from isobit.kernels.native.interface import (
    PLAIN,
    DeltaArguments,
    DeltaGradientArguments,
    SequenceArguments,
    pointer,
)
from isobit.kernels.ops import DeltaHeads
from isobit.kernels.stores import StateStore


def short_convolution(
    ops: NativeBase,
    x: Tensor,
    weight: Tensor,
    store: StateStore | None,
    layout: Layout,
    bias: Tensor | None = None,
) -> Tensor:
    if x.dtype not in PLAIN or (store is not None and store.inputs.dtype != x.dtype):
        return ops.falls_back("short_convolution", x.dtype).short_convolution(
            x, weight, store, layout, bias
        )
    x, weight = x.contiguous(), weight.float().contiguous()
    _check_bias(bias, x)
    y, inputs = torch.empty_like(x), None if store is None else store.inputs
    assert weight.shape[0] == x.shape[1]
    assert inputs is None or (
        inputs.is_contiguous() and inputs.shape[1:] == (weight.shape[1] - 1, x.shape[1])
    )
    ops.lib.isobit_short_convolution(
        ctypes.byref(_sequences(x, store, layout)), PLAIN[x.dtype], x.data_ptr(), weight.data_ptr(),
        pointer(bias), *weight.shape,
        pointer(inputs), y.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return y


def short_convolution_backward(
    ops: NativeBase,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    layout: Layout,
    bias: Tensor | None = None,
) -> tuple[Tensor, ...]:
    if x.dtype not in PLAIN or dy.dtype != x.dtype:
        return ops.falls_back("short_convolution_backward", x.dtype).short_convolution_backward(
            dy, x, weight, layout, bias
        )
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.float().contiguous()
    _check_bias(bias, x)
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias)
    assert dy.shape == x.shape
    assert weight.shape[0] == x.shape[1]
    ops.lib.isobit_short_convolution_backward(
        ctypes.byref(_sequences(x, None, layout)), PLAIN[x.dtype], dy.data_ptr(), x.data_ptr(),
        weight.data_ptr(), pointer(bias),
        *weight.shape, dx.data_ptr(), dweight.data_ptr(), pointer(dbias), torch.get_num_threads(),
    )  # fmt: skip
    return (dx, dweight) if dbias is None else (dx, dweight, dbias)


def _check_bias(bias: Tensor | None, x: Tensor) -> None:
    assert bias is None or (
        bias.dtype == torch.float32 and bias.is_contiguous() and bias.shape == x.shape[1:]
    )


def delta_rule(
    ops: NativeBase,
    qkv: Tensor,
    gates: Tensor,
    heads: DeltaHeads,
    store: StateStore | None,
    layout: Layout,
) -> Tensor:
    if qkv.dtype not in PLAIN:
        return ops.falls_back("delta_rule", qkv.dtype).delta_rule(qkv, gates, heads, store, layout)
    sizes = heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim
    qkv, gates = qkv.contiguous(), gates.float().contiguous()
    decay, step_bias = heads.decay.contiguous(), heads.step_bias.contiguous()
    states = None if store is None else store.states
    assert qkv.shape[1] == 2 * sizes[0] * sizes[2] + sizes[1] * sizes[3]
    assert gates.shape == (len(qkv), heads.gates)
    assert decay.dtype == step_bias.dtype == torch.float32
    assert heads.skip is None or (heads.skip.dtype == torch.float32 and heads.skip.is_contiguous())
    assert states is None or (states.is_contiguous() and states.shape[1:] == sizes[1:])
    out = torch.empty(len(qkv), sizes[1], sizes[3], dtype=qkv.dtype)
    arguments = DeltaArguments(
        PLAIN[qkv.dtype], *sizes, qkv.data_ptr(), gates.data_ptr(), decay.data_ptr(),
        step_bias.data_ptr(),
        heads.key_dim**-0.5, pointer(states), out.data_ptr(), torch.get_num_threads(),
        pointer(heads.skip), heads.least_step,
    )  # fmt: skip
    ops.lib.isobit_delta_rule(ctypes.byref(_sequences(qkv, store, layout)), ctypes.byref(arguments))
    return out


def delta_rule_backward(
    ops: NativeBase, dout: Tensor, qkv: Tensor, gates: Tensor, heads: DeltaHeads, layout: Layout
) -> tuple[Tensor, ...]:
    if qkv.dtype not in PLAIN:
        return ops.falls_back("delta_rule_backward", qkv.dtype).delta_rule_backward(
            dout, qkv, gates, heads, layout
        )
    return delta.through_parts(
        dout, qkv, gates, heads,
        lambda inputs, dout: backward(ops, inputs, dout, layout, heads.corrects),
    )  # fmt: skip


def backward(
    ops: NativeBase, inputs: delta.Parts, dout: Tensor, layout: Layout, corrects: bool = True
) -> delta.Parts:
    """Return the gradients of the recurrence's inputs; value heads that share a key head are added
    in ascending order."""
    (rows, key_heads, key_dim), (_, value_heads, value_dim) = inputs.k.shape, inputs.v.shape
    assert rows == layout.num_rows
    assert all(x.is_contiguous() and x.dtype == torch.float32 for x in (*inputs, dout))
    dq, dk = (torch.empty(rows, key_heads, value_heads // key_heads, key_dim) for _ in range(2))
    dv, dkept, dstrength = (torch.empty_like(tensor) for tensor in inputs[2:])
    arguments = DeltaGradientArguments(
        key_heads, value_heads, key_dim, value_dim, layout.context.shape[0],
        layout.row_start.data_ptr(),
        *(x.data_ptr() for x in (*inputs[:3], dout, *inputs[3:], dq, dk, dv, dkept, dstrength)),
        torch.get_num_threads(), corrects,
    )  # fmt: skip
    ops.lib.isobit_delta_rule_backward(ctypes.byref(arguments))
    return delta.Parts(_added(dq), _added(dk), dv, dkept, dstrength)


def _added(x: Tensor) -> Tensor:
    """Return the sum over the third dimension, in ascending order."""
    first, *columns = x.unbind(2)
    for column in columns:
        first = first + column
    return first


def _sequences(x: Tensor, store: StateStore | None, layout: Layout) -> SequenceArguments:
    """Return the sequences of a batch with these rows. The layout must live until the call."""
    table = layout.page_table
    assert len(x) == layout.num_rows
    assert table.is_contiguous()
    assert store is not None or not layout.context.any(), (
        "a sequence goes on, and nothing was kept of it"
    )
    return SequenceArguments(
        layout.row_start.data_ptr(), layout.context.data_ptr(), table.data_ptr(), table.shape[1],
        layout.page_size,
        layout.context.shape[0],
    )  # fmt: skip
