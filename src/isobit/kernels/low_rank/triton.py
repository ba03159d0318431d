"""The low-rank products of several adapters on a GPU: two launches, whatever their number.

Sums and bits equal those of `definition.py` (tests/kernels/triton/test_low_rank.py).
`shrink` makes A · x of all rows: a program has some rows of one adapter, which it reads from a
table of tiles, as it reads where that adapter's factors stand. `expand` rounds that to BF16,
multiplies it by B, then by the scale, and adds it to the rows' totals, each a float32 operation. A
row's chain of instructions is that of `product` (`product/triton/kernels.py`): factors on the long
side of the instruction, the same steps along K, and the same chunks of K (`splits_of`), which are
added in ascending order either in `shrink` or, where each has its own programs, in `expand`.

Bound, as an estimate: a decode step reads each adapter's factors once, 0.6 MB of rank 16 for the
three projections of Qwen3-8B's heads, which a GPU does in 0.15 microseconds; so the time of a few
is that of two launches, and of 32 steps along K. Left out: factors in float32, of more than `MOST_RANK` or of rows
that others have too, which are multiplied one after the other (`definition.py`); gradients.
"""

import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from isobit.kernels.low_rank import definition
from isobit.kernels.low_rank.definition import Factors, Part
from isobit.kernels.matrices import Operand, plain
from isobit.kernels.ops import Ops
from isobit.kernels.product.triton.plan import PROCESSORS, STEP, splits_of
from isobit.kernels.triton import numbers
from isobit.kernels.triton.launch import launch, target
from isobit.precision import BLOCK

MOST_RANK = 512
"""Of a factor that kernels take: from 4,096 on, `product` would sum B's in chunks."""
_FIELDS = 7
"""Of a part's record: addresses of A and B, rank, first row and number of rows of the weight, steps
of a chunk, and the bits of the scale. A part that is not there has no rank and no rows."""
_STEP = STEP[torch.bfloat16]
_HIGH, _WARPS, _STAGES = 64, 4, 5
"""Rows of a factor in a tile, on the long side of the instruction."""
_HEIGHTS = (16, 32)
"""Rows of x in a tile; with 64 `expand` spills registers."""


@dataclass(frozen=True, eq=False)
class AddressedFactors(Factors):
    """Low-rank factors that kernels find by address.

    `record` [parts, _FIELDS] int64 on the device; then, over all factors, the largest `rank`, the
    largest number of `rows` and the largest number of chunks of K (`splits`); `eights`: whether
    every rank is a multiple of 8.
    """

    record: Tensor
    rank: int
    rows: int
    splits: int
    eights: bool


@triton.jit
def _rows_of(pick_ptr, tile_ptr, tiles, BLOCK_T: tl.constexpr):
    """Return (the adapter of a program's tile, its places among the sorted rows, which of these
    there are, where they stand)."""
    tile = tl.program_id(0)
    t = tl.load(tile_ptr + tiles + tile) + tl.arange(0, BLOCK_T)
    mask = t < tl.load(tile_ptr + 2 * tiles + tile)
    return tl.load(tile_ptr + tile), t, mask, tl.load(pick_ptr + t, mask=mask, other=0)


