"""Layouts, stores of keys and values, and the table of codes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.kernels import KVStore, Layout
from isobit.kernels.codes import decode
from isobit.precision import BF16, E4M3, FP32, INT8, Format, QuantSpec

from .helpers import same


@pytest.mark.parametrize("form", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decoding_is_the_cast_for_every_code(form: torch.dtype, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    expected = codes.view(form).to(dtype)
    finite = ~expected.isnan()
    for given_codes in (codes, codes.view(form)):
        assert same(decode(given_codes, form, dtype)[finite], expected[finite])
        assert bool(decode(given_codes, form, dtype)[~finite].isnan().all())
    assert same(decode(codes.t(), form, dtype).t()[finite], expected[finite])
    assert same(
        decode(codes[:, ::3], form, dtype)[finite[:, ::3]], expected[:, ::3][finite[:, ::3]]
    )


def test_a_layout_places_rows_in_pages() -> None:
    layout = Layout.build([2, 0, 3], [3, 5, 0], torch.tensor([[7, 1], [2, 3], [4, 0]]), 4)
    assert layout.row_start.tolist() == [0, 2, 2, 5]
    assert layout.context.tolist() == [3, 5, 0]
    assert layout.positions.tolist() == [3, 4, 0, 1, 2]
    assert layout.slots.tolist() == [31, 4, 16, 17, 18]
    assert layout.num_rows == 5
    assert layout.num_slots == 32


@given(st.lists(st.integers(1, 70), max_size=8), st.sampled_from([1, 4, 16]))
@settings(max_examples=50, deadline=None)
def test_packed_sequences_have_pages_of_their_own(lengths: list[int], page_size: int) -> None:
    layout = Layout.packed(lengths, page_size)
    assert layout.num_rows == sum(lengths)
    assert layout.slots.unique().numel() == sum(lengths)
    assert layout.num_slots == sum(-(-n // page_size) * page_size for n in lengths)
    assert layout.positions.tolist() == [p for n in lengths for p in range(n)]
    assert not layout.context.any()


@pytest.mark.parametrize("form", [E4M3, INT8])
def test_a_quantized_store_takes_half_the_bytes(form: Format) -> None:
    spec = QuantSpec(form, "row")
    quantized, plain = (KVStore.allocate(32, 2, 64, kv, BF16) for kv in (spec, None))
    assert plain.nbytes == 32 * 2 * 64 * 2 * 2
    assert quantized.nbytes == 32 * 2 * 2 * (64 + 4)
    assert quantized.nbytes / plain.nbytes <= 0.55


@pytest.mark.parametrize("form", [BF16, FP32])
def test_a_plain_store_returns_what_was_written(form: Format) -> None:
    store = KVStore.allocate(8, 2, 4, None, form)
    store.k[3] = 1.5
    keys, values = store.gather(torch.tensor([[3, 0]]))
    assert keys.dtype == torch.float32
    assert keys.shape == (1, 2, 2, 4)
    assert keys[0, 0].unique().tolist() == [1.5]
    assert not keys[0, 1].any()
    assert not values.any()
