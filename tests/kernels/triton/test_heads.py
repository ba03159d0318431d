"""Norm, rotation and storing of heads: rotations and stored bytes bit for bit the reference's,
norms to a bound.

Bounds. A step is the distance of two neighbours of the tensors' type, at most `STEP` of the value.
Squares are summed in float32, in the reference in float64: a normed value differs by less than
2^-20 before it is rounded, so by at most a step (and that) after it. The rotation passes on |cos|
and |sin| of what the two values of a pair differ by, and rounds again: one more step. Gradients say
theirs below.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isobit.errors import IsobitError, NonFiniteError
from isobit.kernels import Heads, KVStore, Layout, get_ops
from isobit.kernels.backends.triton import TritonOps
from isobit.kernels.heads.triton import backward as heads_backward
from isobit.kernels.heads.triton import forward as heads
from isobit.kernels.triton.launch import record_launches
from isobit.model.families.rope import Rope
from isobit.precision import BF16, E4M3, E5M2, FP32, INT8, QuantSpec

from ..helpers import draw, same
from .helpers import DEVICE, moved

pytestmark = pytest.mark.usefixtures("poisoned")

OPS = get_ops("reference", "exact")
STORES = {
    "bf16": (BF16, None),
    "fp32": (FP32, None),
    "ue8m0": (BF16, QuantSpec(E4M3, "row", "ue8m0")),
    "fp32 scales": (FP32, QuantSpec(E4M3, "row", "fp32")),
    "calibrated": (BF16, QuantSpec(E4M3, "tensor", "fp32")),
    "int8": (BF16, QuantSpec(INT8, "row", "fp32")),
    "int8 ue8m0": (FP32, QuantSpec(INT8, "row", "ue8m0")),
}
SHAPES = ((4, 2, 16), (9, 3, 10))
"""Query heads, key heads, head dimension: one group of heads; and two, with ragged halves."""
LENGTHS, CONTEXTS, EPS = (3, 1, 2), (0, 5, 17), 1e-6
STEP = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-23}
Inputs = tuple[Tensor, Heads]


def make_layout() -> Layout:
    table = torch.tensor([[7, 1, 0, 0, 0], [3, 2, 0, 0, 0], [0, 8, 4, 6, 5]])
    return Layout.build(LENGTHS, CONTEXTS, table, 4)


def make_store(name: str, shape: tuple[int, int, int], layout: Layout, seed: int = 0) -> KVStore:
    """A store that holds something already, so that what should not be written is seen."""
    compute, kv = STORES[name]
    store = KVStore.allocate(
        layout.num_slots, shape[1], shape[2], kv, compute, torch.tensor([2.0**-7, 0.0031])
    )
    for data in (store.k, store.v):
        data.copy_(
            draw(seed, *data.shape, dtype=torch.float32)
            if kv is None
            else torch.full_like(data, 0x35)
        )
    return store


def assert_stored_alike(found: KVStore, wanted: KVStore) -> None:
    for name in ("k", "v", "k_scale", "v_scale", "counts"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert (one is None and other is None) or same(one.cpu(), other), name


def inputs(
    shape: tuple[int, int, int], dtype: torch.dtype, norms: bool = True, spread: float = 0.3
) -> Inputs:
    q_heads, kv_heads, dim = shape
    weights = (
        (draw(1, dim, dtype=dtype, spread=0.2), draw(2, dim, dtype=dtype, spread=0.2))
        if norms
        else None
    )
    qkv = draw(3, sum(LENGTHS), q_heads + 2 * kv_heads, dim, dtype=dtype, spread=spread)
    return qkv, Heads(weights, EPS, Rope().tables(20, dim))


def on_device(given: Inputs) -> Inputs:
    qkv, how = given
    weights = None if how.norms is None else (how.norms[0].to(DEVICE), how.norms[1].to(DEVICE))
    return qkv.to(DEVICE), Heads(
        weights, how.eps, (how.tables[0].to(DEVICE), how.tables[1].to(DEVICE))
    )


def flag() -> Tensor:
    return torch.zeros(4, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", STORES)
def test_stored_bytes_are_the_references(name: str, shape: tuple[int, int, int]) -> None:
    """Wide magnitudes, zeros, ties and the smallest normal number; keys contiguous, values a view
    into qkv."""
    _, kv_heads, dim = shape
    layout, dtype = make_layout(), STORES[name][0].dtype
    k = draw(0, 6, kv_heads, dim, dtype=dtype, spread=2.0)
    both = draw(1, 6, 2 * kv_heads, dim, dtype=dtype, spread=2.0)
    k[0], k[1, 0], k[2] = 0.0, 2.0**-126, torch.arange(dim).to(dtype) * 28
    k[3], k[3, :, 0], k[4] = (
        torch.arange(dim).to(dtype) - 4.5,
        127.0,
        2.0**-140,
    )  # ties of INT8, subnormal numbers
    wanted, raised = make_store(name, shape, layout), flag()
    store = moved(wanted)
    OPS.kv_write(wanted, k, both[:, kv_heads:], layout)
    heads.kv_write(store, k.to(DEVICE), both.to(DEVICE)[:, kv_heads:], layout.to(DEVICE), raised)
    assert_stored_alike(store, wanted)
    assert raised.tolist() == [0] * 4
    if wanted.counts is not None:
        assert 0 < wanted.counts[0] < wanted.counts[1] == 2 * k.numel()


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("inverse", [False, True])
def test_rotations_are_the_references(dtype: torch.dtype, inverse: bool) -> None:
    layout, tables = make_layout(), Rope().tables(20, 10)
    x = draw(5, 6, 12, 10, dtype=dtype, spread=1.0)[:, :9]
    wanted = OPS.rotary(x, *tables, layout.positions, inverse)
    cos, sin, positions = (t.to(DEVICE) for t in (*tables, layout.positions))
    assert same(heads.rotary(x.to(DEVICE), cos, sin, positions, inverse).cpu(), wanted)
    # the control: another position
    assert not same(heads.rotary(x.to(DEVICE), cos, sin, positions ^ 1, inverse).cpu(), wanted)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", STORES)
def test_without_norms_all_is_the_references(name: str, shape: tuple[int, int, int]) -> None:
    layout = make_layout()
    given = inputs(shape, STORES[name][0].dtype, norms=False)
    wanted = make_store(name, shape, layout)
    store = moved(wanted)
    expected = OPS.attention_inputs(*given, wanted, layout)
    found = heads.attention_inputs(*on_device(given), store, layout.to(DEVICE), flag())
    assert all(same(one.cpu(), other.contiguous()) for one, other in zip(found, expected))
    assert found[0].is_contiguous()
    assert found[1].is_contiguous()
    assert_stored_alike(store, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"), [("ue8m0", SHAPES[0]), ("int8", SHAPES[1]), ("fp32 scales", SHAPES[1])]
)
def test_the_kernel_is_its_parts_in_turn(name: str, shape: tuple[int, int, int]) -> None:
    """Norms to the bound; then rotation and stored bytes of what came out, bit for bit."""
    layout, dtype = make_layout(), STORES[name][0].dtype
    given = inputs(shape, dtype)
    wanted = make_store(name, shape, layout)
    expected = OPS.attention_inputs(*given, make_store(name, shape, layout), layout)
    qkv, how = on_device(given)
    tables = how.tables
    store, placed = moved(wanted), layout.to(DEVICE)
    q, k, v = heads.attention_inputs(qkv, how, store, placed, flag())
    still = (torch.ones_like(tables[0]), torch.zeros_like(tables[1]))
    normed = heads.attention_inputs(qkv, replace(how, tables=still), moved(wanted), placed, flag())[
        :2
    ]
    starts = (0, shape[0], shape[0] + shape[1])
    for x, y, z, weight, start, stop in zip(
        (q, k), normed, expected, given[1].norms or (), starts, starts[1:]
    ):
        assert same(x, heads.rotary(y, *tables, placed.positions))
        rows = given[0][:, start:stop].reshape(-1, shape[2])
        by_row = OPS.rms_norm(rows, weight, EPS)[0].view(y.shape).float()
        off = (STEP[dtype] + 2.0**-20) * by_row.abs()
        assert bool(((y.cpu().float() - by_row).abs() <= off).all())
        c, s = (t[layout.positions].unsqueeze(1).abs() for t in given[1].tables)
        low, high = off.chunk(2, -1)
        passed_on = torch.cat((low * c + high * s, high * c + low * s), -1)
        assert bool(
            ((x.cpu().float() - z.float()).abs() <= passed_on + STEP[dtype] * z.float().abs()).all()
        )
    OPS.kv_write(wanted, k.cpu(), v.cpu(), layout)
    assert_stored_alike(store, wanted)


def test_the_comparison_of_stored_bytes_can_fail() -> None:
    """The control: scales of the other format, and keys that were not rounded before they were
    stored."""
    layout, shape = make_layout(), SHAPES[0]
    wanted = make_store("ue8m0", shape, layout)
    store = moved(replace(wanted, kv=QuantSpec(E4M3, "row", "fp32")))
    k = draw(0, 6, 2, 16, dtype=torch.float32)
    OPS.kv_write(wanted, k, k, layout)
    heads.kv_write(store, k.to(DEVICE), k.to(DEVICE), layout.to(DEVICE), flag())
    assert not same(store.k.cpu(), wanted.k)
    store = moved(make_store("int8", shape, layout))
    coarse = make_store("int8 ue8m0", shape, layout)
    heads.kv_write(store, k.to(DEVICE), k.to(DEVICE), layout.to(DEVICE), flag())
    OPS.kv_write(coarse, k, k, layout)
    assert not same(store.k.cpu(), coarse.k)
    store = moved(wanted)
    heads.kv_write(store, k.bfloat16().to(DEVICE), k.to(DEVICE), layout.to(DEVICE), flag())
    assert not same(store.k.cpu(), wanted.k)
    assert same(store.v.cpu(), wanted.v)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "ue8m0"])
def test_a_row_alone_has_the_bits_that_it_has_in_a_batch(name: str) -> None:
    shape, layout = SHAPES[1], make_layout()
    qkv, how = on_device(inputs(shape, torch.bfloat16))
    store = moved(make_store(name, shape, layout))
    together = heads.attention_inputs(qkv, how, store, layout.to(DEVICE), flag())
    for row in (0, 3, 5):
        one = replace(
            layout, positions=layout.positions[row : row + 1], slots=layout.slots[row : row + 1]
        ).to(DEVICE)
        other = moved(make_store(name, shape, layout))
        alone = heads.attention_inputs(qkv[row : row + 1].clone(), how, other, one, flag())
        assert all(same(x, y[row : row + 1]) for x, y in zip(alone, together))
        assert same(other.k[one.slots], store.k[one.slots])
        assert same(other.v[one.slots], store.v[one.slots])


@pytest.mark.parametrize("name", ["ue8m0", "fp32 scales", "calibrated", "int8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_noted_and_spread(name: str, value: float) -> None:
    shape, layout = SHAPES[0], make_layout()
    wanted, raised = make_store(name, shape, layout), flag()
    store = moved(wanted)
    k, v = (draw(seed, 6, 2, 16, dtype=STORES[name][0].dtype) for seed in (0, 1))
    OPS.kv_write(wanted, k, v, layout)
    broken = v.clone()
    broken[2, 1, 9] = value
    heads.kv_write(store, k.to(DEVICE), broken.to(DEVICE), layout.to(DEVICE), raised)
    assert raised.tolist() == [1, 0, 0, 0]
    moved_back = (
        moved(store)
        if DEVICE.type == "cpu"
        else KVStore(store.k.cpu(), store.v.cpu(), None, None, None)
    )
    assert same(moved_back.k, wanted.k)
    differs = (moved_back.v != wanted.v).any(-1).nonzero().tolist()
    assert differs == [[int(layout.slots[2]), 1]]
    values = store.gather(layout.slots.to(DEVICE))[1]
    assert bool(values[2, 1].isnan().all())


@pytest.mark.parametrize("name", ["ue8m0", "int8"])
def test_the_error_says_what_could_not_be_stored(name: str) -> None:
    layout, ops = make_layout().to(DEVICE), TritonOps("bitwise", "tested", DEVICE)
    k = draw(0, 6, 2, 16, dtype=STORES[name][0].dtype).to(DEVICE)
    ops.kv_write(moved(make_store(name, SHAPES[0], make_layout())), k, k, layout)
    ops.raise_faults()
    k[2, 1, 9] = torch.nan
    ops.kv_write(moved(make_store(name, SHAPES[0], make_layout())), k, k, layout)
    kv = STORES[name][1]
    assert kv is not None
    with pytest.raises(
        NonFiniteError,
        match=f"cannot quantize keys and values to {kv.format}: it holds NaN or infinity",
    ):
        ops.raise_faults()


def test_no_value_is_read_on_the_host() -> None:
    """Tensors without data will do, at any size."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    starts, context, each = (empty(count, dtype=torch.int64) for count in (3, 2, 5000))
    table = empty(2, 256, dtype=torch.int32)
    layout = Layout(starts, context, table, 16, each, each.clone(), 4000, 4000, 8192)
    store = KVStore.allocate(8192, 4, 128, STORES["ue8m0"][1], BF16, device="meta")
    qkv, norm, table = empty(5000, 40, 128), empty(128), empty(4096, 64, dtype=torch.float32)
    how = Heads((norm, norm), EPS, (table, table))
    with record_launches() as found:
        gradients = heads.attention_inputs(qkv, how, store, layout, empty(1, dtype=torch.int32))
        heads_backward.attention_inputs_backward(gradients, qkv, how, layout.positions)
    assert [launch.grid for launch in found] == [(5000, 6), (512, 6), (2, 4)]


