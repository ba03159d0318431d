"""Stochastic rounding to BF16: one of the two neighbours, without a bias, the same bits in every
backend and part."""

import math

import pytest
import torch
from torch import Tensor

from isobit.kernels import Ops
from isobit.kernels.optim import definition as stochastic

from .helpers import same, threads


def numbers(count: int) -> Tensor:
    """Of either sign and every size, the smallest below the normal ones."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 1 << 32, (count,), generator=generator)
    x = (bits - (1 << 31)).to(torch.int32).view(torch.float32)
    return torch.where(x.isfinite(), x, torch.ones(()))


def below(x: Tensor) -> Tensor:
    """The neighbour towards 0: the upper half of the bits."""
    return (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("count", [1, 7, 64, 65, 5003])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_both_backends_have_the_same_bits(
    count: int, num_threads: int, native: Ops, reference: Ops
) -> None:
    x = numbers(count)
    with threads(num_threads):
        found = native.round_stochastically(x, -5, 3, 8)
    assert same(found, reference.round_stochastically(x, -5, 3, 8))


def test_it_is_one_of_the_two_neighbours_and_right_on_average(native: Ops) -> None:
    """With all 65,536 random numbers the mean would be x; with as many draws it is within five
    deviations."""
    for value in (1.0 + 0.3 * 2**-7, -1.0 - 0.9 * 2**-7, 2**-130 * 1.37, 255.9, -3.0):
        x = torch.full((1 << 16,), value)
        found, low = native.round_stochastically(x, 7, 1, 0).double(), below(x)[:1].double()
        high = (below(x)[:1].view(torch.int16) + 1).view(torch.bfloat16).double()
        assert set(found.unique().tolist()) <= {low.item(), high.item()}
        up = float((x[:1].double() - low) / (high - low))
        fraction = float((found == high).double().mean())
        assert abs(fraction - up) <= 5 * math.sqrt(max(up * (1 - up), 0) / len(x))
        assert up == 0 or float(x[0].bfloat16()) in (low.item(), high.item())
    biased = torch.full((1 << 16,), 1.0 + 0.3 * 2**-7).bfloat16().double().mean()
    assert biased == 1.0, "the control: to nearest the 0.3 is lost, which is 100 deviations"


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_parts_have_the_bits_of_the_whole(backend: str, request: pytest.FixtureRequest) -> None:
    ops: Ops = request.getfixturevalue(backend)
    x = numbers(1000)
    whole = ops.round_stochastically(x, 2**63 - 1, 5, 0)
    for cut in (8, 64, 504):
        parts = (
            ops.round_stochastically(p, 2**63 - 1, 5, at)
            for p, at in ((x[:cut], 0), (x[cut:], cut))
        )
        assert same(torch.cat(list(parts)), whole)
    # the controls: elements that are numbered from each part's own start; another seed, another
    # step
    wrong = (ops.round_stochastically(part, 2**63 - 1, 5, 0) for part in (x[:504], x[504:]))
    assert not same(torch.cat(list(wrong)), whole)
    assert not same(ops.round_stochastically(x, 2**63 - 2, 5, 0), whole)
    assert not same(ops.round_stochastically(x, 2**63 - 1, 6, 0), whole)


def test_long_tensors_are_rounded_in_parts(reference: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    x = numbers(1000)
    whole = reference.round_stochastically(x, 1, 2, 16)
    monkeypatch.setattr(stochastic, "_AT_ONCE", 64)
    assert same(reference.round_stochastically(x, 1, 2, 16), whole)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_what_is_exact_stays_and_nothing_becomes_infinite(
    backend: str, request: pytest.FixtureRequest
) -> None:
    ops: Ops = request.getfixturevalue(backend)
    exact = numbers(4096).bfloat16()
    exact = exact[exact.isfinite()]
    assert same(ops.round_stochastically(exact.float(), 1, 2, 0), exact)
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([largest, -largest, math.inf, -math.inf, 0.0, -0.0]).repeat(100)
    found = ops.round_stochastically(x, 1, 2, 0)[-6:]
    top = torch.finfo(torch.bfloat16).max
    assert same(found, torch.tensor([top, -top, math.inf, -math.inf, 0.0, -0.0]).bfloat16())
    assert torch.tensor(largest).bfloat16().isinf(), "the control: to nearest it is infinite"
    quiet = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(
        torch.float32
    )  # one whose upper half is infinity's
    assert ops.round_stochastically(quiet, 1, 2, 0).isnan().all()


def test_the_random_bits_are_even(reference: Ops) -> None:
    """Each of the 16 is set in half of the elements, within five deviations; neighbours, seeds and
    steps share none."""
    count = 1 << 14
    found = stochastic.noise(count, 3, 4, 0, torch.device("cpu"))
    bound = 5 * math.sqrt(count / 4)
    for bit in range(16):
        assert abs(int((found >> bit & 1).sum()) - count / 2) < bound
    others = [found.roll(1), stochastic.noise(count, 4, 4, 0, torch.device("cpu")),
              stochastic.noise(count, 3, 5, 0, torch.device("cpu"))]  # fmt: skip
    for other in others:
        assert (
            int((found == other).sum()) < 10
        )  # of 16,384 numbers below 65,536: 1 in 4 is expected
