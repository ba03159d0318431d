"""Linear attention by the gated delta rule, or by Mamba-2's recurrence, and the short convolution
before it, in the order `delta32-v1`: the definition for every `consistency` on a CPU.

Of a head with state S [Dk, Dv], a token with query q, key k, value v, forgetting g and strength b
(Yang et al. 2024, arXiv 2412.06464, eq. 10) computes

    S' = exp(g) · S,  e = b · (v - kᵀ S'),  S = S' + k eᵀ,  out = qᵀ S

where q and k are divided by their lengths, q by the root of Dk besides, b = sigmoid(b'), and g =
-exp(decay) · softplus(a + step_bias). Mamba-2 (Dao and Gu 2024, arXiv 2405.21060, section 7.1) is
the same without the term that takes from v what S' says of k already: with B and C for k and q, as
they are, x for v, and dt = max(softplus(a + step_bias), least_step),

    S = exp(-exp(decay) · dt) · S + B (dt · x)ᵀ,  out = Cᵀ S + skip · x

whose sum is a fused multiply-add. All is float32, each operation rounded; sums over Dk are
`rows32.dot` in `LANES` lanes, lengths in `HEAD_LANES`; S' + k eᵀ is a fused multiply-add; exp is
that of rows32, softplus its log of 1 + exp in float64, rounded to float32, and above 20 the number
itself. out is rounded once to the type of its inputs.

Tokens are computed one after the other, so a decoded token, a chunk of a prompt and the learner's
whole sequences are the same operations in the same order: bits cannot depend on how tokens are
divided, and none do (`tests/kernels/test_delta.py`). A form in chunks, whose products would fill
matrix units, has another order for each division. The error of a token is that of float32
recurrence: it fades with the state. The backward is whole sequences only; it repeats, and agrees
with no rollout.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from isobit.kernels.layout import Layout
from isobit.kernels.norms.float32 import HEAD_LANES, dot, exp, fma, log
from isobit.kernels.ops import DeltaHeads
from isobit.kernels.stores import StateStore

ORDER = "delta32-v1"
LANES = 4
EPS = 1e-6
"""Added to squared lengths."""
_LINEAR = 20.0


class Rows(NamedTuple):
    """The rows of one sequence: `start` to `stop` of a batch, after `context` earlier ones, in
    `pages`."""

    start: int
    stop: int
    context: int
    pages: list[int]
    page_size: int

    @property
    def before(self) -> int | None:
        """The page that has the state before the first row; None where there is none."""
        return self.pages[(self.context - 1) // self.page_size] if self.context else None

    def kept(self) -> Iterator[tuple[int, int]]:
        """Yield (new row after which the sequence's state is kept, page that keeps it)."""
        for row in range(self.stop - self.start):
            position = self.context + row
            if (position + 1) % self.page_size == 0 or self.start + row + 1 == self.stop:
                yield row, self.pages[position // self.page_size]


def sequences(layout: Layout) -> Iterator[Rows]:
    """Yield the sequences of a batch that have rows."""
    bounds = layout.row_start.tolist()
    contexts = layout.context.tolist()
    tables = layout.page_table.tolist()
    for start, stop, context, table in zip(bounds, bounds[1:], contexts, tables):
        if stop > start:
            yield Rows(start, stop, context, table, layout.page_size)


def short_convolution(
    x: Tensor,
    weight: Tensor,
    store: StateStore | None,
    layout: Layout,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute `Ops.short_convolution`: a chain of fused multiply-adds from the bias, or zero, over
    ascending j, then s / (1 + exp(-s))."""
    width, y = weight.shape[1], torch.empty_like(x)
    for rows in sequences(layout):
        seen = torch.cat((_inputs_before(rows, x, width, store), x[rows.start : rows.stop]))
        total = _convolved(seen, weight, bias)
        y[rows.start : rows.stop] = (total / (1.0 + exp(-total))).to(x.dtype)
        if store is not None:
            for row, page in rows.kept():
                store.inputs[page] = seen[row + 1 : row + width]
    return y


def _inputs_before(rows: Rows, x: Tensor, width: int, store: StateStore | None) -> Tensor:
    if store is None or rows.before is None:
        assert not rows.context, "a sequence goes on, and nothing was kept of it"
        return x.new_zeros(width - 1, x.shape[1])
    return store.inputs[rows.before]


def _convolved(seen: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    width, wide = weight.shape[1], seen.float()
    total = torch.zeros((), device=seen.device) if bias is None else bias
    for j in range(width):
        total = fma(wide[j : len(seen) - width + 1 + j], weight[:, j], total)
    return total


def short_convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, layout: Layout, bias: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Compute `Ops.short_convolution_backward`, in float32."""
    width, dx, dweight = weight.shape[1], torch.empty_like(x), torch.zeros_like(weight)
    begin = weight.new_zeros(len(weight)) if bias is None else bias
    dbias = torch.zeros_like(begin)
    for rows in sequences(layout):
        seen = functional.pad(x[rows.start : rows.stop].float(), (0, 0, width - 1, 0))
        count = rows.stop - rows.start
        total = sum((seen[j : j + count] * weight[:, j] for j in range(width)), begin)
        sigma = torch.sigmoid(total)
        dtotal = dy[rows.start : rows.stop].float() * sigma * (1.0 + total * (1.0 - sigma))
        dseen = torch.zeros_like(seen)
        for j in range(width):
            dseen[j : j + count] += dtotal * weight[:, j]
            dweight[:, j] += (dtotal * seen[j : j + count]).sum(0)
        dbias += dtotal.sum(0)
        dx[rows.start : rows.stop] = dseen[width - 1 :].to(x.dtype)
    return (dx, dweight) if bias is None else (dx, dweight, dbias)


class Parts(NamedTuple):
    """The inputs of the recurrence, for every token and head, in float32: queries and keys [T, Hk,
    Dk], values [T, Hv, Dv], the state's decay and the strength [T, Hv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    kept: Tensor
    strength: Tensor


Backward = Callable[[Parts, Tensor], Parts]
"""Gradients of the parts, of those of out [T, Hv, Dv] float32."""


def delta_rule(
    qkv: Tensor, gates: Tensor, heads: DeltaHeads, store: StateStore | None, layout: Layout
) -> Tensor:
    inputs = _parts(qkv, gates, heads)
    group = heads.value_heads // heads.key_heads
    q, k = (x.repeat_interleave(group, 1) for x in (inputs.q, inputs.k))
    out = torch.empty_like(inputs.v)
    for rows in sequences(layout):
        assert store is not None or not rows.context, (
            "a sequence goes on, and nothing was kept of it"
        )
        state = q.new_zeros(heads.value_heads, heads.key_dim, heads.value_dim)
        if store is not None and rows.before is not None:
            state = store.states[rows.before]
        stored = dict(rows.kept()) if store is not None else {}
        for row, t in enumerate(range(rows.start, rows.stop)):
            faded = state * inputs.kept[t, :, None, None]
            wanted = inputs.v[t] - _recall(k[t], faded) if heads.corrects else inputs.v[t]
            error = wanted * inputs.strength[t, :, None]
            state = fma(k[t].unsqueeze(-1), error.unsqueeze(1), faded)
            read = _recall(q[t], state)
            out[t] = read if heads.skip is None else fma(heads.skip[:, None], inputs.v[t], read)
            if store is not None and row in stored:
                store.states[stored[row]] = state
    return out.to(qkv.dtype)


def _recall(query: Tensor, state: Tensor) -> Tensor:
    """Return queryᵀ · state of each head, [H, Dv]."""
    return dot(query.unsqueeze(1), state.transpose(1, 2), LANES)


def _parts(qkv: Tensor, gates: Tensor, heads: DeltaHeads) -> Parts:
    q, k, v = _split(qkv, heads)
    a = gates.float()[:, -heads.value_heads :]
    shifted = a + heads.step_bias
    soft = torch.where(shifted > _LINEAR, shifted, log(1.0 + exp(shifted).double()).float())
    if not heads.corrects:
        step = soft.clamp(min=heads.least_step)
        return Parts(q, k, v, exp(-(exp(heads.decay) * step)), step)
    b = gates.float()[:, : heads.value_heads]
    decay = exp(-(exp(heads.decay) * soft))
    scale = torch.tensor(heads.key_dim**-0.5, device=q.device)
    return Parts(
        q * _inverse_length(q) * scale, k * _inverse_length(k), v, decay, 1.0 / (1.0 + exp(-b))
    )


def _split(qkv: Tensor, heads: DeltaHeads) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = heads.key_heads * heads.key_dim, heads.value_heads * heads.value_dim
    if heads.corrects:
        q, k, v = qkv.float().split((keys, keys, values), dim=-1)
    else:
        v, k, q = qkv.float().split((values, keys, keys), dim=-1)
    q, k = (x.unflatten(-1, (heads.key_heads, heads.key_dim)) for x in (q, k))
    return q, k, v.unflatten(-1, (heads.value_heads, heads.value_dim))


def _inverse_length(x: Tensor) -> Tensor:
    squared = dot(x, x, HEAD_LANES) + torch.tensor(EPS, device=x.device)
    return (1.0 / squared.double().sqrt().float()).unsqueeze(-1)  # as in `rows32.rms_norm`


def delta_rule_backward(
    dout: Tensor, qkv: Tensor, gates: Tensor, heads: DeltaHeads, layout: Layout
) -> tuple[Tensor, ...]:
    return through_parts(
        dout,
        qkv,
        gates,
        heads,
        lambda inputs, dout: _backward(inputs, dout, layout, heads.corrects),
    )


def through_parts(
    dout: Tensor, qkv: Tensor, gates: Tensor, heads: DeltaHeads, backward: Backward
) -> tuple[Tensor, ...]:
    """Compute `Ops.delta_rule_backward` from the backward of the recurrence: `backward(inputs,
    dout)` returns the gradients of the recurrence's inputs, without the skip's."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (qkv, gates, heads.decay, heads.step_bias)]
        qkv_leaf, gates_leaf, decay, step_bias = leaves
        q, k, v = _split(qkv_leaf, heads)
        soft = functional.softplus(gates_leaf.float()[:, -heads.value_heads :] + step_bias)
        if heads.corrects:
            q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS) for x in (q, k))
            q = q * heads.key_dim**-0.5
            strength = gates_leaf.float()[:, : heads.value_heads].sigmoid()
        else:
            soft = strength = soft.clamp(min=heads.least_step)
        inputs = Parts(q, k, v, torch.exp(-decay.exp() * soft), strength)
    detached = Parts(*(tensor.detach().contiguous() for tensor in inputs))
    dout = dout.float().contiguous()
    gradients = backward(detached, dout)
    if heads.skip is None:
        return torch.autograd.grad(list(inputs), leaves, list(gradients))
    gradients = gradients._replace(v=gradients.v + heads.skip[:, None] * dout)
    dskip = (dout * detached.v).sum((0, 2))
    return (*torch.autograd.grad(list(inputs), leaves, list(gradients)), dskip)


def _backward(inputs: Parts, dout: Tensor, layout: Layout, corrects: bool = True) -> Parts:
    """Return the gradients of the recurrence's inputs: back through the tokens, over the state
    after each token, which are held for one sequence."""
    group = inputs.v.shape[1] // inputs.k.shape[1]
    q, k = (x.repeat_interleave(group, 1) for x in (inputs.q, inputs.k))
    dq = torch.zeros_like(q)
    dk = torch.zeros_like(k)
    gradients = [torch.zeros_like(x) for x in inputs[2:]]
    dv, dkept, dstrength = gradients

    def wanted_of(t: int, faded: Tensor) -> Tensor:
        if not corrects:
            return inputs.v[t]
        return inputs.v[t] - torch.einsum("hk,hkv->hv", k[t], faded)

    for rows in sequences(layout):
        states = [q.new_zeros(q.shape[1], q.shape[2], inputs.v.shape[2])]
        for t in range(rows.start, rows.stop):
            faded = states[-1] * inputs.kept[t, :, None, None]
            error = wanted_of(t, faded) * inputs.strength[t, :, None]
            states.append(faded + k[t].unsqueeze(-1) * error.unsqueeze(1))
        dstate = torch.zeros_like(states[0])
        for t in reversed(range(rows.start, rows.stop)):
            previous = states[t - rows.start]
            faded, strength = previous * inputs.kept[t, :, None, None], inputs.strength[t, :, None]
            wanted = wanted_of(t, faded)
            dq[t] = torch.einsum("hkv,hv->hk", states[t - rows.start + 1], dout[t])
            dstate = dstate + q[t].unsqueeze(-1) * dout[t].unsqueeze(1)
            derror = torch.einsum("hk,hkv->hv", k[t], dstate)
            dwanted = derror * strength
            dstrength[t], dv[t] = (derror * wanted).sum(-1), dwanted
            dk[t] = torch.einsum("hkv,hv->hk", dstate, wanted * strength)
            dfaded = dstate
            if corrects:
                dk[t] -= torch.einsum("hkv,hv->hk", faded, dwanted)
                dfaded = dstate - k[t].unsqueeze(-1) * dwanted.unsqueeze(1)
            dkept[t] = (dfaded * previous).sum((1, 2))
            dstate = dfaded * inputs.kept[t, :, None, None]
    dq, dk = (x.unflatten(1, (inputs.k.shape[1], group)).sum(2) for x in (dq, dk))
    return Parts(dq, dk, dv, dkept, dstrength)
