"""The backward of the gated delta rule and Mamba-2's recurrence on a GPU, for whole sequences: back
through the tokens, over the state after each token, as in `kernels/delta/definition.py`.

A program has a sequence, a value head and BLOCK columns. It goes forward once, keeping the state
before every SEGMENT tokens; then, from the last segment to the first, once more over a segment,
keeping the state before each token, and back. What a program keeps lies in a part of a scratch
buffer that is its own while it runs; programs are launched in waves that share the buffer, so it
takes no more than `_SCRATCH` bytes, or what one program needs.

Queries and keys are needed by all columns and by the value heads that share them: each program
writes its own part of their gradients, and parts are added in a fixed order. So gradients repeat;
they agree with no rollout, and their sums over a tile are Triton's. Left out: the gradients of
lengths and gates, which PyTorch makes (`through_parts`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.kernels.delta.definition import Parts, through_parts
from isobit.kernels.delta.triton.convolution import added
from isobit.kernels.layout import Layout
from isobit.kernels.ops import DeltaHeads
from isobit.kernels.triton.launch import launch
from isobit.kernels.triton.numbers import steps

_SEGMENT = 64
_BLOCK, _WARPS = 32, 8
"""Columns of a program and its warps: of 128 rows a thread holds 16 numbers of a state, and two
states fit."""
_SCRATCH = 1 << 30


@triton.jit
def _load_token(
    k_ptr, v_ptr, kept_ptr, strength_ptr, t, head, row, column,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Return (k [HIGH, 1], v [1, BLOCK], what is left of the state, the strength) of token `t`."""
    key = (t * KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)) * KEY_DIM + row
    k = tl.load(k_ptr + key, mask=row < KEY_DIM, other=0.0)
    gate = t * VALUE_HEADS + head
    v = tl.load(v_ptr + gate * VALUE_DIM + column, mask=column < VALUE_DIM, other=0.0)
    return k, v, tl.load(kept_ptr + gate), tl.load(strength_ptr + gate)


@triton.jit
def _step(state, k, v, kept, strength, CORRECTS: tl.constexpr):
    """Return (state after a token, the faded state before it, what the token wants to add), given
    the state before."""
    faded = state * kept
    wanted = v
    if CORRECTS:
        wanted = v - tl.sum(k * faded, 0)[None, :]
    return (
        tl.fma(
            tl.broadcast_to(k, state.shape), tl.broadcast_to(wanted * strength, state.shape), faded
        ),
        faded,
        wanted,
    )


