"""Products in the orders of `kernels/product/ordered.py`, in C++ (`ordered.h`): packs, arguments,
the instruction set.

The instruction set is the best that processor and build have for the order, or $ISOBIT_ISA; all
give the same bits. The chosen one is first tested against scalar fused multiply-adds; a mark in the
cache keeps that from being done again.
"""

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from isobit.errors import IsobitError
from isobit.kernels.matrices import (
    Operand,
    Packed,
    Prepared,
    Stacked,
    is_rounded,
    rows_of,
    values,
    weight_of,
)
from isobit.kernels.native.build import differing, library
from isobit.kernels.native.interface import (
    KINDS,
    PLAIN,
    LowRankArguments,
    LowRankFactorsArguments,
    LowRankPartArguments,
    ProductArguments,
    grid,
    nibble_arguments,
    pointer,
    product_arguments,
)
from isobit.kernels.native.large_pages import LargePages
from isobit.kernels.product.ordered import has_block_scales, rounded
from isobit.options.consistency import TDP32, VDP32
from isobit.precision import PackedFP4, QTensor

ISAS = ("portable", "neon", "avx2", "avx512", "amx", "avx512_bf16")
ORDERS = (TDP32, VDP32)
"""`enum Order` of ordered.h."""
_ONE_ORDER = {"amx": TDP32, "avx512_bf16": VDP32}
_FOLD_A, _FOLD_B, _BLOCKS = 1, 2, 4
_REPLACES, _ADDS, _FROM_ZERO = 0, 1, 2
_DEPTH, _PANEL, _NARROW = 32, 16, 32
"""The last: that of low_rank.cpp."""
_AS_IT_IS = 2048
"""Rows up to which AMX reads a transposed matrix faster than its pack, which is written first."""
_HALVES = ORDERS.index(TDP32)
"""The order in which a few ranks of A have half a panel."""
_PAGES, _FACTORS = LargePages(), LargePages(chunk=4 << 20, smallest=1 << 10)
_FEW_OF_CODES = 4
"""Rows beside which AMX would decode for tiles that are empty for the most part: with one row the
vectors take half of its time, with four as long."""


def instruction_set(order: str) -> str:
    """Return the one that computes an order here. Raises IsobitError where $ISOBIT_ISA names none
    that can, or the self-test fails."""
    return ISAS[_chosen(order, os.environ.get("ISOBIT_ISA", ""))]


@cache
def _chosen(order: str, wanted: str) -> int:
    if wanted and wanted not in ISAS:
        raise IsobitError(f"ISOBIT_ISA={wanted}: choose from {', '.join(ISAS)}, or leave it unset")
    if _ONE_ORDER.get(wanted, order) != order:
        raise IsobitError(
            f"ISOBIT_ISA={wanted}: it adds in the order {_ONE_ORDER[wanted]} and not in {order}; "
            f"set consistency: bitwise-{_ONE_ORDER[wanted]}, or leave ISOBIT_ISA unset"
        )
    lib, number = library(), ORDERS.index(order)
    isa: int = lib.isobit_ordered_isa(ISAS.index(wanted) if wanted else -1, number)
    if isa < 0:
        raise IsobitError(
            f"ISOBIT_ISA={wanted}: this processor, or the compiler that built the operators, "
            "lacks it"
        )
    test = f"{order}.{ISAS[isa]}"
    if different := differing(lib, test, lambda: int(lib.isobit_ordered_self_test(isa, number))):
        raise IsobitError(
            f"consistency: bitwise cannot hold here: {different} sums by {ISAS[isa]} differ from "
            "scalar ones; set ISOBIT_ISA=portable, or consistency: exact"
        )
    return isa


