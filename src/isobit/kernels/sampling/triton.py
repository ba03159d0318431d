"""Log-probabilities, entropies and draws of tokens from logits, in two stages over fixed parts of
the vocabulary.

Stage one (`summarize`) turns a part of a row of scaled logits z into four numbers: its largest z,
the sum of exp(z - largest), the sum of exp(z - largest) · (z - largest), and one token's z. Stage
two (`_merge`) combines a row's parts. Both are float32; the parts and the trees of sums are those
of the vocabulary's size, so a row's bits are its own. The output head (`head/triton.py`) makes its
logits tile by tile and runs the same stages on them.

A draw is the exponential race of `kernels/sampling/definition.py`, argmax of p / E, in the form
argmax of z - log(E), with the same Philox words. Scores are float32: where the reference's two best
differ by less than their rounding, another token may win. Which of the two jobs a launch does is a
runtime argument (`race`) and not a constant: so the rollout, which draws, and the learner run the
same instructions, and the drawn token's log-probability has the learner's bits
(`tests/kernels/triton/test_head.py`).

Left out: filtering (its logits are -inf here, which have probability 0 and never win).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from isobit.kernels.ops import Temperature
from isobit.kernels.triton.launch import launch

CHUNK = 4096
"""Logits of a row that one program reads where they are in memory."""

ROWS = 16 if knobs.runtime.interpret else 1
"""Rows that one program takes: one on a GPU; Triton's interpreter is paid by the program."""

KINDS = 4
"""Numbers that stage one leaves of a part: largest, total, energy, and the chosen token's z."""


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Return Philox4x32-10 (Salmon et al. 2011) on uint32 of shapes that broadcast: as
    `reference.sampling.philox`."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def exponential(word):
    """E = -log(u), u = (word + 1/2) / 2^32, float32 to a relative error of 2^-20, whatever the
    word.

    x, the distance of u from the nearer end of (0, 1), is a float32 after two roundings. Below 1/2,
    E = -log(x). Above, E = -log1p(-x) = -log(y) - log1p(-d / y) with y = 1 - x rounded and d = y -
    (1 - x), exact and half a unit at most. So d stands for the last term, right to 2^-24 of x, and
    E is not less than x.
    """
    below = word < 0x80000000
    distance = tl.where(below, word, word ^ 0xFFFFFFFF).to(tl.int32, bitcast=True).to(tl.float32)
    x = (distance + 0.5) * (2.0**-32)
    y = tl.where(below, x, 1.0 - x)
    return tl.where(below, 0.0, x - (1.0 - y)) - tl.log(y)


@triton.jit
def _gumbel(word):
    return -tl.log(exponential(word))


