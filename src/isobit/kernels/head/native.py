"""The backward of the output head in C++ (`head.cpp`): logits become the gradient of logits in their
own memory, between the products that `definition.py` names; the weight's gradient, of several
chunks of rows, is written once. Left out: entropy's gradient, and filtered logits."""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from isobit.kernels.head import definition
from isobit.kernels.matrices import Prepared, values
from isobit.kernels.native.base import NativeBase


def head_backward(
    ops: NativeBase,
    dlogprobs: Tensor,
    hidden: Tensor,
    weight: Prepared,
    tokens: Tensor,
    temperature: float,
    dentropy: Tensor | None = None,
    into: Tensor | None = None,
    trained: bool = True,
) -> tuple[Tensor, Tensor | None]:
    if dentropy is not None or hidden.dtype != torch.bfloat16:
        inputs = (dlogprobs, hidden, weight, tokens, temperature, dentropy)
        return definition.head_backward(ops, *inputs, into, trained)
    logits = ops.product(hidden, weight, None, torch.float32)
    dlogits = _gradient(ops, dlogprobs, logits, tokens, temperature)
    dhidden = ops.gradient_product(dlogits, values(weight).t(), hidden.dtype)
    if not trained:
        return dhidden, None
    return dhidden, ops.gradient_product(dlogits.t(), hidden.t(), torch.float32, into)


def head_backward_kept(
    ops: NativeBase,
    dlogprobs: Tensor,
    logits: Sequence[Tensor],
    hidden: Tensor,
    weight: Prepared,
    tokens: Tensor,
    temperature: float,
    dentropy: Tensor | None = None,
    into: Tensor | None = None,
    from_zero: bool = False,
    trained: bool = True,
) -> tuple[Tensor, Tensor | None]:
    inputs = hidden, weight, tokens, temperature
    if dentropy is not None or hidden.dtype != torch.bfloat16 or ops.ordered is None or not logits:
        return definition.head_backward_kept(
            ops, dlogprobs, logits, *inputs, dentropy, into, from_zero, trained
        )
    dhidden, pairs = torch.empty_like(hidden), []
    for rows, some in definition.rows_of(logits):
        dlogits = _gradient(ops, dlogprobs[rows], some, tokens[rows], temperature)
        dhidden[rows] = ops.gradient_product(dlogits, values(weight).t(), hidden.dtype)
        pairs.append((dlogits.t(), hidden[rows].t()))
    if not trained:
        return dhidden, None
    return dhidden, ops.ordered.summed(pairs, into, from_zero)


def _gradient(
    ops: NativeBase, dlogprobs: Tensor, logits: Tensor, tokens: Tensor, temperature: float
) -> Tensor:
    """Compute the gradient [T, V] BF16 of the tokens' log-probabilities by the logits; it takes the
    first half of the memory of each row of logits, which is overwritten."""
    assert logits.is_contiguous()
    rows, count = logits.shape
    assert not rows or (int(tokens.min()) >= 0 and int(tokens.max()) < count)
    if temperature != 1:
        logits /= temperature
    if apart := not _softmax_is_pytorchs(ops.lib, count):
        torch.softmax(logits, -1, out=logits)
    factor, tokens = (dlogprobs / temperature).contiguous(), tokens.contiguous()
    ops.lib.isobit_logits_gradient(
        logits.data_ptr(), int(apart), tokens.data_ptr(), factor.data_ptr(), rows, count,
        torch.get_num_threads(),
    )  # fmt: skip
    return logits.view(torch.bfloat16)[:, :count]


@cache
def _softmax_is_pytorchs(lib: ctypes.CDLL, count: int) -> bool:
    """Return whether the softmax of rows of `count` in C++ has the bits of PyTorch's, which depend
    on the processor and on PyTorch's version: of logits that are close to each other, and far
    apart."""
    x = torch.randn(6, count, generator=torch.Generator().manual_seed(0))
    x *= torch.tensor([0.01, 1.0, 5.0, 20.0, 60.0, 1000.0]).unsqueeze(1)
    computed, wanted = x.clone(), torch.softmax(x, -1)
    lib.isobit_softmax(computed.data_ptr(), *x.shape, torch.get_num_threads())
    return torch.equal(computed.view(torch.int32), wanted.view(torch.int32))
