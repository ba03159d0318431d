"""Values with their uncertainty: Wilson's interval for a proportion, Student's and the bootstrap's
for a mean, and the unbiased pass@k.

Left out: what a correct completion is (its reward says), how completions are made (`evaluation/`),
and tests of a difference (`evaluation/paired.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_Z95 = 1.959963984540054
_CLOSED_FORM_DEGREES = 200
_HALVINGS = 60  # of an angle, until float64 has no number between its bounds

_ELEMENTS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval, and the number of prompts behind it."""

    value: float
    low: float
    high: float
    prompts: int

    def __str__(self) -> str:
        return (
            f"{self.value:.4f}  (95 % interval {self.low:.4f} to {self.high:.4f}, "
            f"{self.prompts} prompts)"
        )


def proportion(correct: int, total: int) -> Estimate:
    """Return the fraction correct with Wilson's score interval (Wilson 1927): honest at 0, at 1,
    and for few prompts."""
    assert 0 <= correct <= total
    assert total > 0
    fraction = correct / total
    denominator = 1 + _Z95**2 / total
    center = (fraction + _Z95**2 / (2 * total)) / denominator
    half = (
        _Z95 / denominator * math.sqrt(fraction * (1 - fraction) / total + _Z95**2 / (4 * total**2))
    )
    low = 0.0 if correct == 0 else max(0.0, center - half)
    high = 1.0 if correct == total else min(1.0, center + half)
    return Estimate(fraction, low, high, total)


def mean_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """Return (mean, low, high) with Student's interval of the mean (Student 1908), by default of 95
    %; of one value it is the value alone."""
    count = len(values)
    assert count > 0
    mean = math.fsum(values) / count
    if count == 1:
        return mean, mean, mean
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (count - 1))
    half = student_quantile(count - 1, level) * deviation / math.sqrt(count)
    return mean, mean - half, mean + half


def student_quantile(degrees: int, level: float = 0.95) -> float:
    """Return the bound ± within which a share of `level` of Student's t with `degrees` degrees of
    freedom, at least 1, lies.

    Up to 200 degrees by bisection of the closed form; above, by the expansion around the normal
    quantile (Abramowitz & Stegun 1964, 26.7.5), which is off by less than 1e-10 there.
    """
    assert degrees >= 1
    if degrees > _CLOSED_FORM_DEGREES:
        z = _Z95 if level == 0.95 else NormalDist().inv_cdf((1 + level) / 2)
        terms = (
            (z**3 + z) / 4,
            (5 * z**5 + 16 * z**3 + 3 * z) / 96,
            (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
            (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
        )
        return z + math.fsum(term / degrees ** (i + 1) for i, term in enumerate(terms))
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_within(middle, degrees) < level else (low, middle)
    return math.sqrt(degrees) * math.tan(high)


def _student_within(angle: float, degrees: int) -> float:
    """Return P(|t| <= sqrt(degrees) · tan(angle)), a finite sum (Abramowitz & Stegun 1964, 26.7.3
    and 26.7.4)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    total, term = 0.0, cosine if odd else 1.0
    for i in range(odd, degrees - 1, 2):
        total += term
        term *= cosine**2 * (i + 1) / (i + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate without bias, from `num_samples` of which `num_correct` pass, that one of `k`
    passes. 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1), as a product that
    does not overflow."""
    assert 1 <= k <= num_samples
    if num_samples - num_correct < k:
        return 1.0
    missed = 1.0
    for i in range(k):
        missed *= (num_samples - num_correct - i) / (num_samples - i)
    return 1.0 - missed


def bootstrap_mean(values: Sequence[float], resamples: int = 2000) -> Estimate:
    """Return the mean over prompts with the percentile bootstrap's 95 % interval (Efron 1979),
    under a fixed seed, so that it repeats. Values that are all equal give an interval without
    width, and few prompts one that is too narrow."""
    array = np.asarray(values, dtype=np.float64)
    assert array.size > 0
    generator = np.random.Generator(np.random.Philox(key=0))
    at_once = max(1, _ELEMENTS_AT_ONCE // array.size)
    means = [
        array[
            generator.integers(0, array.size, (min(at_once, resamples - start), array.size))
        ].mean(axis=1)
        for start in range(0, resamples, at_once)
    ]
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return Estimate(float(array.mean()), float(low), float(high), array.size)
