"""Samples whose advantage is exactly 0, or whose tokens the loss leaves out: no term of it has a
gradient, and no micro-batch of them alone needs a backward.

Only whole micro-batches are left out. Samples that share one with others stay: their rows decide
with others the scales by which FP8 WGrad quantizes 128 tokens, and a library may choose the order
of a sum by its length. What remains is computed as it would be, and what is left out would have
added zeros (docs/numerics.md, section 6; tests/rl/test_idle.py).
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from isobit.rl.algorithm.loss import LOSSES
from isobit.rl.algorithm.objective import Objective


def zero_advantage_samples(
    objective: Objective,
    advantages: Sequence[Tensor],
    masked: Sequence[bool],
    observed: Sequence[int],
) -> list[bool]:
    """Return which samples teach nothing, given the advantages [trained tokens] of each, which the
    loss leaves out, and how many tokens of each are learned as `observed`. None where another term
    of the loss needs them: a KL penalty, an entropy bonus, a divergence, or what a user's own loss
    may add, which leave out what is masked; a load-balancing loss, which does not."""
    if objective.router_aux_coefficient > 0:
        return [False] * len(advantages)
    penalized = objective.kl_coefficient > 0 and not objective.kl_in_reward
    other = objective.loss == "divergence" or objective.loss not in LOSSES
    if penalized or objective.pays_entropy or other:
        return list(masked)
    return [
        out or not (said or bool(advantage.any()))
        for advantage, out, said in zip(advantages, masked, observed, strict=True)
    ]


def without_teaching(micro: Sequence[Sequence[int]], zero: Sequence[bool]) -> frozenset[int]:
    """Return which of the micro-batches have samples of zero advantage alone."""
    return frozenset(
        number for number, indices in enumerate(micro) if all(zero[i] for i in indices)
    )


def drawn(candidates: Sequence[int], count: int, seed: int, step: int) -> list[int]:
    """At most `count` of the candidates, by raw Philox numbers of (seed, step), in their order."""
    key = np.random.SeedSequence([seed, step, 0x1D1E]).generate_state(2, np.uint64)
    order = np.argsort(np.random.Philox(key=key).random_raw(len(candidates)), kind="stable")
    return [candidates[i] for i in sorted(order[:count].tolist())]
