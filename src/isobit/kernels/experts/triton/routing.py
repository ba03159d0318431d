"""Routing in a mixture of experts: softmax over the experts, the most probable ones and their
gates, in one kernel.

The definition is `kernels/experts/definition.py`'s, with float32 inside: the softmax's denominator
is a sum of neighbours in pairs, then pairs of pairs (`norm.pair_sum`), gates are added in the order
of the slots, and the choice takes no sum at all. So a row's bits depend on the row and on the
number of experts (`tests/kernels/triton/test_routing.py`). The bound is the memory's speed, and for
the few thousand logits of a decode step the launch.

`by_expert` sorts the choices of a few thousand slots, as decoding has, in one launch and not in a
dozen: the place of a choice is how many come before it, counted. More are sorted by PyTorch;
integers are the same.

Left out: the router's logits, which are a product, and gradients (`model/forward/moe.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.kernels.experts import definition
from isobit.kernels.norms.triton.norm import pair_sum
from isobit.kernels.triton import numbers
from isobit.kernels.triton.launch import launch

_HIGH = 8
"""Rows of a program."""

MOST_COUNTED = 8192
"""Choices that are sorted by counting, each against all: 11 microseconds (an estimate) where a sort
takes 40."""
_COUNTED, _AT_ONCE = 64, 256
"""Choices that one program places, and how many it looks at in a step."""


@triton.jit(do_not_specialize=["rows"])
def _route(
    logits_ptr, given_ptr, probability_ptr, chosen_ptr, gate_ptr, rows,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, COUNT: tl.constexpr,
    SLOTS: tl.constexpr,
    NORMALIZE: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """Choose the experts of HIGH rows of logits [rows, EXPERTS]; BLOCK and SLOTS are the powers of
    two from EXPERTS and COUNT on."""
    row = tl.program_id(0).to(tl.int64) * HIGH + tl.arange(0, HIGH)
    present = row < rows
    expert = tl.arange(0, BLOCK)[None, :]
    inside = present[:, None] & (expert < EXPERTS)
    at = row[:, None] * EXPERTS + expert
    z = tl.load(logits_ptr + at, mask=inside, other=-float("inf"))
    weight = tl.where(inside, tl.exp(z - tl.max(z, 1)[:, None]), 0.0)
    total = tl.where(present, pair_sum(weight, LEVELS), 1.0)
    probability = tl.div_rn(weight, tl.broadcast_to(total[:, None], weight.shape))
    tl.store(probability_ptr + at, probability, mask=inside)
    left = tl.where(expert < EXPERTS, probability, -1.0)
    slot = tl.arange(0, SLOTS)[None, :]
    gates = tl.zeros((HIGH, SLOTS), tl.float32)
    gate_total = tl.zeros((HIGH,), tl.float32)
    for i in tl.static_range(COUNT):
        best = tl.max(left, 1)
        # ties go to the lower expert; where all is NaN, to the last: an index of an expert in any
        # case
        index = tl.min(tl.where(left == best[:, None], expert, EXPERTS - 1), 1)
        left = tl.where(expert == index[:, None], -1.0, left)
        tl.store(chosen_ptr + row * COUNT + i, index.to(tl.int64), mask=present)
        if given_ptr is not None:
            index = tl.load(given_ptr + row * COUNT + i, mask=present, other=0).to(tl.int32)
        gate = tl.sum(tl.where(expert == index[:, None], probability, 0.0), 1)  # one term and zeros
        gate_total += gate
        gates = tl.where(slot == i, gate[:, None], gates)
    if NORMALIZE:
        gate_total = tl.where(present, gate_total, 1.0)
        gates = tl.div_rn(gates, tl.broadcast_to(gate_total[:, None], gates.shape))
    tl.store(gate_ptr + row[:, None] * COUNT + slot, gates, mask=present[:, None] & (slot < COUNT))


def route(
    logits: Tensor, count: int, normalize: bool, given: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `Ops.route`, with float32 sums."""
    logits = logits.contiguous()
    assert logits.dtype == torch.float32
    rows, experts = logits.shape
    probabilities, gates = torch.empty_like(logits), logits.new_empty(rows, count)
    chosen = torch.empty((rows, count), dtype=torch.int64, device=logits.device)
    block = triton.next_power_of_2(experts)
    launch(
        _route, (triton.cdiv(rows, _HIGH),), logits, None if given is None else given.contiguous(),
        probabilities,
        chosen, gates, rows, num_warps=4 if block <= 128 else 8,
        EXPERTS=experts, BLOCK=block, LEVELS=block.bit_length() - 1, COUNT=count,
        SLOTS=triton.next_power_of_2(count), NORMALIZE=normalize, HIGH=_HIGH,
    )  # fmt: skip
    return probabilities, chosen, gates


@triton.jit(do_not_specialize=["entries", "blocks"])
def _by_expert(
    chosen_ptr, token_ptr, place_ptr, offset_ptr, entries, blocks,
    SLOTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sort choices by expert: the first `blocks` programs write the positions of BLOCK choices
    each, those after them the offsets of BLOCK experts."""
    program = tl.program_id(0)
    blocked = program < blocks
    first = tl.where(blocked, program, program - blocks) * BLOCK
    entry = first + tl.arange(0, BLOCK)
    choice = tl.load(chosen_ptr + entry, mask=blocked & (entry < entries), other=0).to(tl.int32)
    mine = tl.where(blocked, choice, entry)
    until = tl.where(
        blocked, entry, -1
    )  # of equal choices the earlier ones come before, and none before an expert's rows
    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, numbers.steps(entries), WIDE):
        at = start + tl.arange(0, WIDE)
        rival = tl.load(chosen_ptr + at, mask=at < entries, other=EXPERTS).to(tl.int32)[None, :]
        earlier = (rival < mine[:, None]) | (
            (rival == mine[:, None]) & (at[None, :] < until[:, None])
        )
        rank += tl.sum((earlier & (at < entries)[None, :]).to(tl.int32), 1)
    inside = blocked & (entry < entries)
    tl.store(token_ptr + rank, (entry // SLOTS).to(tl.int64), mask=inside)
    tl.store(place_ptr + entry, rank.to(tl.int64), mask=inside)
    tl.store(offset_ptr + entry, rank.to(tl.int64), mask=(program >= blocks) & (entry <= EXPERTS))


def by_expert(chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    entries = chosen.numel()
    if not 0 < entries <= MOST_COUNTED:
        return definition.by_expert(chosen, count)
    token = chosen.new_empty(entries)
    position = torch.empty_like(chosen, memory_format=torch.contiguous_format)
    offsets, blocks = chosen.new_empty(count + 1), triton.cdiv(entries, _COUNTED)
    launch(
        _by_expert, (blocks + triton.cdiv(count + 1, _COUNTED),), chosen.contiguous(), token, position,
        offsets, entries,
        blocks, num_warps=4, SLOTS=chosen.shape[1], EXPERTS=count, BLOCK=_COUNTED, WIDE=_AT_ONCE,
    )  # fmt: skip
    return token, position, offsets
