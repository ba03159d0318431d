import math

import numpy as np
import pytest
import torch
from torch import Tensor

from isobit.engine.sampler import Draws, draw, filtered_logits, kinds_of
from isobit.engine.types import Sampling
from isobit.kernels import Ops, get_ops
from isobit.kernels.backends.reference import ReferenceOps
from tests.models import require

OPS = get_ops("reference")


def some_logits(rows: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 2


def draws_of(keys: Tensor, *samplings: Sampling) -> Draws:
    """Draws with these keys: all as one sampling, or each as its own."""
    rows = [sampling.settings for sampling in samplings] * (len(keys) // len(samplings))
    settings = np.array(rows, np.float64)
    return Draws(keys, torch.from_numpy(settings), kinds_of(settings))


def drawn(
    logits: Tensor, keys: Tensor, sampling: Sampling, ops: Ops = OPS
) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities from logits of ours: those of hidden states under a head that is
    the identity."""
    return draw(logits, torch.eye(logits.shape[1]), draws_of(keys, sampling), ops)


def kept(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits, of which those that the sampling leaves out are -inf."""
    return filtered_logits(logits, draws_of(some_keys(len(logits)), sampling))


def some_keys(rows: int) -> Tensor:
    return torch.stack(
        [
            torch.full((rows,), 7),
            torch.full((rows,), 3),
            torch.arange(rows),
            torch.full((rows,), 11),
        ],
        1,
    )


def kept_by_definition(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """Token to probability, written out: temperature, then top-k, then top-p, then min-p, then
    renormalize."""
    scaled = [value / sampling.temperature for value in logits]
    peak = max(scaled)
    weights = {token: math.exp(value - peak) for token, value in enumerate(scaled)}
    order = sorted(weights, key=lambda token: (-weights[token], token))
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = math.fsum(weights[token] for token in order)
    nucleus, reached = [], 0.0
    for token in order:
        if reached < sampling.top_p:
            nucleus.append(token)
        reached += weights[token] / total
    kept = [token for token in nucleus if weights[token] >= sampling.min_p * weights[order[0]]]
    total = math.fsum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


def name(sampling: object) -> str:
    """A test's id: the fields that are not the default."""
    changed = {k: v for k, v in vars(sampling).items() if v != getattr(Sampling(), k)}
    return ",".join(f"{k}={v}" for k, v in changed.items()) or "plain"


TRUNCATED = [
    Sampling(top_k=1),
    Sampling(top_k=5, temperature=0.7),
    Sampling(top_k=10_000),
    Sampling(top_p=0.8),
    Sampling(top_p=0.05),
    Sampling(min_p=0.1, temperature=1.5),
    Sampling(top_k=12, top_p=0.9, min_p=0.02, temperature=0.9),
]


@pytest.mark.parametrize("sampling", TRUNCATED, ids=name)
def test_truncated_distributions_are_the_ones_defined(sampling: Sampling) -> None:
    logits = some_logits(40, 50)
    wanted = [kept_by_definition(row, sampling) for row in logits.double().tolist()]
    masked = kept(logits, sampling)
    assert [set(torch.isfinite(row).nonzero().flatten().tolist()) for row in masked] == [
        set(row) for row in wanted
    ]
    tokens, logprobs = drawn(logits, some_keys(40), sampling)
    for token, logprob, row in zip(tokens.tolist(), logprobs.tolist(), wanted):
        assert logprob == pytest.approx(math.log(row[token]), abs=1e-5)


def test_ties_at_the_edge_of_top_k_stay_in_and_of_top_p_go_by_index() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 0.0]])
    assert torch.isfinite(kept(logits, Sampling(top_k=2))).tolist() == [
        [True, True, True, True, False]
    ]
    # probabilities: .676, three times .092, .034: two are needed for .7
    assert torch.isfinite(kept(logits, Sampling(top_p=0.7))).tolist() == [
        [True, True, False, False, False]
    ]


def chi_square(tokens: Tensor, probabilities: Tensor) -> float:
    counts = torch.bincount(tokens, minlength=probabilities.numel()).double()
    expected = probabilities * tokens.numel()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_frequencies_follow_the_distribution(temperature: float) -> None:
    logits, rows = some_logits(1, 12), 20_000
    tokens, _ = drawn(logits.expand(rows, -1), some_keys(rows), Sampling(temperature=temperature))
    # 11 degrees of freedom: above 35 in 2 of 10,000 cases, if the frequencies are right
    assert chi_square(tokens, torch.softmax(logits[0].double() / temperature, -1)) < 35
    # negative control: a temperature that is 10 % off shows
    assert chi_square(tokens, torch.softmax(logits[0].double() / (temperature * 1.1), -1)) > 100


def test_truncated_frequencies_follow_the_renormalized_distribution() -> None:
    sampling = Sampling(top_k=4, temperature=2.0)
    logits, rows = some_logits(1, 12, seed=1), 20_000
    tokens, _ = drawn(logits.expand(rows, -1), some_keys(rows), sampling)
    wanted = kept_by_definition(logits[0].double().tolist(), sampling)
    assert set(tokens.unique().tolist()) == set(wanted)
    order = sorted(wanted)
    places = torch.tensor([order.index(token) for token in tokens.tolist()])
    assert (
        chi_square(places, torch.tensor([wanted[token] for token in order], dtype=torch.float64))
        < 21
    )  # 3 d.o.f.


