"""The output head with its gradient: log-probabilities of given tokens, a few rows of logits at a
time.

Logits are not held for a whole batch, and the backward computes them again, unless those of a few
rows are kept. Where logits are filtered
(top-k, top-p, min-p) the distribution is softmax over each row's support, a constant of the
gradient; it is computed from logits that are held, as the rollout's is, also where a backend has a
fused head. So it is where a model caps its logits. Left out: the other operators (`autograd.py`)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from isobit.kernels import Ops, Prepared
from isobit.kernels.head.definition import head_gradients
from isobit.kernels.matrices import LIBRARY_ROWS
from isobit.kernels.sampling.capped import cap_slope, logits_of
from isobit.kernels.sampling.filtering import (
    Context,
    Filtering,
    filter_around,
    of_rows,
    penalize,
    slopes,
)
from isobit.model.forward.accumulate_grad import added_to, tied_gradient
from isobit.model.weights.stored import Weight

_ALL: Filtering = (0, 1.0, 0.0, 1.0)
"""Of logits that are held, and not filtered."""


def head_logprobs(
    hidden: Tensor,
    head: Weight,
    targets: Tensor,
    temperature: float,
    chunk: int,
    ops: Ops,
    filtering: Filtering | None = None,
    context: Context | None = None,
    cap: float | None = None,
    keep: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (log-probability of `targets`, entropy), [T] float32 both, with their gradients,
    `chunk` rows of logits at a time, capped by `cap`.

    hidden [T, C] in the compute format, targets [T] int64. With a `filtering` both are of the
    renormalized distribution; a target outside its row's support is added to it. A repetition
    penalty is of the tokens in the rows' `context`. `keep`: of a head that is trained, a backend
    that holds logits keeps them for the backward, with the same bits."""
    if cap is not None and filtering is None:
        filtering = _ALL
    arguments = head, targets, temperature, filtering, context, chunk, ops, cap
    if torch.is_grad_enabled():
        keep = keep and filtering is None and head.master.requires_grad and not ops.fused_head
        return _HeadLogprobs.apply(hidden, head.master, *arguments, keep)
    return _chunked_logprobs(hidden, *arguments)


