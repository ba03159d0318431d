"""Every loss and every estimator of a KL in float32, as the learner computes them, against float64
where float32 would fail: probabilities near 1 and near 0, ratios and references 20 nats away. The
tables of losses are walked through, so that a new one is held too."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from isobit.rl import ResolvedObjective
from isobit.rl.algorithm.given import GIVEN_LOSSES
from isobit.rl.algorithm.loss import (
    LOSSES,
    LossFunction,
    LossInputs,
    LossOutputs,
    kl_in_loss,
    kl_penalty,
)
from isobit.rl.algorithm.objective import KL_ESTIMATORS, OWN_RATIO, RATIOS
from isobit.rl.stepwise.losses import LOSSES as STEPWISE
from isobit.rl.stepwise.losses import Rows
from tests.rl.helpers import loss_inputs

POLICY = (-0.0, -1e-30, -1e-12, -1.2e-7, -1e-3, -0.7, -3.0, -26.3, -60.0)
FAR = (
    0.0,
    1e-6,
    -1e-4,
    0.3,
    -1.0,
    3.0,
    8.0,
    -8.0,
    12.0,
    16.0,
    -16.0,
    19.5,
    -19.5,
    20.5,
    -20.5,
    24.0,
)
RELATIVE, ABSOLUTE = 1e-4, 3e-7
LEAST = 1e-12
"""Of a loss's gradient, where that of k3, e^x - 1, may be off by ABSOLUTE."""


def edges() -> dict[str, Tensor]:
    """All policies with all old ones and references, of advantages of both signs, float32; each is
    a sequence of its own."""
    rows = [
        (p, p - d, p + x, a)
        for (p, d, x), a in zip(product(POLICY, FAR, FAR), [1.0, -1.0, 0.3, -2.5] * 10**4)
    ]
    policy, old, reference, advantages = torch.tensor(rows).unbind(1)
    return {
        "policy": policy,
        "old": old,
        "reference": reference,
        "advantages": advantages,
        "sequence": torch.arange(len(rows)),
    }


def inputs_of(settings: ResolvedObjective, dtype: torch.dtype) -> LossInputs:
    """The edges, of the same numbers in any dtype."""
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in edges().items()}
    policy = given["policy"].requires_grad_()
    return loss_inputs(
        policy, given["old"], given["advantages"], settings, sequence=given["sequence"],
        reference_logprobs=given["reference"], divergence=policy * 1.0,
    )  # fmt: skip


def gradient_of(value: Callable[[LossInputs], Tensor], inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """(value, gradient by log policy), [T] float64."""
    found = value(inputs)
    (slope,) = torch.autograd.grad(found.sum(), inputs.policy_logprobs, allow_unused=True)
    assert slope is not None
    return found.detach().double(), slope.double()


def hold(value: Callable[[LossInputs], Tensor], settings: ResolvedObjective) -> None:
    """In float32 as in float64."""
    narrow, wide = (
        gradient_of(value, inputs_of(settings, dtype)) for dtype in (torch.float32, torch.float64)
    )
    compare(narrow, wide, LEAST)


def compare(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], least: float) -> None:
    for mine, theirs, absolute in zip(found, wanted, (ABSOLUTE, least), strict=True):
        assert bool(mine.isfinite().all())
        torch.testing.assert_close(mine, theirs, rtol=RELATIVE, atol=absolute)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("name", [*LOSSES, *GIVEN_LOSSES])
def test_every_loss_in_float32_is_that_of_float64(name: str, ratio: str) -> None:
    if name in OWN_RATIO and ratio != "token":
        pytest.skip("has a ratio of its own")
    loss = (LOSSES | GIVEN_LOSSES)[name]
    if name in ("dpo", "ipo"):  # of pairs
        loss = paired(loss)
    settings = ResolvedObjective(loss=name, ratio=ratio, dual_clip=3.0, kl_baseline=0.5, beta=1.0)
    hold(lambda inputs: loss(inputs).loss, settings)


