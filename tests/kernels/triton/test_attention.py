"""Attention in Triton: against the definition in float64 to a derived bound, and a row's bits in
every company."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isobit.kernels import KVStore, Layout, get_ops
from isobit.kernels.attention.definition import attend
from isobit.kernels.attention.triton import forward as implementation
from isobit.kernels.triton.launch import record_launches
from isobit.precision import BF16, E4M3, FP32, INT8, QuantSpec
from tests.models import slow_where

from ..helpers import draw, same
from .helpers import DEVICE, HAS_GPU, moved, short_splits

REFERENCE = get_ops("reference", "exact")
STORES = {
    "fp32": (FP32, None),
    "bf16": (BF16, None),
    "e4m3 fp32": (BF16, QuantSpec(E4M3, "row", "fp32")),
    "e4m3 ue8m0": (BF16, QuantSpec(E4M3, "row", "ue8m0")),
    "e4m3 calibrated": (BF16, QuantSpec(E4M3, "tensor", "fp32")),
    "fp32 over e4m3": (FP32, QuantSpec(E4M3, "row", "fp32")),
    "int8": (BF16, QuantSpec(INT8, "row", "fp32")),
    "fp32 over int8 ue8m0": (FP32, QuantSpec(INT8, "row", "ue8m0")),
}
SCALE = 0.3


@pytest.fixture
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    short_splits(monkeypatch)


def _rows(
    kind: str, count: int, heads: int, kv_heads: int, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = STORES[kind][0].dtype
    q, k, v = (
        draw(i, count, n, dim, dtype=dtype, spread=0.4)
        for i, n in enumerate((heads, kv_heads, kv_heads))
    )
    return q, k, v


def _filled(kind: str, k: Tensor, v: Tensor, layout: Layout, garbage: bool = False) -> KVStore:
    """A store on the CPU with k and v at the layout's slots; the others hold zeros, or NaN."""
    compute, kv = STORES[kind]
    scales = torch.tensor([0.011, 0.017]) if kind == "e4m3 calibrated" else None
    store = KVStore.allocate(layout.num_slots, k.shape[1], k.shape[2], kv, compute, scales)
    if garbage:
        for x in (store.k, store.v):
            x.fill_(0x7F if kv is not None else math.nan)
        if store.k_scale is not None and store.v_scale is not None and not store.calibrated:
            store.k_scale.fill_(math.nan)
            store.v_scale.fill_(math.nan)
    REFERENCE.kv_write(store, k, v, layout)
    return store


def _run(q: Tensor, store: KVStore, layout: Layout) -> tuple[Tensor, Tensor]:
    out, lse = implementation.attention(q.to(DEVICE), moved(store), layout.to(DEVICE), SCALE)
    return out.cpu(), lse.cpu()


def _assert_close(
    found: tuple[Tensor, Tensor],
    q: Tensor,
    store: KVStore,
    layout: Layout,
    most: float = 3e-3,
) -> None:
    """Every element within its bound of the definition, W = Σ p |v|, whose part in float32 is
    `most` at most.

    BF16: p times the value's scale is rounded for P·V, 2^-8 of a term at most, and so is the
    result: 2^-8 (W + |out|). Float32, in units u = 2^-23 (matrix instructions cut off): a score of
    D products, which are at most |q| |k| scale together, errs by (D + 4) u of that; p takes it
    over, twice because Σ p does too; sums of n terms add 2 n u, and exponentials and the rest 16 u.
    The log-sum-exp errs by that once, and by what its last operations round.
    """
    out, lse = attend(q, store, layout, SCALE, torch.float64)
    v = store.v & 0x7F if store.v.dtype == torch.uint8 else store.v.abs()
    magnitude = attend(q, replace(store, v=v), layout, SCALE, torch.float64)[0]
    keys = store.gather(layout.slots)[0].double()
    score = float(q.double().norm(dim=-1).max() * keys.norm(dim=-1).max()) * SCALE
    single = 2.0**-23 * (2 * (q.shape[2] + 4) * score + 2 * layout.max_keys + 16)
    bound = single * magnitude
    if q.dtype == torch.bfloat16:
        bound += 2.0**-8 * (magnitude + (out.abs() + 2.0**-8 * magnitude))
    assert bool(((found[0].double() - out).abs() <= bound + 1e-30).all())
    assert bool(((found[1].double() - lse).abs() <= single + 2.0**-22 * lse.abs()).all())
    assert (found[0].dtype, found[1].dtype) == (q.dtype, torch.float32)
    assert single < most


