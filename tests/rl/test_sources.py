"""Corrections, penalties and ratios against the formulas of verl, NeMo RL and AReaL, restated here
from their sources on padded batches [sequences, longest] with a mask, which is how those systems
have them."""

import math

import pytest
import torch
from torch import Tensor

from isobit.rl import OBJECTIVES
from isobit.rl.algorithm.correction import correct
from isobit.rl.algorithm.correction_rule import CorrectionRule, Rejection
from isobit.rl.algorithm.loss import kl_penalty, token_weights
from tests.rl.helpers import policy_loss

LENGTHS = [5, 1, 0, 7, 3, 2, 2, 1]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def padded(flat: Tensor) -> tuple[Tensor, Tensor]:
    """[tokens] as [sequences, longest], zero where there is no token, and the mask."""
    rows = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=flat.dtype)
    mask = torch.zeros(len(LENGTHS), max(LENGTHS))
    for i, part in enumerate(flat.split(LENGTHS)):
        rows[i, : len(part)], mask[i, : len(part)] = part, 1
    return rows, mask


def flattened(rows: Tensor) -> Tensor:
    return torch.cat([row[:length] for row, length in zip(rows, LENGTHS)])


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """verl/utils/torch_functional.py, `masked_mean`."""
    if axis is None:
        return (values * mask).sum() / (mask.sum() + 1e-8)
    return (values * mask).sum(axis) / (mask.sum(axis) + 1e-8)


def verl_weights(log_ratio: Tensor, mask: Tensor, kind: str, threshold: float) -> Tensor:
    """verl/trainer/ppo/rollout_corr_helper.py, `compute_rollout_correction_weights` with batch
    normalization."""
    if kind == "token":
        weights = torch.exp(log_ratio.clamp(-20, 20)) * mask
        weights = weights.clamp(max=threshold)
        return weights / masked_mean(weights, mask)
    total = (log_ratio * mask).sum(-1, keepdim=True)
    weights = (torch.exp(total.clamp(-20, 20)).expand_as(log_ratio) * mask).clamp(max=threshold)
    each, there = masked_mean(weights, mask, -1), (mask.sum(-1) > 0).double()
    return weights / ((each * there).sum() / there.sum().clamp_min(1e-8))


def logprobs(spread: float = 0.7) -> tuple[Tensor, Tensor]:
    """The learner's and the rollout's, far enough apart for caps and bounds to act."""
    rollout = -torch.rand(sum(LENGTHS), generator=generator(1)) * 3
    return (rollout + spread * torch.randn(sum(LENGTHS), generator=generator(2))).clamp(
        max=-1e-4
    ), rollout


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_normalized_weights_are_verls(kind: str) -> None:
    """Over all valid tokens, or over sequences, with what a rejection then leaves out; the control
    is the mean over what is kept."""
    old, rollout = logprobs()
    log_ratio, mask = padded((old - rollout).double())
    theirs = flattened(verl_weights(log_ratio, mask, kind, 2.0))
    rejection = Rejection("k3", "sequence_max", high=0.25)
    plain = correct(CorrectionRule(kind, cap=2.0, normalize=True), old, rollout, LENGTHS)
    torch.testing.assert_close(plain.weights, theirs.float(), rtol=1e-5, atol=0)
    found = correct(
        CorrectionRule(kind, cap=2.0, normalize=True, rejection=rejection), old, rollout, LENGTHS
    )
    assert 0 < int(found.accepted.sum()) < sum(LENGTHS)
    torch.testing.assert_close(
        found.weights, torch.where(found.accepted, theirs, 0).float(), rtol=1e-5, atol=0
    )
    over_kept = torch.where(found.accepted, theirs / theirs[found.accepted].mean(), 0).float()
    assert not torch.allclose(found.weights, over_kept, rtol=1e-2)


def verl_k1_mask(log_ratio: Tensor, mask: Tensor, level: str, low: float, high: float) -> Tensor:
    """verl/trainer/ppo/rollout_corr_helper.py, `compute_rollout_rejection_mask`, modes `*_k1`."""
    k1 = -log_ratio.clamp(-20, 20)
    if level == "sequence_sum":
        k1 = (k1 * mask).sum(-1, keepdim=True).expand_as(k1)
    elif level == "sequence_mean":
        k1 = masked_mean(k1, mask, -1).unsqueeze(-1).expand_as(k1)
    return (k1 >= math.log(low)) & (k1 <= math.log(high))


