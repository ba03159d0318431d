"""What a row's bits depend on, under Hopper's matrix instruction and at the real tiles: decoding,
chunks and the learner's packed rows; rows alone and among others. An engine
and its learner are in `tests/engine/test_hopper.py`.

Each promise stands beside cards and kernels that break it: terms in another order in small tiles,
sides that are not alike, channels in reverse. Under the emulated instruction these are noticed. The
interpreter's own product rounds a sum once, and notices none of them.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import TensorHandle

from isobit.kernels import KVStore, Layout, Stacked, get_ops
from isobit.kernels.attention.triton import split
from isobit.kernels.backends.triton import TritonOps
from isobit.kernels.matrices import Operand, rows_of
from isobit.precision import BF16, E4M3, INT8, QuantSpec

from ..helpers import ROW, WEIGHT, bits, draw, keys_of
from .helpers import HAS_GPU
from .hopper import (
    Card,
    alternating_channels,
    in_small_tiles,
    last_channels_first,
    rounded_once,
    unlike_sides,
)
from .test_product import TILES, TOKENS_FIRST, forced

pytestmark = pytest.mark.skipif(HAS_GPU, reason="a GPU is asked itself: tests/gpu")
CACHES = {"bf16": None, "e4m3": QuantSpec(E4M3, "row"), "int8": QuantSpec(INT8, "row", "fp32")}
QUICK_CACHES = ["bf16", "e4m3", pytest.param("int8", marks=pytest.mark.slow)]
Pairs = list[tuple[Tensor, Tensor]]
OPS = TritonOps("bitwise", "interpreted", torch.device("cpu"))
REFERENCE = get_ops("reference", "exact")


def _differing(pairs: Pairs) -> int:
    """Elements whose bits differ."""
    assert all(x.dtype == y.dtype and x.shape == y.shape for x, y in pairs)
    return sum(int((bits(x) != bits(y)).sum()) for x, y in pairs)


def _is_noticed(call: Callable[[], Pairs], broken: Card) -> None:
    """Bits differ on this card, and none does where the same order is in a product that rounds
    once."""
    with broken.computes():
        assert _differing(call()) > 0
    with Card(rounded_once, broken.order).computes():
        assert _differing(call()) == 0


def _attention(cache: str, dim: int = 128, length: int = 70) -> Pairs:
    """Outputs and logs of sums of rows that are decoded one by one, and of chunks, with those of
    the packed sequence: tiles of 16 and 32 rows, which stand on the short side, and of 64 and
    128."""
    q, k, v = (draw(i, length, n, dim, spread=2.5) for i, n in enumerate((2, 1, 1)))
    packed = Layout.packed([length])
    store = KVStore.allocate(packed.num_slots, 1, dim, CACHES[cache], BF16)
    REFERENCE.kv_write(store, k, v, packed)
    whole = OPS.attention(q, store, packed, dim**-0.5)
    pairs: Pairs = []
    for starts, count in (([0, 1, length // 2, length - 1], 1), ([length - 12], 12),
                          ([length - 25], 25)):  # fmt: skip
        table = packed.page_table.expand(len(starts), -1).contiguous()
        layout = Layout.build([count] * len(starts), starts, table, 16)
        at = torch.cat([torch.arange(start, start + count) for start in starts])
        found = OPS.attention(q[at].contiguous(), store, layout, dim**-0.5)
        pairs += [(part, all_rows[at]) for part, all_rows in zip(found, whole)]
    return pairs


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("cache", CACHES)
def test_attention_has_the_same_bits_decoded_in_chunks_and_packed(cache: str) -> None:
    assert _differing(_attention(cache)) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("dim", "length"), [(64, 70), (96, 70), (256, 70), (128, 600)])
def test_attention_of_other_heads_and_over_two_splits(cache: str, dim: int, length: int) -> None:
    assert _differing(_attention(cache, dim, length)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("cache", QUICK_CACHES)
def test_reversed_channels_in_attentions_small_tiles_are_noticed(cache: str) -> None:
    _is_noticed(lambda: _attention(cache), Card(order=in_small_tiles(last_channels_first)))


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
def test_other_terms_in_an_instruction_of_attentions_small_tiles_are_noticed(cache: str) -> None:
    _is_noticed(lambda: _attention(cache), Card(order=in_small_tiles(alternating_channels)))


@pytest.mark.slow
@pytest.mark.parametrize("cache", QUICK_CACHES)
def test_exchanged_operands_are_noticed_where_sides_are_not_alike(cache: str) -> None:
    _is_noticed(lambda: _attention(cache), Card(unlike_sides))


@pytest.mark.slow
def test_a_kernel_that_reverses_the_channels_of_small_tiles_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mutation is in the kernel's source, and the card is Hopper's."""
    own = split.product

    def reversed_product(keys, rows, acc, KEYS_FIRST):  # type: ignore[no-untyped-def]
        if KEYS_FIRST:
            keys, rows = _reversed(keys, 1), _reversed(rows, 0)
        return own(keys, rows, acc, KEYS_FIRST)

    monkeypatch.setattr(split, "product", reversed_product)
    _is_noticed(lambda: _attention("bf16"), Card())


def _reversed(x, dim: int):  # type: ignore[no-untyped-def]
    """An interpreted tensor, with this dimension the other way round."""
    flipped = x.handle.data[:, ::-1] if dim == 1 else x.handle.data[::-1]
    return type(x)(TensorHandle(flipped, x.handle.dtype), x.type)