def head_rows(vocab_size: int, host: bool) -> int:
    """Return the rows of logits at a time: on a CPU (`host`) few enough for its caches; on a GPU
    1 GiB of them, in multiples of what a library multiplies, since each part of the backward adds
    to a gradient as large as the head, and a library would leave the rest of a part to another
    kernel; at least 256."""
    rows = max(256, (1 << (22 if host else 28)) // vocab_size)
    return rows - rows % LIBRARY_ROWS if not host and rows > LIBRARY_ROWS else rows


def most_kept(tokens: int, hidden_size: int) -> int:
    """Return the most rows of logits that are kept for the backward of a micro-batch: those of
    `hidden_size` rows take as much as the head's gradient, of which autograd would hold two; none
    next to the activations of many tokens."""
    return min(tokens, hidden_size) if tokens <= 2 * hidden_size else 0


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
        cap: float | None,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.kept = list[Tensor]() if keep else None
        logprobs, entropy = _chunked_logprobs(
            hidden, head, targets, temperature, filtering, context, chunk, ops, cap, ctx.kept
        )
        ctx.head = head
        ctx.temperature = temperature
        ctx.filtering = filtering
        ctx.chunk = chunk
        ctx.ops = ops
        ctx.context = context
        ctx.cap = cap
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
        master, trained = ctx.head.master, ctx.needs_input_grad[1]
        tied = tied_gradient(master) if trained else None
        into = added_to(master) if trained and ctx.kept is not None else None
        if ctx.kept is None:
            dhidden, dweight = _by_chunks(ctx, dlogprobs, dentropy, trained)
        else:
            dhidden, dweight = ctx.ops.head_backward_kept(
                dlogprobs, ctx.kept, hidden, ctx.head.prepared, targets, ctx.temperature, dentropy,
                into, tied is not None, trained,
            )  # fmt: skip
        if trained and dweight is None:
            dweight = torch.zeros(master.shape, device=hidden.device)
        if tied is not None and dweight is not None:
            tied.add_head(dweight, from_zero=ctx.kept is not None)
        gradient = None if tied is not None or into is not None else dweight
        ctx.kept = None
        return dhidden, gradient, None, None, None, None, None, None, None, None, None


def _by_chunks(
    ctx: Any, dlogprobs: Tensor, dentropy: Tensor | None, trained: bool
) -> tuple[Tensor, Tensor | None]:
    """Return (gradient of hidden, of the weight if it is `trained` and there are rows), of logits
    that are computed again."""
    (hidden, targets), weight, filtering = ctx.saved_tensors, ctx.head.prepared, ctx.filtering
    dhidden, dweight, ops = torch.empty_like(hidden), None, ctx.ops
    for start in range(0, hidden.shape[0], ctx.chunk):
        rows = slice(start, start + ctx.chunk)
        inputs = (hidden[rows], weight, targets[rows], ctx.temperature)
        of_entropy = None if dentropy is None else dentropy[rows]
        if filtering is None:
            gradients = ops.head_backward(dlogprobs[rows], *inputs, of_entropy, dweight, trained)
        else:
            seen = _seen(ctx.context, rows, weight, filtering)
            logits, slope = _kept(*inputs, filtering, seen, ops, ctx.cap, slopes_too=True)
            more = (of_entropy, slope, dweight, trained)
            gradients = head_gradients(ops, dlogprobs[rows], logits, *inputs, *more)
        dhidden[rows], dweight = gradients
    return dhidden, dweight


def _chunked_logprobs(
    hidden: Tensor,
    head: Weight,
    targets: Tensor,
    temperature: float,
    filtering: Filtering | None,
    context: Context | None,
    chunk: int,
    ops: Ops,
    cap: float | None,
    kept: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the targets, a chunk of rows at a time. `kept`: where to put
    the logits of each chunk."""
    assert isinstance(head.working, Tensor), "the output head stays in the compute format"
    results = []
    for index, (rows, tokens) in enumerate(zip(hidden.split(chunk), targets.split(chunk))):
        if kept is not None:
            kept.append(ops.product(rows, head.prepared, None, torch.float32))
            results.append(ops.token_logprobs(kept[-1], tokens, temperature))
        elif filtering is None:
            results.append(ops.head_logprobs(rows, head.prepared, tokens, temperature))
        else:
            seen = _seen(
                context, slice(index * chunk, (index + 1) * chunk), head.prepared, filtering
            )
            inputs = (rows, head.prepared, tokens, temperature, filtering)
            logits, _ = _kept(*inputs, seen, ops, cap, slopes_too=False)
            results.append(ops.token_logprobs(logits, tokens, of_rows(temperature, logits)))
    return torch.cat([result[0] for result in results]), torch.cat(
        [result[1] for result in results]
    )


def _kept(
    hidden: Tensor,
    weight: Prepared,
    tokens: Tensor,
    temperature: float,
    filtering: Filtering,
    seen: Tensor | None,
    ops: Ops,
    cap: float | None,
    *,
    slopes_too: bool,
) -> tuple[Tensor, Tensor | None]:
    """Logits [T, V] float32 of hidden rows, -inf outside each row's support, and where they are
    wanted their slopes by the head's product, if logits are capped, or tokens that were `seen`
    penalized."""
    logits, slope = logits_of(ops, hidden, weight, cap), None
    if cap is not None and slopes_too:
        slope = cap_slope(logits, cap)
    if seen is not None:
        penalty = torch.full((len(logits), 1), filtering[3], device=logits.device)
        if slopes_too:
            local_slopes = slopes(logits, seen, penalty)
            slope = local_slopes if slope is None else slope.mul_(local_slopes)
        logits = penalize(logits, seen, penalty)
    return filter_around(logits, tokens, temperature, filtering[:3]), slope


def _seen(
    context: Context | None, rows: slice, weight: Prepared, filtering: Filtering
) -> Tensor | None:
    if filtering[3] == 1:
        return None
    assert context is not None, "a repetition penalty is of tokens"
    return context.seen(rows, weight.shape[0])
