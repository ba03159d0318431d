"""The output head with its gradient: log-probabilities of given tokens, a few rows of logits at a time.

Logits are never held for a whole batch; the backward computes them again. Left out: the other operators
(`autograd.py`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from isobit.kernels import Ops
from isobit.model.autograd import Weight


def head_logprobs(
    hidden: Tensor, head: Weight, targets: Tensor, temperature: float, chunk: int, ops: Ops
) -> tuple[Tensor, Tensor]:
    """(log-probability of `targets`, entropy without gradient), [T] float32 both, `chunk` rows of logits at a time.

    hidden [T, C] in the compute format, targets [T] int64."""
    if torch.is_grad_enabled():
        return _HeadLogprobs.apply(hidden, head.master, head, targets, temperature, chunk, ops)
    return _chunked_logprobs(hidden, head, targets, temperature, chunk, ops)


class _HeadLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        master: Tensor,
        head: Weight,
        targets: Tensor,
        temperature: float,
        chunk: int,
        ops: Ops,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy = _chunked_logprobs(hidden, head, targets, temperature, chunk, ops)
        ctx.head, ctx.temperature, ctx.chunk, ctx.ops = head, temperature, chunk, ops
        ctx.save_for_backward(hidden, targets)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogprobs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets = ctx.saved_tensors
        weight = ctx.head.prepared
        dhidden, dweight = torch.empty_like(hidden), torch.zeros(weight.shape, device=hidden.device)
        for start in range(0, hidden.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            found = ctx.ops.head_backward(dlogprobs[rows], hidden[rows], weight, targets[rows], ctx.temperature)
            dhidden[rows] = found[0]
            dweight += found[1]
        return dhidden, dweight, None, None, None, None, None


def _chunked_logprobs(
    hidden: Tensor, head: Weight, targets: Tensor, temperature: float, chunk: int, ops: Ops
) -> tuple[Tensor, Tensor]:
    assert isinstance(head.working, Tensor), "the output head stays in the compute format"
    parts = [
        ops.head_logprobs(rows, head.prepared, tokens, temperature)
        for rows, tokens in zip(hidden.split(chunk), targets.split(chunk))
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
