"""The state of a run between two steps: a checkpoint's content apart from weights and optimizer.

A step changes counters, queues and scales first, and the weights only when it learns. So what is
copied here when a step is whole goes with the weights until the next one learns: where that one
fails before, in a reward function, say, the copy is saved, and the run goes on from there as if
nothing had happened (tests/test_resume.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from isobit.rl import Group
from isobit.rl.algorithm.credit import StepBatch
from isobit.rl.algorithm.samples import groups_to_json
from isobit.run.certificate import GENESIS
from isobit.run.metrics import of_the_machine
from isobit.training.saving.checkpoint import Trained


@dataclass
class State:
    """The counters and queues of a run.

    `cursor`: prompts taken from the data; `pending`: scored groups that are in no batch yet;
    `queue`: batches that wait to be learned from, where rollouts run ahead; `unrecorded`: metrics
    of the newest step, if its evaluation failed and they are not in their file; `synced_step`: the
    steps whose masters the working weights are made of, which no checkpoint holds; `head`: the hash
    of the certificate's newest row; `solved`: for prompts that were sampled, by their index, the
    fraction of completions that solved it, for a curriculum; `unfinished`: groups with a completion
    that goes on in the next step, by the order of their prompts.
    """

    step: int = 0
    cursor: int = 0
    pending: list[Group] = field(default_factory=list)
    queue: list[StepBatch] = field(default_factory=list)
    unrecorded: dict[str, float] | None = None
    synced_step: int | None = None
    head: str = GENESIS
    solved: dict[int, float] = field(default_factory=dict)
    unfinished: list[Group] = field(default_factory=list)

    @property
    def synced(self) -> bool:
        """Whether the working weights are those of the masters now."""
        return self.synced_step == self.step

    def progress(self, steps: int, prompts: int) -> dict[str, float]:
        """Return what reward functions get as `trainer_state`, in a run of `steps` steps on
        `prompts` prompts."""
        return {"global_step": self.step, "max_steps": steps, "epoch": self.cursor / prompts}


@dataclass(frozen=True)
class Snapshot:
    """A state that later steps do not change. `rest` are plain values, `scales` those of a
    calibrated KV cache."""

    state: State
    replay: tuple[Group, ...]
    scales: Mapping[str, Tensor]
    rest: Mapping[str, Any]

    @staticmethod
    def take(state: State, trained: Trained, written: Mapping[str, Any], best: Any) -> "Snapshot":
        """Copy the present state. Groups and batches are never changed once they are in it, so only
        the lists are copied."""
        copied = replace(
            state,
            pending=list(state.pending),
            queue=list(state.queue),
            solved=dict(state.solved),
            unfinished=list(state.unfinished),
        )
        rest = {
            "bad_steps_in_a_row": trained.learner.bad_steps_in_a_row,
            "entropy_bonus": trained.learner.entropy_bonus.state(),
            # of the weights learned with last: a resumed run makes the next ones, and counts them
            "weights_version": trained.model.weights_version - state.synced,
            "masters": trained.optimizer.settings.masters,
            "best": best,
            **written,
        }
        return Snapshot(copied, tuple(trained.replay.groups), trained.calibrator.state(), rest)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, `scales` left out; the same on every machine and at any number of
        ranks, so without times."""
        state, unrecorded = self.state, self.state.unrecorded
        if unrecorded is not None:
            unrecorded = {
                name: value for name, value in unrecorded.items() if not of_the_machine(name)
            }
        return {
            "step": state.step,
            "cursor": state.cursor,
            "pending": groups_to_json(state.pending),
            "queue": [batch.to_json() for batch in state.queue],
            "unrecorded": unrecorded,
            "replay": groups_to_json(self.replay),
            **({"solved": state.solved} if state.solved else {}),
            **({"unfinished": groups_to_json(state.unfinished)} if state.unfinished else {}),
            **self.rest,
        }
