"""Attention's sums in a fixed order: ties and repeated tokens, and the trees against what a BLAS is
trusted with."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from isobit.kernels import KVStore, Layout, get_ops
from isobit.kernels.attention import definition as implementation
from isobit.kernels.reference.rounding import round_once
from isobit.kernels.reference.sums import tree_sum
from isobit.precision import BF16, E4M3, QuantSpec

from .helpers import draw, same, threads
from .test_attention import CACHES, filled, inputs

OPS = get_ops("reference", "exact")
CALIBRATED = QuantSpec(E4M3, "tensor", "fp32")


def stored(k: Tensor, v: Tensor, layout: Layout, scales: tuple[float, float]) -> KVStore:
    _, heads, dim = k.shape
    store = KVStore.allocate(layout.num_slots, heads, dim, CALIBRATED, BF16, torch.tensor(scales))
    OPS.kv_write(store, k, v, layout)
    return store


SOME = slice(2, None, 3)


def alone(q: Tensor, store: KVStore, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
    """Some rows of one sequence, each as a batch of its own, as decoding would have it."""
    rows = range(q.shape[0])[SOME]
    layouts = [Layout.build([1], [row], layout.page_table, layout.page_size) for row in rows]
    found = [OPS.attention(q[row : row + 1], store, one, scale) for row, one in zip(rows, layouts)]
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


def constant_values() -> tuple[Tensor, KVStore, Layout, float]:
    """The case of the issue: every value is 9 · 2^-9 · 39, halfway between two BF16 numbers."""
    layout = Layout.packed([600])
    q, k = draw(0, 600, 1, 16), draw(1, 600, 1, 16)
    v = torch.full((600, 1, 16), 9 / 512 * 39, dtype=torch.bfloat16)
    return q, stored(k, v, layout, (0.0125, 39.0)), layout, 0.25


def repeated_token() -> tuple[Tensor, KVStore, Layout, float]:
    """Equal values at all positions, and keys that a rotation tells apart: some products of code
    and scale lie halfway between two BF16 numbers."""
    layout = Layout.packed([300])
    q, k, v = draw(2, 300, 4, 24), draw(3, 300, 2, 24), draw(4, 1, 2, 24).repeat(300, 1, 1)
    return q, stored(k, v, layout, (2.0**-6, 39 / 2**10)), layout, 0.2


TIES: dict[str, Callable[[], tuple[Tensor, KVStore, Layout, float]]] = {
    "constant values": constant_values,
    "repeated token": repeated_token,
}


@pytest.mark.parametrize("case", TIES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_rows_alone_are_the_packed_ones_on_ties(
    case: str, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = TIES[case]()
    with threads(num_threads):
        whole = OPS.attention(*given)
        for ours, theirs in zip(alone(*given), whole):
            assert same(ours, theirs[SOME])
        monkeypatch.setattr(implementation, "_in_order", lambda *_: None)
        assert not same(alone(*given)[0], OPS.attention(*given)[0][SOME]), (
            "the control: in the order of the BLAS"
        )


@pytest.mark.parametrize("case", TIES)
def test_padded_beside_a_longer_sequence_and_in_chunks(case: str) -> None:
    q, store, layout, scale = TIES[case]()
    whole, rows = OPS.attention(q, store, layout, scale), 100
    for lengths, contexts in (
        ([rows, 180], [0, 0]),
        ([rows, 60], [0, 230]),
        ([7, 100], [93, 199]),
        ([1, 1], [99, 298]),
    ):
        both = Layout.build(
            lengths, contexts, layout.page_table.expand(2, -1).contiguous(), layout.page_size
        )
        picked = [torch.arange(before, before + count) for count, before in zip(lengths, contexts)]
        for ours, theirs in zip(OPS.attention(q[torch.cat(picked)], store, both, scale), whole):
            assert same(ours, theirs[torch.cat(picked)])


def tree_row(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The definition: q [H, D] over keys and values [K, KV, D], all float64: (out [H, D], lse
    [H])."""
    group = q.shape[0] // keys.shape[1]
    keys = keys.repeat_interleave(group, 1).transpose(0, 1)
    values = values.repeat_interleave(group, 1).transpose(0, 1)
    scores = tree_sum(q.unsqueeze(1) * keys) * scale
    peak = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - peak)
    total = tree_sum(weights).unsqueeze(-1)
    return tree_sum(weights.unsqueeze(-1) * values, dim=1) / total, (
        peak + torch.log(total)
    ).squeeze(-1)


@pytest.mark.parametrize("spread", [0.0, 2.0])
@pytest.mark.parametrize("cache", CACHES)
def test_every_row_is_the_trees(cache: str, spread: float) -> None:
    lengths = [5, 33, 1, 70]
    q, k, v, _ = inputs(cache, sum(lengths), (6, 2, 24), spread)
    layout = Layout.packed(lengths)
    store = filled(cache, k, v, layout)
    out, lse = OPS.attention(q, store, layout, 0.3)
    keys, values = (x.double() for x in store.gather(layout.slots))
    row = 0
    for length in lengths:
        for position in range(length):
            seen = slice(row - position, row + 1)
            mixed, normalizer = tree_row(q[row].double(), keys[seen], values[seen], 0.3)
            assert same(out[row], round_once(mixed, q.dtype))
            assert same(lse[row], normalizer.float())
            row += 1


@pytest.mark.parametrize("cache", CACHES)
def test_the_trees_everywhere_change_no_bit(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the BLAS is trusted with is what the trees give."""
    lengths = [130, 1, 64, 300]
    q, k, v, _ = inputs(cache, sum(lengths), (6, 2, 24))
    layout = Layout.packed(lengths)
    store = filled(cache, k, v, layout)
    trusted = OPS.attention(q, store, layout, 0.2)
    monkeypatch.setattr(implementation, "undecided", lambda x, *_: torch.ones_like(x).nonzero())
    for ours, theirs in zip(OPS.attention(q, store, layout, 0.2), trusted):
        assert same(ours, theirs)


def test_few_rows_need_the_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = inputs("bf16", 300, (6, 2, 24))
    layout = Layout.packed([300])
    store = filled("bf16", k, v, layout)
    monkeypatch.delattr(implementation, "tree_sum")
    OPS.attention(q, store, layout, 0.2)
    with pytest.raises(NameError):
        OPS.attention(*constant_values())


def test_what_is_not_finite_stays_where_it_is_seen() -> None:
    q, k, v, _ = inputs("fp32", 40, (2, 2, 16))
    layout = Layout.packed([40])
    clean, _ = OPS.attention(q, filled("fp32", k, v, layout), layout, 0.2)
    q[30, 0, 3] = torch.nan
    out, lse = OPS.attention(q, filled("fp32", k, v, layout), layout, 0.2)
    assert bool(out[30, 0].isnan().all())
    assert bool(lse[30, 0].isnan())
    others = torch.arange(40) != 30
    assert same(out[others], clean[others])
    assert same(out[30, 1], clean[30, 1])