@triton.jit
def _noise(keys_ptr, rows, inside, first_word, SIZE: tl.constexpr):
    """Return -log(E) [SIZE, W] of tokens 4 · first_word and on, for the keys `rows` [W]: four
    tokens a Philox counter."""
    key = keys_ptr + rows * 4
    seed = tl.load(key, mask=inside, other=0)
    c3 = tl.load(key + 1, mask=inside, other=0).to(tl.uint32)[None, :]
    c2 = tl.load(key + 2, mask=inside, other=0).to(tl.uint32)[None, :]
    c1 = tl.load(key + 3, mask=inside, other=0).to(tl.uint32)[None, :]
    k0, k1 = seed.to(tl.uint32)[None, :], (seed >> 32).to(tl.uint32)[None, :]
    c0 = (first_word + tl.arange(0, SIZE // 4)).to(tl.uint32)[:, None]
    w0, w1, w2, w3 = philox(c0, c1, c2, c3, k0, k1)
    # one word at a time: all four together would need too many registers
    n0, n1, n2, n3 = _gumbel(w0), _gumbel(w1), _gumbel(w2), _gumbel(w3)
    noise = tl.join(tl.join(n0, n1), tl.join(n2, n3))
    return tl.reshape(tl.permute(noise, (0, 3, 2, 1)), (SIZE, rows.shape[0]))


@triton.jit
def _winner(z, noise):
    """Return (best score [W], its place [W] int32) of z + noise [SIZE, W]; ties go to the lowest
    place; NaN never wins."""
    score = z + noise
    score = tl.where(score == score, score, -float("inf"))
    best = tl.max(score, 0)
    row = tl.broadcast_to(tl.arange(0, z.shape[0])[:, None], z.shape)
    return best, tl.min(tl.where(score == best[None, :], row, z.shape[0]), 0)


@triton.jit
def summarize(
    z,
    part,
    rows,
    inside,
    tokens_ptr,
    keys_ptr,
    partial_ptr,
    race_ptr,
    race,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Stage one for z [SIZE, W], part number `part` of the scaled logits of `rows` [W] int64; -inf
    beyond the vocabulary.

    Writes partial [rows, KINDS, STRIDE]. With `race`, the chosen token is the winner of the part,
    and race [rows, 2, STRIDE] receives its score and its place in the part; else it is tokens
    [rows], noted by the part that it is in.
    """
    largest = tl.max(z, 0)
    shifted = z - tl.where(largest == -float("inf"), 0.0, largest)[None, :]
    weight = tl.exp(shifted)
    total = tl.sum(weight, 0)
    energy = tl.sum(tl.where(weight > 0, weight * shifted, 0.0), 0)
    to = partial_ptr + rows * (4 * STRIDE) + part
    tl.store(to, largest, mask=inside)
    tl.store(to + STRIDE, total, mask=inside)
    tl.store(to + 2 * STRIDE, energy, mask=inside)
    if race != 0:
        best, chosen = _winner(z, _noise(keys_ptr, rows, inside, part * (SIZE // 4), SIZE))
        to_race = race_ptr + rows * (2 * STRIDE) + part
        tl.store(to_race, best, mask=inside)
        tl.store(to_race + STRIDE, chosen.to(tl.float32), mask=inside)
    else:
        chosen = (tl.load(tokens_ptr + rows, mask=inside, other=0) - part * SIZE).to(tl.int32)
    row = tl.arange(0, SIZE)[:, None]
    value = tl.sum(tl.where(row == chosen[None, :], z, 0.0), 0)
    tl.store(to + 3 * STRIDE, value, mask=inside & (chosen >= 0) & (chosen < SIZE))


@triton.jit(do_not_specialize=["num_rows", "race"], do_not_specialize_on_alignment=["tokens_ptr"])
def _merge(
    partial_ptr, race_ptr, tokens_ptr, logprob_ptr, entropy_ptr, norm_ptr, num_rows, race,
    COUNT: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Stage two of ROWS rows: COUNT parts of SIZE tokens. norm [rows, 2]: largest z, and log of the
    sum of exp(z - largest)."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    slot = tl.arange(0, BLOCK)[None, :]
    filled = inside[:, None] & (slot < COUNT)
    at = partial_ptr + (rows * (4 * STRIDE))[:, None] + slot
    largest = tl.load(at, mask=filled, other=-float("inf"))
    total = tl.load(at + STRIDE, mask=filled, other=0.0)
    energy = tl.load(at + 2 * STRIDE, mask=filled, other=0.0)
    most = tl.max(largest, 1)
    most = tl.where(most == -float("inf"), 0.0, most)
    gap = largest - most[:, None]
    weight = tl.exp(gap)
    all_total = tl.sum(weight * total, 1)
    all_energy = tl.sum(tl.where(weight > 0, weight * (energy + total * gap), 0.0), 1)
    if race != 0:
        scores = race_ptr + rows * (2 * STRIDE)
        score = tl.load(scores[:, None] + slot, mask=filled, other=-float("inf"))
        winner = tl.min(tl.where(filled & (score == tl.max(score, 1)[:, None]), slot, COUNT - 1), 1)
        token = tl.load(scores + STRIDE + winner, mask=inside, other=0.0).to(tl.int64)
        tl.store(tokens_ptr + rows, winner.to(tl.int64) * SIZE + token, mask=inside)
    else:
        winner = (tl.load(tokens_ptr + rows, mask=inside, other=0) // SIZE).to(tl.int32)
    known = inside & (winner >= 0) & (winner < COUNT)
    chosen = tl.load(
        partial_ptr + rows * (4 * STRIDE) + 3 * STRIDE + winner, mask=known, other=float("nan")
    )
    log_total = tl.log(all_total)
    tl.store(logprob_ptr + rows, (chosen - most) - log_total, mask=inside)
    tl.store(entropy_ptr + rows, log_total - tl.div_rn(all_energy, all_total), mask=inside)
    tl.store(norm_ptr + rows * 2, most, mask=inside)
    tl.store(norm_ptr + rows * 2 + 1, log_total, mask=inside)


@triton.jit(
    do_not_specialize=["num_rows", "race"],
    do_not_specialize_on_alignment=["logits_ptr", "tokens_ptr", "keys_ptr", "race_ptr"],
)
def _logit_chunks(
    logits_ptr, tokens_ptr, keys_ptr, partial_ptr, race_ptr, num_rows, temperature, race,
    VOCABULARY: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Stage one of logits [rows, VOCABULARY] in memory: a chunk of ROWS rows a program."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    chunk = tl.program_id(1)
    token = chunk * SIZE + tl.arange(0, SIZE)[:, None]
    filled = inside[None, :] & (token < VOCABULARY)
    logits = tl.load(
        logits_ptr + (rows * VOCABULARY)[None, :] + token, mask=filled, other=-float("inf")
    )
    z = scaled(logits, temperature)
    summarize(
        z, chunk, rows, inside, tokens_ptr, keys_ptr, partial_ptr, race_ptr, race, SIZE, STRIDE
    )


@triton.jit
def scaled(logits, temperature):
    """Return logits / temperature, rounded once, as `logits / temperature` in PyTorch; a
    temperature for all, or for each."""
    return tl.div_rn(logits, tl.zeros(logits.shape, tl.float32) + temperature)


class VocabularyParts:
    """The results of stage one for `rows` rows, which stage two reads: `count` parts of `size`
    tokens each."""

    def __init__(
        self, rows: int, vocabulary: int, size: int, race: bool, device: torch.device
    ) -> None:
        self.size, self.count, self.race = size, triton.cdiv(vocabulary, size), race
        self.stride = triton.cdiv(self.count, 32) * 32
        self.partial = torch.empty((rows, KINDS, self.stride), device=device)
        self.scores = torch.empty((rows, 2, self.stride), device=device) if race else self.partial

    def merge(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (log-probabilities [rows], entropies [rows], norms [rows, 2]) of `tokens` [rows],
        which a race first writes."""
        rows = self.partial.shape[0]
        logprob, entropy = (torch.empty(rows, device=self.partial.device) for _ in range(2))
        norm = torch.empty((rows, 2), device=self.partial.device)
        block = triton.next_power_of_2(self.count)
        launch(
            _merge, (triton.cdiv(rows, ROWS),), self.partial, self.scores, tokens, logprob, entropy,
            norm, rows,
            int(self.race), num_warps=4 if block <= 1024 else 8,
            COUNT=self.count, SIZE=self.size, STRIDE=self.stride, ROWS=ROWS, BLOCK=block,
        )  # fmt: skip
        return logprob, entropy, norm


def summarize_logits(
    logits: Tensor, given: Tensor, temperature: Temperature, race: bool
) -> VocabularyParts:
    """Stage one of logits [T, V] float32; `given` are tokens [T] or, for a race, keys [T, 4],
    int64."""
    if isinstance(
        temperature, Tensor
    ):  # the same division as in the kernel, where dividing by 1 then rounds nothing
        logits, temperature = logits / temperature.unsqueeze(1), 1.0
    logits = logits.contiguous()
    assert logits.dtype == torch.float32
    size = min(CHUNK, max(16, triton.next_power_of_2(logits.shape[1])))
    rows, vocabulary = logits.shape
    partials = VocabularyParts(rows, vocabulary, size, race, logits.device)
    launch(
        _logit_chunks, (triton.cdiv(rows, ROWS), partials.count), logits, given, given, partials.partial,
        partials.scores,
        rows, float(temperature), int(race), num_warps=8,
        VOCABULARY=vocabulary, SIZE=size, STRIDE=partials.stride, ROWS=ROWS,
    )  # fmt: skip
    return partials


def token_logprobs(
    logits: Tensor, tokens: Tensor, temperature: Temperature
) -> tuple[Tensor, Tensor]:
    """Return (log-probability of `tokens` [T] int64, entropy) [T] float32 of softmax(logits /
    temperature); logits [T, V] float32, of which some may be -inf.

    Chunks of 4096 tokens: not the bits of `head_logprobs`, whose tiles have 128.
    """
    tokens = tokens.contiguous()
    logprob, entropy, _ = summarize_logits(logits, tokens, temperature, False).merge(tokens)
    return logprob, entropy


def sample(logits: Tensor, keys: Tensor, temperature: Temperature) -> Tensor:
    """Draw tokens [B] int64 from softmax(logits / temperature), logits [B, V] float32, keys [B, 4]
    int64."""
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    summarize_logits(logits, keys.contiguous(), temperature, True).merge(tokens)
    return tokens
