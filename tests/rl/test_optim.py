"""AdamW against its equations, schedules, clipping, and a state that goes on bit for bit."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from isobit.errors import IsobitError
from isobit.rl import OptimizerSettings, learning_rate
from isobit.rl.optim import adamw, eight_bit
from isobit.rl.optim.sharded import ShardedOptimizer

SETTINGS = OptimizerSettings(
    learning_rate=0.01, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, max_grad_norm=1e9
)
SHAPES = {"matrix": (7, 5), "norm": (5,), "bias": (3,)}


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in SHAPES.items()
    }


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def advance(optimizer: ShardedOptimizer, steps: range) -> None:
    for step in steps:
        for name, gradient in gradients(step).items():
            optimizer.parameters[name].grad = gradient.clone()
        optimizer.step(0.01 * (step + 1), optimizer.gradient_norm())
        optimizer.zero_grad()


def test_adamw_follows_its_equations_and_decays_matrices_only() -> None:
    optimizer = ShardedOptimizer(parameters(), SETTINGS)
    advance(optimizer, range(5))
    for name, start in parameters().items():
        weight = start.detach().double()
        first, second = torch.zeros_like(weight), torch.zeros_like(weight)
        for step in range(5):
            gradient, rate = gradients(step)[name].double(), 0.01 * (step + 1)
            if len(SHAPES[name]) > 1:
                weight = weight * (1 - rate * 0.1)
            first = 0.9 * first + 0.1 * gradient
            second = 0.95 * second + 0.05 * gradient**2
            corrected = (first / (1 - 0.9 ** (step + 1)), second / (1 - 0.95 ** (step + 1)))
            weight = weight - rate * corrected[0] / (corrected[1].sqrt() + 1e-8)
        torch.testing.assert_close(
            optimizer.parameters[name].detach().double(), weight, rtol=1e-5, atol=1e-6
        )


def test_a_step_is_the_same_bits_on_any_number_of_threads() -> None:
    """Sizes that do not divide into vectors; the norm is float64."""
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        generator = torch.Generator().manual_seed(0)
        parameter = nn.Parameter(torch.randn(517, 259, generator=generator))
        optimizer = ShardedOptimizer({"p": parameter}, SETTINGS)
        for _ in range(3):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step(0.01, 1.0)
        results.append(parameter.detach().clone())
    assert torch.equal(*results)


@pytest.mark.parametrize("through_file", [False, True])
def test_resumed_state_goes_on_bit_for_bit(tmp_path: Path, through_file: bool) -> None:
    straight = ShardedOptimizer(parameters(), SETTINGS)
    advance(straight, range(6))
    before = ShardedOptimizer(parameters(), SETTINGS)
    advance(before, range(3))
    state = before.state()
    if through_file:
        save_file(state, tmp_path / "optimizer.safetensors")
        state = load_file(tmp_path / "optimizer.safetensors")
    after = ShardedOptimizer(
        {n: nn.Parameter(p.detach().clone()) for n, p in before.parameters.items()}, SETTINGS
    )
    after.load_state(state)
    advance(after, range(3, 6))
    forgetful = ShardedOptimizer(
        {n: nn.Parameter(p.detach().clone()) for n, p in before.parameters.items()}, SETTINGS
    )
    advance(forgetful, range(3, 6))
    for name, parameter in straight.parameters.items():
        assert torch.equal(after.parameters[name], parameter)
        assert not torch.equal(
            forgetful.parameters[name], parameter
        )  # the control: without the state it differs
    assert straight.state().keys() == after.state().keys()
    assert all(torch.equal(value, after.state()[name]) for name, value in straight.state().items())


def test_state_is_a_copy_and_loading_replaces_all_of_it() -> None:
    optimizer = ShardedOptimizer(parameters(), SETTINGS)
    assert optimizer.state() == {}
    advance(optimizer, range(1))
    early = optimizer.state()
    kept = {name: value.clone() for name, value in early.items()}
    advance(optimizer, range(1, 3))
    assert all(torch.equal(early[name], value) for name, value in kept.items())
    optimizer.load_state(early)
    assert all(torch.equal(optimizer.state()[name], value) for name, value in kept.items())
    optimizer.load_state({})
    assert optimizer.state() == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matrix.exp_avg": torch.zeros(5, 7)}, "matrix does not fit"),
        ({"matrix.exp_avg_sq": torch.zeros(3)}, "matrix does not fit"),
        ({"other.step": torch.zeros(())}, "'other', which the model does not have"),
        ({"norm.step": None}, "norm does not fit"),
    ],
)
def test_a_state_of_another_model_is_refused(
    change: dict[str, Tensor | None], message: str
) -> None:
    optimizer = ShardedOptimizer(parameters(), SETTINGS)
    advance(optimizer, range(1))
    state = {
        name: value for name, value in (optimizer.state() | change).items() if value is not None
    }
    with pytest.raises(IsobitError, match=message):
        optimizer.load_state(state)


def test_clipping_scales_the_whole_gradient() -> None:
    """Seen in the first moment, which after one step is (1 - beta1) times the gradient that was
    applied."""
    settings = OptimizerSettings(learning_rate=0.01, max_grad_norm=1.5)
    optimizer = ShardedOptimizer(parameters(), settings)
    for name, gradient in gradients(0).items():
        optimizer.parameters[name].grad = gradient.clone()
    norm = optimizer.gradient_norm()
    expected = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients(0).values()))
    assert norm == pytest.approx(expected, rel=1e-12)
    optimizer.step(0.01, norm)
    for name, gradient in gradients(0).items():
        applied = optimizer.state()[f"{name}.exp_avg"] / 0.1
        torch.testing.assert_close(applied, gradient * (1.5 / norm), rtol=1e-5, atol=1e-7)


def test_small_gradients_are_not_scaled_up() -> None:
    optimizer = ShardedOptimizer(parameters(), OptimizerSettings(max_grad_norm=100.0))
    for name, gradient in gradients(0).items():
        optimizer.parameters[name].grad = gradient.clone()
    given = optimizer.parameters["norm"].grad
    optimizer.step(0.01, optimizer.gradient_norm())
    assert given is not None
    assert torch.equal(given, gradients(0)["norm"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_has_an_infinite_norm(bad: float) -> None:
    optimizer = ShardedOptimizer(parameters(), SETTINGS)
    optimizer.parameters["bias"].grad = torch.tensor([1.0, bad, 2.0])
    assert optimizer.gradient_norm() == math.inf
    optimizer.parameters["bias"].grad = torch.tensor(
        [1e30, 1e38, 0.0]
    )  # finite, though its square is not in float32
    assert optimizer.gradient_norm() == pytest.approx(1e38)


def rates(schedule: str, warmup: int = 0, total: int = 10, final: float = 0.0) -> list[float]:
    settings = OptimizerSettings(2.0, schedule, warmup, final, total_steps=total)
    return [learning_rate(step, settings) for step in range(total + 2)]


def test_schedules_by_hand() -> None:
    assert rates("constant") == [2.0] * 12
    assert rates("linear", total=4) == pytest.approx([2, 1.5, 1, 0.5, 0, 0])
    assert rates("cosine", total=4) == pytest.approx(
        [2, 1 + math.sqrt(0.5), 1, 1 - math.sqrt(0.5), 0, 0]
    )
    assert rates("linear", total=4, final=0.5) == pytest.approx([2, 1.75, 1.5, 1.25, 1, 1])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warmup_rises_linearly_to_the_peak_and_never_starts_at_zero(schedule: str) -> None:
    warmed = rates(schedule, warmup=4)
    assert warmed[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert warmed[4:] == sorted(warmed[4:], reverse=True)
    assert all(rate > 0 for rate in warmed[:10])
    assert all(math.isfinite(rate) for rate in rates(schedule, warmup=50, total=10))


@pytest.mark.parametrize(("state", "at_once"), [("fp32", 1), ("fp32", 1 << 26), ("8bit", 1)])
def test_gradients_are_freed_as_they_are_applied(
    state: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By calls of the update; the control is one call for all. The weights have the same bits."""
    found = []
    for each in (at_once, 1 << 26):
        monkeypatch.setattr(adamw, "AT_ONCE", each)
        given = {str(i): nn.Parameter(torch.full((64, 64), 1.0 + i)) for i in range(4)}
        for parameter in given.values():
            parameter.grad = parameter.detach().clone()
        alive: list[int] = []
        for module, name in ((adamw, "adamw"), (eight_bit.Moment, "zeros")):
            call = getattr(module, name)

            def counted(
                *given_: Any,
                call: Any = call,
                given: Any = given,
                alive: Any = alive,
                **options: Any,
            ) -> Any:
                alive.append(sum(p.grad is not None for p in given.values()))
                return call(*given_, **options)

            monkeypatch.setattr(module, name, counted)
        ShardedOptimizer(given, replace(SETTINGS, state=state)).step(0.1, 1.0)
        monkeypatch.undo()
        assert all(parameter.grad is None for parameter in given.values())
        found.append(
            (sorted(set(alive), reverse=True), [p.detach().clone() for p in given.values()])
        )
    (seen, weights), (whole, wanted) = found
    assert seen == ([4, 3, 2, 1] if at_once == 1 else [4])
    assert whole == ([4] if state == "fp32" else seen)
    assert all(torch.equal(a, b) for a, b in zip(weights, wanted))
