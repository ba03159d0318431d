"""Sampling and log-probabilities: published vectors, frequencies, independence of the batch,
float64 formulas."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isobit.kernels import get_ops
from isobit.kernels.sampling import definition as sampling

from .helpers import draw, keys_of, ordinals, same, threads

OPS = get_ops("reference")
VECTORS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
"""Counter, key and result of philox4x32 with 10 rounds: `kat_vectors` of Random123 (Salmon et al.
2011)."""


def chi_squared(tokens: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * len(tokens)
    return float(
        ((torch.bincount(tokens, minlength=len(expected)) - expected) ** 2 / expected).sum()
    )


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_numbers(counter: str, key: str, expected: str) -> None:
    words, seed = (
        [torch.tensor([int(word, 16)]) for word in text.split()] for text in (counter, key)
    )
    result = sampling.philox((words[0], words[1], words[2], words[3]), (seed[0], seed[1]))
    assert [f"{int(word):08x}" for word in result] == expected.split()


def philox(counter: list[int], key: list[int]) -> list[int]:
    """The same in Python's integers."""
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [(second >> 32) ^ counter[1] ^ key[0], second & 0xFFFFFFFF,
                   (first >> 32) ^ counter[3] ^ key[1], first & 0xFFFFFFFF]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=4, max_size=4), st.integers(0, 200_000))
