"""Attention whose result is quantized by the kernel that finishes a row: the bits of both operators
in turn, wherever splits are joined."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from isobit.kernels import Layout
from isobit.kernels.attention.triton import forward as implementation
from isobit.kernels.quantize.triton import quantize
from isobit.kernels.triton.launch import record_launches
from isobit.precision import E4M3, QTensor, QuantSpec
from tests.models import slow_where

from ..helpers import draw, same
from .helpers import DEVICE, moved, short_splits
from .test_attention import SCALE, _filled, _rows, _scattered
from .test_quantize import equal, flag, host

Result = tuple[Tensor | None, QTensor, Tensor]

QUICK = ((False, "e4m3 fp32", "ue8m0"), (True, "int8", "fp32"), (True, "bf16", "ue8m0"))


@pytest.fixture
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    short_splits(monkeypatch)


def _found(
    q: Tensor,
    layout: Layout,
    store: object,
    spec: QuantSpec,
    raised: Tensor,
    sinks: Tensor | None = None,
    keep: bool = True,
) -> Result:
    there = q.to(DEVICE), moved(store), layout.to(DEVICE), SCALE  # type: ignore[arg-type]
    sinks = None if sinks is None else sinks.to(DEVICE)
    return implementation.attention_quantized(*there, None, sinks, None, spec, raised, keep)


@pytest.mark.slow
@pytest.mark.usefixtures("_short_splits")
@pytest.mark.parametrize(
    ("sinks", "kind", "scale"),
    slow_where(
        list(product([False, True], ["bf16", "e4m3 fp32", "int8"], ["ue8m0", "fp32"])),
        lambda *case: case not in QUICK,
    ),
)
def test_quantized_at_once_has_the_bits_of_both_in_turn(
    kind: str, scale: str, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three query heads to a key head, so that a tile has rows which nobody asked for: these set no
    flag. Decoded, where splits are joined by programs of their own, and packed, 75 rows, whose
    scales lie side by side. What is left out would be NaN. The control: of other values."""
    lengths, starts = [1, 40, 34], [0, 1, 41]
    q, k, v = _rows(kind, sum(lengths), 3, 1, 128)
    spec, given = QuantSpec(E4M3, "1x128", scale), draw(9, 3).float() if sinks else None
    rows = [range(1), range(39, 40), range(31, 32)]
    whole, some, numbers = _scattered(rows, starts, lengths, 4, seed=1)
    own = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **kind: own(x, **kind).fill_(math.nan))
    for layout, asked in ((some, q[numbers]), (whole, q)):
        store, raised = _filled(kind, k, v, whole), flag()
        out, codes, lse = _found(asked, layout, store, spec, raised, given)
        alone = _found(asked, layout, store, spec, flag(), given, keep=False)
        there = asked.to(DEVICE), moved(store), layout.to(DEVICE), SCALE
        wanted = implementation.attention(*there, None, None if given is None else given.to(DEVICE))
        assert raised.item() == 0
        assert out is not None
        assert same(out.cpu(), wanted[0].cpu())
        assert same(lse.cpu(), wanted[1].cpu())
        both = quantize(wanted[0].flatten(1), spec, flag())
        assert equal(codes, host(both))
        assert codes.scale.stride() == both.scale.stride()
        assert alone[0] is None
        assert equal(alone[1], host(codes))
        assert same(alone[2].cpu(), lse.cpu())
        other = _found(asked, layout, _filled(kind, k, 1.25 * v, whole), spec, flag(), given)
        assert not equal(other[1], host(both))


@pytest.mark.usefixtures("_short_splits")
def test_a_query_that_is_no_number_sets_the_flag() -> None:
    """In the scale of its own row and head, and in no other."""
    q, k, v = _rows("bf16", 9, 2, 1, 128)
    q[6, 1, 5] = float("nan")
    layout, raised = Layout.packed([9]), flag()
    codes = _found(q, layout, _filled("bf16", k, v, layout), QuantSpec(E4M3), raised)[1]
    assert raised.item() == 1
    assert host(codes).scale.isnan().nonzero().tolist() == [[6, 1]]


def _launches(kind: str, dim: int, granularity: str) -> int:
    q, k, v = _rows(kind, 5, 2, 1, dim)
    layout = Layout.packed([5])
    store, spec = _filled(kind, k, v, layout), QuantSpec(E4M3, granularity)
    with record_launches() as found:
        _found(q, layout, store, spec, flag(), keep=False)
    return len(found)


def test_heads_that_are_no_blocks_are_left_to_the_two() -> None:
    """Two heads of 64 channels share a scale; `row` has one for all heads; float32 is rounded
    otherwise."""
    assert _launches("bf16", 128, "1x128") == 1
    assert [_launches("bf16", 64, "1x128"), _launches("bf16", 128, "row")] == [2, 2]
    assert _launches("fp32", 128, "1x128") == 2
    q, k, v = _rows("bf16", 5, 2, 1, 64)
    layout = Layout.packed([5])
    store, spec = _filled("bf16", k, v, layout), QuantSpec(E4M3)
    out, codes, _ = _found(q, layout, store, spec, flag())
    assert out is not None
    assert equal(codes, host(quantize(out.flatten(1), spec, flag())))
    assert _found(q, layout, store, spec, flag(), keep=False)[0] is None
