"""Sinks in Triton's attention: against plain PyTorch with one more column of scores, and a row's
bits in every company, wherever its splits are joined."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isobit.kernels import KVStore, Layout
from isobit.kernels.attention.definition import sinks_backward
from isobit.kernels.attention.triton import backward as attention_backward
from isobit.kernels.attention.triton import forward as attention
from isobit.precision import BF16

from ..helpers import same
from ..test_sinks import with_a_column
from ..test_windows import SCALE, STORES, problem
from .helpers import DEVICE, moved
from .test_windows import _small_blocks  # noqa: F401 (a fixture)

LENGTHS = [5, 0, 1, 70]
SINKS = torch.tensor([-2.0, 0.3, 1.0, 4.0, -1e30, 40.0])


def forward(
    q: Tensor, store: KVStore, layout: Layout, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    given = None if sinks is None else sinks.to(DEVICE)
    out, lse = attention.attention(q.to(DEVICE), moved(store), layout.to(DEVICE), SCALE, 40, given)
    return out.cpu(), lse.cpu()


@pytest.mark.slow
@pytest.mark.parametrize("cache", STORES)
def test_a_sink_is_one_column_of_scores_more(cache: str) -> None:
    """Values and gradients, to some roundings of the largest, three query heads to a key head. The
    control are the sinks of other heads."""
    given, rounding = problem(cache, (6, 2, 16), LENGTHS), 2.0**-18 if cache == "fp32" else 2.0**-6
    q, dout, store, layout = given
    out, lse = forward(q, store, layout, SINKS)
    there = [x.to(DEVICE) for x in (dout, q, out, lse)]
    gradients = attention_backward.attention_backward(
        there[0], there[1], there[2], there[3], moved(store), layout.to(DEVICE), SCALE, 40
    )
    found = [out, lse, *(x.cpu() for x in gradients), sinks_backward(dout, out, lse, SINKS)]
    wanted, others = (with_a_column(given, values, 40) for values in (SINKS, SINKS.flip(0)))
    for ours, right, wrong in zip(found, wanted, others, strict=True):
        bound = rounding * float(right[:, :4].abs().max() if right.ndim == 2 else right.abs().max())
        assert float((ours.double() - right).abs().max()) <= bound
        assert float((wrong - right).abs().max()) > 2 * bound


@pytest.mark.slow
def test_a_sink_far_below_is_none() -> None:
    q, _, store, layout = problem("e4m3", (6, 2, 16), [70])
    for found, wanted in zip(
        forward(q, store, layout, SINKS), forward(q, store, layout, None), strict=True
    ):
        assert same(found[:, 4], wanted[:, 4])
        assert not same(found[:, 3], wanted[:, 3])


@pytest.mark.slow
def test_a_rows_bits_do_not_depend_on_its_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded and in chunks, joined in memory and in registers, by shuffled pages: the bits of
    packed rows. The control: another sink."""
    q, _, store, layout = problem("e4m3", (6, 2, 16), [70])
    whole = forward(q, store, layout, SINKS)
    table = torch.randperm(24, generator=torch.Generator().manual_seed(2)).view(1, -1).int()
    everything = Layout.build([70], [0], table, 3)
    paged = KVStore.allocate(72, 2, 16, store.kv, BF16)
    for name in ("k", "v", "k_scale", "v_scale"):
        getattr(paged, name)[everything.slots] = getattr(store, name)[layout.slots]
    for first, count in ((69, 1), (43, 1), (30, 35)):
        rows = slice(first, first + count)
        part = replace(Layout.build([count], [first], table, 3), num_slots=72)
        for most in (1 << 26, 0):
            monkeypatch.setattr(attention, "_MOST_PARTIALS", most)
            found = forward(q[rows], paged, part, SINKS)
            assert all(same(x, y[rows]) for x, y in zip(found, whole, strict=True))
        assert not same(forward(q[rows], paged, part, SINKS + 0.25)[1], whole[1][rows])
