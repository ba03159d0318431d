"""Two models on the same prompts: is the difference more than chance?

`mcnemar` for right and wrong, `sign_flip` for any value per prompt. Both are exact under the null
hypothesis that the two models could be exchanged on every prompt, and use the pairing: what both
get right, or both wrong, says nothing. The interval of a difference is `intervals.bootstrap_mean`
of the differences. Left out: a correction for asking several questions of the same data.
"""

from collections.abc import Sequence

import numpy as np

EXACT_PAIRS = 13
"""Sign-flip tests of at most so many unequal pairs enumerate all 2^13 = 8,192 assignments."""
DRAWS = 9_999
_ROWS_AT_ONCE = 1 << 22


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the two-sided p value of McNemar's exact test (McNemar 1947, with the binomial in
    place of chi-squared): the chance that `only_first` + `only_second` tosses of a coin are split
    at least as unevenly."""
    pairs, fewer = only_first + only_second, min(only_first, only_second)
    term = total = 1  # binomial coefficients, as whole numbers
    for i in range(fewer):
        term = term * (pairs - i) // (i + 1)
        total += term
    return min(1.0, 2 * total / (1 << pairs))


def sign_flip(differences: Sequence[float]) -> float:
    """Return the two-sided p value of the sign-flip permutation test of a mean difference of 0
    (Fisher 1935).

    All assignments of signs where at most EXACT_PAIRS differences are not 0, else DRAWS random ones
    under a fixed seed, with the observed one counted among them, so that p is never 0 (Phipson &
    Smyth 2010).
    """
    unequal = np.asarray([d for d in differences if d != 0], dtype=np.float64)
    if unequal.size == 0:
        return 1.0
    # sums of the same numbers in another order may differ in their last bits
    observed = abs(unequal.sum()) - 1e-9 * np.abs(unequal).sum()
    if unequal.size <= EXACT_PAIRS:
        every = 1.0 - 2.0 * ((np.arange(1 << unequal.size)[:, None] >> np.arange(unequal.size)) & 1)
        return float((np.abs(every @ unequal) >= observed).mean())
    generator = np.random.Generator(np.random.Philox(key=0))
    as_far, rows = 0, max(1, _ROWS_AT_ONCE // unequal.size)
    for start in range(0, DRAWS, rows):
        signs = 1.0 - 2.0 * generator.integers(
            0, 2, (min(rows, DRAWS - start), unequal.size), dtype=np.int8
        )
        as_far += int((np.abs(signs @ unequal) >= observed).sum())
    return (as_far + 1) / (DRAWS + 1)