@pytest.mark.parametrize("level", ["token", "sequence_sum", "sequence_mean"])
def test_bounds_of_the_inverse_ratio_are_those_of_verls_k1_modes(level: str) -> None:
    old, rollout = logprobs(0.6)
    log_ratio, mask = padded((old - rollout).double())
    theirs = flattened(verl_k1_mask(log_ratio, mask, level, 0.6, 1.4))

    def kept(measure: str) -> Tensor:
        rule = CorrectionRule(rejection=Rejection(measure, level, 0.6, 1.4))
        return correct(rule, old, rollout, LENGTHS).accepted

    assert 0 < int(theirs.sum()) < sum(LENGTHS)
    assert torch.equal(kept("inverse_ratio"), theirs)
    assert not torch.equal(
        kept("ratio"), theirs
    )  # the control: the same bounds on the ratio itself


def areal_binary_kl(log_p: Tensor, log_q: Tensor, eps: float = 1e-8) -> Tensor:
    """AReaL, areal/utils/functional/functional.py, `compute_binary_kl_divergence`; here in
    float64."""
    p, q = log_p.double().exp().clamp(eps, 1 - eps), log_q.double().exp().clamp(eps, 1 - eps)
    return p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q))


@pytest.mark.parametrize("bound", [0.02, 0.1, 2.0])
def test_kpop_keeps_what_both_divergences_keep(bound: float) -> None:
    """verl's pull request 6800 and AReaL: max(KL(train ‖ rollout), KL(rollout ‖ train)) <= bound,
    token by token."""
    old, rollout = logprobs()
    old = torch.cat([old, torch.tensor([0.0, -40.0])])
    rollout = torch.cat([rollout, torch.tensor([-3.0, -1e-9])])
    larger = torch.maximum(areal_binary_kl(old, rollout), areal_binary_kl(rollout, old))
    rule = CorrectionRule(rejection=Rejection("binary_kl", "token", high=bound))
    found = correct(rule, old, rollout, [*LENGTHS, 2])
    assert torch.equal(found.accepted, larger <= bound)
    assert torch.isfinite(larger).all()
    assert not found.accepted[-2:].any()
    one_way = areal_binary_kl(old, rollout) <= bound  # the control: one direction keeps more
    assert int(one_way.sum()) > int(found.accepted.sum()) or bound > 1


def test_kpop_depends_on_the_probability_and_not_on_the_ratio_alone() -> None:
    """The ratio 1.5 moves a rare token by little, and a likely one by much."""
    rule = CorrectionRule(rejection=Rejection("binary_kl", "token", high=0.1))
    rollout = torch.tensor([0.01, 0.6]).log()
    assert correct(rule, rollout + math.log(1.5), rollout, [2]).accepted.tolist() == [True, False]


def clamped_k3(policy: Tensor, reference: Tensor) -> Tensor:
    """verl, core_algos.py, `kl_penalty_forward`, low_var_kl; NeMo RL, utils.py, `calculate_kl`, k3
    with its bounds."""
    difference = (reference - policy).clamp(-20, 20)
    return (torch.exp(difference) - difference - 1).clamp(-10, 10)


def test_low_var_kl_is_verls_and_nemo_rls() -> None:
    difference = torch.tensor(
        [-200.0, -21.0, -12.0, -10.0, -1.0, 0.0, 1.0, 2.5, 2.7, 5.0, 50.0], dtype=torch.float64
    )
    ours, theirs = (-difference).requires_grad_(), (-difference).requires_grad_()
    zero = torch.zeros_like(difference)
    value, expected = kl_penalty(ours, zero, "low_var_kl"), clamped_k3(theirs, zero)
    torch.testing.assert_close(value, expected)
    value.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    plain = kl_penalty(ours.detach(), zero, "k3")  # the control, which is TRL's
    assert not torch.allclose(plain, expected.detach())
    inside = (difference > -10) & (difference < 2.6)
    torch.testing.assert_close(plain[inside], expected.detach()[inside])


def verl_gspo(
    policy: Tensor, old: Tensor, advantages: Tensor, weights: Tensor, mask: Tensor
) -> Tensor:
    """verl, core_algos.py, `compute_policy_loss_gspo`; clip 3e-4 and 4e-4,
    `seq-mean-token-mean`."""
    log_ratio = policy - old
    mean = (log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    ratio = torch.exp((policy - policy.detach() + mean.detach().unsqueeze(-1)).clamp(max=10.0))
    losses = (
        torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - 3e-4, 1 + 4e-4)) * weights
    )
    each = (losses * mask).sum(-1) / (mask.sum(-1) + 1e-8)
    return each.sum() / len(LENGTHS)


