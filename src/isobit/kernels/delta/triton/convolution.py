"""The short convolution before linear attention, on a GPU, and its backward.

y[t, c] = silu(bias[c] + Σ_j weight[c, j] · x[t - W + 1 + j, c]) of the rows of a sequence, in
float32: a chain of fused multiply-adds from the bias, or 0, over ascending j, then the gate's
division and exponential (`kernels/norms/triton/gate.py`), rounded once. Elementwise over rows and
channels, so a row's bits depend on the W inputs that it sees, whether they are rows of the batch or
stored, and on no tile.
Memory bounds it: an element of BF16 takes 2 bytes read and 2 written, as the W rows meet in a
cache.

Of a sequence's programs the one that has its first rows alone reads and writes the store: first all
that it reads, then what each page keeps. The backward is whole sequences; the weight's gradient is
summed over tiles of rows, which are added in a fixed order, so it repeats. Left out: the delta rule
(`forward.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.kernels.layout import Layout
from isobit.kernels.stores import StateStore
from isobit.kernels.triton.launch import launch
from isobit.kernels.triton.numbers import cast, steps

_ROWS, _CHANNELS = 16, 64
_PAGES = 8
"""Of a program's tile; and pages at a time where what they keep is written."""


@triton.jit(do_not_specialize=["page_size", "pages"])
def _convolve(
    x_ptr, weight_ptr, bias_ptr, y_ptr, inputs_ptr, row_start_ptr, context_ptr, table_ptr,
    page_size, pages,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, KEPT: tl.constexpr, HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    PAGES: tl.constexpr,
):  # fmt: skip
    """Compute a tile [HIGH, WIDE] of a sequence's rows; a sequence's first one keeps inputs."""
    start = tl.load(row_start_ptr + tl.program_id(0))
    rows = (tl.load(row_start_ptr + tl.program_id(0) + 1) - start).to(tl.int32)
    first = tl.program_id(1) * HIGH
    if first < rows:
        column = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
        context = tl.load(context_ptr + tl.program_id(0)).to(tl.int32)
        row = first + tl.arange(0, HIGH)
        x = x_ptr + start.to(tl.int64) * COLUMNS + column[None, :]
        there = (row < rows)[:, None] & (column < COLUMNS)[None, :]
        table = table_ptr + tl.program_id(0).to(tl.int64) * pages
        earlier = inputs_ptr
        if inputs_ptr is not None:
            page = tl.load(table + (context - 1) // page_size, mask=context > 0, other=0).to(
                tl.int64
            )
            earlier = inputs_ptr + page * ((WIDTH - 1) * COLUMNS) + column[None, :]
        total = _begin(bias_ptr, column, HIGH, COLUMNS)
        for j in tl.static_range(WIDTH):
            number = _input(x, earlier, row - (WIDTH - 1) + j, there, context, COLUMNS, WIDTH)
            weight = tl.load(weight_ptr + column * WIDTH + j, mask=column < COLUMNS, other=0.0)
            total = tl.fma(
                number.to(tl.float32), tl.broadcast_to(weight[None, :], (HIGH, WIDE)), total
            )
        y = cast(tl.div_rn(total, 1.0 + tl.exp(-total)), y_ptr.dtype.element_ty)
        tl.store(
            y_ptr + (start + row)[:, None].to(tl.int64) * COLUMNS + column[None, :], y, mask=there
        )
        if inputs_ptr is not None and first == 0:
            _keep(
                x,
                earlier,
                inputs_ptr,
                table,
                column,
                rows,
                context,
                page_size,
                COLUMNS,
                WIDTH,
                KEPT,
                PAGES,
            )


