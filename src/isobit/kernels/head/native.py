"""The backward of the output head in C++ (`head.cpp`): logits become the gradient of logits in one
reading, between the products that `definition.py` names. Left out: entropy's gradient, and filtered
logits."""

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
    """As `Ops.head_backward`."""
    if dentropy is not None or hidden.dtype != torch.bfloat16:
        given = (dlogprobs, hidden, weight, tokens, temperature, dentropy)
        return definition.head_backward(ops, *given, into, trained)
    logits = ops.product(hidden, weight, None, torch.float32)
    if temperature != 1:
        logits /= temperature
    probabilities = torch.softmax(logits, -1)
    del logits
    factor, tokens = (dlogprobs / temperature).contiguous(), tokens.contiguous()
    dlogits = torch.empty(probabilities.shape, dtype=torch.bfloat16)
    assert not tokens.numel() or (int(tokens.min()) >= 0 and int(tokens.max()) < dlogits.shape[1])
    ops.lib.isobit_logits_gradient(
        probabilities.data_ptr(), tokens.data_ptr(), factor.data_ptr(), *dlogits.shape,
        dlogits.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    del probabilities
    dhidden = ops.gradient_product(dlogits, values(weight).t(), hidden.dtype)
    if not trained:
        return dhidden, None
    return dhidden, ops.gradient_product(dlogits.t(), hidden.t(), torch.float32, into)
