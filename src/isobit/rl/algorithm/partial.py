"""Completions that go on across updates of the weights: how far each gets in a round, and which of
their tokens are too old to learn from.

The budget is in tokens of each completion (Kimi k1.5, arXiv 2501.12599), not in
seconds or steps of an engine, so what is interrupted depends on the tokens alone. Tokens of weights
that are too old stay as context and leave the loss (slime's `mask_offpolicy_in_partial_rollout`);
to drop their completions would leave out the long ones. Left out: who samples
(`training/rollouts/partial.py`), and the correction of what is learned from (`correction.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from isobit.errors import IsobitError
from isobit.options.declare import at_least
from isobit.rl.algorithm.samples import Group, Sample


@dataclass(frozen=True)
class PartialSettings:
    """Completions that go on across updates: a step ends with the round in which enough groups are
    whole, and the others go on after the update, under the new weights."""

    tokens_per_round: Annotated[
        int,
        at_least(0),
        "new tokens of a completion in a round, after which a step looks whether enough groups are "
        "whole; 0: every step samples its completions whole",
    ] = 0
    extra_prompts: Annotated[
        int | None,
        at_least(0),
        "prompts that are under way besides those that a step waits for; 0: it waits for all of "
        "them, and none goes on later; default: as many as `prompts_per_step`",
    ] = None
    max_staleness: Annotated[
        int,
        at_least(0),
        "age limit of tokens in steps; older ones have no loss, and are only the context of "
        "what follows",
    ] = 4

    @property
    def used(self) -> bool:
        """Whether a completion may go on after an update."""
        return self.tokens_per_round > 0

    def extra(self, prompts_per_step: int) -> int:
        """`extra_prompts`, resolved; 0 where completions are whole."""
        if not self.used:
            return 0
        return prompts_per_step if self.extra_prompts is None else self.extra_prompts

    def check(self, refused: Sequence[tuple[str, bool, str]]) -> None:
        """Raise IsobitError for the first setting in use that excludes partial rollouts: (key,
        whether it is used, the setting that switches it off)."""
        for key, present, instead in refused if self.used else ():
            if present:
                raise IsobitError(
                    f"partial.tokens_per_round: completions that go on across an update cannot be "
                    f"used with {key} yet: set {instead}, or partial.tokens_per_round: 0"
                )


def unfinished(sample: Sample, max_new_tokens: int) -> bool:
    """Return whether a completion was interrupted: neither ended nor at its length limit."""
    return sample.truncated and len(sample.completion_ids) < max_new_tokens


def learnable(group: Group, step: int, max_staleness: int) -> Group:
    """Return a group as the step after `step` learned ones learns from it: tokens that were drawn
    more than `max_staleness` steps before are context."""
    samples = []
    for sample in group:
        young = [s for s in sample.drawn if step - s.rollout_step <= max_staleness]
        start = young[0].start if young else len(sample.completion_ids)
        samples.append(sample.trained_from(start))
    return samples