def test_greedy_takes_the_largest_and_reports_the_models_own_logprob() -> None:
    logits = some_logits(9, 33)
    logits[0, 4] = logits[0, 9] = 20.0
    tokens, logprobs = drawn(logits, some_keys(9), Sampling(temperature=0, top_k=3))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert tokens[0] == 4  # the first of two equal ones
    expected = torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])[:, 0]
    assert torch.allclose(logprobs.double(), expected, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("size", [50, 4099])
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.8), Sampling(temperature=0), *TRUNCATED], ids=name
)
def test_a_row_alone_and_in_a_batch_gives_the_same_bits(
    sampling: Sampling, size: int, backend: str
) -> None:
    require(backend)
    ops = get_ops(backend)
    hidden, weight, keys = some_logits(37, 24), some_logits(size, 24, seed=1) / 4, some_keys(37)
    tokens, logprobs = draw(hidden, weight, draws_of(keys, sampling), ops)
    for start, stop in ((0, 1), (5, 6), (3, 11), (36, 37)):
        part = draw(
            hidden[start:stop].clone(), weight, draws_of(keys[start:stop].clone(), sampling), ops
        )
        assert torch.equal(part[0], tokens[start:stop])
        assert torch.equal(part[1], logprobs[start:stop])


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.8), Sampling(temperature=0), TRUNCATED[-1]], ids=name
)
def test_several_keys_may_draw_from_one_row(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples of a prompt, at its first token; whether or not all logits are held at once."""
    hidden, weight, keys = some_logits(5, 24), some_logits(50, 24, seed=1) / 4, some_keys(12)
    source = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 3, 4])
    expected = draw(hidden[source], weight, draws_of(keys, sampling), OPS)
    for most in (2**26, 3 * 50):
        monkeypatch.setattr("isobit.engine.sampler.LOGITS_AT_ONCE", most)
        found = draw(hidden, weight, draws_of(keys, sampling), OPS, source)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


class Fused(ReferenceOps):
    """A backend whose operators on the output head are its own, as on a GPU; `calls` says which
    ran."""

    fused_head = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def head_sample(self, *arguments: object) -> tuple[Tensor, Tensor]:
        self.calls.append("head_sample")
        return super().head_sample(*arguments)  # type: ignore[arg-type]

    def head_logprobs(self, *arguments: object) -> tuple[Tensor, Tensor]:
        self.calls.append("head_logprobs")
        return super().head_logprobs(*arguments)  # type: ignore[arg-type]


def test_operators_of_the_head_are_used_where_a_backend_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their log-probabilities are the learner's; and a fused one holds no logits, so it takes all
    rows at once."""
    hidden, weight, keys = some_logits(6, 24), some_logits(50, 24, seed=1) / 4, some_keys(6)
    monkeypatch.setattr("isobit.engine.sampler.LOGITS_AT_ONCE", 2 * 50)
    for sampling, calls in (
        (Sampling(), ["head_sample"]),
        (Sampling(temperature=0), 3 * ["head_logprobs"]),
    ):
        ops = Fused()
        found, expected = (
            draw(hidden, weight, draws_of(keys, sampling), each) for each in (ops, OPS)
        )
        assert ops.calls == calls
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("backend", ["reference", "native", "fused"])
def test_rows_with_different_settings_are_drawn_together(backend: str) -> None:
    """The bits of every row with nobody beside it; with the settings of the next row they are
    others."""
    if backend != "fused":
        require(backend)
    ops = Fused() if backend == "fused" else get_ops(backend)
    samplings = [
        Sampling(temperature=0.8),
        Sampling(),
        Sampling(temperature=0, top_k=3),
        *TRUNCATED,
    ]
    rows = 4 * len(samplings)
    hidden, weight, keys = some_logits(rows, 24), some_logits(600, 24, seed=1) / 4, some_keys(rows)
    tokens, logprobs = draw(hidden, weight, draws_of(keys, *samplings), ops)
    other = draw(hidden, weight, draws_of(keys, *samplings[1:], samplings[0]), ops)[1]
    assert float((logprobs != other).double().mean()) > 0.8
    for row in range(rows):
        one = slice(row, row + 1)
        alone = draw(hidden[one], weight, draws_of(keys[one], samplings[row % len(samplings)]), ops)
        assert torch.equal(alone[0], tokens[one])
        assert torch.equal(alone[1], logprobs[one])


def test_every_part_of_the_key_matters() -> None:
    logits = torch.zeros(64, 1000)
    base = torch.tensor([[5, 6, 7, 8]]).repeat(64, 1)
    tokens = drawn(logits, base, Sampling())[0]
    assert tokens.unique().numel() == 1
    for column in range(4):
        keys = base.clone()
        keys[:, column] += torch.arange(64)
        assert drawn(logits, keys, Sampling())[0].unique().numel() > 50
    high_word = base.clone()
    high_word[:, 0] += torch.arange(64) << 40
    assert drawn(logits, high_word, Sampling())[0].unique().numel() > 50


def test_top_p_ends_where_the_probability_is_reached() -> None:
    """Four equal tokens have a quarter each, without rounding: two of them reach a half, and a
    third is not taken."""
    equal = torch.zeros(1, 4)
    for top_p, count in ((0.25, 1), (0.5, 2), (0.75, 3), (0.76, 4)):
        assert torch.isfinite(kept(equal, Sampling(top_p=top_p))).sum() == count


def test_min_p_keeps_what_has_exactly_the_fraction() -> None:
    equal = torch.zeros(1, 4)
    assert torch.isfinite(kept(equal, Sampling(min_p=1.0))).sum() == 4
