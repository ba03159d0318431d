"""Products of rows sorted by expert, on a GPU: FProp, DGrad and WGrad of a mixture of experts.

The arithmetic is that of one matrix product: weights on the 64-high side of the matrix instruction,
K ascending, a block of 128 of E4M3 codes summed from zero by the matrix unit, times its two scales,
added in float32 by fma; BF16 and FP32 in one float32 sum. Tiles, steps and stages are constants,
for one row and for a hundred thousand: so the bits of a row depend on that row and its expert's
weights. Nothing waits for the device but the end of WGrad, which leaves out experts without rows
(`tests/kernels/triton/test_grouped.py`).

Bound, as an estimate: few rows read every chosen expert's weights once, so memory decides; from
about 200 rows an expert the reads from the L2 cache do (a step moves 24 KiB for 2.1 MFLOP). Left
out: the kernels (`kernels.py`), and one expert's matrices alone.
"""

import math
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from isobit.errors import IsobitError
from isobit.kernels.experts import definition
from isobit.kernels.experts.triton import kernels
from isobit.kernels.matrices import Gradients, Operand, Stacked, is_rounded, picked
from isobit.kernels.product.triton.operands import check_blocks, scale_strides
from isobit.kernels.product.triton.product import values
from isobit.kernels.triton.launch import launch, target
from isobit.kernels.triton.transpose import contiguous_bytes
from isobit.precision import BLOCK, E4M3, QTensor, QuantSpec
from isobit.precision.packed_fp4 import panels

_OUTPUTS = (torch.bfloat16, torch.float32)
_SCHEDULED = 64  # tiles that one program of the schedule writes
_SUMMED = 1024  # columns that one program of a sum of rows has


@dataclass(frozen=True)
class Tile:
    """Rows of weights by rows of tokens, the step along K, and how a kernel over them is
    compiled."""

    n: int
    t: int
    step: int
    num_warps: int
    num_stages: int


FP8_TILE = Tile(128, 64, BLOCK, 4, 4)
PLAIN_TILE = {torch.bfloat16: Tile(128, 64, 64, 4, 4), torch.float32: Tile(32, 32, 32, 4, 3)}
FP8_GRADIENT_TILE = Tile(128, 64, BLOCK, 8, 3)
PLAIN_GRADIENT_TILE = {
    torch.bfloat16: Tile(128, 128, 64, 8, 3),
    torch.float32: Tile(32, 32, 32, 4, 3),
}


