"""The algorithm: advantages, losses, correction, mismatch, packing, optimizer; and the learner that joins them."""

from isobit.rl.advantages import group_advantages, has_spread, overlong_penalty
from isobit.rl.learner import Learner
from isobit.rl.objective import OBJECTIVES, Objective, for_precision
from isobit.rl.optim import Optimizer, OptimizerSettings, learning_rate
from isobit.rl.samples import Group, Sample
from isobit.rl.supervised import supervised_update

__all__ = [
    "OBJECTIVES",
    "Group",
    "Learner",
    "Objective",
    "Optimizer",
    "OptimizerSettings",
    "Sample",
    "for_precision",
    "group_advantages",
    "has_spread",
    "learning_rate",
    "overlong_penalty",
    "supervised_update",
]
