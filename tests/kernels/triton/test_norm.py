"""RMSNorm's kernels: the same float32 sums in PyTorch bit for bit, float64 to a bound, fused and
unfused, alone and in a batch, gradients."""

import pytest
import torch
from torch import Tensor

from isobit.kernels import get_ops
from isobit.kernels.backends.triton import TritonOps
from isobit.kernels.norms.triton import norm
from isobit.kernels.quantize.triton import quantize
from isobit.precision import E4M3, QTensor, QuantSpec

from ..helpers import draw, same
from .helpers import DEVICE
from .test_quantize import equal, flag, host

REFERENCE = get_ops("reference", "exact")
DTYPES = (torch.bfloat16, torch.float32)
UNIT = 2.0**-24
"""The largest relative error of one float32 operation."""
LAST = {torch.bfloat16: 2.0**-8, torch.float32: UNIT}
EPS = 1e-6


def pair_sum(x: Tensor) -> Tensor:
    """Sums over the last dimension, a power of two: neighbours in pairs, then pairs of pairs."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def padded(x: Tensor) -> Tensor:
    wide = 1 << (x.shape[-1] - 1).bit_length()
    return torch.nn.functional.pad(x, (0, wide - x.shape[-1]))


def rstd_of(mean: Tensor) -> Tensor:
    """1 / sqrt(mean + eps), each operation rounded to float32. Through float64, which rounds these
    the same (Figueroa 1995); PyTorch's own float32 root on a CPU is not always the nearest
    number."""
    root = (mean + torch.tensor(EPS)).double().sqrt().float()
    return (1.0 / root.double()).float()


def operands(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x = draw(0, rows, columns, dtype=dtype, spread=1.0)
    residual = draw(1, rows, columns, dtype=dtype, spread=1.0)
    return x, draw(2, columns, dtype=dtype), residual


def run(x: Tensor, weight: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    given = None if residual is None else residual.to(DEVICE)
    y, summed, rstd = norm.rms_norm(x.to(DEVICE), weight.to(DEVICE), EPS, given)
    return y.cpu(), summed.cpu(), rstd.cpu()


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [20, 128, 200, 1024])
def test_bits_are_those_of_the_written_order_and_near_float64(
    columns: int, dtype: torch.dtype, with_residual: bool
) -> None:
    """rstd's relative error: the sum of L = log2 levels and its squares (L + 1), the mean, eps;
    half of it through the root; root and quotient. y's: that of rstd, two products, its own
    rounding."""
    x, weight, residual = operands(5, columns, dtype)
    given = residual if with_residual else None
    y, summed, rstd = run(x, weight, given)
    wanted = REFERENCE.rms_norm(x, weight, EPS, given)
    assert same(summed, wanted[1])
    s = summed.float()
    mean = pair_sum(padded(s * s)) / columns
    assert same(rstd, rstd_of(mean))
    assert same(y, (s * rstd.unsqueeze(1) * weight.float()).to(dtype))
    wide = summed.double()
    exact_rstd = (wide.square().mean(-1) + EPS).rsqrt()
    levels = (columns - 1).bit_length()
    error = 1.001 * ((levels + 4) / 2 + 2) * UNIT
    assert bool(((rstd.double() - exact_rstd).abs() <= error * exact_rstd).all())
    exact = wide * exact_rstd.unsqueeze(1) * weight.double()
    bound = (error + 2.001 * UNIT + LAST[dtype]) * (1 + LAST[dtype]) * exact.abs() + 2.0**-148
    assert bool(((y.double() - exact).abs() <= bound).all())


def test_another_order_gives_other_bits() -> None:
    """The control of the written order: PyTorch's own sum, and a bound a tenth as wide."""
    x, weight, _ = operands(20, 1000, torch.float32)
    rstd = run(x, weight, None)[2]
    assert not same(rstd, rstd_of(x.square().sum(-1) / 1000))
    exact = (x.double().square().mean(-1) + EPS).rsqrt()
    assert bool(((rstd.double() - exact).abs() > 0.1 * UNIT * exact).any())


