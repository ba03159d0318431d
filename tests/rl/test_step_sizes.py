"""How far a step of AdamW moves an element, in learning rates, with moments in 8 bits and in 32:
over gradients that are sparse, begin late, or differ in size within a block of moments."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from isobit.rl import OptimizerSettings
from isobit.rl.optim import eight_bit
from isobit.rl.optim.eight_bit import Moment, code_book, smallest_second
from isobit.rl.optim.sharded import ShardedOptimizer

RATE, ROWS, COLUMNS, STEPS = 1e-3, 256, 64, 160
Gradients = Callable[[int], Tensor]


def random(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rare_rows(decades: float) -> Gradients:
    """Rows that are touched always or almost never, four of them in a block, of sizes that differ
    by `decades`."""
    size, often = 10 ** (-decades * random(ROWS, 1, seed=1)), random(ROWS, 1, seed=2) ** 3
    base = normal(ROWS, COLUMNS, seed=3)
    return lambda step: (
        (random(ROWS, 1, seed=step) < often) * size * (base + normal(ROWS, COLUMNS, seed=-step))
    )


def columns(step: int) -> Tensor:
    """Dense gradients whose columns differ by three decades, as activations' do."""
    return 10 ** (-3 * random(COLUMNS, seed=1)) * (
        normal(ROWS, COLUMNS, seed=2) + normal(ROWS, COLUMNS, seed=-step)
    )


def bursts(step: int) -> Tensor:
    """Small elements that begin late, keep their sign and end after 20 steps, beside large ones
    that never end."""
    start = (random(ROWS, COLUMNS, seed=1) * STEPS).int()
    size = 10 ** (-4 * random(ROWS, COLUMNS, seed=2))
    large = torch.arange(COLUMNS) < 16
    active = large | ((start <= step) & (step < start + 20))
    return torch.where(large, 1.0, size) * active * normal(ROWS, COLUMNS, seed=3).sign()


def rare_expert(step: int) -> Tensor:
    """All elements at once, in a tenth of the steps, as those of an expert."""
    return (step % 10 == 7) * columns(step)


GRADIENTS: Mapping[str, Gradients] = {
    "rows of one size": rare_rows(0),
    "rows of three decades": rare_rows(3),
    "columns of three decades": columns,
    "bursts": bursts,
    "an expert that is rarely chosen": rare_expert,
}


def moved(
    gradients: Gradients, state: str, name: str = "layers.0.o", masters: str = "fp32"
) -> tuple[float, Tensor]:
    """(the largest |step| / rate of any element and step, the sum of all steps / rate)."""
    parameter = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))
    optimizer = ShardedOptimizer({name: parameter}, OptimizerSettings(state=state, masters=masters))
    largest, total = 0.0, torch.zeros(ROWS, COLUMNS)
    for step in range(STEPS):
        with torch.no_grad():
            parameter.zero_()
        parameter.grad = gradients(step)
        optimizer.step(RATE, 0.0)
        largest = max(largest, float(parameter.detach().abs().max()) / RATE)
        total = total + parameter.detach() / RATE
    return largest, total


def to_nearest(moment: Moment, part: slice, moments: Tensor, draw: object) -> None:
    """`Moment.write` as torchao and bitsandbytes have it: to the nearest value, also if that is
    0."""
    values = torch.tensor([float(value) for value in code_book(moment.signed)])
    blocks = moments.view(-1, 256)
    scale = blocks.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny)
    codes = torch.bucketize(blocks / scale.unsqueeze(1), (values[1:] + values[:-1]) / 2, right=True)
    moment.codes.view(-1)[part] = codes.view(-1).to(torch.uint8)
    moment.scale[part.start // 256 : part.stop // 256] = scale


@pytest.fixture
def rounding_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Moment, "write", to_nearest)
    monkeypatch.setattr(eight_bit, "smallest_second", lambda *_: 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", GRADIENTS)
def test_the_largest_step_is_about_that_of_32_bits(name: str) -> None:
    """At most that of 32 bits and one and a half rates, and the same way in the end up to a
    fifth."""
    plain, path = moved(GRADIENTS[name], "fp32")
    largest, other = moved(GRADIENTS[name], "8bit")
    assert plain < 4
    assert largest < plain + 1.5
    assert float((other - path).norm() / path.norm()) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", list(GRADIENTS)[:4])
def test_rounded_to_nearest_steps_are_many_rates_long(name: str, rounding_to_nearest: None) -> None:
    """The control: what the values were before."""
    largest, _ = moved(GRADIENTS[name], "8bit")
    assert largest > 1000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["embed", "head"])
def test_embedding_and_head_have_the_steps_of_32_bits(name: str) -> None:
    """Bit for bit. The control: another matrix has not."""
    _, path = moved(rare_rows(3), "fp32", name)
    assert torch.equal(moved(rare_rows(3), "8bit", name)[1], path)
    assert not torch.equal(moved(rare_rows(3), "8bit", "layers.0.o")[1], path)


def adam(gradients: Gradients, steps: int, betas: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Both moments after some steps, in float64."""
    first = second = torch.zeros((), dtype=torch.float64)
    for step in range(steps):
        gradient = gradients(step).double()
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient.square()
    return first, second


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.99), (0.95, 0.9)])
@pytest.mark.parametrize("steps", [1, 2, 30])
def test_no_gradients_give_a_second_moment_below_the_smallest(
    betas: tuple[float, float], steps: int
) -> None:
    """And those whose size is (a/b)^j for the one of j updates ago give just that: a larger one
    would be wrong."""
    for gradients in GRADIENTS.values():
        first, second = adam(gradients, steps, betas)
        assert bool((second >= smallest_second(first, betas, steps) - 1e-12 * second).all())
    worst = betas[0] / betas[1]
    first, second = adam(
        lambda step: torch.tensor(worst ** (steps - 1 - step)).double(), steps, betas
    )
    if betas[0] ** 2 < betas[1]:
        assert float(smallest_second(first, betas, steps)) == pytest.approx(float(second), rel=1e-6)
    else:
        assert smallest_second(first, betas, steps) == 0.0


@pytest.mark.parametrize("signed", [True, False])
def test_the_mean_of_many_roundings_is_the_moment(signed: bool) -> None:
    """To four standard errors. The control is a rounding to the nearest value, whose mean is that
    value."""
    optimizer = ShardedOptimizer(
        {"w": torch.nn.Parameter(torch.zeros(16, 256))}, OptimizerSettings(state="8bit")
    )
    x = normal(4096, seed=0) if signed else normal(4096, seed=0).square()
    x.view(-1, 256)[:, 0] = 5.0  # a block's largest: 1, which both books have
    total, part, rounds = torch.zeros(4096, dtype=torch.float64), slice(0, 4096), 400
    for step in range(rounds):
        moment = Moment.zeros(optimizer.parameters["w"], signed)
        moment.write(
            part,
            x.clone(),
            lambda chances, step=step: optimizer._masters.draw("it", "w", part, step, chances),
        )
        total += moment.read(part)
    nearest = Moment.zeros(optimizer.parameters["w"], signed)
    to_nearest(nearest, part, x, None)
    gap = 5 * 0.9 / 64  # the widest of the books
    middle = x.abs() > 1e-3  # above the values that are not rounded to 0
    apart = ((total / rounds).float() - x)[middle].abs()
    assert float(apart.max()) < 4.5 * gap / 2 / rounds**0.5
    assert float(apart.square().mean()) < 0.1 * float(
        (nearest.read(part) - x)[middle].square().mean()
    )
