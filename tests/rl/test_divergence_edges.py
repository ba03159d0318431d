"""The divergence from a teacher in float32 where policy, teacher or both are sure of some tokens, so
that all others have 1e-7 to 1e-30 together: against 60 digits."""

from collections.abc import Sequence
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor

from isobit.rl.algorithm.divergence import Divergence

VOCABULARY, SURE = 16, 4
RESTS = (1e-3, 1e-6, 1e-7, 1e-10, 1e-18, 1e-30)
Row = Sequence[Decimal]


def logits(sure_of: int, rest: float, seed: int, sure: int = SURE) -> Tensor:
    """Logits [V] float32: `sure` tokens from `sure_of` on, and the others, which have `rest`."""
    found = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))
    top = torch.arange(sure_of, sure_of + sure)
    others = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, top, False)
    found[others] += found[top].logsumexp(0) - found[others].logsumexp(0)
    found[others] += torch.tensor(rest).log()
    return found


def softmax(values: Row) -> Row:
    weights = [value.exp() for value in values]
    return [weight / sum(weights) for weight in weights]


def exact(policy: Tensor, teacher: Tensor, beta: float, top_k: int) -> tuple[float, list[float]]:
    """(value, gradient by the policy's logits), from probabilities, as the formula says."""
    with localcontext() as context:
        context.prec = 60
        x, y = ([Decimal(value) for value in row.tolist()] for row in (policy, teacher))
        events = [[i] for i in range(VOCABULARY)]
        if top_k:
            order = sorted(range(VOCABULARY), key=lambda i: -x[i])
            events = [*([i] for i in order[:top_k]), order[top_k:]]
        each = softmax(x)
        p, q = (
            [sum((row[i] for i in one), Decimal(0)) for one in events] for row in (each, softmax(y))
        )
        b = Decimal(beta)
        m = {0.0: p, 1.0: q}.get(beta, [(1 - b) * u + b * v for u, v in zip(p, q)])
        forwards = sum(v * (v / w).ln() for v, w in zip(q, m)) if beta < 1 else Decimal(0)
        reverse = sum(u * (u / w).ln() for u, w in zip(p, m)) if beta > 0 else Decimal(0)
        value = b * forwards + (1 - b) * reverse if 0 < beta < 1 else forwards + reverse
        by_p = {0.0: [-v / u for u, v in zip(p, q)]}.get(
            beta, [(1 if beta == 1 else 1 - b) * (u / w).ln() for u, w in zip(p, m)]
        )
        mean = sum(u * c for u, c in zip(p, by_p))
        gradient = [0.0] * VOCABULARY
        for one, c in zip(events, by_p):
            for i in one:
                gradient[i] = float(each[i] * (c - mean))
        return float(value), gradient


def found(policy: Tensor, teacher: Tensor, beta: float, top_k: int) -> tuple[float, Tensor]:
    leaf = policy[None].clone().requires_grad_()
    value = Divergence(beta, top_k).of(leaf, teacher[None], 1.0)
    value.sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert value.dtype == leaf.grad.dtype == torch.float32
    return float(value.detach()), leaf.grad[0]


@pytest.mark.parametrize("sure_of", [1, SURE])
@pytest.mark.parametrize("top_k", [0, 1, SURE, 9])
@pytest.mark.parametrize("beta", [0.0, 1e-3, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("rest", RESTS)
def test_value_and_gradient_are_right_down_to_the_smallest_rest(
    rest: float, beta: float, top_k: int, sure_of: int
) -> None:
    """Of a sure policy and a teacher that is not, one that is as sure, or sure of other tokens, and
    the other way round."""
    sure, same, other, flat = (
        logits(0, rest, 1, sure_of),
        logits(0, 3 * rest, 2, sure_of),
        logits(SURE, rest, 3, sure_of),
        logits(0, 0.96, 4, sure_of),
    )
    for policy, teacher in ((sure, flat), (flat, sure), (sure, same), (sure, other)):
        value, gradient = found(policy, teacher, beta, top_k)
        wanted, theirs = exact(policy, teacher, beta, top_k)
        assert value == pytest.approx(wanted, rel=1e-3, abs=1e-36)
        assert gradient.tolist() == pytest.approx(
            theirs, rel=2e-3, abs=2e-5 * max(map(abs, theirs))
        )


def test_one_minus_the_sum_of_the_top_k_is_not() -> None:
    """The control: the rest of a forward KL as TRL has it, in float32."""

    def with_rest(x: Tensor, chosen: Tensor) -> Tensor:
        top = torch.log_softmax(x, -1).gather(-1, chosen)
        whole = top.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
        return torch.cat([top, torch.log(-torch.expm1(whole))], -1)

    policy, teacher = logits(0, 1e-10, 1), logits(0, 0.96, 4)
    leaf = policy[None].clone().requires_grad_()
    chosen = leaf.detach().topk(SURE).indices
    mine, theirs = with_rest(leaf, chosen), with_rest(teacher[None], chosen)
    (theirs.exp() * (theirs - mine)).sum().backward()  # type: ignore[no-untyped-call]
    wanted = torch.tensor(exact(policy, teacher, 0.0, SURE)[1])
    assert leaf.grad is not None
    assert float((leaf.grad[0] - wanted).norm() / wanted.norm()) > 0.5
    right = found(policy, teacher, 0.0, SURE)[1]
    assert float((right - wanted).norm() / wanted.norm()) < 1e-5


def test_a_single_long_row_has_the_same_bits_at_any_threads() -> None:
    """A vocabulary of 100,003 tokens, of one row: PyTorch's own sum of it is another at some number
    of threads."""
    policy, teacher = torch.randn(2, 1, 100_003, generator=torch.Generator().manual_seed(0))
    before, seen, own = torch.get_num_threads(), list[Tensor](), set[float]()
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            own.add(float(policy.exp().sum(-1)))
            for top_k in (0, 100):
                leaf = policy.clone().requires_grad_()
                value = Divergence(0.3, top_k).of(leaf, teacher, 0.7)
                value.sum().backward()  # type: ignore[no-untyped-call]
                assert leaf.grad is not None
                seen.append(torch.cat([value.detach(), leaf.grad[0]]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(seen[i], seen[i % 2]) for i in range(len(seen)))
    assert len(own) > 1
