"""maj@k, also called cons@k: is the most frequent answer of k samples right?

Self-consistency (Wang et al. 2022, arXiv 2203.11171): an answer is extracted from each completion,
and the most frequent one is the answer of the group. From n samples of a prompt, `majority_at_k` is
the mean over all ways to take k of them, without replacement and in any order, where the answer
that was given first wins a tie: an unbiased estimate of what k fresh samples would do, without any
resampling (verl's maj@k draws 1,000 times with replacement, which is biased towards the frequent
answers; NeMo RL's cons@k enumerates the subsets). A sample without an answer has no vote; a group
without a vote is wrong. Where completions of one answer differ in their reward, that of the first
one counts.

Orders need not be enumerated: whichever of the t tied answers comes first is each of them with
probability 1/t, and the first completion of an answer is each of its completions with the same
probability. So a subset of samples whose largest vote is j contributes the mean, over the answers
with j votes, of the fraction of the answer's completions that are right. The sum over subsets is a
product of polynomials, one factor per answer: the coefficient of x^i counts the ways to take i of
its completions.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

LARGEST_GROUP = 1000
"""Samples per prompt; above that the number of subsets overflows float64."""


def majority_at_k(
    answers: Sequence[str | None], correct: Sequence[bool], ks: Sequence[int]
) -> dict[int, float]:
    """Return maj@k for every k, from one prompt's samples: their answers (None: no vote) and
    whether each is right.

    Each 1 <= k <= the number of samples <= LARGEST_GROUP.
    """
    assert len(answers) == len(correct) <= LARGEST_GROUP
    assert all(1 <= k <= len(answers) for k in ks)
    votes = Counter(answer for answer in answers if answer is not None)
    right = Counter(
        answer for answer, passed in zip(answers, correct) if answer is not None and passed
    )
    signature = tuple(sorted((count, right[answer]) for answer, count in votes.items()))
    return dict(zip(ks, _expected(signature, len(answers), tuple(ks))))


@lru_cache(maxsize=4096)  # many prompts share their counts, such as 8 of 8
def _expected(votes: tuple[tuple[int, int], ...], n: int, ks: tuple[int, ...]) -> list[float]:
    """Return maj@k of answers with (completions, right completions), of `n` samples, those without
    an answer included."""
    sums = dict.fromkeys(ks, 0.0)
    for top in range(1, min(max(ks), max((count for count, _ in votes), default=0)) + 1):
        rights = _subsets_with_top_vote(votes, n - sum(count for count, _ in votes), top, max(ks))
        ties = np.arange(1, rights.shape[1])
        for k in ks:
            sums[k] += float((rights[k, 1:] / ties).sum())
    return [min(1.0, sums[k] / math.comb(n, k)) for k in ks]


def _subsets_with_top_vote(
    votes: Sequence[tuple[int, int]], silent: int, top: int, largest: int
) -> np.ndarray:
    """Return [i, t]: over the subsets of i samples whose largest vote is `top`, given to t answers,
    the sum over these answers of the fraction that is right."""
    ways = np.zeros(
        (largest + 1, largest // top + 1)
    )  # subsets; t * top samples at least, so t has this bound
    ways[:, 0] = [math.comb(silent, i) for i in range(largest + 1)]
    rights = np.zeros_like(ways)
    for count, right in votes:
        next_ways, next_rights = np.zeros_like(ways), np.zeros_like(rights)
        for taken in range(min(count, top - 1) + 1):
            choices = float(
                math.comb(count, taken)
            )  # NumPy 1 multiplies no array by an integer of more than 64 bits
            next_ways[taken:] += choices * ways[: largest + 1 - taken]
            next_rights[taken:] += choices * rights[: largest + 1 - taken]
        if count >= top:
            choices = float(math.comb(count, top))
            next_ways[top:, 1:] += choices * ways[:-top, :-1]
            next_rights[top:, 1:] += choices * (
                rights[:-top, :-1] + right / count * ways[:-top, :-1]
            )
        ways, rights = next_ways, next_rights
    return rights