@settings(max_examples=100, deadline=None)
def test_exponentials_are_those_of_the_counter(key: list[int], token: int) -> None:
    """Token v of (seed, prompt, sample, position) has word v % 4 of philox(v / 4, position, sample,
    prompt; seed)."""
    seed, prompt, sample, position = (number & 0xFFFFFFFFFFFFFFFF for number in key)
    counter = [token // 4, position & 0xFFFFFFFF, sample & 0xFFFFFFFF, prompt & 0xFFFFFFFF]
    word = philox(counter, [seed & 0xFFFFFFFF, seed >> 32])[token % 4]
    ours = sampling.exponentials(torch.tensor([key]), token + 1)[0, token]
    assert float(ours) == pytest.approx(-math.log((word + 0.5) * 2.0**-32), rel=1e-15)


def test_frequencies_are_the_probabilities() -> None:
    """Chi-squared with 32 degrees of freedom: above 70 once in 10,000; it must notice a temperature
    of 1.05."""
    row = draw(0, 33, dtype=torch.float32)
    logits = row.expand(40_000, -1).contiguous()
    for temperature in (1.0, 0.6, 2.0):
        tokens = OPS.sample(logits, keys_of(40_000), temperature)
        assert chi_squared(tokens, torch.softmax(row.double() / temperature, -1)) < 70
    assert (
        chi_squared(OPS.sample(logits, keys_of(40_000), 1.05), torch.softmax(row.double(), -1)) > 70
    )


@pytest.mark.parametrize("column", [1, 2, 3])
def test_neighbouring_draws_are_independent(column: int) -> None:
    """Pairs of draws whose prompt, sample or position are one apart are uniform over 8 x 8: 63
    degrees of freedom."""
    keys = keys_of(20_000)
    keys[:, 1:] = torch.randint(
        0, 1 << 20, (20_000, 3), generator=torch.Generator().manual_seed(column)
    )
    beside = keys.clone()
    beside[:, column] += 1
    first, second = (OPS.sample(torch.zeros(20_000, 8), k, 1.0) for k in (keys, beside))
    assert chi_squared(first * 8 + second, torch.full((64,), 1 / 64)) < 115


def test_every_part_of_the_key_counts() -> None:
    logits = torch.zeros(64, 500)
    base = OPS.sample(logits, keys_of(64), 1.0)
    for column in range(4):
        for step in (1, 1 << 31):
            keys = keys_of(64)
            keys[:, column] += step
            assert float((OPS.sample(logits, keys, 1.0) == base).double().mean()) < 0.1
    keys = keys_of(64)
    keys[:, 0] += 1 << 40  # seeds have 64 bits
    assert float((OPS.sample(logits, keys, 1.0) == base).double().mean()) < 0.1


@pytest.mark.parametrize("num_threads", [1, 2])
def test_rows_are_the_same_in_every_batch(num_threads: int) -> None:
    logits, keys = draw(1, 257, 1003, dtype=torch.float32) * 3, keys_of(257)
    chosen = torch.randint(0, 1003, (257,), generator=torch.Generator().manual_seed(0))
    with threads(1):
        rows = [slice(i, i + 1) for i in range(257)]
        tokens = torch.cat([OPS.sample(logits[row], keys[row], 0.9) for row in rows])
        alone = [
            torch.cat(x)
            for x in zip(*(OPS.token_logprobs(logits[row], chosen[row], 0.9) for row in rows))
        ]
    with threads(num_threads):
        for count in (2, 3, 8, 31, 64, 129, 257):
            order = torch.randperm(257, generator=torch.Generator().manual_seed(count))[:count]
            assert same(OPS.sample(logits[order], keys[order], 0.9), tokens[order])
            for ours, theirs in zip(OPS.token_logprobs(logits[order], chosen[order], 0.9), alone):
                assert same(ours, theirs[order])


def test_a_batch_wide_generator_is_noticed() -> None:
    """The negative control: PyTorch's own multinomial depends on the order of the rows."""
    probabilities = torch.softmax(draw(2, 64, 50, dtype=torch.float32), -1)
    order = torch.arange(63, -1, -1)
    draws = [
        torch.multinomial(p, 1, generator=torch.Generator().manual_seed(0))
        for p in (probabilities, probabilities[order])
    ]
    assert not same(draws[0], draws[1][order])


def test_a_long_row_alone_and_in_a_batch() -> None:
    """PyTorch sums a single long row on several threads; the sum in two levels has the same bits in
    float64."""
    x = draw(3, 5, 150_000, dtype=torch.float32).double().exp()
    tokens = torch.tensor([0, 5, 149_999, 7, 8])
    with threads(2):
        whole = (sampling.row_sum(x), *OPS.token_logprobs(x.float(), tokens, 1.0))
        rows = [slice(i, i + 1) for i in range(5)]
        alone = [
            (sampling.row_sum(x[row]), *OPS.token_logprobs(x[row].float(), tokens[row], 1.0))
            for row in rows
        ]
        plain = torch.cat([x[row].sum(-1) for row in rows])
        assert not same(plain, x.sum(-1))  # the negative control
    for ours, parts in zip(whole, zip(*alone)):
        assert same(ours, torch.cat(parts))


@pytest.mark.parametrize("vocabulary", [1, 2, 97, 1024, 1025, 5000])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_logprobs_and_entropy_are_their_formulas(vocabulary: int, temperature: float) -> None:
    logits = draw(4, 20, vocabulary, dtype=torch.float32) * 8
    tokens = torch.randint(0, vocabulary, (20,), generator=torch.Generator().manual_seed(1))
    logprob, entropy = OPS.token_logprobs(logits, tokens, temperature)
    exact = torch.log_softmax((logits / temperature).double(), -1)
    chosen = exact.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float()
    assert int((ordinals(logprob) - ordinals(chosen)).abs().max()) <= 1
    torch.testing.assert_close(
        entropy.double(), -(exact.exp() * exact).sum(-1), rtol=2.0**-22, atol=1e-12
    )


def test_excluded_tokens_have_no_probability_and_never_win() -> None:
    logits = torch.full((2000, 9), -math.inf)
    logits[:, [2, 7]] = torch.tensor([0.0, -1.0])
    tokens = OPS.sample(logits, keys_of(2000), 1.0)
    assert set(tokens.tolist()) == {2, 7}
    logprob, entropy = OPS.token_logprobs(logits[:2], torch.tensor([2, 3]), 1.0)
    p = 1 / (1 + math.exp(-1))
    assert logprob.tolist() == [pytest.approx(math.log(p)), -math.inf]
    assert entropy.tolist() == [pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))] * 2


def test_certain_rows_and_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(500, 9)
    logits[:, 4] = 200.0
    assert set(OPS.sample(logits, keys_of(500), 1.0).tolist()) == {4}
    monkeypatch.setattr(
        sampling, "exponentials", lambda keys, count: torch.ones(len(keys), count).double()
    )
    assert OPS.sample(
        torch.tensor([[0.0, 3.0, 3.0, 1.0], [1.0] * 4]), keys_of(2), 1.0
    ).tolist() == [1, 0]
