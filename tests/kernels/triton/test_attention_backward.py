"""Backward of attention against the reference, element by element to a bound, over scattered pages.

The reference gets what the kernels should have read: the store's values rounded to the type of the
queries. Bounds: u is that type's unit roundoff, e = 2^-24 float32's. A sum of n products in float32
is off by at most n · e of the sum of their magnitudes. With A = scale · Σ|q||k|, B = Σ|dout||v| and
C = Σ|dout||out| of a query and a key:

- P is off by the fraction p = (D + 4) · e · A + 4 · e · |lse| + 8 · e (score, exponent, exp2), and
  by u when rounded;
- dS = P · (dP - Σ dout · out) by P · D · e · (B + C) and the fraction p + 4 · e, and by u when
  rounded;
- sums over n keys or queries add n · e of their magnitudes; results are rounded twice, here and
  there: 2 · u.
"""

from itertools import product

import pytest
import torch
from torch import Tensor

from isobit.kernels import KVStore, Layout, get_ops
from isobit.kernels.attention.triton import backward as implementation
from isobit.kernels.triton.launch import record_launches
from isobit.precision import BF16, E4M3, FP32, INT8, QuantSpec
from tests.models import slow_where

from ..helpers import draw, same
from ..test_shared_keys import Case as SharedCase
from .helpers import DEVICE, moved

pytestmark = pytest.mark.usefixtures("poisoned")

OPS = get_ops("reference", "exact")
CACHES = {
    "bf16": (BF16, None),
    "fp32": (FP32, None),
    "bf16 ue8m0": (BF16, QuantSpec(E4M3, "row", "ue8m0")),
    "bf16 fp32 scales": (BF16, QuantSpec(E4M3, "row", "fp32")),
    "fp32 calibrated": (FP32, QuantSpec(E4M3, "tensor", "fp32")),
    "int8": (BF16, QuantSpec(INT8, "row", "fp32")),
}
LENGTHS = (19, 1, 33)
Case = tuple[Tensor, Tensor, Tensor, Tensor, KVStore, Layout, float]