def _operands(kind: str, rows: int, columns: int, inner: int) -> tuple[Operand, Operand]:
    x, w = draw(0, rows, inner, spread=1.0), draw(1, columns, inner, spread=1.0)
    return (OPS.quantize(x, ROW), OPS.quantize(w, WEIGHT)) if kind == "e4m3" else (x, w)


def _product(kind: str, columns: int = 70, inner: int = 400) -> Pairs:
    """Rows alone and in parts, with those of 80: tiles of 16, 32 and 64 rows, which stand on
    the short side, and a large one, where codes are exchanged; float32 results."""
    x, w = _operands(kind, 80, columns, inner)
    whole = OPS.product(x, w, None, torch.float32)
    return [
        (OPS.product(rows_of(x, lo, hi), w, None, torch.float32), whole[lo:hi])
        for lo, hi in ((0, 1), (79, 80), (3, 20), (10, 60), (5, 75))
    ]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", ["e4m3", "bf16"])
def test_a_row_of_a_product_has_the_same_bits_alone_and_among_others(kind: str) -> None:
    assert _differing(_product(kind)) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", ["e4m3", "bf16"])
def test_a_row_of_a_long_product_in_chunks_too(kind: str) -> None:
    assert _differing(_product(kind, 64, 8192)) == 0


def _by_every_tile(kind: str) -> Pairs:
    """The product of 80 rows by each tile that a plan has, with the first one's; of codes by those
    with tokens on the long side too."""
    x, w = _operands(kind, 80, 70, 400)
    tiles = [(*tile, False) for tile in TILES[torch.bfloat16]]
    if kind == "e4m3":
        tiles += [(*tile, True) for tile in TOKENS_FIRST]
    found = []
    for tile_n, tile_m, warps, first in tiles:
        with pytest.MonkeyPatch.context() as patch:
            forced(patch, tile_n=tile_n, tile_m=tile_m, num_warps=warps, tokens_first=first)
            found.append(OPS.product(x, w, None, torch.float32))
    return [(each, found[0]) for each in found[1:]]


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", ["e4m3", "bf16"])
def test_every_tile_gives_the_same_bits(kind: str) -> None:
    assert _differing(_by_every_tile(kind)) == 0


@pytest.mark.slow
def test_tokens_on_the_long_side_are_noticed_where_sides_are_not_alike() -> None:
    """80 rows of codes have them there, and up to 64 do not."""
    _is_noticed(lambda: _product("e4m3"), Card(unlike_sides))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["e4m3", pytest.param("bf16", marks=pytest.mark.slow)])
def test_reversed_channels_in_small_tiles_of_products_are_noticed(kind: str) -> None:
    _is_noticed(lambda: _product(kind), Card(order=in_small_tiles(last_channels_first)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["e4m3", "bf16"])
def test_other_terms_in_an_instruction_of_products_are_noticed(kind: str) -> None:
    """By the tiles that a plan chooses, and by each that it may choose."""
    for call in (_product, _by_every_tile):
        _is_noticed(lambda call=call: call(kind), Card(order=in_small_tiles(alternating_channels)))


def test_a_tile_of_weights_too_low_for_the_fp8_instruction_is_noticed() -> None:
    """32 rows of the weight: Triton multiplies them as float16, with other bits."""
    x, w = _operands("e4m3", 16, 64, 256)

    def pairs() -> Pairs:
        with pytest.MonkeyPatch.context() as patch:
            forced(patch, tile_n=32, tile_m=16)
            low = OPS.product(x, w, None, torch.float32)
        return [(low, OPS.product(x, w, None, torch.float32))]

    _is_noticed(pairs, Card())


def _experts(kind: str) -> Pairs:
    """An expert's rows alone, with the same among those of others."""
    count, each, columns, inner = 3, 20, 70, 256
    x = _operands(kind, count * each, 1, inner)[0]
    weights = [draw(i, columns, inner, spread=1.0) for i in range(count)]
    stacked = Stacked.of(
        [OPS.quantize(one, WEIGHT) if kind == "e4m3" else one for one in weights], count
    )
    offsets = torch.arange(count + 1) * each
    whole = OPS.grouped_product(x, stacked, offsets, torch.float32)
    pairs: Pairs = []
    for expert, start, size in ((0, 0, 1), (2, 45, 15)):
        alone = torch.zeros(count + 1, dtype=torch.int64)
        alone[expert + 1 :] = size
        found = OPS.grouped_product(rows_of(x, start, start + size), stacked, alone, torch.float32)
        pairs.append((found, whole[start : start + size]))
    return pairs


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", ["e4m3", "bf16"])
def test_an_experts_rows_have_the_same_bits_alone_and_among_others(kind: str) -> None:
    assert _differing(_experts(kind)) == 0


def _head() -> Pairs:
    """Log-probabilities of the sampler, and of rows alone, with those of 80 rows."""
    hidden, weight = draw(0, 80, 200), draw(1, 300, 200) * 0.1
    tokens, sampled = OPS.head_sample(hidden, weight, keys_of(80), 1.0)
    whole = OPS.head_logprobs(hidden, weight, tokens, 1.0)[0]
    parts = [
        (OPS.head_logprobs(hidden[lo:hi], weight, tokens[lo:hi], 1.0)[0], whole[lo:hi])
        for lo, hi in ((0, 1), (60, 80))
    ]
    return [(sampled, whole), *parts]


@pytest.mark.usefixtures("hopper")
def test_the_output_head_gives_a_row_the_same_bits() -> None:
    assert _differing(_head()) == 0


@pytest.mark.slow
def test_another_order_in_the_heads_small_tiles_is_noticed() -> None:
    """Small ones have 64 rows there."""
    _is_noticed(_head, Card(order=in_small_tiles(last_channels_first, 64)))