@pytest.mark.parametrize("scale", ["ue8m0", "fp32"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [20, 384])
def test_quantized_at_once_has_the_bits_of_both_in_turn(
    columns: int, dtype: torch.dtype, scale: str
) -> None:
    x, weight, residual = operands(4, columns, dtype)
    x[2], residual[2] = 0.0, 0.0
    for given in (None, residual):
        y, summed, rstd = run(x, weight, given)
        for granularity in ("1x128", "row"):
            spec, raised = QuantSpec(E4M3, granularity, scale), flag()
            on_device = None if given is None else given.to(DEVICE)
            found = norm.rms_norm_quantized(
                x.to(DEVICE), weight.to(DEVICE), EPS, on_device, spec, raised
            )
            assert equal(found[0], host(quantize(y.to(DEVICE), spec, flag())))
            assert same(found[1].cpu(), summed)
            assert same(found[2].cpu(), rstd)
            assert raised.item() == 0
    assert not equal(found[0], host(quantize((y * 1.01).to(DEVICE), spec, flag()))), "the control"


def test_the_backend_adds_the_residual_before_it_quantizes() -> None:
    ops, spec = TritonOps("bitwise", "a test", DEVICE), QuantSpec(E4M3)
    x, weight, residual = operands(4, 20, torch.bfloat16)
    rows, by, more = (each.to(DEVICE) for each in (x, weight, residual))
    found = ops.rms_norm_quantized(rows, by, EPS, more, spec, "x")
    wanted = norm.rms_norm_quantized(rows, by, EPS, more, spec, flag())
    assert equal(found[0], host(wanted[0]))
    assert same(found[1].cpu(), run(x, weight, residual)[1])
    assert not same(found[1].cpu(), x), "the control"


def test_scales_of_many_rows_stand_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, residual = (t.to(DEVICE) for t in operands(7, 384, torch.bfloat16))
    spec = QuantSpec(E4M3, "1x128", "fp32")
    few = norm.rms_norm_quantized(x, weight, EPS, residual, spec, flag())[0]
    monkeypatch.setattr("isobit.kernels.quantize.triton.FEW_ROWS", 6)
    many = norm.rms_norm_quantized(x, weight, EPS, residual, spec, flag())[0]
    assert (few.scale.stride(), many.scale.stride()) == ((3, 1), (1, 7))
    assert equal(many, host(few))
    assert not equal(many, host(QTensor(few.data, few.scale.flip(0), spec))), "the control"


def test_nan_sets_the_flag() -> None:
    x, weight, _ = operands(3, 200, torch.bfloat16)
    x[1, 7] = float("nan")
    raised = flag()
    found = norm.rms_norm_quantized(
        x.to(DEVICE), weight.to(DEVICE), EPS, None, QuantSpec(E4M3), raised
    )[0]
    assert raised.item() == 1
    assert found.scale.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_alone_have_the_bits_of_the_batch(dtype: torch.dtype) -> None:
    x, weight, residual = operands(6, 200, dtype)
    whole = run(x, weight, residual)
    dy = draw(3, 6, 200, dtype=dtype)
    ds = _backward(dy, whole[1], weight, whole[2])[0]
    for row in (slice(0, 1), slice(4, 6)):
        alone = run(x[row], weight, residual[row])
        assert all(same(a, b[row]) for a, b in zip(alone, whole))
        assert same(_backward(dy[row], alone[1], weight, alone[2])[0], ds[row])
    shifted = run(x.roll(1, 1), weight, residual.roll(1, 1))
    assert not same(shifted[0].roll(-1, 1), whole[0]), "the control: places matter"


def _backward(dy: Tensor, summed: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    ds, dweight = norm.rms_norm_backward(*(t.to(DEVICE) for t in (dy, summed, weight, rstd)))
    return ds.cpu(), dweight.cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 21])
def test_gradients_are_those_of_float64(rows: int, dtype: torch.dtype) -> None:
    """ds = rstd · (a - n · m), a = dy·w, m the mean of a·n: at most 5 operations on every term, and
    for m a sum of L levels and 4 more. dweight: a sum of rows, two products each, in at most rows
    additions."""
    columns = 200
    x, weight, _ = operands(rows, columns, dtype)
    dy = draw(3, rows, columns, dtype=dtype)
    _, summed, rstd = run(x, weight, None)
    ds, dweight = _backward(dy, summed, weight, rstd)
    assert (ds.dtype, dweight.dtype) == (dtype, torch.float32)
    scale, normed = rstd.double().unsqueeze(1), summed.double() * rstd.double().unsqueeze(1)
    a = dy.double() * weight.double()
    exact = scale * (a - normed * (a * normed).mean(-1, keepdim=True))
    levels = (columns - 1).bit_length()
    size = scale * (a.abs() + normed.abs() * (a * normed).abs().mean(-1, keepdim=True))
    bound = 1.001 * (levels + 9) * UNIT * size + LAST[dtype] * exact.abs() * 1.01
    assert bool(((ds.double() - exact).abs() <= bound).all())
    terms = dy.double() * normed
    assert bool(
        (
            (dweight.double() - terms.sum(0)).abs()
            <= 1.001 * (rows + 2) * UNIT * terms.abs().sum(0)
        ).all()
    )
    again = _backward(dy, summed, weight, rstd)
    assert same(again[1], dweight)
    assert not bool(((ds.double() - 1.01 * exact).abs() <= bound).all()), (
        "the control: a gradient one percent off"
    )


def test_chunks_of_rows_are_added_in_order_and_none_is_missed() -> None:
    """Rows in more than one chunk; ones and powers of two, whose sum is exact in any order."""
    rows = 8 * norm._FEWEST_ROWS + 3
    dy = (2.0 ** (torch.arange(rows) % 12)).unsqueeze(1).expand(rows, 40).contiguous()
    ones = torch.ones(rows, 40)
    dweight = _backward(dy, ones, torch.ones(40), torch.ones(rows))[1]
    assert torch.equal(dweight, dy.sum(0))
    assert torch.equal(
        _backward(ones[:0], ones[:0], torch.ones(40), torch.ones(0))[1], torch.zeros(40)
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_that_is_added_has_the_bits_of_an_addition(dtype: torch.dtype) -> None:
    """The rounded gradient, and one addition that is rounded; the control: before it is rounded."""
    x, weight, _ = operands(21, 200, dtype)
    dy, added = draw(3, 21, 200, dtype=dtype), draw(4, 21, 200, dtype=dtype)
    _, summed, rstd = run(x, weight, None)
    alone = _backward(dy, summed, weight, rstd)
    given = (t.to(DEVICE) for t in (dy, summed, weight, rstd, added))
    found = [t.cpu() for t in norm.rms_norm_backward_added(*given)]
    assert same(found[0], alone[0] + added)
    assert same(found[1], alone[1])
    if dtype == torch.bfloat16:
        wide = _backward(dy.float(), summed.float(), weight.float(), rstd)[0]
        assert not same(found[0], (wide + added.float()).bfloat16())
