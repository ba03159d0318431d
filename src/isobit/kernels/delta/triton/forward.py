"""Linear attention by the gated delta rule, and Mamba-2's recurrence, on a GPU: what
`kernels/delta/definition.py` defines, token by token, in float32.

A program has a sequence, a value head and a block of its columns: that part of the state, [Dk,
BLOCK], stays in its registers over all rows of the sequence, one after the other. Columns of the
state do not meet, so a program needs no other. Which rows there are is data to the kernel, so a
decoded token, a chunk of a prompt and a learner's whole sequences are the same instructions in the
same order. Sums over Dk are neighbours in pairs, then pairs of pairs, each step a sum of two, so
their order does not depend on how Triton spreads a state over threads either
(`tests/kernels/triton/test_delta.py`). exp is the GPU's, softplus Kahan's log of 1 + exp in
float32. So the bits are not the CPU's.

A decoded token is bounded by memory, which the state crosses twice, a chunk by the time that a
token takes: what a token needs is read while the one before is computed. Left out: forms in chunks,
which fill matrix units, and have other bits for every division of a sequence; the backward
(`backward.py`), the convolution (`convolution.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.kernels.delta.definition import EPS
from isobit.kernels.layout import Layout
from isobit.kernels.ops import DeltaHeads
from isobit.kernels.stores import StateStore
from isobit.kernels.triton.launch import launch
from isobit.kernels.triton.numbers import cast, steps

_BLOCK = 8
"""Columns of a program, which is one warp: a row of them is a sector of memory, and of 128 rows a
thread has 4."""
_EPS = tl.constexpr(EPS)
_LINEAR = tl.constexpr(20.0)


@triton.jit
def column_sums(x, LEVELS: tl.constexpr):
    """Return sums of the columns of float32 `x` [2**LEVELS, B]: [1, B]. Neighbours in pairs, then
    pairs of pairs: a thread has neighbours, so that few numbers cross threads."""
    B: tl.constexpr = x.shape[1]
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (2 ** (LEVELS - level - 1), 2, B)), 1)
    return tl.reshape(x, (1, B))


@triton.jit
def _inverse_length(x, LEVELS: tl.constexpr):
    """Return 1 / the length of x [2**LEVELS, 1]: [1, 1]."""
    return tl.div_rn(1.0, tl.sqrt_rn(column_sums(x * x, LEVELS) + _EPS))


@triton.jit
def _kept_and_strength(a, b, decay, step_bias, least_step, CORRECTS: tl.constexpr):
    """Return the factor by which a token's state fades, and how strongly the token writes."""
    shifted = a + step_bias
    exponential = tl.exp(shifted)
    more = 1.0 + exponential
    soft = tl.where(more == 1.0, exponential, tl.log(more) * tl.div_rn(exponential, more - 1.0))
    soft = tl.where(shifted > _LINEAR, shifted, soft)
    strength = tl.div_rn(1.0, 1.0 + tl.exp(-b))
    if not CORRECTS:
        soft = tl.where(soft < least_step, least_step, soft)
        strength = soft
    return tl.exp(-(tl.exp(decay) * soft)), strength


