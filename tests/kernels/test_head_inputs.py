"""Queries, keys and values made in one pass in C++: the bits of rotation and cache write in
turn."""

import pytest
import torch
from torch import Tensor

from isobit.errors import NonFiniteError
from isobit.kernels import Composed, Heads, KVStore, Layout, Ops, get_ops
from isobit.kernels.native import available
from isobit.precision import BF16, E4M3, FP32, INT8, QuantSpec

from .helpers import draw, same, threads

pytestmark = pytest.mark.skipif(not available()[0], reason=f"native backend: {available()[1]}")

NATIVE = get_ops("native")
LEVELS = (
    {level: get_ops("native", level) for level in ("exact", "bitwise", "fast")}
    if available()[0]
    else {}
)
STORES = {
    "bf16": (None, BF16),
    "fp32": (None, FP32),
    "e4m3": (QuantSpec(E4M3, "row"), BF16),
    "e4m3 powers of two": (QuantSpec(E4M3, "row", "ue8m0"), BF16),
    "e4m3 of fp32": (QuantSpec(E4M3, "row"), FP32),
    "calibrated": (QuantSpec(E4M3, "tensor"), BF16),
    "int8": (QuantSpec(INT8, "row", "fp32"), BF16),
    "int8 powers of two of fp32": (QuantSpec(INT8, "row", "ue8m0"), FP32),
}


def make(
    name: str, heads: int, kv_heads: int, dim: int, normed: bool
) -> tuple[Tensor, Heads, KVStore, Layout]:
    spec, wide = STORES[name]
    layout = Layout.build([1, 7, 40], [30, 0, 3], torch.arange(60).view(3, 20).int(), 4)
    qkv = draw(1, 48, heads + 2 * kv_heads, dim, dtype=wide.dtype, spread=1.5)
    angles = torch.rand(64, dim // 2, generator=torch.Generator().manual_seed(2)) * 6
    weights = (draw(3, dim, dtype=wide.dtype), draw(4, dim, dtype=wide.dtype))
    scales = torch.tensor([0.01, 0.02]) if name == "calibrated" else None
    store = KVStore.allocate(layout.num_slots, kv_heads, dim, spec, wide, scales)
    return (
        qkv,
        Heads(weights if normed else None, 1e-6, (angles.cos(), angles.sin())),
        store,
        layout,
    )


def parts(store: KVStore) -> list[Tensor]:
    return [x for x in (store.k, store.v, store.k_scale, store.v_scale) if x is not None]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", [(4, 2, 32), (3, 1, 10), (8, 8, 64), (6, 2, 36)])
@pytest.mark.parametrize("name", STORES)
def test_one_pass_has_the_bits_of_norm_rotation_and_write(
    name: str, shape: tuple[int, int, int], normed: bool
) -> None:
    for level, count in (("exact", 1), ("fast", 2), ("bitwise", 1), ("bitwise", 2)):
        ops: Ops = LEVELS[level]
        qkv, heads, wanted, layout = make(name, *shape, normed)
        expected = Composed.attention_inputs(ops, qkv, heads, wanted, layout)  # type: ignore[arg-type]
        _, _, store, _ = make(name, *shape, normed)
        with threads(count):
            found = ops.attention_inputs(qkv, heads, store, layout)
        assert all(same(a, b) for a, b in zip(found, expected))
        assert all(same(a, b) for a, b in zip(parts(store), parts(wanted)))
    # the controls: each token at its neighbour's position, and norms of which one weight is another
    angles = (heads.tables[0].roll(1, 0), heads.tables[1].roll(1, 0))
    moved = NATIVE.attention_inputs(qkv, Heads(heads.norms, heads.eps, angles), store, layout)
    assert not any(same(a, b) for a, b in zip(moved[:2], expected[:2]))
    assert not same(store.k, wanted.k)
    if heads.norms is not None:
        heads.norms[0][-1] *= 2
        assert not same(NATIVE.attention_inputs(qkv, heads, store, layout)[0], expected[0])


@pytest.mark.parametrize(("name", "place"), [("e4m3", 4), ("e4m3", 5), ("int8", 5)])
def test_what_is_not_finite_is_refused(name: str, place: int) -> None:
    qkv, heads, store, layout = make(name, 4, 1, 32, False)
    qkv[-1, place, 3] = torch.nan
    with pytest.raises(NonFiniteError, match="keys and values"):
        NATIVE.attention_inputs(qkv, heads, store, layout)