def test_other_formats_of_a_store_are_refused() -> None:
    layout = make_layout()
    store = KVStore.allocate(layout.num_slots, 2, 16, QuantSpec(E5M2, "row", "fp32"), BF16)
    k = draw(0, 6, 2, 16)
    with pytest.raises(
        IsobitError, match=r"triton backend stores keys and values in e4m3 .* not e5m2"
    ):
        heads.kv_write(store, k, k, layout, flag())


def gradient_inputs(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    q_heads, kv_heads, dim = shape
    drawn = [
        draw(seed, 6, count, dim, dtype=dtype)
        for seed, count in ((7, q_heads), (8, kv_heads), (9, kv_heads))
    ]
    return (drawn[0], drawn[1], drawn[2])


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "chunks"), [(SHAPES[0], 512), (SHAPES[1], 4)])
@pytest.mark.parametrize("dtype", STEP)
def test_gradients_are_the_references_to_a_bound(
    shape: tuple[int, int, int], chunks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With n = x · rstd and g = dy · w: dx = rstd · (g - n · mean(g · n)).

    Both compute it in float32 from the same rounded dy; D + 8 operations lie between dy and dx, of
    2^-24 each of the largest intermediate magnitude rstd · (|g| + |n| · mean|g · n|), on either
    side. Then both round to the type. The weights' gradients are sums of T · heads products,
    likewise, of D + 8 operations before them.
    """
    monkeypatch.setattr(heads_backward, "_CHUNKS", chunks)
    layout, gradients = make_layout(), gradient_inputs(shape, dtype)
    qkv, how = inputs(shape, dtype)
    norms, eps, tables = how.norms, how.eps, how.tables
    assert norms is not None
    wanted = OPS.attention_inputs_backward(gradients, qkv, how, layout.positions)
    moved_gradients = tuple(dx.to(DEVICE) for dx in gradients)
    given = (*on_device((qkv, how)), layout.positions.to(DEVICE))
    found = heads_backward.attention_inputs_backward(moved_gradients, *given)
    start = 0
    for index in range(3):
        stop = start + gradients[index].shape[1]
        one, other = found[0][:, start:stop].cpu(), wanted[0][:, start:stop]
        if index == 2:
            assert same(one.contiguous(), other.contiguous())
            break
        dy = OPS.rotary(gradients[index], *tables, layout.positions, inverse=True).double()
        x = qkv[:, start:stop].double()
        rstd = 1 / (x.square().mean(-1, keepdim=True) + eps).sqrt()
        n, g = (x * rstd).abs(), (dy * norms[index].double()).abs()
        unit = (shape[2] + 8) * 2.0**-23
        bound = unit * rstd * (g + n * (g * n).mean(-1, keepdim=True))
        error = (one.double() - other.double()).abs()
        assert bool((error <= bound + STEP[dtype] * other.double().abs()).all())
        weight_bound = (unit + n.shape[0] * n.shape[1] * 2.0**-23) * (dy.abs() * n).sum((0, 1))
        weight = found[1 + index]
        assert weight is not None
        assert weight.dtype == torch.float32
        assert bool(((weight.cpu() - wanted[1 + index]).abs() <= weight_bound).all())
        start = stop
    again = heads_backward.attention_inputs_backward(moved_gradients, *given)
    assert all(
        same(one, other)
        for one, other in zip(found, again)
        if one is not None and other is not None
    )
    # the control: another eps
    other_eps = heads_backward.attention_inputs_backward(
        moved_gradients, given[0], replace(given[1], eps=0.5), given[2]
    )
    assert not bool(
        ((other_eps[0].cpu() - wanted[0]).abs() <= 2 * STEP[dtype] * wanted[0].abs()).all()
    )


@pytest.mark.parametrize("dtype", STEP)
def test_gradients_without_norms_are_the_references(dtype: torch.dtype) -> None:
    shape, layout = SHAPES[1], make_layout()
    gradients, given = gradient_inputs(shape, dtype), inputs(shape, dtype, norms=False)
    wanted = OPS.attention_inputs_backward(gradients, *given, layout.positions)
    moved_gradients = tuple(dx.to(DEVICE) for dx in gradients)
    found = heads_backward.attention_inputs_backward(
        moved_gradients, *on_device(given), layout.positions.to(DEVICE)
    )
    assert same(found[0].cpu(), wanted[0])
    assert found[1:] == (None, None)
