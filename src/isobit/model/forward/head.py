"""The output head with its gradient: log-probabilities of given tokens, a few rows of logits at a
time.

Logits are never held for a whole batch; the backward computes them again. Where logits are filtered
(top-k, top-p, min-p) the distribution is softmax over each row's support, a constant of the
gradient; it is computed from logits that are held, as the rollout's is, also where a backend has a
fused head. Left out: the other operators (`autograd.py`)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from isobit.kernels import Ops, Prepared
from isobit.kernels.head.definition import head_gradients
from isobit.kernels.sampling.filtering import (
    Context,
    Filtering,
    filter_around,
    of_rows,
    penalize,
    slopes,
)
from isobit.model.weights.stored import Weight


def head_logprobs(
    hidden: Tensor,
    head: Weight,
    targets: Tensor,
    temperature: float,
    chunk: int,
    ops: Ops,
    filtering: Filtering | None = None,
    context: Context | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probability of `targets`, entropy), [T] float32 both, with their gradients, `chunk`
    rows of logits at a time.

    hidden [T, C] in the compute format, targets [T] int64. With a `filtering` both are of the
    renormalized distribution; a target outside its row's support is added to it. A repetition
    penalty is of the tokens in the rows' `context`."""
    if torch.is_grad_enabled():
        return _HeadLogprobs.apply(
            hidden, head.master, head, targets, temperature, filtering, context, chunk, ops
        )
    return _chunked_logprobs(hidden, head, targets, temperature, filtering, context, chunk, ops)


class _HeadLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        master: Tensor,
        head: Weight,
        targets: Tensor,
        temperature: float,
        filtering: Filtering | None,
        context: Context | None,
        chunk: int,
        ops: Ops,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy = _chunked_logprobs(
            hidden, head, targets, temperature, filtering, context, chunk, ops
        )
        ctx.head = head
        ctx.temperature = temperature
        ctx.filtering = filtering
        ctx.chunk = chunk
        ctx.ops = ops
        ctx.context = context
        ctx.save_for_backward(hidden, targets)
        ctx.set_materialize_grads(False)  # most losses have no gradient by the entropy
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dlogprobs: Tensor | None, dentropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, targets = ctx.saved_tensors
        if dlogprobs is None:
            dlogprobs = torch.zeros(len(hidden), device=hidden.device)
        weight, filtering, ops = ctx.head.prepared, ctx.filtering, ctx.ops
        dhidden, dweight, trained = torch.empty_like(hidden), None, ctx.needs_input_grad[1]
        for start in range(0, hidden.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            given = (hidden[rows], weight, targets[rows], ctx.temperature)
            of_entropy = None if dentropy is None else dentropy[rows]
            if filtering is None:
                found = ops.head_backward(dlogprobs[rows], *given, of_entropy, dweight, trained)
            else:
                logits, slope = _kept(
                    *given, filtering, _seen(ctx.context, rows, weight, filtering), ops
                )
                more = (of_entropy, slope, dweight, trained)
                found = head_gradients(ops, dlogprobs[rows], logits, *given, *more)
            dhidden[rows], dweight = found
        if trained and dweight is None:
            dweight = torch.zeros(weight.shape, device=hidden.device)
        return dhidden, dweight, None, None, None, None, None, None, None


def _chunked_logprobs(
    hidden: Tensor,
    head: Weight,
    targets: Tensor,
    temperature: float,
    filtering: Filtering | None,
    context: Context | None,
    chunk: int,
    ops: Ops,
) -> tuple[Tensor, Tensor]:
    assert isinstance(head.working, Tensor), "the output head stays in the compute format"
    parts = []
    for place, (rows, tokens) in enumerate(zip(hidden.split(chunk), targets.split(chunk))):
        if filtering is None:
            parts.append(ops.head_logprobs(rows, head.prepared, tokens, temperature))
        else:
            seen = _seen(
                context, slice(place * chunk, (place + 1) * chunk), head.prepared, filtering
            )
            logits, _ = _kept(rows, head.prepared, tokens, temperature, filtering, seen, ops)
            parts.append(ops.token_logprobs(logits, tokens, of_rows(temperature, logits)))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _kept(
    hidden: Tensor,
    weight: Prepared,
    tokens: Tensor,
    temperature: float,
    filtering: Filtering,
    seen: Tensor | None,
    ops: Ops,
) -> tuple[Tensor, Tensor | None]:
    """Logits [T, V] float32 of hidden rows, -inf outside each row's support, and their slope where
    tokens that were `seen` are penalized."""
    logits, slope = ops.product(hidden, weight, None, torch.float32), None
    if seen is not None:
        penalty = torch.full((len(logits), 1), filtering[3], device=logits.device)
        slope, logits = slopes(logits, seen, penalty), penalize(logits, seen, penalty)
    return filter_around(logits, tokens, temperature, filtering[:3]), slope


def _seen(
    context: Context | None, rows: slice, weight: Prepared, filtering: Filtering
) -> Tensor | None:
    if filtering[3] == 1:
        return None
    assert context is not None, "a repetition penalty is of tokens"
    return context.seen(rows, weight.shape[0])
