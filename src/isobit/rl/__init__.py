"""The algorithm: advantages, losses, correction, mismatch, packing, optimizer, and the learner that
joins them.

Here are the names that need no torch: settings and samples.
"""

from isobit.rl.algorithm.objective import OBJECTIVES, Objective, ResolvedObjective, for_precision
from isobit.rl.algorithm.samples import Group, Sample
from isobit.rl.optim.schedule import OptimizerSettings, learning_rate

__all__ = [
    "OBJECTIVES",
    "Group",
    "Objective",
    "OptimizerSettings",
    "ResolvedObjective",
    "Sample",
    "for_precision",
    "learning_rate",
]
