"""Tinker's losses: values and gradients in float64 beside formulas written out here, and what may
not be asked of them."""

import math

import pytest
import torch
from torch import Tensor

from isobit.errors import IsobitError
from isobit.rl.stepwise.losses import HIGH, LOSSES, LOW, Rows, loss_of, options_of

COUNT, SEQUENCE = 400, 20


def rows(name: str, given: dict[str, float] | None = None, seed: int = 0) -> Rows:
    """Random ones in float64, of which some ratios are beyond the thresholds."""
    random = torch.Generator().manual_seed(seed)
    logprobs = -3 * torch.rand(COUNT, generator=random, dtype=torch.float64)
    inputs = {
        "weights": torch.randn(COUNT, generator=random, dtype=torch.float64),
        "advantages": torch.randn(COUNT, generator=random, dtype=torch.float64),
        "logprobs": logprobs + 0.5 * torch.randn(COUNT, generator=random, dtype=torch.float64),
        "sequence_ratio_mask": (torch.rand(COUNT, generator=random) > 0.3).double(),
    }
    sequence = torch.arange(COUNT) // SEQUENCE
    inputs["sequence_ratio_mask"][sequence == 3] = 0  # of no token of it
    options = options_of(name, LOSSES[name], given or {})
    inputs |= {key: torch.full((COUNT,), v, dtype=torch.float64) for key, v in options.items()}
    return Rows(logprobs.requires_grad_(), inputs, sequence)


def by_hand(name: str, given: Rows) -> tuple[list[float], list[float]]:
    """(the loss of each token, its derivative by that token's log p), a token at a time."""
    ours = {key: value.tolist() for key, value in given.inputs.items()}
    losses, slopes, logprobs = [], [], given.logprobs.tolist()
    for t, policy in enumerate(logprobs):
        a, ratio = ours["advantages"][t], math.exp(policy - ours["logprobs"][t])
        if name == "gspo":
            mine = [i for i in range(COUNT) if i // SEQUENCE == t // SEQUENCE]
            chosen = [i for i in mine if ours["sequence_ratio_mask"][i] != 0]
            logs = [logprobs[i] - ours["logprobs"][i] for i in chosen]
            ratio = math.exp(sum(logs) / len(logs)) if logs else 1.0
        bounded = min(max(ratio, ours[LOW][t]), ours[HIGH][t]) if LOW in ours else ratio
        if name == "cross_entropy":
            loss, slope = -ours["weights"][t] * policy, -ours["weights"][t]
        elif name == "importance_sampling":
            loss, slope = -ratio * a, -ratio * a
        elif name == "cispo":
            loss, slope = -bounded * a * policy, -bounded * a
        elif name == "dro":
            log_ratio, beta = policy - ours["logprobs"][t], ours["beta"][t]
            loss, slope = -policy * a + beta / 2 * log_ratio**2, -a + beta * log_ratio
        else:
            loss = -min(ratio * a, bounded * a)
            slope = 0.0 if bounded * a < ratio * a else -ratio * a
        losses.append(loss)
        slopes.append(slope)
    return losses, slopes


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_those_of_the_formula(name: str) -> None:
    given = rows(name)
    found = LOSSES[name].of(given)
    losses, slopes = by_hand(name, given)
    torch.testing.assert_close(found.tolist(), losses, rtol=1e-12, atol=1e-12)
    found.sum().backward()
    gradient = given.logprobs.grad
    assert gradient is not None
    torch.testing.assert_close(gradient.tolist(), slopes, rtol=1e-12, atol=1e-12)
    if LOW in LOSSES[name].options:  # both kinds of tokens were there
        ratio = given.ratio if name != "gspo" else None
        assert ratio is None or 0 < int((given.clipped(ratio) != ratio).sum()) < COUNT


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ppo", {LOW: 0.5, HIGH: 1.1}),
        ("cispo", {HIGH: 4.0}),
        ("gspo", {LOW: 0.99, HIGH: 1.01}),
        ("dro", {"beta": 0.7}),
    ],
)
def test_options_reach_the_formula(name: str, options: dict[str, float]) -> None:
    """The control is the loss by its defaults."""
    found = LOSSES[name].of(rows(name, options))
    losses, _ = by_hand(name, rows(name, options))
    torch.testing.assert_close(found.tolist(), losses, rtol=1e-12, atol=1e-12)
    assert not torch.equal(found, LOSSES[name].of(rows(name)))


def test_thresholds_may_differ_by_token() -> None:
    given = rows("ppo")
    given.inputs[HIGH][::2] = 1.01  # type: ignore[index]
    losses, _ = by_hand("ppo", given)
    torch.testing.assert_close(LOSSES["ppo"].of(given).tolist(), losses, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_a_token_depends_on_its_own_sequence_alone(name: str) -> None:
    given = rows(name)
    whole = LOSSES[name].of(given)
    part = slice(2 * SEQUENCE, 5 * SEQUENCE)
    inputs: dict[str, Tensor] = {key: value[part] for key, value in given.inputs.items()}
    cut = Rows(given.logprobs[part], inputs, given.sequence[part] - 2)
    assert torch.equal(LOSSES[name].of(cut), whole[part])


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("ppo", {"clip_high": 1.2}, "'clip_high' is no option of it; it has clip_low_threshold"),
        ("cross_entropy", {"beta": 0.1}, "no option of it, and has none"),
        ("dro", {"beta": math.nan}, "beta: expected a number from 0 on, got nan"),
        ("dro", {"beta": -0.1}, "beta: expected a number from 0 on, got -0.1"),
        ("dro", {"beta": "0.1"}, "beta: expected a number from 0 on, got '0.1'"),
        ("dro", {"beta": True}, "beta: expected a number from 0 on, got True"),
        ("cispo", {LOW: 1.5}, "clip_low_threshold 1.5 is above clip_high_threshold 1.2"),
    ],
)
def test_other_options_are_refused_by_name(name: str, options: dict[str, float], told: str) -> None:
    with pytest.raises(IsobitError) as error:
        options_of(name, LOSSES[name], options)
    assert told in str(error.value)


@pytest.mark.parametrize("name", ["stable_reinforce", "custom", "", "x" * 500])
def test_another_loss_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(IsobitError) as error:
        loss_of(name)
    assert "expected one of cross_entropy, importance_sampling" in str(error.value)
    assert len(str(error.value)) < 300


def test_the_client_knows_these_losses() -> None:
    """All names that Tinker's SDK has, but for the two that are refused."""
    tinker = pytest.importorskip("tinker", reason="tinker is not installed")
    from typing import get_args

    named = set(get_args(tinker.types.LossFnType))
    assert named - set(LOSSES) == {"stable_reinforce", "custom"}
    assert set(LOSSES) <= named
