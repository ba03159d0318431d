"""The learner of a run of any kind with all that it changes, its reference, and the size of its
micro-batches."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from isobit.config import Config, SftConfig
from isobit.engine.calibration import Calibrator
from isobit.model import Model
from isobit.model.transformer import Transformer
from isobit.rl import ResolvedObjective
from isobit.rl.algorithm.replay import ReplayBuffer, ReplaySettings
from isobit.rl.learner.learner import Learner
from isobit.rl.optim.sharded import ShardedOptimizer
from isobit.tasks.builtin import Task
from isobit.training.plan.cards import Machine
from isobit.training.plan.host import this_machine
from isobit.training.plan.job import Job
from isobit.training.plan.memory import fitting_tokens
from isobit.training.saving.checkpoint import Trained
from isobit.training.saving.reference import FollowingReference, calibrate_reference

_Config = TypeVar("_Config", bound=Config | SftConfig)


def trained_by(
    config: Config | SftConfig,
    optimizer: ShardedOptimizer,
    model: Model,
    objective: ResolvedObjective,
    reference: Model | FollowingReference | None,
    frozen: Sequence[Transformer] = (),
    expects_equal_bits: bool = False,
) -> Trained:
    """Return what a learner of the objective changes. `frozen`: models other than the reference
    that do not learn; `expects_equal_bits`: of rollout and learner."""
    following = reference if isinstance(reference, FollowingReference) else None
    compared = reference.model if isinstance(reference, FollowingReference) else reference
    tokens = config.optimizer.micro_batch_tokens
    assert tokens != "auto"
    sampling = config if isinstance(config, Config) else None
    learner = Learner(
        model,
        optimizer,
        objective,
        reference=compared,
        micro_batch_tokens=tokens,
        recompute=config.optimizer.activation_checkpointing,
        seed=config.seed,
        on_mismatch="warn" if sampling is None else sampling.on_mismatch,
        expects_equal_bits=expects_equal_bits,
        check_gradients_every=config.run.check_gradients_every,
        measured_zero_advantage=0
        if sampling is None
        else sampling.mismatch.samples_of_zero_advantage,
    )
    if compared is not None and compared is not model:
        frozen = [*frozen, compared.transformer]
    replay = ReplayBuffer(ReplaySettings() if sampling is None else sampling.replay, config.seed)
    calibrator = Calibrator(model, tokens)
    return Trained(model, optimizer, learner, calibrator, replay, frozen, following)


def frozen_reference(reference: Model, task: Task) -> Model:
    """Return a reference that stays, calibrated on the task's prompts where its KV cache has
    scales."""
    calibrate_reference(reference, task)
    reference.transformer.freeze()
    return reference


def with_micro_batches(config: _Config, model: Model, job: Callable[[Machine], Job]) -> _Config:
    """Return the config with a number in place of `micro_batch_tokens: auto`: what fits into the
    rank with the least memory. The split of a batch decides how gradients are rounded, so a run
    that goes on repeats the number, on any machine."""
    if config.optimizer.micro_batch_tokens != "auto":
        return config
    ranks, divided = model.ranks, model.transformer.group.size
    fitting = fitting_tokens(job(this_machine(model.ops, ranks.size)).together(divided))
    tokens = int(min(ranks.all_gather_json(fitting)))
    return replace(config, optimizer=replace(config.optimizer, micro_batch_tokens=tokens))
