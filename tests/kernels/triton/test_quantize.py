"""The quantizer's kernels against the one quantizer, bit for bit; NaN and infinity; rows alone and
in a batch."""

import pytest
import torch
from torch import Tensor

from isobit.kernels import get_ops
from isobit.kernels.quantize.triton import quantize as kernel
from isobit.kernels.quantize.triton import quantize_along_tokens, quantize_both_ways, supported
from isobit.kernels.triton.launch import record_launches
from isobit.precision import E4M3, E5M2, QTensor, QuantSpec, quantize

from ..helpers import bits, draw, same
from .helpers import DEVICE, HAS_GPU, there

REFERENCE = get_ops("reference", "exact")
GRANULARITIES = ("1x128", "128x1", "128x128", "row")
SCALES = ("ue8m0", "fp32")
DTYPES = (torch.bfloat16, torch.float32)


def flag() -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=DEVICE)


def host(q: QTensor) -> QTensor:
    return QTensor(q.data.cpu(), q.scale.cpu(), q.spec)


def equal(found: QTensor, wanted: QTensor) -> bool:
    found = host(found)
    return (
        found.spec == wanted.spec
        and same(found.data, wanted.data)
        and same(found.scale, wanted.scale)
    )


def hard(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Magnitudes of all sizes, from below the smallest scale to near the largest number; zero
    blocks and signed zeros."""
    x = draw(seed, rows, columns, dtype=torch.float32, spread=4.0)
    part = max(columns // 4, 1)
    x[: rows // 2, :part] *= 2.0**-120
    x[rows // 2 :, part : 2 * part] = x[rows // 2 :, part : 2 * part].sign() * 3e38
    x[:, 2 * part : 3 * part] = -0.0
    x[rows // 3 : rows // 3 + 2] = 0.0
    if dtype == torch.bfloat16 and not HAS_GPU:
        x[x.abs() < 2.0**-126] = 0.0  # the interpreter reads subnormal BF16 wrongly
    return x.to(dtype)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_and_scales_are_the_quantizers(
    dtype: torch.dtype, granularity: str, scale: str
) -> None:
    spec = QuantSpec(E4M3, granularity, scale)
    most = {"row": 5, "1x128": 35}.get(
        granularity, 258
    )  # a program of few rows takes the interpreter as long
    for rows, columns in ((1, 20), (1, 128), (5, 300), (most, 270)):
        for x in (hard(rows, columns, dtype), draw(1, rows, columns, dtype=dtype, spread=1.0)):
            raised = flag()
            found = kernel(x.to(DEVICE), spec, raised)
            assert equal(found, quantize(x, spec)), (rows, columns)
            assert found.data.is_contiguous()
            assert laid_out(found)
            assert raised.item() == 0


@pytest.mark.slow
def test_rows_of_any_stride_and_long_rows() -> None:
    wide = draw(2, 7, 400).to(DEVICE)
    long = draw(3, 2, 33_000).to(DEVICE)
    for granularity in GRANULARITIES:
        spec = QuantSpec(E4M3, granularity)
        for x in (wide[:, 30:190], wide.t()[3:20], wide[1:2].expand(5, 400)):
            assert equal(kernel(x, spec, flag()), quantize(x.cpu(), spec)), granularity
    assert equal(
        kernel(long, QuantSpec(E4M3, "row"), flag()), quantize(long.cpu(), QuantSpec(E4M3, "row"))
    )


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_along_tokens_is_the_composition(dtype: torch.dtype, scale: str) -> None:
    spec = QuantSpec(E4M3, "1x128", scale)
    for rows, columns in ((1, 20), (5, 300), (144, 70), (258, 128)):
        x = hard(rows, columns, dtype, seed=4)
        saved = quantize(x, spec), quantize(x, QuantSpec(E4M3, "row", scale))
        for operand in (x, *saved):
            raised = flag()
            found = quantize_along_tokens(there(operand), spec, raised)
            assert equal(found, REFERENCE.quantize_along_tokens(operand, spec, "x")), (
                rows,
                columns,
            )
            assert found.data.stride() == (-(-rows // 16) * 16, 1)
            assert laid_out(found)
            assert raised.item() == 0


def test_one_binary_serves_any_number_of_tokens() -> None:
    """Triton compiles anew where an integer that it may specialize on is 1, or no multiple of
    16."""
    x, spec = draw(8, 258, 40).to(DEVICE), QuantSpec(E4M3, "1x128")
    free = {"rows", "old_row", "old_step"}  # `do_not_specialize` of the kernel
    seen = set()
    for rows in (1, 5, 97, 128, 255, 258):
        for operand in (x[:rows], kernel(x[:rows], spec, flag())):
            with record_launches() as found:
                quantize_along_tokens(operand, spec, flag())
            (launch,) = found
            given = dict(zip(launch.kernel.fn.__code__.co_varnames, launch.arguments))
            numbers = {
                name: n for name, n in given.items() if isinstance(n, int) and name not in free
            }
            seen.add(tuple(sorted((name, n == 1, n % 16 == 0) for name, n in numbers.items())))
            assert numbers["pitch"] % 16 == 0
            assert given["rows"] == rows
    assert len(seen) == 1
    padding = quantize_along_tokens(x[:5], spec, flag()).data.as_strided((40, 11), (16, 1), 5)
    assert not padding.view(torch.uint8).any(), "zeros"


def laid_out(found: QTensor) -> bool:
    """Scales side by side for many rows, as products load them; contiguous for few, and for other
    blocks."""
    across = found.spec.granularity == "1x128" and found.shape[0] > 64
    return (found.scale.t() if across else found.scale).is_contiguous()


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
def test_scales_of_many_rows_stand_side_by_side(scale: str) -> None:
    """As a product takes them, without a copy; the bits, and those of what is quantized again from
    them, stay."""
    spec = QuantSpec(E4M3, "1x128", scale)
    for rows in (64, 65, 131):
        x = draw(7, rows, 300, spread=1.0)
        found = kernel(x.to(DEVICE), spec, flag())
        assert equal(found, quantize(x, spec))
        beside = found.scale.stride() == (1, rows)
        assert beside == (rows > 64)
        assert (found.scale.t().contiguous().data_ptr() == found.scale.data_ptr()) == beside
        for part in (found, QTensor(found.data[3:67], found.scale[3:67], spec)):
            own = QTensor(part.data.cpu(), part.scale.cpu().contiguous(), spec)
            again = quantize_along_tokens(part, spec, flag())
            assert equal(again, REFERENCE.quantize_along_tokens(own, spec, "x"))
            assert laid_out(again)
            other = QTensor(own.data, own.scale.flip(0), spec)
            assert not equal(again, REFERENCE.quantize_along_tokens(other, spec, "x")), (
                "the control"
            )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_nan_and_infinity_set_the_flag_and_make_the_scale_nan(
    granularity: str, value: float
) -> None:
    last = 8 if granularity == "row" else 129
    x = draw(5, last + 1, 200)
    x[last, 150] = value
    for scale in SCALES:
        spec, raised = QuantSpec(E4M3, granularity, scale), flag()
        found = host(kernel(x.to(DEVICE), spec, raised))
        assert raised.item() == 1
        x[last, 150] = 1.0
        wanted = quantize(x, spec)
        high, wide = wanted.block
        broken = torch.zeros_like(wanted.scale, dtype=torch.bool)
        broken[last // high, 150 // wide] = True
        assert torch.equal(found.scale.isnan(), broken), (
            "NaN in the scale of that block, and in no other"
        )
        assert torch.equal(found.scale[~broken], wanted.scale[~broken])
        x[last, 150] = value
    raised = flag()
    assert quantize_along_tokens(x.to(DEVICE), QuantSpec(E4M3), raised).scale[150, -1].isnan()
    assert raised.item() == 1


def test_a_nan_scale_of_a_saved_activation_is_noticed() -> None:
    saved, raised = quantize(draw(6, 40, 130), QuantSpec(E4M3)), flag()
    saved.scale[7, 1] = float("nan")
    found = host(quantize_along_tokens(there(saved), QuantSpec(E4M3), raised))
    assert raised.item() == 1
    assert found.scale[128:].isnan().all()
    assert not found.scale[:128].isnan().any()


def test_empty_matrices() -> None:
    for granularity in GRANULARITIES:
        spec = QuantSpec(E4M3, granularity)
        assert equal(
            kernel(torch.empty(0, 200, device=DEVICE), spec, flag()),
            quantize(torch.empty(0, 200), spec),
        )
    found = quantize_along_tokens(torch.empty(0, 200, device=DEVICE), QuantSpec(E4M3), flag())
    assert (found.shape, tuple(found.scale.shape)) == ((200, 0), (200, 0))


def test_rows_alone_have_the_bits_of_the_batch() -> None:
    """With one scale a row or a block of a row; the control, one scale for all of them, differs."""
    x = draw(7, 20, 200, spread=1.0).to(DEVICE)
    for granularity in ("1x128", "row"):
        spec = QuantSpec(E4M3, granularity)
        whole = host(kernel(x, spec, flag()))
        for row in (0, 17):
            alone = host(kernel(x[row : row + 1], spec, flag()))
            assert same(alone.data, whole.data[row : row + 1])
            assert same(alone.scale, whole.scale[row : row + 1])
    spec = QuantSpec(E4M3, "128x128")
    whole, alone = host(kernel(x, spec, flag())), host(kernel(x[17:18], spec, flag()))
    assert not same(alone.data, whole.data[17:18])


def test_the_comparison_can_fail() -> None:
    """The controls: the other scale format, the untransposed blocks, one unit in the last place of
    one number."""
    x = draw(8, 20, 200, spread=1.0)
    found = kernel(x.to(DEVICE), QuantSpec(E4M3, "1x128", "ue8m0"), flag())
    assert not same(host(found).data, quantize(x, QuantSpec(E4M3, "1x128", "fp32")).data)
    along = host(quantize_along_tokens(x.to(DEVICE), QuantSpec(E4M3), flag()))
    assert not same(along.data, quantize(x, QuantSpec(E4M3)).transpose().data)
    row = QuantSpec(E4M3, "row", "fp32")
    largest = x[0].abs().argmax()
    nudged = x.clone()
    nudged[0, largest] = (bits(x[0, largest].view(1)) + 1).view(torch.bfloat16)[0]
    assert not same(host(kernel(nudged.to(DEVICE), row, flag())).scale, quantize(x, row).scale)


def test_what_is_supported() -> None:
    assert all(supported(QuantSpec(E4M3, g, s)) for g in GRANULARITIES for s in SCALES)
    others = (
        QuantSpec(E5M2),
        QuantSpec(E4M3, "tensor"),
        QuantSpec(E4M3, "1x32"),
        QuantSpec(E4M3, "1x128", "nvfp4"),
    )
    assert not any(supported(spec) for spec in others)
    with pytest.raises(AssertionError, match="no kernel quantizes"):
        kernel(torch.zeros(2, 2, device=DEVICE), others[1], flag())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (70, 130), (130, 300), (256, 128)])
def test_both_ways_of_one_reading_are_the_two_in_turn(rows: int, columns: int, scale: str) -> None:
    """Codes, scales, where these lie, and the padding behind the tokens. The control: of another
    matrix."""
    spec, x = QuantSpec(E4M3, "1x128", scale), hard(rows, columns, torch.bfloat16).to(DEVICE)
    raised = flag()
    found = quantize_both_ways(x, spec, raised)
    assert not bool(raised)
    wanted = kernel(x, spec, flag()), quantize_along_tokens(x, spec, flag())
    for one, other in zip(found, wanted):
        assert equal(one, host(other))
        assert one.scale.stride() == other.scale.stride()
        assert one.data.stride() == other.data.stride()
    pitch = found[1].data.stride(0)
    whole = found[1].data.view(torch.uint8).as_strided((columns, pitch), (pitch, 1))
    assert not bool(whole[:, rows:].any())
    moved = quantize_both_ways(-x, spec, flag())
    assert not any(equal(one, host(other)) for one, other in zip(moved, wanted))


def test_both_ways_meet_nan_and_leave_other_blocks_to_the_two() -> None:
    """`row` has no blocks of 128 columns; no rows are none."""
    x, raised = draw(0, 140, 40).to(DEVICE), flag()
    x[135, 3] = float("nan")
    rows, tokens = quantize_both_ways(x, QuantSpec(E4M3), raised)
    assert bool(raised)
    assert rows.scale.isnan().nonzero().tolist() == [[135, 0]]
    assert tokens.scale.isnan().nonzero().tolist() == [[3, 1]]
    for spec, given in ((QuantSpec(E4M3, "row"), x[:5]), (QuantSpec(E4M3), x[:0])):
        found = quantize_both_ways(given, spec, flag())
        wanted = kernel(given, spec, flag()), quantize_along_tokens(given, spec, flag())
        assert all(equal(one, host(other)) for one, other in zip(found, wanted))
