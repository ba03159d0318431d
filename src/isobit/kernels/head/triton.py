"""The output head: log-probabilities, entropies and draws of tokens from hidden rows, without
writing logits.

A program multiplies a tile of 128 rows of the head's weight with 64 hidden rows (the weight on the
M side of the matrix instruction, so that few rows waste little), and leaves the numbers of
`sampling.summarize` for its part of the vocabulary; `sampling.VocabularyParts.merge` combines them.
One kernel serves rollout and learner at every batch size. On Hopper more than 64 rows go in tiles
of 128 by twice as many warps, two of these tiles side by side: the warps along the vocabulary are
the same, so is the instruction, and so are the chain over C and the tree over the vocabulary. So
the bits of a row are its own (`tests/kernels/triton/test_head.py`,
`tests/kernels/test_kernel_table.py`). Hidden rows are loaded through an index: several keys may
draw from one.

A decode step of up to 64 rows reads the weight once: that is its time, V · C · 2 bytes over the
memory's bandwidth. The learner's is the L2 cache's: 64 rows take 24 KiB for 1 MFLOP, 128 rows 32
KiB for 2, which at 27 bytes a clock and multiprocessor (an estimate) is 29 and 43 % of the matrix
units' rate. Neighbouring programs share a weight tile.

The backward (`head_backward`) works on logits in memory, a gibibyte at a time.
Left out: the two products of the backward, which are passed in.
"""

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.kernels.matrices import Prepared, values
from isobit.kernels.ops import Ops, Temperature
from isobit.kernels.product.triton.plan import FEW_ROWS
from isobit.kernels.sampling.triton import (
    CHUNK,
    KINDS,
    VocabularyParts,
    scaled,
    summarize,
    summarize_logits,
)
from isobit.kernels.triton import numbers
from isobit.kernels.triton.launch import launch, target

PARTIALS_AT_ONCE = 2**26
"""Float32 numbers that stage one may leave at a time (256 MiB); rows beyond that wait for the next
launch."""

MOST_REGISTERS = 128
"""Of a thread of the tile's kernel: then two programs of 8 warps fit on a multiprocessor, one
computing while the other loads, or one of 16."""

VOCABULARY_TILE = {torch.bfloat16: 128, torch.float32: 64}
"""Rows of the weight in a tile, a part of the vocabulary: for any number of hidden rows, since it
decides bits."""


class Others(Protocol):
    """The ranks that have the other rows of the head's weight: `first` is the row of the whole that
    is the first here."""

    first: int

    def exchange(self, summary: Tensor, size: int) -> None:
        """Fill a summary [rows, kinds, tiles] of tiles of `size` rows of the weight with the tiles
        of other ranks."""


