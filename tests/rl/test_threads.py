"""What an algorithm makes of more tokens than one thread of PyTorch takes: the same bits with any
number of threads. PyTorch's own means and sums of so many are others."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from isobit.kernels.reference.sums import block_sum, mean, total
from isobit.rl import ResolvedObjective
from isobit.rl.algorithm.advantages import AdvantageInputs
from isobit.rl.algorithm.correction import correct, correction_metrics, step_metrics
from isobit.rl.algorithm.correction_rule import CORRECTIONS, CorrectionRule
from isobit.rl.algorithm.functions import ADVANTAGES, weighted_sum
from isobit.rl.algorithm.given import GIVEN_LOSSES
from isobit.rl.algorithm.loss import LOSSES, LossInputs, kl_in_loss, without_off_policy
from isobit.rl.algorithm.mismatch import mismatch_metrics, position_metrics, sequence_metrics
from isobit.rl.algorithm.objective import ADVANTAGE_KINDS, KL_ESTIMATORS, OWN_RATIO, RATIOS
from isobit.rl.learner.totals import Totals
from isobit.rl.stepwise.losses import LOSSES as STEPWISE
from isobit.rl.stepwise.losses import Rows
from tests.rl.helpers import group, loss_inputs

SEQUENCES, LENGTH = 30, 4001
TOKENS = SEQUENCES * LENGTH
THREADS = (1, 2, 3, 4)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def tokens(seed: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of policy and rollout, [T] float32."""
    generator = torch.Generator().manual_seed(seed)
    policy = -3 * torch.rand(TOKENS, generator=generator)
    return policy, policy + 0.1 * torch.randn(TOKENS, generator=generator)


def by_threads(compute: Callable[[], object]) -> list[str]:
    """What it gives at each number of threads, in all digits."""
    found = []
    for threads in THREADS:
        torch.set_num_threads(threads)
        found.append(repr(compute()))
    return found


def in_bits(*tensors: Tensor | None) -> list[int]:
    """Of float32 tensors: all of their bits, in a few integers."""
    words = [t.detach().float().view(torch.int32).long() for t in tensors if t is not None]
    return [int((w * torch.arange(1, len(w) + 1)).sum()) for w in words]


def test_the_control_pytorchs_own_differ() -> None:
    policy = tokens(0)[0].double()
    means = range(1, 20)
    assert len(set(by_threads(lambda: [float((policy * k).exp().mean()) for k in means]))) > 1
    leaf = torch.zeros(SEQUENCES, requires_grad=True)
    places = torch.arange(SEQUENCES).repeat_interleave(LENGTH)

    def slope() -> list[int]:
        return in_bits(torch.autograd.grad((leaf[places] * policy.float()).sum(), leaf)[0])

    assert len(set(by_threads(slope))) > 1


def test_sums_and_means() -> None:
    """Also of many blocks; of few elements they are PyTorch's in every bit."""
    x = torch.randn(3, 1_000_003, generator=torch.Generator().manual_seed(1))
    assert len(set(by_threads(lambda: (total(x), mean(x), float(block_sum(x)))))) == 1
    assert total(x) == pytest.approx(float(x.double().sum()), rel=1e-9)
    assert total(x[0, :16_384]) == float(x[0, :16_384].double().sum())
    assert total(x[0, :16_385]) == pytest.approx(float(x[0, :16_385].double().sum()), rel=1e-12)
    assert total(torch.zeros(0)) == 0.0


def test_metrics_of_the_mismatch() -> None:
    policy, rollout = tokens(2)
    rows: Sequence[Tensor] = policy.split(2), rollout.split(2)  # more sequences than a thread takes

    def found() -> object:
        places = torch.arange(TOKENS) % LENGTH
        return (
            mismatch_metrics(policy, rollout),
            sequence_metrics(*rows),
            position_metrics(policy, rollout, places),
        )

    assert len(set(by_threads(found))) == 1