@pytest.mark.parametrize("weighted", [False, True])
def test_gspo_with_token_weights_has_verls_gradient(weighted: bool) -> None:
    """A token's weight reaches that token; the control is the ratio of the sequence without the
    straight-through form, which spreads it over the sequence. Where all weights are equal the two
    are one."""
    old, _ = logprobs()
    old = old.double()
    start = old + 1e-4 * torch.randn(len(old), generator=generator(3), dtype=torch.float64)
    weights = (
        torch.rand(len(old), generator=generator(4), dtype=torch.float64) * 2
        if weighted
        else torch.ones_like(old)
    )
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    advantages = torch.tensor([1.0, -0.5, 0.0, -1.0, 2.0, -2.0, 0.5, 1.0], dtype=torch.float64)[
        sequence
    ]
    scale = torch.tensor(token_weights(LENGTHS, "sequence_mean", 10), dtype=torch.float64)[sequence]

    def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
        return torch.autograd.grad(loss, leaf)[0]

    ours, theirs, spread = (start.clone().requires_grad_() for _ in range(3))
    clip = {"clip_low": 3e-4, "clip_high": 4e-4}
    found = gradient(
        (
            policy_loss(ours, old, advantages, ratio="sequence", sequence=sequence, **clip).loss
            * weights
            * scale
        ).sum(),
        ours,
    )
    (rows, mask), (olds, _), (credit, _), (importance, _) = map(
        padded, (theirs, old, advantages, weights)
    )
    torch.testing.assert_close(
        found, gradient(verl_gspo(rows, olds, credit, importance, mask.double()), theirs)
    )
    sums = torch.zeros(len(LENGTHS), dtype=torch.float64).index_add(0, sequence, spread - old)
    whole = torch.exp(sums / torch.tensor(LENGTHS).clamp(min=1))[sequence]
    without = (
        -torch.minimum(whole * advantages, whole.clamp(1 - 3e-4, 1 + 4e-4) * advantages) * weights
    )
    assert torch.allclose(found, gradient((without * scale).sum(), spread)) is not weighted


def trl_rloo(
    policy: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, epsilon: float
) -> Tensor:
    """TRL, trl/trainer/rloo_trainer.py, `_compute_loss`: `advantages` are of sequences."""
    ratio = torch.exp((policy * mask).sum(1) - (old * mask).sum(1))
    return -torch.min(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon) * advantages).mean()


def test_rloo_clips_one_ratio_of_a_sequence_as_trl_does() -> None:
    """Loss and gradient of the preset; the control is a ratio per token."""
    lengths = [n for n in LENGTHS if n]
    rollout = -torch.rand(sum(lengths), generator=generator(1), dtype=torch.float64) * 3
    start = rollout + 0.1 * torch.randn(len(rollout), generator=generator(2), dtype=torch.float64)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    credit = torch.tensor([1.0, -0.5, -1.0, 2.0, -2.0, 0.5, 1.0], dtype=torch.float64)
    preset = OBJECTIVES["rloo"]
    scale = torch.tensor(token_weights(lengths, preset.loss_aggregation, 10), dtype=torch.float64)[
        sequence
    ]
    mask = torch.nn.functional.one_hot(sequence).T.double()

    def ours(ratio: str) -> tuple[Tensor, Tensor]:
        leaf = start.clone().requires_grad_()
        options = {"clip_low": preset.clip_low, "clip_high": preset.clip_high}
        loss = (
            policy_loss(
                leaf, rollout, credit[sequence], ratio=ratio, sequence=sequence, **options
            ).loss
            * scale
        ).sum()
        return loss, torch.autograd.grad(loss, leaf)[0]

    leaf = start.clone().requires_grad_()
    theirs = trl_rloo(
        leaf.expand(len(lengths), -1), rollout.expand(len(lengths), -1), credit, mask, 0.2
    )
    (wanted,) = torch.autograd.grad(theirs, leaf)
    loss, found = ours(preset.ratio)
    torch.testing.assert_close(loss, theirs)
    torch.testing.assert_close(found, wanted)
    assert 0 < int((wanted == 0).sum()) < len(wanted)  # some sequences are clipped
    assert not torch.allclose(ours("token")[1], wanted, rtol=0.1)


def test_reinforce_has_no_ratio_and_no_clip() -> None:
    """NeMo RL, loss_functions.py, `disable_ppo_ratio`: -A·log policy, times a correction's
    weight."""
    old, rollout = logprobs()
    advantages = torch.randn(len(old), generator=generator(5))
    weights = torch.rand(len(old), generator=generator(6))
    leaf = old.clone().requires_grad_()
    options = {"clip_low": 0.2, "clip_high": 0.2}
    result = policy_loss(leaf, rollout, advantages, loss="reinforce", **options)
    torch.testing.assert_close(result.loss * weights, -advantages * old * weights)
    (result.loss * weights).sum().backward()
    torch.testing.assert_close(leaf.grad, -advantages * weights)
    assert not result.clipped.any()
    assert policy_loss(leaf, rollout, advantages, **options).clipped.any()