@dataclass(frozen=True, eq=False)
class Schedule:
    """Tiles of at most `height` rows of one expert, on the device.

    tile [2, count] int32: expert, or -1 for a surplus tile, and first row; start [E + 1] int32:
    every expert's first tile, and their number. `count` is an upper bound from sizes alone, and met
    where it can be: no more than one tile for each expert that can have rows is short.
    """

    tile: Tensor
    start: Tensor
    height: int

    @property
    def count(self) -> int:
        return self.tile.shape[1]

    @staticmethod
    def of(offsets: Tensor, rows: int, height: int) -> "Schedule":
        """Return the schedule of `rows` rows whose expert e has rows offsets[e] to offsets[e + 1].
        It is made once for products of the same `offsets`, which are never written again."""
        made = _schedules.setdefault(offsets, {})
        if (rows, height) not in made:
            made[rows, height] = Schedule._written(offsets, rows, height)
        return made[rows, height]

    @staticmethod
    def _written(offsets: Tensor, rows: int, height: int) -> "Schedule":
        experts = offsets.shape[0] - 1
        served = min(experts, rows)
        count = served + (rows - served) // height
        tile = torch.empty((2, count), dtype=torch.int32, device=offsets.device)
        start = torch.empty(experts + 1, dtype=torch.int32, device=offsets.device)
        launch(
            kernels.schedule, (-(-count // _SCHEDULED),), offsets, tile, start, count, num_warps=4,
            EXPERTS=experts, PADDED=triton.next_power_of_2(experts), BLOCK_T=height,
            BLOCK=_SCHEDULED,
        )  # fmt: skip
        return Schedule(tile, start, height)


_schedules: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by offsets, then (rows, height)


def grouped_product(
    a: Operand, weights: Stacked, offsets: Tensor, out: torch.dtype, rows: Tensor | None = None
) -> Tensor:
    """Compute every row of a [R, K] times the weights [N, K] of its expert, plus its bias, rounded
    once to `out`: [R, N].

    With `rows` [R] int64, row r is a's at rows[r], loaded from there. offsets [E + 1] int64 on the
    device. Both quantized: E4M3, a with a scale per row and block of K (1x128), weights the same or
    128x128; raises IsobitError for other blocks. Else plain, a quantized one counting as its
    values, NVFP4's next to BF16 as values in BF16.
    """
    assert a.shape[1] == weights.shape[2], (
        f"operands of {a.shape[1]} and {weights.shape[2]} columns"
    )
    assert out in _OUTPUTS, f"a product has no result in {out}"
    if weights.common is not None:
        return _nibbles(a if rows is None else picked(a, rows), weights, offsets, out)
    count = a.shape[0] if rows is None else rows.shape[0]
    y = torch.empty((count, weights.shape[1]), dtype=out, device=offsets.device)
    if isinstance(a, QTensor) and weights.spec is not None:
        _block_product(a, weights, offsets, y, rows)
        return y
    left = a.dequantize() if isinstance(a, QTensor) else a
    right = weights if weights.spec is None else weights.map(values)
    if is_rounded(a, weights.spec):
        right = Stacked(right.data.bfloat16())
    if left.dtype != right.data.dtype:
        left, right = left.float(), Stacked(right.data.float())
    _plain_product(left, right.data, weights.bias, offsets, y, rows)
    return y


def grouped_weight_gradient(
    dy: Tensor,
    x: Operand,
    offsets: Tensor,
    gradient: QuantSpec | None,
    flags: tuple[Tensor, Tensor],
    into: Gradients = (),
) -> list[Tensor | None]:
    """Compute `Ops.grouped_weight_gradient`: for every expert dyᵀ · x of its rows, [N, K] float32,
    or None without rows.

    `flags` [1] int32, one for dy and one for x, are set where these hold NaN or infinity and are
    quantized. The results are views of one storage; where `into` are views of that storage, the
    kernel adds to it. Waits for the device, to know which experts have rows.
    """
    dy = dy.contiguous()
    experts, sizes = offsets.shape[0] - 1, (dy.shape[1], x.shape[1])
    y, held = _stacked(into, experts, sizes), None
    if y is None:
        y = torch.empty((experts, *sizes), dtype=torch.float32, device=offsets.device)
    else:
        held = torch.tensor(
            [previous is not None for previous in into], dtype=torch.int32, device=offsets.device
        )
    if gradient is not None and isinstance(x, QTensor):
        _block_weight_gradient(dy, x, offsets, gradient, flags, y, held)
    else:
        plain = x.dequantize().to(dy.dtype) if isinstance(x, QTensor) else x.contiguous()
        tile = PLAIN_GRADIENT_TILE[dy.dtype]
        launch(
            kernels.plain_weight_gradient, (_tiles(sizes, tile), experts if dy.shape[0] else 0), dy,
            plain, y, held,
            offsets, num_warps=tile.num_warps, num_stages=tile.num_stages, ROWS=sizes[0],
            COLUMNS=sizes[1],
            BLOCK_N=tile.n, BLOCK_K=tile.t, BLOCK_T=tile.step, STAGES=tile.num_stages,
        )  # fmt: skip
    if offsets.device.type == "meta":  # launches are recorded: no value is known
        return list(y.unbind(0))
    gradients = [
        dw if any_rows else None for dw, any_rows in zip(y.unbind(0), (offsets.diff() > 0).tolist())
    ]
    if held is not None or not into:
        return gradients
    added = (dw if dw is None or old is None else old.add_(dw) for old, dw in zip(into, gradients))
    return list(added)


def _stacked(gradients: Gradients, experts: int, sizes: tuple[int, int]) -> Tensor | None:
    """Return the storage [E, N, K] that these are views of, each at its place; None if they are
    not, or there are none."""
    first = next(((e, grad) for e, grad in enumerate(gradients) if grad is not None), None)
    if first is None:
        return None
    start = first[1].storage_offset() - first[0] * math.prod(sizes)
    if start < 0 or first[1].untyped_storage().nbytes() < 4 * (start + experts * math.prod(sizes)):
        return None
    whole = first[1].as_strided((experts, *sizes), (math.prod(sizes), sizes[1], 1), start)
    there = (
        grad is None or grad.data_ptr() == whole[e].data_ptr() for e, grad in enumerate(gradients)
    )
    return whole if all(there) else None


def grouped_bias_gradient(dy: Tensor, offsets: Tensor) -> list[Tensor | None]:
    """Compute `Ops.grouped_bias_gradient`. Waits for the device."""
    if offsets.device.type == "meta":  # launches are recorded: no value is known
        return list(
            dy.new_empty((offsets.shape[0] - 1, dy.shape[1]), dtype=torch.float32).unbind(0)
        )
    return definition.grouped_bias_gradient(dy, offsets)


def sum_of_rows(x: Tensor, place: Tensor, gates: Tensor | None) -> Tensor:
    """Compute `Ops.sum_of_rows`: row t is Σ_j gates[t, j] · x[place[t, j]]; the same bits."""
    (rows, slots), columns = place.shape, x.shape[1]
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    launch(
        kernels.sum_of_rows, (rows, -(-columns // _SUMMED)), x.contiguous(), place.contiguous(),
        None if gates is None else gates.contiguous(), y, num_warps=4, COLUMNS=columns, SLOTS=slots,
        GATED=gates is not None, BLOCK=_SUMMED,
    )  # fmt: skip
    return y


def sum_of_rows_backward(
    dy: Tensor, x: Tensor, place: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (gradient of x [R, C], of the gates [T, k] float32): `Ops.sum_of_rows_backward`."""
    (rows, slots), columns = place.shape, x.shape[1]
    dx, dgates = torch.empty_like(x), torch.empty_like(gates, memory_format=torch.contiguous_format)
    launch(
        kernels.sum_of_rows_backward, (rows,), dy.contiguous(), x.contiguous(), place.contiguous(),
        gates.contiguous(),
        dx, dgates, num_warps=4, COLUMNS=columns, SLOTS=slots,
        BLOCK=triton.next_power_of_2(columns),
    )  # fmt: skip
    return dx, dgates


def _nibbles(a: Operand, weights: Stacked, offsets: Tensor, out: torch.dtype) -> Tensor:
    """Multiply by FP4 weights, some rows of every expert at a time, dequantized. Tiles are
    constants, so the bits are those of all rows at once."""
    if isinstance(a, QTensor):
        raise IsobitError(
            "backend: triton multiplies nvfp4 weights with plain activations: choose backend: "
            "native"
        )
    experts, columns, inner = weights.shape
    tiles = []
    for rows in panels(columns, experts * inner):
        bias = None if weights.bias is None else weights.bias[:, rows].contiguous()
        tile = torch.empty((a.shape[0], rows.stop - rows.start), dtype=out, device=offsets.device)
        _plain_product(a, weights.values(rows).to(a.dtype), bias, offsets, tile)
        tiles.append(tile)
    return torch.cat(tiles, 1)


def _block_product(
    a: QTensor, weights: Stacked, offsets: Tensor, y: Tensor, picks: Tensor | None = None
) -> None:
    assert weights.scale is not None
    assert weights.spec is not None
    check_blocks(a, QTensor(weights.data[0], weights.scale[0], weights.spec))
    rows, inner = a.shape
    columns, tile, scale = weights.shape[1], FP8_TILE, weights.scale
    if target().matrix == "tensor":  # where four warps spill
        tile = replace(tile, num_warps=8)
    planned = Schedule.of(offsets, y.shape[0], tile.t)
    launch(
        kernels.block_product, (planned.count * -(-columns // tile.n),),
        a.data.view(torch.uint8).contiguous(), a.scale,
        contiguous_bytes(weights.data.view(torch.uint8)), scale,
        weights.bias, y, planned.tile, offsets, picks, planned.count, *scale_strides(a.scale, rows),
        scale.stride(0), *scale_strides(scale[0], columns),
        num_warps=tile.num_warps, num_stages=tile.num_stages, COLUMNS=columns, INNER=inner,
        BLOCK_N=tile.n, BLOCK_T=tile.t, ROW_SCALES=weights.block[0] == 1, STAGES=tile.num_stages,
        TOKENS_FIRST=target().matrix == "warpgroup" and weights.block[0] != 1,
    )  # fmt: skip


def _plain_product(
    a: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    y: Tensor,
    picks: Tensor | None = None,
) -> None:
    columns, inner = weights.shape[1:]
    tile = PLAIN_TILE[a.dtype]
    if weights.stride(0) != columns * inner:
        weights = weights.contiguous()
    planned = Schedule.of(offsets, y.shape[0], tile.t)
    launch(
        kernels.plain_product, (planned.count * -(-columns // tile.n),), a.contiguous(), weights,
        bias, y, planned.tile,
        offsets, picks, planned.count, weights.stride(1), weights.stride(2),
        num_warps=tile.num_warps, num_stages=tile.num_stages, COLUMNS=columns, INNER=inner,
        BLOCK_N=tile.n,
        BLOCK_T=tile.t, BLOCK_K=tile.step, STAGES=tile.num_stages,
    )  # fmt: skip


def _block_weight_gradient(
    dy: Tensor,
    x: QTensor,
    offsets: Tensor,
    gradient: QuantSpec,
    flags: tuple[Tensor, Tensor],
    y: Tensor,
    held: Tensor | None,
) -> None:
    experts, rows, columns = y.shape
    tile = FP8_GRADIENT_TILE
    planned = Schedule.of(offsets, dy.shape[0], tile.step)
    left = quantize_tokens(dy, gradient, planned, offsets, flags[0])
    right = quantize_tokens(x, x.spec, planned, offsets, flags[1])
    launch(
        kernels.block_weight_gradient,
        (_tiles((rows, columns), tile), experts if planned.count else 0), *left, *right,
        y, held, planned.start, planned.count, num_warps=tile.num_warps, num_stages=tile.num_stages,
        ROWS=rows,
        COLUMNS=columns, BLOCK_N=tile.n, BLOCK_K=tile.t, STAGES=tile.num_stages,
    )  # fmt: skip


def quantize_tokens(
    x: Operand, spec: QuantSpec, planned: Schedule, offsets: Tensor, flag: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (codes [C, 128 tiles] uint8, scales [tiles, C]) of x [R, C], transposed and quantized
    along the tokens.

    A tile of `planned` is 128 rows of one expert, padded with zeros, and a block; a surplus tile is
    not written. `spec` is x's own along its columns; a quantized x counts as its values. Raises
    IsobitError unless `spec` is e4m3 1x128.
    """
    quantized = isinstance(x, QTensor)
    data = x.data.view(torch.uint8) if isinstance(x, QTensor) else x
    if spec.format is not E4M3 or spec.granularity != f"1x{BLOCK}" or planned.height != BLOCK:
        raise IsobitError(
            f"backend: triton quantizes along tokens in e4m3 1x128, not {spec}; choose backend: "
            "native"
        )
    columns = x.shape[1]
    codes = torch.empty((columns, planned.count * BLOCK), dtype=torch.uint8, device=data.device)
    scales = torch.empty((planned.count, columns), dtype=torch.float32, device=data.device)
    scale = x.scale if isinstance(x, QTensor) else None
    strides = scale_strides(scale, x.shape[0]) if scale is not None else (0, 0)
    launch(
        kernels.quantize_tokens, (planned.count, -(-columns // 64)), data.contiguous(), scale,
        codes, scales, flag,
        planned.tile, offsets, planned.count, *strides, num_warps=8,
        COLUMNS=columns, CODES=quantized, UE8M0=spec.scale == "ue8m0", BLOCK_C=64,
    )  # fmt: skip
    return codes, scales


def _tiles(sizes: tuple[int, int], tile: Tile) -> int:
    return -(-sizes[0] // tile.n) * -(-sizes[1] // tile.t)