@triton.jit(
    do_not_specialize=["num_rows", "race", "first"],
    do_not_specialize_on_alignment=[
        "source_ptr",
        "tokens_ptr",
        "keys_ptr",
        "race_ptr",
        "temperature_ptr",
    ],
)
def _head_tiles(
    hidden_ptr, weight_ptr, source_ptr, tokens_ptr, keys_ptr, partial_ptr, race_ptr,
    temperature_ptr, num_rows, weight_stride, race, first,
    VOCABULARY: tl.constexpr, C: tl.constexpr, STEPS: tl.constexpr, STRIDE: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return logits of a tile [BLOCK_V tokens, BLOCK_T rows] and stage one of them. UNIT: every
    temperature is 1. The weight's rows begin at tile `first` of the vocabulary."""
    block = first + tl.program_id(1)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = rows < num_rows
    source = tl.load(source_ptr + rows, mask=inside, other=0)
    token = block * BLOCK_V + tl.arange(0, BLOCK_V)
    k = tl.arange(0, BLOCK_K)
    # beyond the edges some row is loaded again: its logits are not used
    weight_row = tl.minimum(token, VOCABULARY - 1) - first * BLOCK_V
    weight_at = weight_ptr + (weight_row.to(tl.int64) * weight_stride)[:, None] + k[None, :]
    hidden_at = hidden_ptr + source[None, :] * C + k[:, None]
    logits = tl.zeros((BLOCK_V, BLOCK_T), tl.float32)
    for step in range(STEPS):
        at = step * BLOCK_K
        weight, hidden = numbers.load_step(
            weight_at + at, hidden_at + at, k, C - at, C % BLOCK_K == 0
        )
        logits = numbers.dot(weight, hidden, logits)
    if UNIT:
        z = logits
    else:
        z = scaled(logits, tl.load(temperature_ptr + rows, mask=inside, other=1.0)[None, :])
    z = tl.where(token[:, None] < VOCABULARY, z, -float("inf"))
    summarize(
        z, block, rows, inside, tokens_ptr, keys_ptr, partial_ptr, race_ptr, race, BLOCK_V, STRIDE
    )


def _tile(rows: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return (BLOCK_T, BLOCK_K, warps, stages) for rows of operands of `dtype`: bfloat16 or
    float32. Warps along the vocabulary, and BLOCK_K, are those of one row."""
    if dtype == torch.float32:
        return 32, 16, 4, 2
    return (
        (128, 64, 16, 4) if rows > FEW_ROWS and target().matrix == "warpgroup" else (64, 64, 8, 4)
    )


def _summarize_head(
    hidden: Tensor,
    weight: Prepared,
    source: Tensor,
    given: Tensor,
    temperature: Temperature,
    race: bool,
    others: Others | None,
) -> VocabularyParts:
    """Stage one of the logits of hidden[source], source [R]; `given` are tokens [R] or, for a race,
    keys [R, 4]."""
    (vocabulary, channels), weight = weight.shape, values(weight)
    assert hidden.dtype == weight.dtype, f"{hidden.dtype} rows and a head of {weight.dtype}"
    assert hidden.is_contiguous()
    assert weight.stride(1) == 1
    rows = source.shape[0]
    block_v = VOCABULARY_TILE[hidden.dtype]
    (block_t, block_k, warps, stages) = _tile(rows, hidden.dtype)
    unit = not isinstance(temperature, Tensor) and temperature == 1
    if not isinstance(temperature, Tensor):
        temperature = torch.full((rows,), float(temperature), device=hidden.device)
    partials = VocabularyParts(rows, vocabulary, block_v, race, hidden.device)
    launch(
        _head_tiles, (triton.cdiv(rows, block_t), triton.cdiv(weight.shape[0], block_v)),
        hidden, weight, source, given, given, partials.partial, partials.scores,
        temperature, rows, weight.stride(0), int(race), 0 if others is None else others.first // block_v,
        num_warps=warps, num_stages=stages, maxnreg=MOST_REGISTERS,
        VOCABULARY=vocabulary, C=channels, STEPS=triton.cdiv(channels, block_k),
        STRIDE=partials.stride,
        UNIT=unit, BLOCK_V=block_v, BLOCK_T=block_t, BLOCK_K=block_k,
    )  # fmt: skip
    if others is not None:
        others.exchange(partials.partial, block_v)
        if race:
            others.exchange(partials.scores, block_v)
    return partials


def head_logprobs(
    hidden: Tensor,
    weight: Prepared,
    tokens: Tensor,
    temperature: float,
    others: Others | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (log-probability of `tokens` [T] int64, entropy) [T] float32 of softmax(hidden ·
    weightᵀ / temperature).

    hidden [T, C] and weight [V, C] of one dtype, bfloat16 or float32, the weight's last dimension
    contiguous. Logits are sums in float32. With `others` the weight has some rows of V.
    """
    hidden, tokens = hidden.contiguous(), tokens.contiguous()
    every = torch.arange(hidden.shape[0], device=hidden.device)
    stride = triton.cdiv(triton.cdiv(weight.shape[0], VOCABULARY_TILE[hidden.dtype]), 32) * 32
    size = max(1, PARTIALS_AT_ONCE // (KINDS * stride))
    results = [
        _summarize_head(hidden, weight, source, chunk, temperature, False, others).merge(chunk)
        for source, chunk in zip(every.split(size), tokens.split(size))
    ]
    logprob, entropy, _ = (
        results[0] if len(results) == 1 else (torch.cat(column) for column in zip(*results))
    )
    return logprob, entropy


def head_sample(
    hidden: Tensor,
    weight: Prepared,
    keys: Tensor,
    temperature: Temperature,
    source: Tensor | None = None,
    others: Others | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (tokens [B] int64, their log-probabilities [B] float32): key b of `keys` [B, 4] int64
    (seed, prompt, sample, position) draws from row `source[b]` of hidden, by default row b. The
    log-probabilities have the bits of `head_logprobs`."""
    hidden, keys = hidden.contiguous(), keys.contiguous()
    source = (
        torch.arange(keys.shape[0], device=hidden.device) if source is None else source.contiguous()
    )
    tokens = torch.empty(keys.shape[0], dtype=torch.int64, device=hidden.device)
    summary = _summarize_head(hidden, weight, source, keys, temperature, True, others)
    return tokens, summary.merge(tokens)[0]


@triton.jit(
    do_not_specialize_on_alignment=["tokens_ptr", "dlogprobs_ptr", "entropy_ptr", "dentropy_ptr"]
)
def _logits_gradient(
    logits_ptr, norm_ptr, tokens_ptr, dlogprobs_ptr, entropy_ptr, dentropy_ptr, dlogits_ptr,
    temperature,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    OF_ENTROPY: tl.constexpr,
):  # fmt: skip
    """Compute (onehot - p) · dlogprob / temperature, p = softmax(logits / temperature), in the type
    of dlogits; where it is also OF_ENTROPY, less p · (log p + entropy) · dentropy / temperature."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCABULARY
    z = scaled(tl.load(logits_ptr + row * VOCABULARY + token, mask=inside, other=0.0), temperature)
    largest, log_total = tl.load(norm_ptr + row * 2), tl.load(norm_ptr + row * 2 + 1)
    probability = tl.exp((z - largest) - log_total)
    onehot = tl.where(token == tl.load(tokens_ptr + row), 1.0, 0.0)
    dlogit = (onehot - probability) * tl.div_rn(tl.load(dlogprobs_ptr + row), temperature)
    if OF_ENTROPY:
        above = ((z - largest) - log_total) + tl.load(entropy_ptr + row)
        slope = tl.where(probability > 0.0, probability * above, 0.0)
        dlogit -= slope * tl.div_rn(tl.load(dentropy_ptr + row), temperature)
    to = dlogits_ptr + row * VOCABULARY + token
    tl.store(to, numbers.cast(dlogit, dlogits_ptr.dtype.element_ty), mask=inside)


def logits_gradient(
    dlogprobs: Tensor,
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    dtype: torch.dtype,
    dentropy: Tensor | None = None,
) -> Tensor:
    """Compute the gradient [T, V] in `dtype` of logits [T, V] float32 from those of the tokens'
    log-probabilities [T] float32 and, if there are any, of the entropies [T] float32."""
    rows, vocabulary = logits.shape
    logits, tokens = logits.contiguous(), tokens.contiguous()
    _, entropy, norm = summarize_logits(logits, tokens, temperature, False).merge(tokens)
    dlogits = torch.empty((rows, vocabulary), dtype=dtype, device=logits.device)
    block = min(CHUNK, triton.next_power_of_2(vocabulary))
    dlogprobs = dlogprobs.contiguous()
    launch(
        _logits_gradient, (rows, triton.cdiv(vocabulary, block)), logits, norm, tokens,
        dlogprobs, entropy, dlogprobs if dentropy is None else dentropy.contiguous(),
        dlogits, float(temperature), num_warps=8, VOCABULARY=vocabulary, BLOCK=block,
        OF_ENTROPY=dentropy is not None,
    )  # fmt: skip
    return dlogits


def head_backward(
    ops: Ops,
    dlogprobs: Tensor,
    hidden: Tensor,
    weight: Prepared,
    tokens: Tensor,
    temperature: float,
    dentropy: Tensor | None = None,
    into: Tensor | None = None,
    trained: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Compute `Ops.head_backward`, tile by tile of the vocabulary. The logits of all rows are in
    memory at once: a caller decides how many these are (`head_rows`)."""
    weight = values(weight)
    if not len(hidden):
        empty = torch.zeros(weight.shape, device=weight.device) if trained else None
        return torch.empty_like(hidden), into if into is not None else empty
    logits = ops.product(hidden, weight, None, torch.float32)
    dlogits = logits_gradient(dlogprobs, logits, tokens, temperature, hidden.dtype, dentropy)
    dhidden = ops.gradient_product(dlogits, weight.t(), hidden.dtype)
    if not trained:
        return dhidden, into
    return dhidden, ops.gradient_product(dlogits.t(), hidden.t(), torch.float32, into)


def embedding_backward(dy: Tensor, tokens: Tensor, count: int) -> Tensor:
    gradient = torch.zeros(count, dy.shape[1], device=dy.device)
    # on a GPU index_add_ adds in any order; index_put_ sorts first, and so repeats
    return gradient.index_put_((tokens,), dy.float(), accumulate=True)