@pytest.mark.usefixtures("_short_splits")
@pytest.mark.parametrize("kind", STORES)
def test_every_row_attends_to_the_keys_before_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three query heads to a key head, 24 channels: neither is a power of two. Whatever is left out
    would be NaN."""
    lengths = [5, 0, 1, 37]
    q, k, v = _rows(kind, sum(lengths), 3, 1, 24)
    layout = Layout.packed(lengths, page_size=4)
    store = _filled(kind, k, v, layout)
    monkeypatch.setattr(torch, "empty_like", lambda x, **kind: torch.full_like(x, math.nan, **kind))
    _assert_close(_run(q, store, layout), q, store, layout)


@pytest.mark.usefixtures("_short_splits")
@pytest.mark.parametrize("heads", [(3, 3, 7), (8, 2, 40), (64, 1, 8)])
def test_shapes_of_heads(heads: tuple[int, int, int]) -> None:
    q, k, v = _rows("e4m3 fp32", 9, *heads)
    layout = Layout.packed([9], page_size=3)
    store = _filled("e4m3 fp32", k, v, layout)
    _assert_close(_run(q, store, layout), q, store, layout)


@pytest.mark.usefixtures("_short_splits")
@pytest.mark.parametrize(("kind", "factor"), [("fp32", 1.001), ("e4m3 fp32", 1.1), ("int8", 1.1)])
def test_a_changed_key_or_value_is_noticed(kind: str, factor: float) -> None:
    """The control of the bounds: one key of 40, or one value, that is larger by this factor."""
    q, k, v = _rows(kind, 40, 2, 1, 16)
    layout = Layout.packed([40])
    store = _filled(kind, k, v, layout)
    for name in ("k", "v") if store.kv is None else ("k_scale", "v_scale"):
        changed = getattr(store, name).clone()
        changed[33] *= factor
        found = _run(q, replace(store, **{name: changed}), layout)
        with pytest.raises(AssertionError):
            _assert_close(found, q, store, layout)


def _scattered(
    rows: list[range], starts: list[int], lengths: list[int], page_size: int, seed: int
) -> tuple[Layout, Layout, Tensor]:
    """(layout of all of the sequences, of `rows` of each, numbers of these in the batch of all),
    pages shuffled."""
    pages = -(-max(lengths) // page_size)
    random = torch.Generator().manual_seed(seed)
    table = torch.randperm(pages * len(lengths), generator=random).view(len(lengths), pages)
    whole = Layout.build(lengths, [0] * len(lengths), table.int(), page_size)
    some = Layout.build([len(r) for r in rows], [r.start for r in rows], table.int(), page_size)
    numbers = torch.cat([torch.arange(r.start, r.stop) + start for r, start in zip(rows, starts)])
    return whole, replace(some, num_slots=whole.num_slots), numbers


COMPANIES = {
    "decoding": [range(1), range(69, 70), range(31, 32)],
    "decoding at a split": [range(1), range(32, 33), range(32, 33)],
    "a chunk and two rows": [range(1), range(7, 67), range(33, 34)],
    "two chunks": [range(1), range(20, 41), range(2, 34)],
    "one row at the start, one nowhere": [range(0), range(1), range(34)],
}


@pytest.mark.slow
@pytest.mark.usefixtures("_short_splits")
@pytest.mark.parametrize(
    "kind",
    slow_where(["fp32", "bf16", "e4m3 fp32", "e4m3 calibrated"], lambda kind: kind != "e4m3 fp32"),
)
def test_a_rows_bits_do_not_depend_on_its_company(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoded, in a chunk, packed; pages of several sizes in random places, unused slots NaN;
    splits joined by programs of their own or in registers: the bits of a whole forward, in which a
    sequence is three tiles.
    """
    lengths, starts = [1, 70, 34], [0, 1, 71]
    q, k, v = _rows(kind, sum(lengths), 2, 1, 16)
    packed = Layout.packed(lengths)
    whole = _run(q, _filled(kind, k, v, packed), packed)
    for number, rows in enumerate(COMPANIES.values()):
        everything, layout, numbers = _scattered(
            rows, starts, lengths, (1, 4, 16, 3, 64)[number], seed=number
        )
        store = _filled(kind, k, v, everything, garbage=True)
        for most in (1 << 26, 0):
            monkeypatch.setattr(implementation, "_MOST_PARTIALS", most)
            found = _run(q[numbers], store, layout)
            assert all(same(part, all_rows[numbers]) for part, all_rows in zip(found, whole))