@pytest.mark.parametrize(
    "rule",
    [*CORRECTIONS.values(), *(CorrectionRule(w, normalize=True) for w in ("token", "sequence"))],
    ids=str,
)
def test_corrections_and_their_metrics(rule: CorrectionRule) -> None:
    policy, rollout = tokens(3)
    lengths = [LENGTH] * SEQUENCES

    def found() -> object:
        correction = correct(rule, policy, rollout, lengths)
        before, after = [1 / 7] * SEQUENCES, [1 / 11] * SEQUENCES
        steps = step_metrics(correction, policy, lengths, before, after)
        return in_bits(correction.weights), correction_metrics(correction), steps

    assert len(set(by_threads(found))) == 1


@pytest.mark.parametrize("name", [*ADVANTAGE_KINDS])
def test_advantages(name: str) -> None:
    """Of rewards and of penalties by token."""
    values = torch.randn(SEQUENCES, generator=torch.Generator().manual_seed(4)).abs().tolist()
    groups = [group(i, *values[i : i + 5], length=LENGTH) for i in range(0, SEQUENCES, 5)]
    charged = iter(tokens(5)[0].view(SEQUENCES, LENGTH).tolist())
    penalties = [[tuple(next(charged)) for _ in one] for one in groups]
    norms = [[tuple(abs(value) for value in row) for row in one] for one in penalties]
    rewards = [[sample.reward for sample in one] for one in groups]
    inputs = AdvantageInputs(rewards, penalties, groups, ResolvedObjective(discount=0.9), norms)

    def found() -> object:
        rows = [one for row in ADVANTAGES[name](inputs) for one in row]
        flat = [x for one in rows for x in (one if isinstance(one, tuple) else (one or 0.0,))]
        return hash(tuple(flat))

    assert len(set(by_threads(found))) == 1


def inputs_of(settings: ResolvedObjective, leaf: Tensor) -> LossInputs:
    """Of many tokens, in few sequences."""
    policy, rollout = tokens(6)
    return loss_inputs(
        leaf, rollout, policy.sin(), settings, reference_logprobs=policy - policy.cos() / 3,
        sequence=torch.arange(SEQUENCES).repeat_interleave(LENGTH), divergence=leaf * 1.0,
        token_weights=policy.exp(), entropy=-policy,
    )  # fmt: skip


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("name", [*LOSSES, *GIVEN_LOSSES])
def test_losses_their_gradients_and_what_is_counted(name: str, ratio: str) -> None:
    if name in OWN_RATIO and ratio != "token":
        pytest.skip("has a ratio of its own")
    settings = ResolvedObjective(loss=name, ratio=ratio, off_policy_mask_threshold=0.01, beta=0.01)

    def found() -> object:
        leaf = tokens(6)[0].requires_grad_()
        inputs = inputs_of(settings, leaf)
        outputs = without_off_policy((LOSSES | GIVEN_LOSSES)[name](inputs), inputs)
        loss, totals = weighted_sum(outputs, inputs), Totals()
        totals.count(loss, outputs, inputs.entropy, outputs.loss)
        totals.observe(outputs.loss)
        return in_bits(*torch.autograd.grad(loss, leaf)), dict(vars(totals))

    assert len(set(by_threads(found))) == 1


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_penalties(kind: str, ratio: str) -> None:
    settings = ResolvedObjective(kl_coefficient=1.0, kl_estimator=kind, ratio=ratio)

    def found() -> object:
        leaf = tokens(6)[0].requires_grad_()
        penalty = kl_in_loss(inputs_of(settings, leaf))
        weights = tokens(7)[1]
        return in_bits(penalty, *torch.autograd.grad((penalty * weights).sum(), leaf))

    assert len(set(by_threads(found))) == 1


@pytest.mark.parametrize("name", STEPWISE)
def test_losses_of_the_stepwise_learner(name: str) -> None:
    policy, rollout = tokens(8)
    loss = STEPWISE[name]
    given = {"logprobs": rollout, "advantages": policy.sin(), "weights": policy.cos()}
    given |= {"sequence_ratio_mask": torch.ones(TOKENS)}
    given |= {key: value * torch.ones(TOKENS) for key, value in loss.options.items()}
    sequence = torch.arange(SEQUENCES).repeat_interleave(LENGTH)

    def found() -> object:
        leaf = policy.clone().requires_grad_()
        losses = loss.of(Rows(leaf, given, sequence))
        return total(losses), in_bits(losses, *torch.autograd.grad(losses.sum(), leaf))

    assert len(set(by_threads(found))) == 1