@triton.jit
def _token(
    state, query, key, value, kept, strength, scale, skip,
    LEVELS: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """Return (state [HIGH, BLOCK] after a token, what it recalls [1, BLOCK]), given that before."""
    faded = state * kept
    wanted = value
    if CORRECTS:
        query = query * _inverse_length(query, LEVELS) * scale
        key = key * _inverse_length(key, LEVELS)
        wanted = value - column_sums(key * faded, LEVELS)
    error = wanted * strength
    state = tl.fma(tl.broadcast_to(key, state.shape), tl.broadcast_to(error, state.shape), faded)
    recalled = column_sums(query * state, LEVELS)
    if not CORRECTS:
        recalled = tl.fma(tl.broadcast_to(skip, value.shape), value, recalled)
    return state, recalled


@triton.jit
def _load_token(
    qkv_ptr, gates_ptr, t, there, head, column,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HIGH: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """Return (q, k [HIGH, 1], v [1, BLOCK], b, a [1, 1]) of token `t` as they are stored: as q, k,
    v, b and a, or where nothing is corrected as v, k, q and a, which is b too."""
    WIDTH: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    GATES: tl.constexpr = 2 * VALUE_HEADS if CORRECTS else VALUE_HEADS
    row = tl.arange(0, HIGH)[:, None]
    token = qkv_ptr + t * (2 * WIDTH + VALUES)
    key = token + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + row
    value = token + (2 * WIDTH if CORRECTS else 0) + head * VALUE_DIM + column
    gate = gates_ptr + t * GATES + head + tl.arange(0, 1)[:, None] + tl.arange(0, 1)[None, :]
    q_at = key + (0 if CORRECTS else VALUES + WIDTH)
    q = tl.load(q_at, mask=there & (row < KEY_DIM), other=0.0)
    k = tl.load(key + (WIDTH if CORRECTS else VALUES), mask=there & (row < KEY_DIM), other=0.0)
    v = tl.load(value, mask=there & (column < VALUE_DIM), other=0.0)
    b = tl.load(gate, mask=there, other=0.0)
    a = tl.load(gate + (GATES - VALUE_HEADS), mask=there, other=0.0)
    return q, k, v, b, a


@triton.jit(do_not_specialize=["page_size", "pages"])
def _delta_rule(
    qkv_ptr, gates_ptr, decay_ptr, step_bias_ptr, skip_ptr, out_ptr, states_ptr, row_start_ptr,
    context_ptr, table_ptr,
    page_size, pages, scale, least_step,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HIGH: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute a sequence's rows for one value head and BLOCK of its columns, page by page."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    column = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    start = tl.load(row_start_ptr + sequence).to(tl.int64)
    rows = (tl.load(row_start_ptr + sequence + 1) - start).to(tl.int32)
    context = tl.load(context_ptr + sequence).to(tl.int32)
    decay, step_bias = tl.load(decay_ptr + head), tl.load(step_bias_ptr + head)
    CORRECTS: tl.constexpr = skip_ptr is None
    skip = decay if CORRECTS else tl.load(skip_ptr + head)
    row = tl.arange(0, HIGH)[:, None]
    inside = (row < KEY_DIM) & (column < VALUE_DIM)
    entry = (head * KEY_DIM + row) * VALUE_DIM + column
    table = table_ptr + sequence.to(tl.int64) * pages
    state = tl.zeros((HIGH, BLOCK), tl.float32)
    if states_ptr is not None:
        continued = (rows > 0) & (context > 0)
        page = tl.load(table + (context - 1) // page_size, mask=continued, other=0).to(tl.int64)
        state = tl.load(
            states_ptr + page * (VALUE_HEADS * KEY_DIM * VALUE_DIM) + entry,
            mask=inside & continued,
            other=0.0,
        )
    q, k, v, b, a = _load_token(
        qkv_ptr, gates_ptr, start, rows > 0, head, column,
        KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, HIGH, CORRECTS,
    )  # fmt: skip
    done = tl.minimum(rows, 0)
    first = context // page_size
    for step in range(steps(tl.where(rows > 0, (context + rows - 1) // page_size - first + 1, 0))):
        end = tl.minimum((first + step + 1) * page_size - context, rows)
        for _ in range(steps(end - done)):
            t, done = start + done, done + 1
            query = q.to(tl.float32)
            key = k.to(tl.float32)
            value = v.to(tl.float32)
            strength = b
            step_size = a
            q, k, v, b, a = _load_token(
                qkv_ptr, gates_ptr, t + 1, done < rows, head, column,
                KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, HIGH, CORRECTS,
            )  # fmt: skip
            retention, strength = _kept_and_strength(
                step_size, strength, decay, step_bias, least_step, CORRECTS
            )
            state, read = _token(
                state, query, key, value, retention, strength, scale, skip, LEVELS, CORRECTS
            )
            out = cast(read, out_ptr.dtype.element_ty)
            to = out_ptr + t * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + column
            tl.store(to, out, mask=column < VALUE_DIM)
        if states_ptr is not None:
            page = tl.load(table + first + step).to(tl.int64)
            tl.store(
                states_ptr + page * (VALUE_HEADS * KEY_DIM * VALUE_DIM) + entry, state, mask=inside
            )


def delta_rule(
    qkv: Tensor, gates: Tensor, heads: DeltaHeads, store: StateStore | None, layout: Layout
) -> Tensor:
    qkv, gates = qkv.contiguous(), gates.contiguous()
    assert gates.dtype == torch.float32, f"gates in {gates.dtype}"
    assert gates.shape[1] == heads.gates
    out = torch.empty(
        qkv.shape[0], heads.value_heads, heads.value_dim, dtype=qkv.dtype, device=qkv.device
    )
    high = triton.next_power_of_2(heads.key_dim)
    block = min(_BLOCK, triton.next_power_of_2(heads.value_dim))
    launch(
        _delta_rule, (-(-heads.value_dim // block), heads.value_heads,
            layout.row_start.shape[0] - 1), qkv, gates,
        heads.decay.contiguous(), heads.step_bias.contiguous(), heads.skip, out,
        None if store is None else store.states,
        layout.row_start, layout.context, layout.page_table, layout.page_size,
        layout.page_table.stride(0),
        heads.key_dim**-0.5, heads.least_step, num_warps=1, KEY_HEADS=heads.key_heads,
        VALUE_HEADS=heads.value_heads,
        KEY_DIM=heads.key_dim, VALUE_DIM=heads.value_dim, HIGH=high, LEVELS=high.bit_length() - 1,
        BLOCK=block,
    )  # fmt: skip
    return out
