"""RMSNorm, rotary embedding and SiLU gate: against their formulas, the same bits in every batch,
gradients."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isobit.kernels import Activation, get_ops

from .helpers import ACTIVATIONS, draw, ordinals, same, threads

OPS = get_ops("reference", "exact")
DTYPES = (torch.bfloat16, torch.float32)
CHANNELS = 200


def assert_within_one_ulp(ours: Tensor, exact: Tensor) -> None:
    """Of the float64 value, rounded."""
    assert int((ordinals(ours) - ordinals(exact.to(ours.dtype))).abs().max()) <= 1


def assert_gradient(ours: Tensor, exact: Tensor) -> None:
    """Computed in float32, rounded to its type once."""
    tolerance = 2.0**-8 if ours.dtype == torch.bfloat16 else 2.0**-20
    assert float((ours.double() - exact).abs().max()) <= tolerance * float(exact.abs().max())
    assert float((ours.double() - exact).norm()) <= tolerance * float(exact.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_is_its_formula(dtype: torch.dtype, with_residual: bool) -> None:
    x, weight = draw(0, 9, CHANNELS, dtype=dtype, spread=2.0), draw(1, CHANNELS, dtype=dtype)
    residual = draw(2, 9, CHANNELS, dtype=dtype, spread=2.0) if with_residual else None
    y, summed, rstd = OPS.rms_norm(x, weight, 1e-6, residual)
    assert (y.dtype, summed.dtype, rstd.dtype) == (dtype, dtype, torch.float32)
    assert same(summed, x if residual is None else x + residual)
    for row in range(9):
        values = summed[row].tolist()
        mean = math.fsum(v * v for v in values) / CHANNELS
        assert float(rstd[row]) == float(
            torch.tensor(1 / math.sqrt(mean + 1e-6), dtype=torch.float32)
        )
        exact = [v * float(rstd[row]) * w for v, w in zip(values, weight.tolist())]
        assert_within_one_ulp(y[row], torch.tensor(exact, dtype=torch.float64))


def test_known_answers() -> None:
    y, _, rstd = OPS.rms_norm(torch.tensor([[3.0, -4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    assert float(rstd) == float(torch.tensor(1 / math.sqrt(12.5)))
    torch.testing.assert_close(y, torch.tensor([[3.0, -8.0]]) / math.sqrt(12.5))
    assert OPS.rms_norm(torch.zeros(1, 4), torch.ones(4), 1e-6)[0].tolist() == [[0.0] * 4]
    hidden = OPS.gate_mul(
        "silu", torch.tensor([[0.0, math.log(3.0), -200.0, 90.0, 5.0, 4.0, 7.0, 0.5]])
    )
    torch.testing.assert_close(hidden, torch.tensor([[0.0, math.log(3.0) * 0.75 * 4, 0.0, 45.0]]))
    hidden = OPS.gate_mul(
        "sigmoid", torch.tensor([[0.0, math.log(3.0), -1e20, 1e20, 5.0, 4.0, 7.0, 0.5]])
    )
    torch.testing.assert_close(hidden, torch.tensor([[2.5, 3.0, 0.0, 0.5]]))
    quarter = torch.tensor([[0.0]]), torch.tensor([[1.0]])
    assert OPS.rotary(torch.tensor([[[1.0, 2.0]]]), *quarter, torch.tensor([0])).tolist() == [
        [[-2.0, 1.0]]
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_gradients_are_those_of_float64_autograd(dtype: torch.dtype) -> None:
    x = draw(3, 33, CHANNELS, dtype=dtype)
    weight = draw(4, CHANNELS, dtype=dtype)
    dy = draw(5, 33, CHANNELS, dtype=dtype)
    _, summed, rstd = OPS.rms_norm(x, weight, 1e-5)
    dx, dweight = OPS.rms_norm_backward(dy, summed, weight, rstd)
    assert (dx.dtype, dweight.dtype) == (dtype, torch.float32)
    leaves = x.double().requires_grad_(), weight.double().requires_grad_()
    y = leaves[0] * torch.rsqrt(leaves[0].square().mean(-1, keepdim=True) + 1e-5) * leaves[1]
    expected = torch.autograd.grad(y, leaves, dy.double())
    assert_gradient(dx, expected[0])
    assert_gradient(dweight, expected[1])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_mul_and_its_gradient(dtype: torch.dtype, activation: Activation) -> None:
    """In the tail of GELU, PyTorch's 1 + tanh cancels; there an absolute error of 2^-50 is its
    own."""
    gate_up, dh = draw(6, 33, 2 * CHANNELS, dtype=dtype) * 3, draw(7, 33, CHANNELS, dtype=dtype)
    leaf = gate_up.double().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    exact = ACTIVATIONS[activation](gate, up)
    ours = OPS.gate_mul(activation, gate_up)
    assert ours.dtype == dtype
    torch.testing.assert_close(
        ours.double(),
        exact.detach(),
        rtol=2e-6 if dtype == torch.float32 else 2.0**-8,
        atol=2.0**-42,
    )
    (expected,) = torch.autograd.grad(exact, leaf, dh.double())
    assert_gradient(OPS.gate_mul_backward(activation, dh, gate_up), expected)


def test_the_clamped_gate_ends() -> None:
    """Beyond its bounds neither gate nor up changes anything; at them they still do."""
    gate_up = torch.tensor([[7.0, 8.0, -9.0, 1e20, -1e20, 3.0, -7.0, 7.5, -1e20, 2.0]])
    hidden = OPS.gate_mul("swiglu_clamped", gate_up)[0].tolist()
    assert hidden == pytest.approx([28.0, -42.0, 0.0, -42.0, 0.0], rel=1e-4, abs=2e-5)
    gradient = OPS.gate_mul_backward("swiglu_clamped", torch.ones(1, 5), gate_up)[0]
    assert (gradient != 0).tolist() == [
        True,
        False,
        True,
        False,
        False,
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gates_far_out_are_finite(activation: Activation) -> None:
    gate_up = torch.tensor([[-1e20, -100.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0]])
    assert OPS.gate_mul(activation, gate_up).tolist() == [
        [0.0, pytest.approx(0.0, abs=1e-40), 100.0, 1e4]
    ]
    gradient = OPS.gate_mul_backward(activation, torch.ones(1, 4), gate_up)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 100.0, 1e4]]))


def tables(positions: int, half: int) -> tuple[Tensor, Tensor]:
    angle = torch.arange(positions).unsqueeze(1).double() * 10_000.0 ** -(
        torch.arange(half).double() / half
    )
    return angle.cos().float(), angle.sin().float()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_is_the_rotate_half_of_hugging_face(dtype: torch.dtype) -> None:
    x, positions = draw(8, 33, 3, 16, dtype=dtype), torch.randperm(50)[:33]
    cos, sin = tables(50, 8)
    wide = x.double()
    rotated = torch.cat([-wide[..., 8:], wide[..., :8]], -1)
    full_cos, full_sin = (
        torch.cat([t, t], -1)[positions].unsqueeze(1).double() for t in (cos, sin)
    )
    exact = wide * full_cos + rotated * full_sin
    ours = OPS.rotary(x, cos, sin, positions)
    assert ours.dtype == dtype
    torch.testing.assert_close(
        ours.double(), exact, rtol=2.0**-8 if dtype == torch.bfloat16 else 0, atol=1e-6
    )
    fused = draw(8, 33, 5, 16, dtype=dtype)
    assert same(
        OPS.rotary(fused[:, 1:3], cos, sin, positions),
        OPS.rotary(fused, cos, sin, positions)[:, 1:3],
    )


def test_rotating_back_is_the_gradient_and_the_inverse() -> None:
    x = draw(9, 33, 3, 16, dtype=torch.float32)
    dy = draw(10, 33, 3, 16, dtype=torch.float32)
    positions = torch.arange(33)
    cos, sin = tables(33, 8)
    leaf = x.requires_grad_()
    (expected,) = torch.autograd.grad(OPS.rotary(leaf, cos, sin, positions), leaf, dy)
    assert same(OPS.rotary(dy, cos, sin, positions, inverse=True), expected)
    with torch.no_grad():
        restored = OPS.rotary(OPS.rotary(x, cos, sin, positions), cos, sin, positions, inverse=True)
    torch.testing.assert_close(restored, x.detach(), rtol=0, atol=2e-6)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60), st.integers(0, 100))
@settings(max_examples=50, deadline=None)
def test_rotated_products_depend_on_the_distance_only(
    first: int, second: int, shift: int, seed: int
) -> None:
    q, k = draw(seed, 1, 1, 16, dtype=torch.float32), draw(seed + 1, 1, 1, 16, dtype=torch.float32)
    cos, sin = tables(121, 8)
    scores = [
        (
            OPS.rotary(q, cos, sin, torch.tensor([first + by]))
            * OPS.rotary(k, cos, sin, torch.tensor([second + by]))
        ).sum()
        for by in (0, shift)
    ]
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=1e-5)


def row_operators(dtype: torch.dtype) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Operators as functions of rows [M, CHANNELS] and the rows' identities [M]."""
    weight = draw(11, CHANNELS, dtype=dtype)
    cos, sin = tables(300, CHANNELS // 2)
    return {
        "rms_norm": lambda x, _: OPS.rms_norm(x, weight, 1e-5)[0],
        "rms_norm with residual": lambda x, _: OPS.rms_norm(x, weight, 1e-5, x.flip(1))[0],
        "rms_norm rstd": lambda x, _: OPS.rms_norm(x, weight, 1e-5)[2],
        "rms_norm of strided rows": lambda x, _: OPS.rms_norm(x.t().contiguous().t(), weight, 1e-5)[
            0
        ],
        "rms_norm_backward": lambda x, _: OPS.rms_norm_backward(
            x, x.flip(1), weight, x[:, 0].float().abs()
        )[0],
        "rotary": lambda x, row: OPS.rotary(x.unsqueeze(1), cos, sin, row).squeeze(1),
        "silu": lambda x, _: OPS.gate_mul("silu", x),
        "silu backward": lambda x, _: OPS.gate_mul_backward(
            "silu", x[:, : CHANNELS // 2], x.flip(1)
        ),
        "sigmoid": lambda x, _: OPS.gate_mul("sigmoid", x),
        "sigmoid backward": lambda x, _: OPS.gate_mul_backward(
            "sigmoid", x[:, : CHANNELS // 2], x.flip(1)
        ),
        "gelu": lambda x, _: OPS.gate_mul("gelu_pytorch_tanh", x),
        "gelu backward": lambda x, _: OPS.gate_mul_backward(
            "gelu_pytorch_tanh", x[:, : CHANNELS // 2], x.flip(1)
        ),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_rows_are_the_same_in_every_batch(dtype: torch.dtype, num_threads: int) -> None:
    x, identity = draw(12, 257, CHANNELS, dtype=dtype, spread=1.0), torch.arange(257)
    random = torch.Generator().manual_seed(num_threads)
    for name, operator in row_operators(dtype).items():
        with threads(1):
            alone = torch.cat([operator(x[i : i + 1], identity[i : i + 1]) for i in range(257)])
        with threads(num_threads):
            for count in (2, 3, 7, 8, 9, 31, 64, 127, 257):
                chosen = torch.randperm(257, generator=random)[:count]
                assert same(operator(x[chosen], identity[chosen]), alone[chosen]), (name, count)


def test_wide_rows_are_the_same_alone() -> None:
    """A row of 8,192 channels, beyond which models do not go, is not summed by two threads."""
    x, weight = draw(13, 3, 8192, dtype=torch.float32), torch.ones(8192)
    with threads(2):
        whole = OPS.rms_norm(x, weight, 1e-5)[0]
        assert same(
            torch.cat([OPS.rms_norm(x[i : i + 1], weight, 1e-5)[0] for i in range(3)]), whole
        )


def test_functions_with_a_vector_tail_are_noticed() -> None:
    """The negative control: PyTorch's own silu gives an element other bits at another place of the
    vector."""
    x = draw(14, 257, CHANNELS + 3, dtype=torch.float32)
    whole = torch.nn.functional.silu(x)
    alone = torch.cat([torch.nn.functional.silu(x[i : i + 1]) for i in range(257)])
    assert not same(whole, alone)