def paired(loss: LossFunction) -> LossFunction:
    """Of an even number of answers."""

    def of_pairs(inputs: LossInputs) -> LossOutputs:
        tokens = slice(len(inputs.sequence) // 2 * 2)
        names = ("policy_logprobs", "reference_logprobs", "sequence")
        return loss(replace(inputs, **{name: getattr(inputs, name)[tokens] for name in names}))

    return of_pairs


@pytest.mark.parametrize("name", STEPWISE)
def test_every_loss_of_the_stepwise_learner_is_that_of_float64(name: str) -> None:
    loss = STEPWISE[name]

    def value(inputs: LossInputs) -> Tensor:
        ones = torch.ones_like(inputs.advantages)
        given = {"logprobs": inputs.old_logprobs, "advantages": inputs.advantages, "weights": ones}
        given |= {"sequence_ratio_mask": ones} | {k: v * ones for k, v in loss.options.items()}
        return loss.of(Rows(inputs.policy_logprobs, given, inputs.sequence))

    hold(value, ResolvedObjective())


SLOPES: dict[str, Callable[[float, float], float]] = {
    "k1": lambda x, ratio: 1.0,
    "k2": lambda x, ratio: -x,
    "k3": lambda x, ratio: -math.expm1(x) if x <= 20 else 0.0,
    "low_var_kl": lambda x, ratio: (
        -math.expm1(x) if abs(x) <= 20 and math.expm1(x) - x <= 10 else 0.0
    ),
    "k3-unbiased": lambda x, ratio: -ratio * x,
}
"""The gradient by log policy, x = log reference - log policy."""


def estimated(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """(value, gradient) of the KL in the loss by hand, in float64."""
    assert inputs.reference_logprobs is not None
    given = inputs.policy_logprobs, inputs.old_logprobs, inputs.reference_logprobs
    policy, old, reference = (x.detach().double() for x in given)
    x, kind = (reference - policy).float().double(), inputs.settings.estimator
    x = reference - policy if kind == "k3-unbiased" else x
    ratio = (policy - old).clamp(-20, 20).exp()
    slopes = [SLOPES[kind](a, b) for a, b in zip(x.tolist(), ratio.tolist(), strict=True)]
    bounded = x.clamp(max=20) if kind != "low_var_kl" else x.clamp(-20, 20)
    k3 = torch.expm1(bounded) - bounded
    values = {"k1": -x, "k2": x**2 / 2, "low_var_kl": k3.clamp(max=10)}
    found = values.get(kind, k3 * ratio if kind == "k3-unbiased" else k3)
    return found, torch.tensor(slopes).double()


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_every_estimator_has_its_own_gradient(kind: str) -> None:
    """k3-unbiased held its value above 20 nats, times a ratio with a gradient: of the wrong sign,
    and 1e7 times too large."""
    settings = ResolvedObjective(kl_coefficient=1.0, kl_estimator=kind)
    inputs = inputs_of(settings, torch.float32)
    least = LEAST if kind == "k3-unbiased" else ABSOLUTE
    compare(gradient_of(kl_in_loss, inputs), estimated(inputs), least)


@pytest.mark.parametrize("ratio", ["sequence", "sequence_sum"])
def test_k3_unbiased_is_right_with_the_ratio_of_a_sequence_too(ratio: str) -> None:
    """By autograd in float64 of what it is, within 20 nats; beyond, a token that the reference
    finds likelier becomes likelier."""
    policy = torch.tensor([-0.1, -19.0, -2.0, -1e-7, -26.0])
    old, sequence = (
        policy - torch.tensor([0.1, -0.3, 0.2, 1e-7, 0.4]),
        torch.tensor([0, 0, 0, 1, 2]),
    )
    settings = ResolvedObjective(kl_coefficient=1.0, kl_estimator="k3-unbiased", ratio=ratio)

    def slopes(x: Tensor, dtype: torch.dtype) -> Tensor:
        leaf = policy.to(dtype, copy=True).requires_grad_()
        reference = (policy + x).to(dtype)
        given = {"sequence": sequence, "reference_logprobs": reference}
        inputs = loss_inputs(leaf, old.to(dtype), torch.ones_like(leaf), settings, **given)
        if dtype == torch.float32:
            return gradient_of(kl_in_loss, inputs)[1]
        d, own = reference - leaf, leaf - old.double()
        same = (sequence[:, None] == sequence[None]).double()
        log = same @ own if ratio == "sequence_sum" else same @ own / same.sum(1)
        return torch.autograd.grad((log.exp() * (d.exp() - d - 1)).sum(), leaf)[0]

    within = torch.tensor([1e-3, 18.5, -0.5, 1e-6, 19.5])
    torch.testing.assert_close(
        slopes(within, torch.float32), slopes(within, torch.float64), rtol=1e-5, atol=1e-9
    )
    beyond = slopes(torch.tensor([1e-3, 21.0, -0.5, 25.0, 30.0]), torch.float32)
    assert bool((beyond[[1, 3, 4]] < 0).all())


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_an_estimate_of_equal_policies_is_0_and_of_near_ones_not_noise(kind: str) -> None:
    policy = torch.tensor([-0.3, -2.0, -1e-7])
    assert kl_penalty(policy, policy, kind).tolist() == [0.0] * 3
    if kind != "k1":
        assert float(kl_penalty(torch.zeros(1), torch.tensor([1e-4]), kind)) == pytest.approx(
            5e-9, rel=1e-4
        )


def unbounded(inputs: LossInputs) -> Tensor:
    """k3 held constant above 20, times a ratio that has a gradient."""
    assert inputs.reference_logprobs is not None
    d = (inputs.reference_logprobs - inputs.policy_logprobs).clamp(max=20)
    ratio = (inputs.policy_logprobs - inputs.old_logprobs).clamp(-20, 20).exp()
    return (d.exp() - d - 1) * ratio


@pytest.mark.parametrize(
    "loss",
    [
        lambda inputs: 1 - torch.sigmoid(inputs.policy_logprobs + 70),
        lambda inputs: -torch.log(1 - inputs.policy_logprobs.exp()).clamp(max=50),
        unbounded,
    ],
    ids=["sigmoid", "others", "k3"],
)
def test_a_difference_of_numbers_near_1_is_found(loss: Callable[[LossInputs], Tensor]) -> None:
    """The control: losses that float32 does not have."""
    with pytest.raises(AssertionError):
        hold(loss, ResolvedObjective())