@triton.jit
def _factor(address):
    """Return a pointer to a factor, from its address."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(tl.bfloat16)), 16)


@triton.jit(do_not_specialize=["tiles", "rows", "parts"])
def shrink(
    x_ptr, pick_ptr, tile_ptr, record_ptr, sum_ptr, tiles, rows, parts, width,
    INNER: tl.constexpr, RANKS: tl.constexpr, FIELDS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, IN_CHUNKS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Compute sums [chunks, parts, rows, width] float32 of A [r, INNER] · x at `pick`: of every
    chunk where they are APART, or of all of K. RANKS: tiles along r."""
    adapter, t, mask, at = _rows_of(pick_ptr, tile_ptr, tiles, BLOCK_T)
    block, chunk = tl.program_id(1) // RANKS, tl.program_id(2)
    record = record_ptr + (adapter * parts + block) * FIELDS
    rank, steps = tl.load(record + 2).to(tl.int32), tl.load(record + 5).to(tl.int32)
    lowest = tl.program_id(1) % RANKS * BLOCK_R
    STEPS: tl.constexpr = (INNER + BLOCK_K - 1) // BLOCK_K
    start = chunk * steps
    stop = tl.minimum(start + steps, STEPS) if APART else STEPS
    if (lowest >= rank) | (start >= STEPS):
        return
    r, k = lowest + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    first = start * BLOCK_K + k
    a_tile = _factor(record) + r.to(tl.int64)[:, None] * INNER + first[None, :]
    x_tile = x_ptr + at[None, :] * INNER + first[:, None]
    total = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
    acc = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
    for step in range(numbers.steps(start), numbers.steps(stop)):
        if IN_CHUNKS:
            fresh = step % steps == 0
            if fresh:
                total += acc
                acc = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
        inside = k < INNER - step * BLOCK_K
        a = tl.load(a_tile, mask=(r < rank)[:, None] & inside[None, :], other=0.0)
        x = tl.load(x_tile, mask=mask[None, :] & inside[:, None], other=0.0)
        acc = numbers.dot(a, x, acc)
        a_tile += BLOCK_K
        x_tile += BLOCK_K
    if IN_CHUNKS:  # one chunk is not added to zero, which would change the sign of another
        acc = tl.where(steps < STEPS, total + acc, acc)
    to = ((chunk * parts + block).to(tl.int64) * rows + t)[:, None] * width + r[None, :]
    tl.store(sum_ptr + to, tl.trans(acc), mask=mask[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["tiles", "rows", "parts"])
def expand(
    sum_ptr, pick_ptr, tile_ptr, record_ptr, total_ptr, tiles, rows, parts, width, columns,
    STEPS: tl.constexpr, FIELDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, EIGHTS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Compute total [T, columns] float32, at `pick`: plus scale · (B · u), u the sums of `shrink`
    in BF16, where they are APART added in ascending order. STEPS: those of K in `shrink`. EIGHTS:
    every rank is a multiple of 8."""
    adapter, t, mask, at = _rows_of(pick_ptr, tile_ptr, tiles, BLOCK_T)
    block = tl.program_id(2)
    record = record_ptr + (adapter * parts + block) * FIELDS
    rank, low = tl.load(record + 2).to(tl.int32), tl.load(record + 3)
    high, steps = tl.load(record + 4).to(tl.int32), tl.load(record + 5).to(tl.int32)
    if tl.program_id(1) * BLOCK_N >= high:
        return
    n, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    pitch = tl.multiple_of(rank, 8) if EIGHTS else rank
    b_tile = _factor(record + 1) + n.to(tl.int64)[:, None] * pitch + k[None, :]
    u_tile = sum_ptr + (tl.cast(block, tl.int64) * rows + t)[None, :] * width + k[:, None]
    size = tl.cast(parts, tl.int64) * rows * width
    chunks = (STEPS + steps - 1) // steps if APART else 1
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for step in range(numbers.steps((rank + BLOCK_K - 1) // BLOCK_K)):
        inside = k < rank - step * BLOCK_K
        b = tl.load(b_tile, mask=(n < high)[:, None] & inside[None, :], other=0.0)
        there = inside[:, None] & mask[None, :]
        u = tl.load(u_tile, mask=there, other=0.0)
        if APART:  # one chunk is not added to zero, which would change the sign of another
            u = tl.where(chunks > 1, 0.0 + u, u)
            for chunk in range(1, numbers.steps(chunks)):
                u += tl.load(u_tile + chunk * size, mask=there, other=0.0)
        acc = numbers.dot(b, numbers.cast(u, tl.bfloat16), acc)
        b_tile += BLOCK_K
        u_tile += BLOCK_K
    scale = tl.load(record + 6).to(tl.int32).to(tl.float32, bitcast=True)
    to = total_ptr + at[:, None] * columns + low + n[None, :]
    there = mask[:, None] & (n < high)[None, :]
    tl.store(to, tl.load(to, mask=there, other=0.0) + tl.trans(acc) * scale, mask=there)


def prepare_factors(
    ops: Ops, parts: Sequence[tuple[Tensor, Tensor, int, int]], scale: float
) -> Factors:
    if not _addressable(parts):
        return definition.prepare_factors(ops, parts, scale)
    parts = [(_aligned(a), _aligned(b), lo, hi) for a, b, lo, hi in parts]
    (bits,) = struct.unpack("<i", struct.pack("<f", scale))
    record, splits = [], []
    for a, b, lo, hi in parts:
        count, blocks = splits_of(len(a), a.shape[1], a.dtype)
        splits.append(count)
        chunk = blocks * (BLOCK // _STEP)
        record.append([a.data_ptr(), b.data_ptr(), len(a), lo, hi - lo, chunk, bits])
    return AddressedFactors(
        tuple(Part(*block) for block in parts), scale,
        torch.tensor(record, dtype=torch.int64, device=parts[0][0].device),
        max(len(a) for a, *_ in parts), max(hi - lo for *_, lo, hi in parts), max(splits),
        all(len(a) % 8 == 0 for a, *_ in parts),
    )  # fmt: skip


def _addressable(parts: Sequence[tuple[Tensor, Tensor, int, int]]) -> bool:
    """Return whether the kernels take these factors."""
    rows = sorted((lo, hi) for *_, lo, hi in parts)
    apart = all(upper[1] <= lower[0] for upper, lower in pairwise(rows))
    plain = all(a.dtype == b.dtype == torch.bfloat16 for a, b, *_ in parts)
    return bool(parts) and plain and apart and all(a.shape[0] <= MOST_RANK for a, *_ in parts)


def _aligned(factor: Tensor) -> Tensor:
    """Return a factor in its own storage, or itself: row by row, from a multiple of 16 bytes on."""
    factor = factor.contiguous()
    return factor.clone() if factor.data_ptr() % 16 else factor


def add_low_rank(
    ops: Ops,
    total: Tensor,
    x: Operand,
    adapters: Sequence[Factors],
    rows: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    addressed = [lora for lora in adapters if isinstance(lora, AddressedFactors)]
    if dtype != torch.bfloat16 or len(addressed) != len(adapters):
        return definition.add_low_rank(ops, total, x, adapters, rows, offsets, dtype)
    if len(rows):
        _add(total, plain(x, dtype).contiguous(), addressed, rows, offsets)
    return total.to(dtype)


def _add(
    total: Tensor, x: Tensor, adapters: Sequence[AddressedFactors], rows: Tensor, offsets: Tensor
) -> None:
    """Add to `total` [T, N] float32 what adapters make of their rows of x [T, K] BF16."""
    tiles, height = _tiles(offsets, x.device)
    blocks, inner = max(len(lora.parts) for lora in adapters), x.shape[1]
    width, records = -(-max(lora.rank for lora in adapters) // 16) * 16, _records(adapters, blocks)
    splits, count, ranks = max(lora.splits for lora in adapters), tiles.shape[1], -(-width // _HIGH)
    # for a B200 Triton 3.6 does not compile BF16 chunks in one program
    few = count * blocks <= PROCESSORS or target().matrix == "tensor"
    apart = splits > 1 and few
    chunks = splits if apart else 1
    sums = torch.empty((chunks, blocks, len(rows), width), dtype=torch.float32, device=x.device)
    schedule = rows, tiles, records
    sizes = count, len(rows), blocks, width
    launch(
        shrink, (count, blocks * ranks, chunks), x, *schedule, sums, *sizes, num_warps=_WARPS,
        num_stages=_STAGES, INNER=inner, RANKS=ranks, FIELDS=_FIELDS, BLOCK_R=_HIGH,
        BLOCK_T=height, BLOCK_K=_STEP, IN_CHUNKS=splits > 1 and not apart, APART=apart,
    )  # fmt: skip
    widest = max(lora.rows for lora in adapters)
    launch(
        expand, (count, -(-widest // _HIGH), blocks), sums, *schedule, total, *sizes, total.shape[1],
        num_warps=_WARPS, num_stages=2, STEPS=-(-inner // _STEP), FIELDS=_FIELDS, BLOCK_N=_HIGH,
        BLOCK_T=height, BLOCK_K=_STEP, EIGHTS=all(lora.eights for lora in adapters), APART=apart,
    )  # fmt: skip


_stacked: WeakIdKeyDictionary = WeakIdKeyDictionary()  # records of several, by the first of them


def _records(adapters: Sequence[AddressedFactors], parts: int) -> Tensor:
    """Return the records of adapters [adapters, parts, _FIELDS] on the device. Factors never
    change, so they are stacked again only where a weight's adapters are others than the last
    time."""
    known, stacked = _stacked.get(adapters[0], ((), None))
    if stacked is None or [reference() for reference in known] != list(adapters):
        missing = [parts - len(lora.parts) for lora in adapters]
        padded = [functional.pad(x.record, (0, 0, 0, n)) for x, n in zip(adapters, missing)]
        stacked = torch.stack(padded)
        _stacked[adapters[0]] = tuple(map(weakref.ref, adapters)), stacked
    return stacked


_made: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tables of tiles, by offsets


def _tiles(offsets: Tensor, device: torch.device) -> tuple[Tensor, int]:
    """Return (the adapter of every tile, its first row and the end of its adapter's: [3, tiles]
    int32 on the device; rows of a tile). They are made once for all weights that have the same
    `offsets` [adapters + 1], on the CPU, which are never written again."""
    if offsets not in _made:
        bounds = list(pairwise(offsets.tolist()))
        most = max(stop - start for start, stop in bounds)
        height = _HEIGHTS[most > _HEIGHTS[0]]
        tiled = [
            (index, first, stop)
            for index, (start, stop) in enumerate(bounds)
            for first in range(start, stop, height)
        ]
        table = torch.tensor(tiled, dtype=torch.int32).t().contiguous()
        _made[offsets] = table.to(device, non_blocking=True), height
    table, height = _made[offsets]
    return table, height