@triton.jit
def _run(
    state, to, k_ptr, v_ptr, kept_ptr, strength_ptr, first, length, head, row, column, tile,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE: tl.constexpr, KEEP: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """Return the state after `length` tokens from `first` on; KEEP stores those before each."""
    for i in range(steps(length)):
        if KEEP:
            tl.store(to + i * TILE + tile, state)
        k, v, decay, strength = _load_token(
            k_ptr, v_ptr, kept_ptr, strength_ptr, first + i, head, row, column,
            KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM,
        )  # fmt: skip
        state, _, _ = _step(state, k, v, decay, strength, CORRECTS)
    return state


@triton.jit
def _back(
    dstate, before, dout_ptr, q_ptr, k_ptr, v_ptr, kept_ptr, strength_ptr,
    dq_ptr, dk_ptr, dv_ptr, dkept_ptr, dstrength_ptr, t, own, head, row, column,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """Return the gradient of the state before token `t`, from that of the state after it; store the
    gradients of the token's inputs. `own`: the index of this block of columns, token and head."""
    k, v, decay, strength = _load_token(
        k_ptr,
        v_ptr,
        kept_ptr,
        strength_ptr,
        t,
        head,
        row,
        column,
        KEY_HEADS,
        VALUE_HEADS,
        KEY_DIM,
        VALUE_DIM,
    )
    key = (t * KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)) * KEY_DIM + row
    q = tl.load(q_ptr + key, mask=row < KEY_DIM, other=0.0)
    value = (t * VALUE_HEADS + head) * VALUE_DIM + column
    dout = tl.load(dout_ptr + value, mask=column < VALUE_DIM, other=0.0)
    later, faded, wanted = _step(before, k, v, decay, strength, CORRECTS)
    tl.store(dq_ptr + own * KEY_DIM + row, tl.sum(later * dout, 1)[:, None], mask=row < KEY_DIM)
    dstate += q * dout
    derror = tl.sum(k * dstate, 0)[None, :]
    dwanted = derror * strength
    tl.store(dv_ptr + value, dwanted, mask=column < VALUE_DIM)
    tl.store(dstrength_ptr + own, tl.sum(tl.sum(derror * wanted, 1), 0))
    dkeys = dstate * (wanted * strength)
    dfaded = dstate
    if CORRECTS:
        dkeys -= faded * dwanted
        dfaded = dstate - k * dwanted
    dk = tl.sum(dkeys, 1)[:, None]
    tl.store(dk_ptr + own * KEY_DIM + row, dk, mask=row < KEY_DIM)
    tl.store(dkept_ptr + own, tl.sum(tl.sum(dfaded * before, 1), 0))
    return dfaded * decay


@triton.jit(do_not_specialize=["first_item", "tokens", "segments"])
def _delta_backward(
    dout_ptr, q_ptr, k_ptr, v_ptr, kept_ptr, strength_ptr, dq_ptr, dk_ptr, dv_ptr, dkept_ptr,
    dstrength_ptr,
    scratch_ptr, row_start_ptr, first_item, tokens, segments,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HIGH: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SEGMENT: tl.constexpr,
    CORRECTS: tl.constexpr,
):  # fmt: skip
    """Compute item `first_item` + program of the backward: one of (sequence, value head, block of
    columns), the last running fastest."""
    item = first_item + tl.program_id(0)
    block, head = item % BLOCKS, item // BLOCKS % VALUE_HEADS
    start = tl.load(row_start_ptr + item // (BLOCKS * VALUE_HEADS)).to(tl.int64)
    rows = (tl.load(row_start_ptr + item // (BLOCKS * VALUE_HEADS) + 1) - start).to(tl.int32)
    row, column = tl.arange(0, HIGH)[:, None], (block * BLOCK + tl.arange(0, BLOCK))[None, :]
    TILE: tl.constexpr = HIGH * BLOCK
    before_token = scratch_ptr + tl.program_id(0).to(tl.int64) * (segments + SEGMENT) * TILE
    before_segment = before_token + SEGMENT * TILE
    tile = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    count = (rows + SEGMENT - 1) // SEGMENT
    state = tl.zeros((HIGH, BLOCK), tl.float32)
    for segment in range(steps(count)):
        tl.store(before_segment + tl.cast(segment, tl.int64) * TILE + tile, state)
        state = _run(
            state, before_token, k_ptr, v_ptr, kept_ptr, strength_ptr, start + segment * SEGMENT,
            tl.where(segment + 1 < count, SEGMENT, 0), head, row, column, tile,
            KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TILE, False, CORRECTS,
        )  # fmt: skip
    dstate = tl.zeros((HIGH, BLOCK), tl.float32)
    for ended in range(steps(count)):
        segment = count - 1 - ended
        first, length = start + segment * SEGMENT, tl.minimum(rows - segment * SEGMENT, SEGMENT)
        # other threads may have kept what this one reads, and read what it will overwrite
        tl.debug_barrier()
        state = tl.load(before_segment + tl.cast(segment, tl.int64) * TILE + tile)
        _run(
            state, before_token, k_ptr, v_ptr, kept_ptr, strength_ptr, first, length, head, row,
            column, tile,
            KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TILE, True, CORRECTS,
        )  # fmt: skip
        tl.debug_barrier()
        for i in range(steps(length)):
            t = first + (length - 1 - i)
            dstate = _back(
                dstate, tl.load(before_token + (length - 1 - i) * TILE + tile), dout_ptr, q_ptr,
                k_ptr, v_ptr, kept_ptr,
                strength_ptr, dq_ptr, dk_ptr, dv_ptr, dkept_ptr, dstrength_ptr, t,
                (tl.cast(block, tl.int64) * tokens + t) * VALUE_HEADS + head, head, row, column,
                KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, CORRECTS,
            )  # fmt: skip


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


def _backward(inputs: Parts, dout: Tensor, layout: Layout, corrects: bool = True) -> Parts:
    """Return the gradients of the recurrence's inputs, in waves of programs that share a scratch
    buffer."""
    (tokens, key_heads, key_dim), (value_heads, value_dim) = inputs.k.shape, inputs.v.shape[1:]
    high, block = triton.next_power_of_2(key_dim), min(_BLOCK, triton.next_power_of_2(value_dim))
    blocks, segments = -(-value_dim // block), -(-layout.max_rows // _SEGMENT)
    items = (layout.row_start.shape[0] - 1) * value_heads * blocks
    workspace = (segments + _SEGMENT) * high * block
    wave = max(1, min(items, _SCRATCH // (4 * workspace)))
    dq, dk = (dout.new_empty(blocks, tokens, value_heads, key_dim) for _ in range(2))
    dkept, dstrength = (dout.new_empty(blocks, tokens, value_heads) for _ in range(2))
    dv, scratch = torch.empty_like(inputs.v), dout.new_empty(wave, workspace)
    for first in range(0, items, wave):
        launch(
            _delta_backward, (min(wave, items - first),), dout, *inputs, dq, dk, dv, dkept,
            dstrength, scratch,
            layout.row_start, first, tokens, segments, num_warps=_WARPS, KEY_HEADS=key_heads,
            VALUE_HEADS=value_heads,
            KEY_DIM=key_dim, VALUE_DIM=value_dim, HIGH=high, BLOCK=block, BLOCKS=blocks,
            SEGMENT=_SEGMENT, CORRECTS=corrects,
        )  # fmt: skip
    dq, dk = (added(added(x).unflatten(1, (key_heads, -1)).movedim(2, 0)) for x in (dq, dk))
    return Parts(dq, dk, dv, added(dkept), added(dstrength))
