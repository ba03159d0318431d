"""The entropy bonus: the loss is less by coefficient · entropy of the policy at each token, averaged
as the loss is (verl's `entropy_coeff`).

Under a target the coefficient adapts to it: after an optimizer step whose mean entropy is at or
below the target it grows by a step, else it shrinks, within bounds; and it applies only while the
last mean entropy was at or below the target (He et al. 2025, Skywork Open Reasoner 1, arXiv
2505.22312, section 4; the bounds are those of TRL's `use_adaptive_entropy`). Left out: the entropy
and its gradient (`model/forward/head.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from isobit.rl.algorithm.objective import Objective


@dataclass
class EntropyBonus:
    """The `coefficient` now, and the mean entropy of the last optimizer step in nats, None before
    the first: what a checkpoint holds of it."""

    coefficient: float
    last: float | None = None

    @staticmethod
    def of(objective: Objective) -> "EntropyBonus":
        """Return the bonus at the beginning of a run."""
        return EntropyBonus(objective.entropy_coefficient)

    def applied(self, objective: Objective) -> float:
        """Return the coefficient of the next optimizer step."""
        target = objective.entropy_target
        if target is None:
            return self.coefficient
        return self.coefficient if self.last is not None and self.last <= target else 0.0

    def stepped(self, entropy: float, objective: Objective) -> None:
        """Adapt the coefficient after an optimizer step on tokens of this mean `entropy`."""
        target, by = objective.entropy_target, objective.entropy_coefficient_step
        if target is None:
            return
        moved = self.coefficient + (by if entropy <= target else -by)
        self.coefficient = min(max(moved, 0.0), objective.entropy_coefficient_max)
        self.last = entropy

    def state(self) -> Mapping[str, float | None]:
        """Return plain values for a checkpoint."""
        return {"coefficient": self.coefficient, "last": self.last}
