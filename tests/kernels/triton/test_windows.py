"""Sliding windows in Triton's attention: against plain PyTorch with a mask, and a row's bits in
every company, where splits and blocks of keys that no row sees are left out."""

import math
from dataclasses import replace

import pytest
import torch

from isobit.kernels import KVStore, Layout
from isobit.kernels.attention.triton import backward as attention_backward
from isobit.kernels.attention.triton import forward as attention
from isobit.precision import BF16

from ..helpers import same
from ..test_windows import SCALE, STORES, masked, problem
from .helpers import DEVICE, moved, short_splits

LENGTHS = [5, 0, 1, 70]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 32 keys in blocks of 16, so that toy sequences have several."""
    short_splits(monkeypatch)
    for name in ("_query_blocks", "_key_blocks"):
        monkeypatch.setattr(attention_backward, name, lambda *_: (16, 16, 4, 1))


def forward(
    q: torch.Tensor, store: KVStore, layout: Layout, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = attention.attention(q.to(DEVICE), moved(store), layout.to(DEVICE), SCALE, window)
    return out.cpu(), lse.cpu()


def computed(
    given: tuple[torch.Tensor, torch.Tensor, KVStore, Layout], window: int | None
) -> list[torch.Tensor]:
    """(out, lse, dq, dk, dv)."""
    q, dout, store, layout = given
    out, lse = forward(q, store, layout, window)
    there = [x.to(DEVICE) for x in (dout, q, out, lse)]
    gradients = attention_backward.attention_backward(
        there[0], there[1], there[2], there[3], moved(store), layout.to(DEVICE), SCALE, window
    )
    return [out, lse, *(x.cpu() for x in gradients)]


@pytest.mark.slow
@pytest.mark.parametrize("cache", STORES)
def test_a_row_attends_to_the_last_keys(cache: str) -> None:
    """Values and gradients, to some roundings of the largest. The control is a window that is one
    key longer."""
    given, rounding = problem(cache, (2, 1, 16), LENGTHS), 2.0**-18 if cache == "fp32" else 2.0**-6
    for window in (2, 33):
        wanted, longer = (masked(*given, size) for size in (window, window + 1))
        for found, right, wrong in zip(computed(given, window), wanted, longer, strict=True):
            bound = rounding * float(right.abs().max())
            assert float((found.double() - right).abs().max()) <= bound
            assert float((wrong - right).abs().max()) > bound


@pytest.mark.slow
def test_a_window_as_long_as_the_sequence_is_none() -> None:
    """The same bits; a shorter one changes those of the rows that it hides a key from, and no
    others."""
    given = problem("e4m3", (2, 1, 16), [70])
    for found, wanted in zip(computed(given, 70), computed(given, None), strict=True):
        assert same(found, wanted)
    short, whole = computed(given, 40)[0], computed(given, None)[0]
    assert same(short[:40], whole[:40])
    assert not bool((short[40:] == whole[40:]).flatten(1).all(1).any())


@pytest.mark.slow
@pytest.mark.parametrize("window", [3, 40])
def test_a_rows_bits_do_not_depend_on_its_company(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoded and in chunks, joined in memory and in registers, by shuffled pages: the bits of
    packed rows. Codes below the window are others there. The control: one that is seen."""
    q, _, store, layout = problem("e4m3", (2, 1, 16), [70])
    whole = forward(q, store, layout, window)
    table = torch.randperm(24, generator=torch.Generator().manual_seed(2)).view(1, -1).int()
    everything = Layout.build([70], [0], table, 3)
    for first, count in ((69, 1), (43, 1), (30, 35)):
        paged = KVStore.allocate(72, 1, 16, store.kv, BF16)
        for name in ("k", "v", "k_scale", "v_scale"):
            getattr(paged, name)[everything.slots] = getattr(store, name)[layout.slots]
        lowest, rows = max(0, first - window + 1), slice(first, first + count)
        below = everything.slots[:lowest]
        paged.k[below], paged.v[below] = (
            paged.k[below].flip(-1) ^ 0x80,
            paged.v[below].flip(-1) ^ 0x80,
        )
        part = replace(Layout.build([count], [first], table, 3), num_slots=72)
        for most in (1 << 26, 0):
            monkeypatch.setattr(attention, "_MOST_PARTIALS", most)
            found = forward(q[rows], paged, part, window)
            assert all(same(x, y[rows]) for x, y in zip(found, whole, strict=True))
        assert not math.isnan(float(whole[1].sum()))
        paged.k[everything.slots[lowest]] ^= 0x80
        assert not same(forward(q[rows], paged, part, window)[1], whole[1][rows])