@triton.jit
def _begin(bias_ptr, column, HIGH: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the first terms of the sums of a tile [HIGH, WIDE]: the bias, or zeros."""
    total = tl.zeros((HIGH, column.shape[0]), tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=column < COLUMNS, other=0.0)[None, :]
    return total


@triton.jit
def _input(x, before, row, there, context, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Return inputs of a sequence's new rows `row`, which may be negative: then they are stored
    `before`, or zeros."""
    new = tl.load(
        x + row[:, None].to(tl.int64) * COLUMNS, mask=there & (row >= 0)[:, None], other=0.0
    )
    if before is None:
        return new
    else:
        stored = there & ((row < 0) & (context > 0))[:, None]
        old = tl.load(
            before + (row + WIDTH - 1)[:, None].to(tl.int64) * COLUMNS, mask=stored, other=0.0
        )
        return tl.where((row < 0)[:, None], old, new)


@triton.jit
def _keep(
    x, before, inputs_ptr, table, column, rows, context, page_size,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, KEPT: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """Store the last inputs at the end of each page, and after the last row. Pages go from the last
    to the first, and all reads of a page before its writes, as the first may be the page that is
    read."""
    first_page = context // page_size
    count = (context + rows - 1) // page_size - first_page + 1
    groups = (count + PAGES - 1) // PAGES
    which = tl.arange(0, PAGES * KEPT)
    for step in range(steps(groups)):
        page = (groups - 1 - step) * PAGES + which // KEPT
        end = tl.minimum((first_page + page + 1) * page_size - context, rows)
        slot = which % KEPT
        there = ((page < count) & (slot < WIDTH - 1))[:, None] & (column < COLUMNS)[None, :]
        number = _input(x, before, end - (WIDTH - 1) + slot, there, context, COLUMNS, WIDTH)
        tl.debug_barrier()
        to = tl.load(table + first_page + page, mask=page < count, other=0).to(tl.int64)
        at = (to * (WIDTH - 1) + slot)[:, None] * COLUMNS + column[None, :]
        tl.store(inputs_ptr + at, number, mask=there)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, positions_ptr, dx_ptr, part_ptr, rows,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, HIGH: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Compute, for a tile [HIGH, WIDE], the gradient of x and the tile's sums over rows of the
    weight's gradient, followed by the bias's."""
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    row = tl.program_id(0) * HIGH + tl.arange(0, HIGH)
    inside = column < COLUMNS
    dx = tl.zeros((HIGH, WIDE), tl.float32)
    for j in tl.static_range(WIDTH):
        later = _before_silu(
            dy_ptr,
            x_ptr,
            weight_ptr,
            bias_ptr,
            positions_ptr,
            row,
            WIDTH - 1 - j,
            column,
            rows,
            COLUMNS,
            WIDTH,
        )
        dx += later * tl.load(weight_ptr + column * WIDTH + j, mask=inside, other=0.0)[None, :]
    there = (row < rows)[:, None] & inside[None, :]
    at = row[:, None].to(tl.int64) * COLUMNS + column[None, :]
    tl.store(dx_ptr + at, cast(dx, dx_ptr.dtype.element_ty), mask=there)
    dtotal = _before_silu(
        dy_ptr, x_ptr, weight_ptr, bias_ptr, positions_ptr, row, 0, column, rows, COLUMNS, WIDTH
    )
    partial = part_ptr + (tl.program_id(0).to(tl.int64) * COLUMNS + column) * PARTS
    for j in tl.static_range(WIDTH):
        number = _earlier(x_ptr, positions_ptr, row, WIDTH - 1 - j, column, rows, COLUMNS)
        tl.store(partial + j, tl.sum(dtotal * number, 0), mask=inside)
    if bias_ptr is not None:
        tl.store(partial + WIDTH, tl.sum(dtotal, 0), mask=inside)


@triton.jit
def _before_silu(
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    positions_ptr,
    row,
    later,
    column,
    rows,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the gradient of the sums of the rows `later` after `row`, 0 beyond the end."""
    row += later
    position = tl.load(positions_ptr + row, mask=row < rows, other=0)
    there = ((row < rows) & (position >= later))[:, None] & (column < COLUMNS)[None, :]
    total = _begin(bias_ptr, column, row.shape[0], COLUMNS)
    for j in tl.static_range(WIDTH):
        weight = tl.load(weight_ptr + column * WIDTH + j, mask=column < COLUMNS, other=0.0)
        total += (
            _earlier(x_ptr, positions_ptr, row, WIDTH - 1 - j, column, rows, COLUMNS)
            * weight[None, :]
        )
    sigma = tl.div_rn(1.0, 1.0 + tl.exp(-total))
    at = row[:, None].to(tl.int64) * COLUMNS + column[None, :]
    dy = tl.load(dy_ptr + at, mask=there, other=0.0).to(tl.float32)
    return dy * sigma * (1.0 + total * (1.0 - sigma))


@triton.jit
def _earlier(x_ptr, positions_ptr, row, by, column, rows, COLUMNS: tl.constexpr):
    """Return inputs `by` rows before `row`, 0 before their sequence's first."""
    position = tl.load(positions_ptr + row, mask=row < rows, other=-1)
    there = (position >= by)[:, None] & (column < COLUMNS)[None, :]
    at = (row - by)[:, None].to(tl.int64) * COLUMNS + column[None, :]
    return tl.load(x_ptr + at, mask=there, other=0.0).to(tl.float32)


def short_convolution(
    x: Tensor,
    weight: Tensor,
    store: StateStore | None,
    layout: Layout,
    bias: Tensor | None = None,
) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    y, (columns, width) = torch.empty_like(x), weight.shape
    high = min(_ROWS, triton.next_power_of_2(max(1, layout.max_rows)))
    touched = (layout.max_rows + layout.page_size - 2) // layout.page_size + 1
    grid = (layout.row_start.shape[0] - 1, -(-layout.max_rows // high), -(-columns // _CHANNELS))
    launch(
        _convolve, grid, x, weight, bias, y, None if store is None else store.inputs,
        layout.row_start, layout.context,
        layout.page_table, layout.page_size, layout.page_table.stride(0), num_warps=2,
        COLUMNS=columns, WIDTH=width, KEPT=triton.next_power_of_2(max(1, width - 1)), HIGH=high,
        WIDE=_CHANNELS,
        PAGES=min(_PAGES, triton.next_power_of_2(touched)),
    )  # fmt: skip
    return y


def short_convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, layout: Layout, bias: Tensor | None = None
) -> tuple[Tensor, ...]:
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    (rows, columns), width = x.shape, weight.shape[1]
    tiles, terms = -(-rows // _ROWS), width if bias is None else width + 1
    dx, partials = torch.empty_like(x), torch.empty(tiles, columns, terms, device=x.device)
    launch(
        _backward, (tiles, -(-columns // _CHANNELS)), dy, x, weight, bias, layout.positions, dx,
        partials, rows,
        COLUMNS=columns, WIDTH=width, PARTS=terms, HIGH=_ROWS, WIDE=_CHANNELS, num_warps=4,
    )  # fmt: skip
    total = added(partials)
    if bias is None:
        return dx, total
    return dx, total[:, :width].contiguous(), total[:, width].contiguous()


def added(partials: Tensor) -> Tensor:
    """Return the pairwise sum [...] of partial sums [N, ...] over their first dimension, in a fixed
    order: in each step the later half is added to the earlier half. Overwrites `partials`."""
    while partials.shape[0] > 1:
        half = (partials.shape[0] + 1) // 2
        last = partials[half:]
        partials = partials[:half]
        partials[: last.shape[0]] += last
    return partials.sum(0)  # of one, or of none
