"""Advantages of completions from rewards of their group (GRPO, Dr. GRPO, RLOO); which groups teach anything.

Left out: advantages of tokens (`token_advantages.py`). An unscored sample (reward None) has no advantage and no part in
its group's baseline. Equal rewards give exactly 0.
"""

import math
from collections.abc import Sequence

GROUP_KINDS = ("grpo", "dr_grpo", "rloo")
_EPS = 1e-6


def group_advantages(rewards: Sequence[float | None], kind: str) -> list[float | None]:
    """Advantages of one group, None where the reward is None.

    grpo: (r - mean) / (std + 1e-6) (Shao et al. 2024, arXiv 2402.03300, section 4.1.2), with the sample's standard
    deviation (n - 1), as the field's trainers take it. dr_grpo: r - mean (Liu et al. 2025, arXiv
    2503.20783). rloo: r - mean of the others (Ahmadian et al. 2024, 2402.14740). A group of one scored sample, or of
    equal rewards, has advantage 0.
    """
    assert kind in GROUP_KINDS
    scored = [reward for reward in rewards if reward is not None]
    if not has_spread(rewards):
        return [None if reward is None else 0.0 for reward in rewards]
    count = len(scored)
    mean = math.fsum(scored) / count
    if kind == "grpo":
        deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in scored) / (count - 1))
        factor = 1.0 / (deviation + _EPS)
    else:
        # r - mean of the others = (r - mean of all) * n / (n - 1)
        factor = count / (count - 1) if kind == "rloo" else 1.0
    return [None if reward is None else (reward - mean) * factor for reward in rewards]


def has_spread(rewards: Sequence[float | None]) -> bool:
    """Whether the scored rewards of a group differ: if not, no sample of it has a gradient.

    Dynamic sampling (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2) keeps a group if this holds; it decides on
    the group, never on a sample.
    """
    scored = [reward for reward in rewards if reward is not None]
    return len(scored) > 1 and min(scored) != max(scored)


def overlong_penalty(length: int, limit: int, buffer: int, penalty: float = 1.0) -> float:
    """DAPO's soft penalty (section 3.4, eq. 13), added to the reward.

    0 up to `limit - buffer` tokens, falling linearly to -penalty at `limit`.
    """
    if buffer == 0:
        return 0.0
    excess = length - (limit - buffer)
    return -penalty * min(max(excess / buffer, 0.0), 1.0)