@pytest.mark.slow
@pytest.mark.skipif(
    HAS_GPU,
    reason="16 keys are no long side of a GPU's instruction; its own tiles are compared below",
)
@pytest.mark.usefixtures("_short_splits")
@pytest.mark.parametrize(
    "kind", slow_where(list(STORES), lambda kind: kind not in ("bf16", "e4m3 ue8m0", "int8"))
)
def test_tiles_of_every_size_and_either_side_first_have_the_same_bits(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows first or keys first, 16 to 128 rows. Two query heads to a key head, 6 channels that are
    padded to 64. The control: blocks of other keys."""
    q, k, v = _rows(kind, 45, 2, 1, 6)
    layout = Layout.packed([45], page_size=8)
    store = _filled(kind, k, v, layout)
    wanted = _run(q, store, layout)

    def found(rows: int, keys: int, few: int) -> tuple[Tensor, Tensor]:
        monkeypatch.setattr(
            implementation, "tiling", lambda *_: implementation.Tiling(rows, keys, 4, 2)
        )
        monkeypatch.setattr(implementation, "_FEW_ROWS", few)
        return _run(q, store, layout)

    for rows, few in ((16, 128), (16, 0), (32, 128), (64, 0), (128, 128), (128, 0)):
        assert all(same(x, y) for x, y in zip(found(rows, 16, few), wanted, strict=True))
    assert not same(found(16, 32, 128)[0], wanted[0])


@pytest.mark.slow
@pytest.mark.usefixtures("_short_splits")
@pytest.mark.parametrize("kind", ["e4m3 fp32", "int8", "bf16"])
def test_queries_of_any_magnitude(kind: str) -> None:
    """Beside codes queries are float16: 2^90 times as large or as small, under a scale that takes
    it back, they give the same bits. The control: a scale that is a little larger."""
    q, k, v = _rows(kind, 40, 2, 1, 16)
    layout = Layout.packed([40])
    store = _filled(kind, k, v, layout)
    wanted = _run(q, store, layout)

    def found(power: float, scale: float) -> tuple[Tensor, Tensor]:
        given = (q * 2.0**power).to(DEVICE), moved(store), layout.to(DEVICE), scale * 2.0**-power
        return tuple(x.cpu() for x in implementation.attention(*given))  # type: ignore[return-value]

    for power in (-90, 90):
        assert all(same(x, y) for x, y in zip(found(power, SCALE), wanted, strict=True))
        assert not same(found(power, 1.01 * SCALE)[1], wanted[1])


@pytest.mark.usefixtures("_short_splits")
def test_sizes_on_the_host_are_bounds() -> None:
    """A CUDA graph is captured for more keys and rows than there are: empty splits and tiles change
    no bit."""
    q, k, v = _rows("e4m3 fp32", 50, 2, 1, 16)
    packed = Layout.packed([50])
    store = _filled("e4m3 fp32", k, v, packed)
    layout = replace(
        Layout.build([1, 0], [49, 0], torch.tensor([[0, 1, 2, 3], [0, 0, 0, 0]]), 16), num_slots=64
    )
    wanted = _run(q[49:], store, layout)
    for keys, rows in ((200, 1), (50, 70)):
        found = _run(q[49:], store, replace(layout, max_keys=keys, max_rows=rows))
        assert all(same(a, b) for a, b in zip(found, wanted))


@pytest.mark.usefixtures("_short_splits")
def test_other_splits_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: rows that see one split keep their bits with longer ones, others do not."""
    q, k, v = _rows("e4m3 fp32", 64, 2, 1, 16)
    layout = Layout.packed([64])
    store = _filled("e4m3 fp32", k, v, layout)
    out, lse = _run(q, store, layout)
    monkeypatch.setattr(implementation, "_KEYS_PER_SPLIT", 64)
    other, other_lse = _run(q, store, layout)
    assert same(other[:32], out[:32])
    assert same(other_lse[:32], lse[:32])
    assert not same(other[32:], out[32:])
    assert not same(other_lse[32:], lse[32:])


@pytest.mark.usefixtures("_short_splits")
def test_scores_beyond_the_range_of_exp() -> None:
    """Scores in the thousands, of both signs, over several splits: finite, and the largest takes
    all."""
    q, k, v = (x * factor for x, factor in zip(_rows("fp32", 70, 1, 1, 8), (100, 100, 1)))
    layout = Layout.packed([70])
    out, lse = _run(q, _filled("fp32", k, v, layout), layout)
    assert bool(torch.isfinite(out).all())
    assert float(lse.max() - lse.min()) > 10_000
    for row in (40, 69):
        winner = int((k[: row + 1, 0] @ q[row, 0]).argmax())
        torch.testing.assert_close(out[row, 0], v[winner, 0])


def _meta(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_launches_need_no_values() -> None:
    """Tensors without values: nothing is read on the host. Decoding runs splits beside each other
    and joins them."""
    store = KVStore.allocate(4096, 8, 128, QuantSpec(E4M3, "row", "ue8m0"), BF16, device="meta")
    grids = []
    for rows, keys in ((1, 2000), (1, 500), (300, 2000)):
        table, count = _meta(4, 125, dtype=torch.int32), 4 * rows
        layout = Layout(_meta(5), _meta(4), table, 16, _meta(count), _meta(count), rows, keys, 4096)
        with record_launches() as found:
            out, _ = implementation.attention(
                _meta(count, 16, 128, dtype=torch.bfloat16), store, layout, SCALE
            )
        assert out.shape == (count, 16, 128)
        grids.append([launch.grid for launch in found])
    assert grids == [[(32, 1, 4), (4, 8)], [(32, 1, 1)], [(32, 5, 1)]]


@pytest.mark.gpu
@pytest.mark.skipif(
    not HAS_GPU, reason="needs a CUDA device: the real tiles, on matrix instructions"
)
@pytest.mark.parametrize("kind", ["bf16", "e4m3 fp32", "e4m3 ue8m0", "int8"])
@pytest.mark.parametrize(
    "heads", [(16, 8, 128), (32, 8, 128), (32, 4, 128), (4, 1, 256), (14, 2, 64)]
)
def test_real_heads_over_long_contexts(kind: str, heads: tuple[int, int, int]) -> None:
    """Every row of 1,300, decoded by the hundred and in chunks, has the bits of the packed
    forward."""
    lengths, starts = [1300, 700, 65], [0, 1300, 2000]
    q, k, v = _rows(kind, sum(lengths), *heads)
    packed = Layout.packed(lengths)
    store = _filled(kind, k, v, packed)
    whole = _run(q, store, packed)
    # scores of heads of 256 channels are large, and so is what they err by
    _assert_close(whole, q, store, packed, most=2e-2)
    for rows in (
        [range(p, p + 1) for p in (1299, 512, 64)],
        [range(500, 1100), range(511, 512), range(65)],
    ):
        everything, layout, numbers = _scattered(rows, starts, lengths, 16, seed=1)
        found = _run(q[numbers], _filled(kind, k, v, everything, garbage=True), layout)
        assert all(same(part, all_rows[numbers]) for part, all_rows in zip(found, whole))
