"""Losses of answers that were given, not sampled: supervised training's. The learner takes them as it
takes a loss of `loss.py`; a run that samples cannot name them.

Left out: where the answers come from (`training/sft/`).
"""

from isobit.rl.algorithm.advantages import AdvantageFunction, AdvantageInputs, Advantages
from isobit.rl.algorithm.loss import LossFunction, LossInputs, LossOutputs
from isobit.rl.algorithm.objective import ResolvedObjective

GIVEN = "given"
"""The advantage of a given answer, by name."""


def given(inputs: AdvantageInputs) -> Advantages:
    """The reward itself, which is 1: nothing is compared with it."""
    return list(inputs.rewards)


def cross_entropy(inputs: LossInputs) -> LossOutputs:
    """-log policy of each trained token, which knows no advantage."""
    return LossOutputs(-inputs.policy_logprobs)


GIVEN_LOSSES: dict[str, LossFunction] = {"cross_entropy": cross_entropy}
GIVEN_ADVANTAGES: dict[str, AdvantageFunction] = {GIVEN: given}


def supervised_objective() -> ResolvedObjective:
    """The mean cross-entropy of all trained tokens of a step. The answers are of no weights of the
    run, so nothing is compared with a rollout."""
    return ResolvedObjective(
        advantage=GIVEN,
        loss="cross_entropy",
        loss_aggregation="token_mean",
        stale_samples=True,
    )
