"""Two-stage log-probabilities and draws over logits in memory, against the reference in float64.

UNIT is half a unit in the last place of 1. Bounds are derived where they stand: a weight exp(x) is
right to 3|x| + 4 units (the rounding of x, of x · log2(e), and of the power), sums have at most 160
additions one after the other, and errors of z pass to a log-probability at most twice.
"""

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.kernels.sampling import definition as reference
from isobit.kernels.sampling import triton as sampling
from isobit.kernels.triton.launch import launch

from ..helpers import draw, keys_of, same
from .helpers import DEVICE

UNIT = 2.0**-24
LOGITS = draw(1, 6, 600, dtype=torch.float32) * 3
TOKENS = torch.tensor([0, 255, 256, 599, 17, 300])


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then 600 logits are three chunks, the last ragged."""
    monkeypatch.setattr(sampling, "CHUNK", 256)


def logprob_bound(z: Tensor, error: float = 0.0) -> float:
    """How far a log-probability of scaled logits z may be off, if these are by `error`."""
    finite = z[torch.isfinite(z)]
    spread = float(finite.max() - finite.min())
    return 2 * (error + 2 * UNIT * float(finite.abs().max())) + UNIT * (
        4 * spread + 170 + 2 * math.log(z.shape[-1])
    )


def entropy_bound(z: Tensor, error: float = 0.0) -> float:
    """The same of the entropy: its derivatives by z add up to 2 log V at most, and it is a mean of
    at most `spread`."""
    finite = z[torch.isfinite(z)]
    spread = float(finite.max() - finite.min())
    return (1 + spread + 2 * math.log(z.shape[-1])) * logprob_bound(z, error)


def check_draws(
    tokens: Tensor, logits: Tensor, keys: Tensor, temperature: float, error: float = 0.0
) -> int:
    """How many tokens are not the reference's; each must have a score within rounding of the best.

    A score z - log(E) is off by that of z, 2^-20 of E, and the roundings of the logarithm (below
    24) and of the sum.
    """
    z = (logits / temperature).double()
    score = z - torch.log(reference.exponentials(keys, logits.shape[1]))
    finite = z[torch.isfinite(z)].abs().max()
    bound = 2 * (error + 2.0**-20 + UNIT * (4 * float(finite) + 72))
    assert bool((score.gather(1, tokens.unsqueeze(1))[:, 0] >= score.amax(1) - bound).all())
    return int((tokens != reference.sample(logits, keys, temperature)).sum())


@triton.jit
def _words(in_ptr, out_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    c0, c1 = tl.load(in_ptr + at).to(tl.uint32), tl.load(in_ptr + COUNT + at).to(tl.uint32)
    c2 = tl.load(in_ptr + 2 * COUNT + at).to(tl.uint32)
    c3 = tl.load(in_ptr + 3 * COUNT + at).to(tl.uint32)
    k0 = tl.load(in_ptr + 4 * COUNT + at).to(tl.uint32)
    k1 = tl.load(in_ptr + 5 * COUNT + at).to(tl.uint32)
    w0, w1, w2, w3 = sampling.philox(c0, c1, c2, c3, k0, k1)
    tl.store(out_ptr + at, w0.to(tl.int64))
    tl.store(out_ptr + COUNT + at, w1.to(tl.int64))
    tl.store(out_ptr + 2 * COUNT + at, w2.to(tl.int64))
    tl.store(out_ptr + 3 * COUNT + at, w3.to(tl.int64))


@triton.jit
def _exponentials(in_ptr, out_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out_ptr + at, sampling.exponential(tl.load(in_ptr + at).to(tl.uint32)))


def random_words(*shape: int) -> Tensor:
    return torch.randint(0, 1 << 32, shape, generator=torch.Generator().manual_seed(0))


def test_philox_words_are_the_references() -> None:
    words = random_words(6, 512)
    words[:, 0], words[:, 1] = 0, 0xFFFFFFFF
    found = torch.empty(4, 512, dtype=torch.int64, device=DEVICE)
    launch(_words, (1,), words.to(DEVICE), found, num_warps=4, COUNT=512)
    wanted = torch.stack(
        reference.philox((words[0], words[1], words[2], words[3]), (words[4], words[5]))
    )
    assert torch.equal(found.cpu(), wanted)
    assert [f"{int(word):08x}" for word in found[:, 0]] == [
        "6627e8d5",
        "e169c58d",
        "bc57ac4c",
        "9b00dbd8",
    ]  # published


def test_exponentials_are_precise_at_both_ends() -> None:
    edges = torch.tensor([0, 1, 2, 255, 2**23, 2**24 + 1, 2**31 - 1, 2**30])
    powers = torch.cat([(1 << torch.arange(32)) + step for step in (-1, 0, 1)])
    words = torch.cat([edges, powers, random_words(2048)]).unique()
    words = torch.cat([words, 0xFFFFFFFF - words])
    words = torch.cat([words, words[:1].expand(8192 - len(words))])
    found = torch.empty(8192, device=DEVICE)
    launch(_exponentials, (1,), words.to(DEVICE), found, num_warps=4, COUNT=8192)
    # float64 to the same precision at both ends: the complement is exact
    distance = (torch.minimum(words, 0xFFFFFFFF - words).double() + 0.5) * 2.0**-32
    wanted = torch.where(words < 2**31, -torch.log(distance), -torch.log1p(-distance))
    assert float(((found.cpu().double() - wanted) / wanted).abs().max()) < 2.0**-20
    naive = -torch.log((words.float() + 0.5) * 2.0**-32).double()  # the control
    assert float(((naive - wanted) / wanted).abs().max()) == 1.0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropies_are_the_references(temperature: float) -> None:
    found = sampling.token_logprobs(LOGITS.to(DEVICE), TOKENS.to(DEVICE), temperature)
    wanted = reference.token_logprobs(LOGITS, TOKENS, temperature)
    z = LOGITS / temperature
    assert float((found[0].cpu() - wanted[0]).abs().max()) < logprob_bound(z)
    assert float((found[1].cpu() - wanted[1]).abs().max()) < entropy_bound(z)
    other = sampling.token_logprobs(LOGITS.to(DEVICE), TOKENS.to(DEVICE), temperature + 0.01)
    assert float((other[0].cpu() - wanted[0]).abs().max()) > logprob_bound(z)


def test_a_long_row_in_whole_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "CHUNK", 4096)
    logits, tokens = draw(1, 2, 9000, dtype=torch.float32) * 3, torch.tensor([4096, 8999])
    found = sampling.token_logprobs(logits.to(DEVICE), tokens.to(DEVICE), 1.0)
    wanted = reference.token_logprobs(logits, tokens, 1.0)
    assert float((found[0].cpu() - wanted[0]).abs().max()) < logprob_bound(logits)
    assert float((found[1].cpu() - wanted[1]).abs().max()) < entropy_bound(logits)


def test_truncated_tokens_have_no_probability_and_never_win() -> None:
    logits = torch.full((40, 300), -math.inf)
    logits[:, [2, 297]] = torch.tensor([0.0, -1.0])
    logits[20:, 297] = -math.inf
    tokens = sampling.sample(logits.to(DEVICE), keys_of(40).to(DEVICE), 1.0).cpu()
    assert set(tokens[:20].tolist()) == {2, 297}
    assert set(tokens[20:].tolist()) == {2}
    assert check_draws(tokens, logits, keys_of(40), 1.0) == 0
    chosen = torch.tensor([2, 297, 3, 2])
    logprob, entropy = sampling.token_logprobs(logits[18:22].to(DEVICE), chosen.to(DEVICE), 1.0)
    p = 1 / (1 + math.exp(-1))
    mixed = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert logprob.tolist() == [
        pytest.approx(math.log(p)),
        pytest.approx(math.log(1 - p)),
        -math.inf,
        0.0,
    ]
    assert entropy.tolist() == [pytest.approx(mixed), pytest.approx(mixed), 0.0, 0.0]


def test_tokens_are_the_references() -> None:
    logits, keys = draw(2, 60, 300, dtype=torch.float32) * 2, keys_of(60, -(2**40))
    for temperature in (1.0, 0.6):
        tokens = sampling.sample(logits.to(DEVICE), keys.to(DEVICE), temperature).cpu()
        assert check_draws(tokens, logits, keys, temperature) == 0
    with pytest.raises(AssertionError):  # other keys draw other tokens
        check_draws(tokens, logits, keys_of(60), 0.6)


def test_rows_are_the_same_in_every_batch() -> None:
    logits, tokens, keys = LOGITS.to(DEVICE), TOKENS.to(DEVICE), keys_of(6).to(DEVICE)
    drawn = sampling.sample(logits, keys, 0.9)
    whole = sampling.token_logprobs(logits, tokens, 0.9)
    for rows in ([3], [5, 1], [4, 2, 0]):
        assert same(sampling.sample(logits[rows], keys[rows], 0.9), drawn[rows])
        for ours, theirs in zip(sampling.token_logprobs(logits[rows], tokens[rows], 0.9), whole):
            assert same(ours, theirs[rows])


def test_other_chunks_have_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the size of the chunks is in the bits, so it must not depend on the
    batch. Of 60 rows, since a sum may be the same in both orders."""
    logits, tokens = draw(2, 60, 300, dtype=torch.float32).to(DEVICE), torch.arange(60).to(DEVICE)
    before = sampling.token_logprobs(logits, tokens, 1.0)[0]
    monkeypatch.setattr(sampling, "CHUNK", 64)
    assert not same(sampling.token_logprobs(logits, tokens, 1.0)[0], before)


def test_no_finite_logit_still_gives_a_token_of_the_vocabulary() -> None:
    logits = torch.zeros(4, 300)
    logits[0], logits[1] = -math.inf, math.nan
    logits[2, [200, 210, 299]], logits[3, [270, 299]] = (
        math.inf,
        math.inf,
    )  # a tie goes to the lowest
    tokens = sampling.sample(logits.to(DEVICE), keys_of(4).to(DEVICE), 1.0).cpu()
    assert tokens.tolist() == [0, 0, 200, 270]
    logprob, _ = sampling.token_logprobs(logits.to(DEVICE), tokens.to(DEVICE), 1.0)
    assert logprob.isnan().all()