class OrderedProducts:
    """The products of `consistency: bitwise` in one order, where `reference.ordered.computes`
    them."""

    def __init__(self, order: str) -> None:
        self._order, self._isa = ORDERS.index(order), ISAS.index(instruction_set(order))
        few = "avx512" if ISAS[self._isa] == "amx" else ISAS[self._isa]  # a tile would be empty
        self._isa_of_few = _chosen(order, few)
        self._lib = library()

    def prepare(self, weight: Operand, kept: Packed | None) -> Packed:
        data = weight.data if isinstance(weight, QTensor) else weight
        into = _PAGES.empty(_packed_size(data), data.dtype) if kept is None else kept.panels
        panels = self._pack(data, into)
        return kept or Packed(weight, panels)

    def product(
        self,
        a: Operand,
        b: Prepared,
        bias: Tensor | None,
        out: torch.dtype,
        into: Tensor | None = None,
    ) -> Tensor:
        """Compute `Ops.product`, or with `into` as `Ops.gradient_product`."""
        result = into
        if result is None:
            result = torch.empty((a.shape[0], weight_of(b).shape[0]), dtype=out)
        assert result.is_contiguous()
        arguments, _kept = self._arguments(a, b, bias, result)
        arguments.adds = into is not None
        self._lib.isobit_ordered_product(ctypes.byref(arguments))
        return result

    def grouped_product(
        self, a: Operand, weights: Stacked, bounds: Sequence[int], out: torch.dtype
    ) -> Tensor:
        """Compute `Ops.grouped_product`, of rows bounds[e] to bounds[e + 1], in one call."""
        result = torch.empty((a.shape[0], weights.shape[1]), dtype=out)
        calls = [
            self._arguments(rows_of(a, start, stop), weight, bias, result[start:stop])
            for weight, bias, (start, stop) in zip(*weights.each, pairwise(bounds))
            if stop > start
        ]
        args = (ProductArguments * len(calls))(*(arguments for arguments, _ in calls))
        self._lib.isobit_ordered_products(ctypes.byref(args), len(calls), torch.get_num_threads())
        return result

    def summed(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        into: Tensor | None = None,
        from_zero: bool = False,
    ) -> Tensor:
        """Return the sum over `pairs` of a [M, K] · b [N, K]ᵀ, all BF16, in the order of `pairs`,
        [M, N] float32. Its bits are those of `product`, each result added to the first one's.
        `into`: the sum is added to it; `from_zero`: the sum begins at 0, as with an `into` of
        zeros."""
        assert all(x.dtype == torch.bfloat16 for pair in pairs for x in pair)
        shape = pairs[0][0].shape[0], pairs[0][1].shape[0]
        result = torch.empty(shape) if into is None else into
        assert result.shape == shape
        assert result.is_contiguous()
        calls = [self._arguments(a, b, None, result) for a, b in pairs]
        args = (ProductArguments * len(calls))(*(arguments for arguments, _ in calls))
        begins = _ADDS if into is not None else _FROM_ZERO if from_zero else _REPLACES
        self._lib.isobit_ordered_sum(ctypes.byref(args), len(calls), begins)
        return result

    def low_rank_factors(
        self, parts: Sequence[tuple[Tensor, Tensor, int, int]], scale: float
    ) -> tuple[LowRankFactorsArguments, tuple[object, ...]]:
        """Return C++'s struct of one adapter's factors of a weight, and what must live as long."""
        a = torch.cat([a for a, *_ in parts])
        ranks, rest = len(a), len(a) % _PANEL
        whole = ranks - rest if rest <= _PANEL // 2 and self._order == _HALVES else ranks
        packs = [self._pack(a[:whole]), _halves(a[whole:])]
        packs += [_pairs(b) if b.shape[1] <= _NARROW else self._pack(b) for _, b, *_ in parts]
        # in the order in which a step reads them
        together = _FACTORS.empty(sum(map(len, packs)), torch.bfloat16)
        torch.cat(packs, out=together)
        panels = together.split([len(pack) for pack in packs])[2:]
        pack = (LowRankPartArguments * len(parts))(
            *(
                LowRankPartArguments(panel.data_ptr(), b.shape[1], lo, hi)
                for panel, (_, b, lo, hi) in zip(panels, parts)
            )
        )
        struct = LowRankFactorsArguments(
            together.data_ptr(), ranks, whole, ctypes.addressof(pack), len(parts), scale
        )
        return struct, (together, pack)

    def adapted_product(
        self,
        a: Operand,
        b: Prepared,
        bias: Tensor | None,
        factors: Tensor,
        rows: Tensor,
        offsets: Tensor,
    ) -> Tensor:
        """Compute `Ops.adapted_product`, in BF16, of the structs at these addresses, int64."""
        out = torch.empty((a.shape[0], weight_of(b).shape[0]), dtype=torch.bfloat16)
        product, _kept = self._arguments(a, b, bias, out)
        product.out_kind = KINDS[torch.float32]
        by_rows = isinstance(a, QTensor) and a.data.dtype == torch.float8_e4m3fn and product.scaled
        if by_rows and product.a_column == 1:
            x = None
        else:
            x = (values(a).bfloat16() if isinstance(a, QTensor) else a).contiguous()
        self._adapted(out, x, a.shape[1], factors, rows, offsets, product)
        return out

    def add_low_rank(
        self, total: Tensor, x: Tensor, factors: Tensor, rows: Tensor, offsets: Tensor
    ) -> Tensor:
        """Compute `Ops.add_low_rank`, of x [T, K] BF16, contiguous."""
        assert total.is_contiguous()
        out = torch.empty(total.shape, dtype=torch.bfloat16)
        self._adapted(out, x, x.shape[1], factors, rows, offsets, total)
        return out

    def _adapted(
        self,
        out: Tensor,
        x: Tensor | None,
        inner: int,
        factors: Tensor,
        rows: Tensor,
        offsets: Tensor,
        sums: Tensor | ProductArguments,
    ) -> None:
        rows = rows.contiguous()
        assert x is None or (x.dtype == torch.bfloat16 and x.is_contiguous())
        # a pointer of ctypes keeps what it points to, also in a recording
        product, total = (None, sums) if isinstance(sums, Tensor) else (ctypes.pointer(sums), None)
        arguments = LowRankArguments(
            product, pointer(x), inner, out.shape[0], inner, pointer(total), out.data_ptr(),
            out.shape[1], rows.data_ptr(), offsets.data_ptr(), factors.data_ptr(),
            factors.stride(0), factors.shape[0], torch.get_num_threads(), self._isa,
            self._isa_of_few, self._order,
        )  # fmt: skip
        self._lib.isobit_low_rank(ctypes.byref(arguments))

    def _arguments(
        self, a: Operand, b: Prepared, bias: Tensor | None, result: Tensor
    ) -> tuple[ProductArguments, tuple[object, ...]]:
        """Return C++'s arguments of a product, and what must live as long."""
        if isinstance(b, PackedFP4):
            return self._of_nibbles(a, b, bias, result)
        panels, b = b.panels if isinstance(b, Packed) else None, weight_of(b)
        if isinstance(b, QTensor) and is_rounded(a, b.spec):
            b = rounded(b)
        blocks = has_block_scales(a, b)
        a, b = (x if _in_steps(x) else values(x).bfloat16() for x in (a, b))
        left, right = (x.data if isinstance(x, QTensor) else x for x in (a, b))
        few = left.shape[0] <= (_FEW_OF_CODES if isinstance(b, QTensor) else 1)
        if panels is None and (few or not self._reads(left, right)):
            panels = self._pack(right)
        bias = _plain(bias)
        arguments = product_arguments(left, right, panels, bias, result)
        arguments.isa = self._isa_of_few if few else self._isa
        arguments.order = self._order
        if isinstance(a, QTensor):
            arguments.scale_a[:] = grid(a)
            arguments.scaled |= _BLOCKS if blocks else _FOLD_A
        if isinstance(b, QTensor):
            arguments.scale_b[:] = grid(b)
            arguments.scaled |= _BLOCKS if blocks else _FOLD_B
        return arguments, (a, b, panels, bias)

    def _of_nibbles(
        self, a: Operand, b: PackedFP4, bias: Tensor | None, result: Tensor
    ) -> tuple[ProductArguments, tuple[object, ...]]:
        """Return the same of two codes to a byte, which are rounded where they are read."""
        assert isinstance(a, Tensor)
        bias = _plain(bias)
        arguments = nibble_arguments(a, b, bias, result)
        arguments.isa, arguments.order = self._isa, self._order
        return arguments, (a, b, bias)

    def _reads(self, a: Tensor, b: Tensor) -> bool:
        """Return whether a product of few rows of a takes a transposed b unchanged: AMX's, which
        pairs its rows of K in registers where a pack would be read once."""
        few = ISAS[self._isa] == "amx" and a.shape[0] <= _AS_IT_IS
        return few and b.dtype == torch.bfloat16 and b.stride(0) == 1 and b.shape[0] % _PANEL == 0

    def _pack(self, b: Tensor, into: Tensor | None = None) -> Tensor:
        """Pack a matrix [N, K] into panels of 16 rows, with zeros up to whole panels and 32
        columns."""
        columns, inner = b.shape
        panels = torch.empty(_packed_size(b), dtype=b.dtype) if into is None else into
        self._lib.isobit_ordered_pack(
            KINDS[b.dtype],
            b.data_ptr(),
            columns,
            inner,
            *b.stride(),
            panels.data_ptr(),
            torch.get_num_threads(),
        )
        return panels


