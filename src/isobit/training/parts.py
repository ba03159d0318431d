"""What a config names, opened: what a run is put together from (`session/open_run.py`), and its
memory planned for. The verbs of the loop are given what they need of it. Left out: how it is opened
(`session/assembly.py`)."""

from dataclasses import dataclass
from typing import Any

from isobit.config import Config
from isobit.data.dataset import Dataset
from isobit.distributed import Ranks
from isobit.engine.calibration import Calibrator
from isobit.engine.dialogue import Dialogue
from isobit.engine.engine import Engine
from isobit.engine.fleet.fleet import Fleet
from isobit.engine.types import Sampling
from isobit.evaluation.periodic import PeriodicEvaluation
from isobit.model import Model
from isobit.rl.learner.learner import Learner
from isobit.rl.optim.sharded import ShardedOptimizer
from isobit.tasks.builtin import Task
from isobit.training.resolved import Resolved
from isobit.training.rollouts.processes import Processes
from isobit.training.rollouts.serving import Serving
from isobit.training.rollouts.teaching import Teaching
from isobit.training.saving.checkpoint import Trained
from isobit.training.scoring import RewardScorer


@dataclass(frozen=True, eq=False)
class Parts:
    """`engine` rolls out, or the engines of a `fleet` instead; that of `held_out` answers its
    prompts, and that of `serving` others' requests. These share the weights. `processes`: of the user's
    code; `dialogue`: with environments, where there are some; `teaching`: what a teacher reads, where
    it is shown more than the policy. `unlike`: what makes a run from recorded
    rollouts compute other bits than they promise."""

    config: Config
    resolved: Resolved
    ranks: Ranks
    trained: Trained
    reference: Model | None
    task: Task
    held_out: PeriodicEvaluation | None
    processes: Processes
    scorer: RewardScorer
    engine: Engine
    sampling: Sampling
    unlike: tuple[str, ...] = ()
    fleet: Fleet | None = None
    serving: Serving | None = None
    dialogue: Dialogue | None = None
    teaching: Teaching | None = None

    @property
    def train(self) -> Dataset:
        return self.task.train

    @property
    def model(self) -> Model:
        return self.trained.model

    @property
    def optimizer(self) -> ShardedOptimizer:
        return self.trained.optimizer

    @property
    def learner(self) -> Learner:
        return self.trained.learner

    @property
    def calibrator(self) -> Calibrator:
        return self.trained.calibrator

    @property
    def engines(self) -> list[Engine]:
        """That of the rollout, of held-out prompts and of others' requests, in this process."""
        held_out = [] if self.held_out is None else [self.held_out.engine]
        return [self.engine, *held_out, *([] if self.serving is None else [self.serving.engine])]

    @property
    def micro_batch_tokens(self) -> int:
        """As resolved: `auto` is a number here, which the run's config.yaml keeps."""
        return self.resolved.micro_batch_tokens

    def resolved_values(self) -> dict[str, Any]:
        """What the config leaves open, as `resolved.json` has it."""
        return self.resolved.plain()

    def memory_metrics(self) -> dict[str, float]:
        """Allocated for keys and values, and for weights, in MiB."""
        kept = sum(engine.kv_bytes for engine in self.engines)
        reference = None if self.config.shares_reference else self.reference
        found = {"memory/kv_cache_mib": kept / 2**20, **self.trained.memory_metrics(reference)}
        if self.scorer.models:
            judging = sum(weighted.model.nbytes() for weighted in self.scorer.models)
            found["memory/reward_models_mib"] = judging / 2**20
        return found