def scattered(lengths: tuple[int, ...], page_size: int, seed: int) -> Layout:
    """Whole sequences in pages that are anywhere."""
    pages = -(-max(lengths) // page_size)
    order = torch.randperm(len(lengths) * pages + 3, generator=torch.Generator().manual_seed(seed))
    table = order[: len(lengths) * pages].view(len(lengths), pages)
    return Layout.build(lengths, [0] * len(lengths), table, page_size)


def make(
    cache: str, shape: tuple[int, int, int], lengths: tuple[int, ...], layout: Layout
) -> tuple[Case, KVStore]:
    """What the operator is called with; and a store of the values that it should read."""
    heads, kv_heads, dim = shape
    compute, kv = CACHES[cache]
    counts = (heads, kv_heads, kv_heads, heads)
    q, k, v, dout = (
        torch.cat(
            [
                draw(100 * s + i, n, count, dim, dtype=compute.dtype, spread=0.3)
                for s, n in enumerate(lengths)
            ]
        )
        for i, count in enumerate(counts)
    )
    scales = torch.tensor([0.011, 0.0073])
    store = KVStore.allocate(layout.num_slots, kv_heads, dim, kv, compute, scales)
    OPS.kv_write(store, k, v, layout)
    read = KVStore.allocate(layout.num_slots, kv_heads, dim, None, compute)
    k, v = (x.to(compute.dtype) for x in store.gather(layout.slots))
    OPS.kv_write(read, k, v, layout)
    out, lse = OPS.attention(q, read, layout, 0.3)
    return (dout, q, out, lse, store, layout, 0.3), read


def run(case: Case) -> tuple[Tensor, ...]:
    dout, q, out, lse, store, layout, scale = case
    dout, q, out, lse = (x.to(DEVICE) for x in (dout, q, out, lse))
    found = implementation.attention_backward(
        dout, q, out, lse, moved(store), layout.to(DEVICE), scale
    )
    return tuple(x.cpu() for x in found)


def bounds(case: Case, read: KVStore, wanted: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The largest errors of dq, dk and dv that roundings explain, as derived above."""
    dout, q, out, lse, _, layout, scale = case
    u, e = torch.finfo(q.dtype).eps / 2, 2.0**-24
    dim, group = q.shape[2], q.shape[1] // read.k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in read.gather(layout.slots))
    found = [2 * u * x.double().abs() for x in wanted]
    for start, stop in zip(layout.row_start.tolist(), layout.row_start.tolist()[1:]):
        # [H, queries, keys, ...]
        rows = slice(start, stop)
        q_, dout_, out_ = (x[rows].double().transpose(0, 1) for x in (q, dout, out))
        k_, v_ = (x[rows].transpose(0, 1) for x in (keys, values))
        lse_, count = lse[rows].double().t().unsqueeze(-1), stop - start
        visible = torch.ones(count, count).tril().double()
        p = torch.exp(q_ @ k_.mT * scale - lse_) * visible
        fraction = (dim + 4) * e * (q_.abs() @ k_.abs().mT) * scale + 4 * e * lse_.abs() + 8 * e
        inner = (dout_ * out_).sum(-1, keepdim=True)
        ds = (p * (dout_ @ v_.mT - inner)).abs()
        magnitude = dout_.abs() @ v_.abs().mT + (dout_ * out_).abs().sum(-1, keepdim=True)
        off_p = p * (fraction + u + count * group * e)
        off_ds = p * dim * e * magnitude + ds * (fraction + 4 * e + u + count * group * e)
        found[0][rows] += (scale * off_ds @ k_.abs()).transpose(0, 1)
        dk, dv = scale * off_ds.mT @ q_.abs(), off_p.mT @ dout_.abs()
        for total, part in ((found[1], dk), (found[2], dv)):
            total[rows] += part.view(-1, group, count, dim).sum(1).transpose(0, 1)
    return tuple(1.01 * x for x in found)


def within(
    found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], limits: tuple[Tensor, ...]
) -> list[bool]:
    return [
        bool(((x.double() - y.double()).abs() <= z).all()) for x, y, z in zip(found, wanted, limits)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "shape", "blocks"),
    [
        ("bf16", (4, 2, 16), None),
        ("bf16", (4, 2, 16), (16, 16)),
        ("bf16 ue8m0", (4, 2, 16), (16, 32)),
        ("bf16 fp32 scales", (3, 1, 10), (32, 16)),
        ("fp32", (4, 2, 16), (32, 16)),
        ("fp32 calibrated", (2, 2, 24), (16, 32)),
        ("int8", (4, 2, 16), (16, 32)),
    ],
)
def test_gradients_are_the_references_to_a_bound(
    cache: str,
    shape: tuple[int, int, int],
    blocks: tuple[int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the blocks of a real model, and in blocks so small that these sequences have several."""
    if blocks is not None:
        for name in ("_query_blocks", "_key_blocks"):
            monkeypatch.setattr(implementation, name, lambda *_: (*blocks, 4, 1))
    layout = scattered(LENGTHS, 4, seed=1)
    case, read = make(cache, shape, LENGTHS, layout)
    dout, q, out, lse, _, _, scale = case
    wanted = OPS.attention_backward(dout, q, out, lse, read, layout, scale)
    found, limits = run(case), bounds(case, read, wanted)
    assert within(found, wanted, limits) == [True, True, True]
    assert all(x.dtype == y.dtype and x.shape == y.shape for x, y in zip(found, wanted))


def test_no_value_is_read_on_the_host() -> None:
    """Tensors without data will do, at any size."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, heads = empty(5000, 32, 128), empty(5000, 32, dtype=torch.float32)
    starts, context, each = (empty(count, dtype=torch.int64) for count in (3, 2, 5000))
    table = empty(2, 256, dtype=torch.int32)
    layout = Layout(starts, context, table, 16, each, each.clone(), 4000, 4000, 8192)
    store = KVStore.allocate(8192, 4, 128, CACHES["bf16 ue8m0"][1], BF16, device="meta")
    with record_launches() as found:
        dq, dk, dv = implementation.attention_backward(rows, rows, rows, heads, store, layout, 0.1)
    assert (dq.shape, dk.shape, dv.shape) == (rows.shape, (5000, 4, 128), (5000, 4, 128))
    assert [launch.grid for launch in found] == [(1250, 2), (10000,), (64, 32), (64, 4)]


@pytest.mark.slow
def test_the_comparison_can_fail() -> None:
    """The control: another scale; values from other pages; an lse that is off."""
    layout = scattered(LENGTHS, 4, seed=1)
    case, read = make("bf16 ue8m0", (4, 2, 16), LENGTHS, layout)
    dout, q, out, lse, store, _, scale = case
    wanted = OPS.attention_backward(dout, q, out, lse, read, layout, scale)
    limits = bounds(case, read, wanted)
    assert within(run((dout, q, out, lse, store, layout, 1.03 * scale)), wanted, limits)[:2] == [
        False,
        False,
    ]
    elsewhere = scattered(LENGTHS, 4, seed=2)
    assert within(run((dout, q, out, lse, store, elsewhere, scale)), wanted, limits) == [False] * 3
    assert (
        within(run((dout, q, out, lse + 0.02, store, layout, scale)), wanted, limits) == [False] * 3
    )


@pytest.mark.slow
def test_a_sequence_has_the_same_gradients_alone_and_in_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, on other pages of another size."""
    for name in ("_query_blocks", "_key_blocks"):
        monkeypatch.setattr(implementation, name, lambda *_: (16, 32, 4, 1))
    shape, together = (2, 1, 16), scattered(LENGTHS, 4, seed=1)
    case, _ = make("bf16 ue8m0", shape, LENGTHS, together)
    found = run(case)
    layout = scattered(LENGTHS[2:], 16, seed=5)
    store = KVStore.allocate(layout.num_slots, 1, 16, case[4].kv, BF16)
    slots = together.slots[20:]
    for name in ("k", "v", "k_scale", "v_scale"):
        getattr(store, name)[layout.slots] = getattr(case[4], name)[slots]
    alone = run((*(x[20:] for x in case[:4]), store, layout, case[6]))
    assert all(same(x, y[20:]) for x, y in zip(alone, found))
    assert all(same(x, y) for x, y in zip(run(case), found))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "window"),
    slow_where(
        list(product(["bf16", "fp32", "int8"], [None, 20])),
        lambda cache, window: (cache == "fp32") == (window is None),
    ),
)
def test_rows_that_sequences_share(
    cache: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sequence's keys have their own gradients: those of whole sequences, up to rounding. In
    the control they are of other rows."""
    case = SharedCase(cache, (2, 1, 16))
    layout, rows = case.shared.layout, torch.arange(len(case.q))
    store = case.store(OPS, layout, rows)
    out, lse = OPS.attention(case.q, store, layout, 0.3, window)
    wanted = OPS.attention_backward(case.dout, case.q, out, lse, store, layout, 0.3, window)

    def distances() -> list[float]:
        there = [x.to(DEVICE) for x in (case.dout, case.q, out, lse)]
        found = implementation.attention_backward(
            there[0], there[1], there[2], there[3], moved(store), layout.to(DEVICE), 0.3, window
        )
        return [
            float((ours.cpu().double() - theirs.double()).norm() / theirs.double().norm())
            for ours, theirs in zip(found, wanted, strict=True)
        ]

    near = 2.0**-6 if case.q.dtype == torch.bfloat16 else 2.0**-17
    assert max(distances()) < near
    monkeypatch.setattr(
        Layout, "key_slots", property(lambda self: self.slots[self.keys.copies.index.roll(1)])
    )
    assert min(distances()) > 4 * near