def _plain(bias: Tensor | None) -> Tensor | None:
    """Return a bias as C++ reads it, contiguous and in a plain format; None without one."""
    return bias if bias is None else (bias if bias.dtype in PLAIN else bias.float()).contiguous()


def _halves(a: Tensor) -> Tensor:
    """Pack up to 8 rows of A [r, K] in the layout of low_rank.h: [K / 64][16][2][8][2]."""
    if not len(a):
        return a.flatten()
    ranks, blocks = _PANEL // 2, 2 * _DEPTH
    missing = -a.shape[1] % blocks, ranks - len(a)
    whole = functional.pad(a, (0, missing[0], 0, missing[1]))
    return whole.view(ranks, -1, 2, _DEPTH // 2, 2).permute(1, 3, 2, 0, 4).flatten()


def _pairs(b: Tensor) -> Tensor:
    """Pack B [N, r] into panels [N / 16][r / 2][16][2], with zeros up to whole panels and pairs."""
    whole = functional.pad(b, (0, b.shape[1] % 2, 0, -len(b) % _PANEL))
    return whole.view(-1, _PANEL, whole.shape[1] // 2, 2).transpose(1, 2).flatten()


def _packed_size(b: Tensor) -> int:
    """Return the number of elements in a matrix's panels."""
    columns, inner = b.shape
    return -(-columns // _PANEL) * _PANEL * -(-inner // _DEPTH) * _DEPTH


def is_packed(weight: Operand) -> bool:
    """Return whether a prepared weight has the packs of these products."""
    if isinstance(weight, QTensor):
        return _in_steps(weight) and (
            weight.spec.scale == "ue8m0" or has_block_scales(weight, weight)
        )
    return weight.dtype == torch.bfloat16


def _in_steps(x: Operand) -> bool:
    """Return whether C++ reads an operand unchanged: scales change at multiples of 16 columns."""
    return isinstance(x, Tensor) or x.block[1] % 16 == 0 or x.block[1] == x.shape[1]
