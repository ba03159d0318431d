"""Whether the learner computes the bits that the rollout recorded, where the flow promises that it
does.

Under a unified precision and `consistency: bitwise` or `exact` a single differing token means that
an operator depends on its batch, or that weights, scales or cache were not what they should be. So
the learner compares before its first optimizer step changes anything, and nothing is learned from a
batch that disagrees (tests/training/test_agreement.py). Left out: where the difference begins
(`evaluation/inspection/locate.py`) and the message for the user (`training/measuring/agreement.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from isobit.model import Model
from isobit.rl.algorithm.correction_rule import CORRECTIONS
from isobit.rl.algorithm.mismatch import differing_places
from isobit.rl.algorithm.objective import ResolvedObjective
from isobit.rl.algorithm.samples import Sample

Compared = tuple[Sample, Tensor, Tensor]
"""A sample with the log-probabilities [trained tokens] that the rollout recorded, and the
learner's."""


@dataclass(frozen=True)
class Difference:
    """The first differing token, at `position` in the sample's completion, and its two
    log-probabilities."""

    sample: Sample
    position: int
    rollout: float
    learner: float


class Disagreement(Exception):
    """`differing` of `compared` tokens differ in a bit, `first` before all others. `batch` are the
    samples that the learner computed together, in its order: those that it was about to take an
    optimizer step on."""

    def __init__(
        self, differing: int, compared: int, first: Difference, batch: Sequence[Sample]
    ) -> None:
        super().__init__(f"{differing} of {compared} tokens differ")
        self.differing, self.compared, self.first, self.batch = differing, compared, first, batch


def promises_bits(model: Model) -> bool:
    """Return whether rollout and learner of this model must compute the same bits."""
    precision = model.precision
    return (
        precision.unified
        and model.ops.consistency != "fast"
        and precision.varies_with_batch() is None
    )


def require_agreement(compared: Sequence[Compared], batch: Sequence[Sample]) -> None:
    """Raise Disagreement unless both log-probabilities of samples are equal, bit for bit. `batch`:
    all samples that the learner computed together, with those that have nothing to compare."""
    differing, first = 0, None
    for sample, rollout, learner in compared:
        positions = differing_places(learner, rollout).nonzero().flatten()
        differing += len(positions)
        if first is None and len(positions):
            position = int(positions[0])
            first = Difference(
                sample, sample.trained[position], float(rollout[position]), float(learner[position])
            )
    if first is not None:
        raise Disagreement(differing, sum(len(learner) for _, _, learner in compared), first, batch)


def corrected(objective: ResolvedObjective) -> ResolvedObjective:
    """Return the objective for a batch that disagrees: old log-probabilities are recomputed, and
    tokens weighed by the given correction, or by token TIS, which is the default of flows with two
    engines."""
    rule = objective.rule if objective.rule.active else CORRECTIONS["token_tis"]
    return replace(objective, recompute_old=True, rule=rule)
