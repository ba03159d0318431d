"""The tiles and splits of K of a matrix product: a pure function of its sizes.

A product a [M, K] · b [N, K]ᵀ is cut into tiles of `tile_n` rows of b by `tile_m` rows of a. The
rows of b stand on the 64-high side of the matrix instruction, so that one row of a runs on the same
instructions as a thousand, and the tile along M may follow M and the architecture. On Hopper codes
of more rows than half of that side change sides (`tokens_first`): an element is the same chain of
instructions over the same 32 columns of K each, and which operand is on which side is left to be
the hardware's indifference, which the check at the first start asks for (`put_weights_first`).
Everything that could change a bit depends on N and K alone: the number of `splits` of K (chunks of
whole blocks, each summed from zero, their sums added in ascending order), and the step along K. N
is the whole weight's where b holds some of its rows (`Divided`); tiles follow the rows that are
there.

With few rows the time is that of reading b, so there must be enough programs to use the whole
memory bandwidth. On an H200 a program of BF16 reads up to 40 GB/s of b next to as much of a, and one
of codes 18 where weights were first and scales not loaded ahead (4,096 x 12,288, 64 rows: 64
programs, docs/gpu.md); so where tiles of 64 leave half of the processors idle, tokens that are first
have half as many weights next to them. An estimate: a second kernel costs about as long as one takes
to read 32 tiles of 64 x 128. Left out: the kernels (`kernels.py`).
"""

from dataclasses import dataclass

import torch

from isobit.kernels.triton.launch import target
from isobit.precision import BLOCK

PROCESSORS = 132
"""Streaming multiprocessors of an H100 or H200. A constant rather than a property of the device,
because it decides bits."""

LEAST_CHUNK = {torch.uint8: 32, torch.bfloat16: 16, torch.float32: 2}
"""The fewest blocks of K in a chunk, by element type: with fewer, the second kernel costs more than
splitting saves."""

STEP = {torch.uint8: BLOCK, torch.bfloat16: 64, torch.float32: 32}
"""Elements of K that one step of a kernel takes, by element type."""

FEW_ROWS = 64
"""Up to this many rows, one tile holds all of them and every chunk has its own programs."""

_WEIGHTS_FIRST = 32
"""Up to this many rows, the long side of the instruction would be empty by half."""


@dataclass(frozen=True)
class ProductPlan:
    """Tiles of tile_n rows of b by tile_m rows of a, and K in `splits` chunks of `chunk` steps of
    `step` elements.

    `apart`: every chunk has its own programs, and a second kernel adds their sums in order; else
    one program does both. `tokens_first`: rows of a on the 64-high side.
    """

    tile_n: int
    tile_m: int
    step: int
    splits: int
    chunk: int
    apart: bool
    num_warps: int
    num_stages: int
    tokens_first: bool = False


_tokens_first = True


def put_weights_first() -> None:
    """Put weights on the long side in every tile from here on, as they are next to few rows: the
    same bits, where exchanging the operands of an instruction does not keep them."""
    global _tokens_first
    _tokens_first = False


def tokens_first(rows: int, dtype: torch.dtype, b_row_scales: bool = False) -> bool:
    """Return whether tokens are on the long side of a product of `rows` rows. Not where rows of b
    have their own scales: a thread has as many to multiply by either way, and registers do not
    suffice."""
    codes = dtype == torch.uint8 and not b_row_scales
    return _tokens_first and target().matrix == "warpgroup" and codes and rows > _WEIGHTS_FIRST


def splits_of(columns: int, inner: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return (splits, blocks of K in each but the last) for b [N, K]: of N and K alone."""
    blocks = max(-(-inner // BLOCK), 1)
    tiles = -(-columns // _lowest(dtype))
    wanted = max(min(PROCESSORS // max(2 * tiles, 1), blocks // LEAST_CHUNK[dtype]), 1)
    chunk = -(-blocks // wanted)
    return -(-blocks // chunk), chunk


def plan(
    rows: int,
    columns: int,
    inner: int,
    dtype: torch.dtype,
    b_row_scales: bool = False,
    whole: int | None = None,
) -> ProductPlan:
    """Return the plan of a product of M = `rows`, N = `columns` of `whole`, by default of as many,
    K = `inner`; codes count as uint8, b with a scale for each row or for 128 of them."""
    splits, blocks = splits_of(columns if whole is None else whole, inner, dtype)
    first = tokens_first(rows, dtype, b_row_scales)
    tile_n, tile_m, num_warps, num_stages = _tile(rows, columns, splits, dtype, first)
    # for a B200 Triton 3.6 does not compile BF16 chunks in one program
    apart = splits > 1 and (rows <= FEW_ROWS or target().matrix == "tensor")
    return ProductPlan(
        tile_n,
        tile_m,
        STEP[dtype],
        splits,
        blocks * (BLOCK // STEP[dtype]),
        apart,
        num_warps,
        num_stages,
        first,
    )


def _lowest(dtype: torch.dtype) -> int:
    return 16 if dtype == torch.float32 else 64


def _tile(
    rows: int, columns: int, splits: int, dtype: torch.dtype, first: bool
) -> tuple[int, int, int, int]:
    """Return (tile_n, tile_m, warps, stages): warps grow with the long side of the instruction, so
    that each holds whole rows of it; with tokens `first`, that is tile_m."""
    if dtype == torch.float32:
        return (16, 16, 4, 4) if rows <= FEW_ROWS else (64, 32, 4, 3)
    if rows <= FEW_ROWS:
        tile_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
        tile_n = 32 if first and -(-columns // 64) * splits <= PROCESSORS // 2 else 64
        alone = -(-columns // tile_n) * splits <= PROCESSORS
        kib = _in_flight_kib(alone)
        return tile_n, tile_m, 4, kib * 1024 // _stage_bytes(tile_n, tile_m, dtype)
    by_warp = target().matrix == "warp"
    for tile_m in (64,) if by_warp else (128, 64):
        programs = -(-columns // 128) * -(-rows // tile_m)
        if programs >= PROCESSORS and not (splits > 1 and tile_m == 128):
            warps = tile_m // 16 if first else 8
            return 128, tile_m, warps, 3 if by_warp else 4
    return 64, 64, 4, 5


def _in_flight_kib(alone: bool) -> int:
    """KiB of operands on their way to one program, `alone` on its processor or one of two."""
    most = target().shared_kib - 3
    return min(160, most) if alone else min(80, most // 2)


def _stage_bytes(tile_n: int, tile_m: int, dtype: torch.dtype) -> int:
    """Shared memory of one step: 128 bytes of every row, for FP8 and BF16."""
    return (tile_n + tile_m) * STEP[dtype] * dtype.itemsize
