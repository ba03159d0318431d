"""Open what a config names: models, task, rewards, engine, optimizer, learner.

Everything here runs before a run directory is written, so that a user's mistake costs nothing. Left
out: the directory (`opening.py`).
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from isobit.config import Config
from isobit.distributed import ALONE, Ranks
from isobit.distributed.launch import check_alike
from isobit.engine.calibration import Calibrator
from isobit.engine.dialogue import Dialogue
from isobit.engine.engine import Engine
from isobit.engine.prompts import Prompt
from isobit.engine.types import Sampling
from isobit.errors import IsobitError
from isobit.evaluation.answers import answer_extractor
from isobit.evaluation.measure import EvaluationPlan, Scorer, default_ks
from isobit.evaluation.periodic import SEED_OFFSET, PeriodicEvaluation
from isobit.kernels import computed_by, get_ops
from isobit.model import Model, RewardModel, TextRules
from isobit.model.adapters.peft import is_adapter
from isobit.monitor.trackers.process import check_trackers
from isobit.options.declare import plain
from isobit.rl import ResolvedObjective
from isobit.rl.algorithm.functions import check_functions
from isobit.rl.algorithm.replay import ReplayBuffer
from isobit.rl.learner.learner import Learner
from isobit.rl.optim.sharded import ShardedOptimizer
from isobit.tasks.builtin import Task, load_task
from isobit.training.adapting import load_trained, model_named, shared_vocabulary
from isobit.training.measuring.agreement import unlike
from isobit.training.objects import NO_OBJECTS, Objects
from isobit.training.parts import Parts
from isobit.training.plan.advice import cannot_fit
from isobit.training.plan.host import this_machine
from isobit.training.plan.job import architecture, job_with
from isobit.training.plan.memory import fitting_tokens
from isobit.training.recording.evaluating import require_held_out
from isobit.training.resolved import Resolved, in_steps, resolve
from isobit.training.rollouts.lengths import encode_prompt, fit_prompts
from isobit.training.rollouts.processes import Processes, no_processes, open_processes
from isobit.training.rollouts.teaching import Teaching
from isobit.training.running.machine import date_of, machine_facts
from isobit.training.saving.checkpoint import Trained
from isobit.training.saving.reference import calibrate_reference, followed
from isobit.training.scoring import RewardScorer, WeightedModel
from isobit.training.session.conversing import open_dialogue
from isobit.training.sft.base import cached_model


def open_parts(
    config: Config,
    *,
    quiet: bool,
    checkpoint: Path | None = None,
    objects: Objects = NO_OBJECTS,
    ranks: Ranks = ALONE,
    began: Mapping[str, Any] = MappingProxyType({}),
    before_weights: Callable[[Task, Path, Processes], None] | None = None,
    recorded: Path | None = None,
) -> Parts:
    """Open all parts of a run and return them. `checkpoint`: where the weights are read from, if
    given; `began`: the facts of the run that goes on, or is replayed; `recorded`: the run whose
    rollouts this run learns from: no environment is opened then, unless held-out prompts are asked.
    `before_weights` is called with the task, the model's directory and the processes of the user's
    code before a weight is read, and replaces the warning that the run cannot fit. Several `ranks`
    share the policy's masters; a reference and reward models are whole on each rank once they are
    read. Raises IsobitError for anything that does not fit."""
    objects.require(config)
    check_trackers(plain(config.tracking))
    task = task_of(config, objects)
    require_held_out(config, task)
    if recorded is None or config.evaluation.every or not config.environment.used:
        processes = open_processes(config, task, objects)
    else:
        processes = no_processes(config, task, recorded)
    try:
        processes.check(config, task, quiet=not ranks.first)
        base = base_of(config, began, quiet)
        if before_weights is not None:
            before_weights(task, base, processes)
        elif checkpoint is None and ranks.first and not is_adapter(base):  # refused later
            _say_what_cannot_fit(config, base)
        models = _open_models(config, task, processes, base, began, checkpoint, ranks)
        return _put_together(config, processes, models, ranks, recorded)
    except BaseException:
        processes.close()
        raise


def task_of(config: Config, objects: Objects = NO_OBJECTS) -> Task:
    """Load the task of a run that samples, or of an evaluation. Raises IsobitError for bad data."""
    by_columns = config.environment.factory is not None
    return load_task(
        replace(config.task, seed=config.seed, rows=objects.rows, by_columns=by_columns)
    )


def _say_what_cannot_fit(config: Config, base: Path) -> None:
    ops = get_ops(config.backend, config.consistency)
    job = job_with(config, architecture(str(base)), 1, this_machine(ops, config.ranks))
    if (line := cannot_fit(job)) is not None:
        print(line, file=sys.stderr)


@dataclass(frozen=True, eq=False)
class _Models:
    """The model that a run trains, its scorer and its dialogue, opened, and the task with the
    prompts that fit; `longest`: the tokens of the longest prompt."""

    model: Model
    base: Path
    task: Task
    longest: list[int]
    scorer: RewardScorer
    dialogue: Dialogue | None


def _open_models(
    config: Config,
    task: Task,
    processes: Processes,
    base: Path,
    began: Mapping[str, Any],
    checkpoint: Path | None,
    ranks: Ranks,
) -> _Models:
    model = _trained(config, base, began, checkpoint, ranks)
    environments, tools = processes.environments, processes.tools
    new_tokens = config.sampling.max_new_tokens
    fitted = fit_prompts(task, model, config.task, new_tokens, tools, quiet=not ranks.first)
    dialogue = None
    if environments is not None:
        dialogue = open_dialogue(config, model, environments, fitted.longest)
    scorer = RewardScorer(
        processes.rewards,
        () if processes.recorded else reward_models(config, model.tokenizer.now, ranks),
        config.rewards.on_error == "stop",
        processes.earned,
        required=config.needs_rewards,
        tokenizer=model.tokenizer,
    )
    longest = encode_prompt(fitted.longest, model, tools)
    return _Models(model, base, fitted.task, longest, scorer, dialogue)


def _put_together(
    config: Config, processes: Processes, models: _Models, ranks: Ranks, recorded: Path | None
) -> Parts:
    model, task, scorer, dialogue = models.model, models.task, models.scorer, models.dialogue
    config = in_steps(config, len(task.train))
    other = (
        ()
        if recorded is None
        else tuple(unlike(recorded, config, machine_facts(model, config.algorithm)))
    )
    resolved = resolve(config, model, scorer.weights, learns_like_recorded=not other)
    objective = resolved.objective
    _check_router(objective, model)
    check_functions(objective)
    following = followed(model, config.reference.precision or config.precision, config, task)
    reference = following.model if following is not None else None
    if objective.kl_coefficient > 0 and following is None:
        reference = _reference(config, models.base, model, task)
    teaching = None
    if config.reference.shown is not None and reference is not None and recorded is None:
        teaching = Teaching.of(
            config.reference.shown, task, reference, ranks, config.sampling.max_new_tokens
        )
    optimizer = optimizer_of(config, model)
    coming = optimizer.nbytes + optimizer.gradient_bytes
    sampling = rollout_sampling(config)
    sequences = config.prompts_under_way * sampling.n
    engine = sized_engine(
        config, model, [models.longest], sequences, coming, resolved.record_routes
    )
    held_out = (
        _held_out(config, model, task, scorer, coming, dialogue)
        if config.evaluation.every
        else None
    )

    def parts_with(config: Config, resolved: Resolved) -> Parts:
        learner = _learner(config, model, optimizer, resolved, reference)
        frozen = [weighted.model.transformer for weighted in scorer.models]
        frozen += [] if reference is None or reference is model else [reference.transformer]
        calibrator = Calibrator(model, resolved.micro_batch_tokens)
        replay = ReplayBuffer(config.replay, config.seed)
        trained = Trained(model, optimizer, learner, calibrator, replay, frozen, following)
        return Parts(
            config,
            resolved,
            ranks,
            trained,
            reference,
            task,
            held_out,
            processes,
            scorer,
            engine,
            sampling,
            other,
            dialogue=dialogue,
            teaching=teaching,
        )

    if config.optimizer.micro_batch_tokens != "auto":
        return parts_with(config, resolved)
    # a number, in the config too: the split of a batch decides how gradients are rounded, so a
    # run that goes on repeats the number, on any machine
    machine = this_machine(model.ops, ranks.size)
    job = job_with(config, model.config, engine.longest_prompt, machine, ranks=ranks.size)
    fitting = min(ranks.all_gather_json(fitting_tokens(job)))
    fixed = replace(config, optimizer=replace(config.optimizer, micro_batch_tokens=fitting))
    return parts_with(fixed, replace(resolved, micro_batch_tokens=fitting))


def _check_router(objective: ResolvedObjective, model: Model) -> None:
    if model.config.routed is None and (
        objective.router_replay or objective.router_aux_coefficient
    ):
        key = "router_replay" if objective.router_replay else "router_aux_coefficient"
        raise IsobitError(
            f"algorithm.{key}: the model is dense ({model.config.family}): it has no router"
        )


def optimizer_of(config: Config, model: Model) -> ShardedOptimizer:
    """Return the optimizer of a run, for the model's masters."""
    return ShardedOptimizer.of(
        model, replace(config.optimizer, total_steps=config.steps, seed=config.seed)
    )


def _learner(
    config: Config,
    model: Model,
    optimizer: ShardedOptimizer,
    resolved: Resolved,
    reference: Model | None,
) -> Learner:
    return Learner(
        model,
        optimizer,
        resolved.objective,
        reference=reference,
        micro_batch_tokens=resolved.micro_batch_tokens,
        recompute=config.optimizer.activation_checkpointing,
        seed=config.seed,
        on_mismatch=config.on_mismatch,
        expects_equal_bits=resolved.expects_equal_bits,
        check_gradients_every=config.run.check_gradients_every,
        measured_zero_advantage=config.mismatch.samples_of_zero_advantage,
    )


def _trained(
    config: Config, base: Path, began: Mapping[str, Any], checkpoint: Path | None, ranks: Ranks
) -> Model:
    """Load the model that is trained, with a tokenizer that reads prompts as the run does."""
    vocabulary = shared_vocabulary(config, base)
    model = load_trained(config, base, checkpoint, ranks, date_of(began, ranks), vocabulary)
    check_alike(ranks, computed_by(model.ops))  # a machine may lack a compiler
    return model


def rollout_sampling(config: Config) -> Sampling:
    """Return the settings with which a run samples the completions that it learns from."""
    return replace(config.sampling, n=config.sampling.group_size, seed=config.seed)


def base_of(config: Config, began: Mapping[str, Any], quiet: bool) -> Path:
    """Return the directory of the model that a run begins with, which may also be the reference of
    its KL penalty. A model of `model.sft` is trained if it is not in the cache."""
    if config.model.path is not None:
        return model_named(config.model.path)
    return cached_model(str(config.model.sft), began, quiet=quiet)


def _reference(config: Config, base: Path, model: Model, task: Task) -> Model:
    """Return the frozen model of the KL penalty, or a teacher: a model with working weights that
    are whole on every rank, made of masters that no rank had whole; or the policy's base without
    its adapter; or the policy itself. Raises IsobitError for a teacher that cannot be compared with
    the policy."""
    if config.reference.weights == "policy":
        return model
    if config.shares_reference:
        reference = model.without_adapter()
    else:
        teacher = config.reference.path
        precision = config.reference.precision or config.precision
        # the policy's numbers, so that a reference that is the policy costs nothing
        masters = config.optimizer.masters if config.adapter is None else "fp32"
        flow = precision, config.backend, config.consistency, model.ranks
        path = base if teacher is None else model_named(teacher)
        ids = model.config.vocab_size
        reference = Model.load(path, *flow, masters=masters, vocabulary=ids)
        if teacher is not None:
            _check_teacher(teacher, reference, model)
        reference.tokenizer = model.tokenizer  # with its chat template
    calibrate_reference(reference, task)
    reference.transformer.freeze()
    return reference


def _check_teacher(path: str, teacher: Model, policy: Model) -> None:
    """Raise IsobitError unless the teacher has a context at least as long."""
    if teacher.config.max_positions < policy.config.max_positions:
        raise IsobitError(
            f"reference.path: {path} has a context of {teacher.config.max_positions} tokens, and the "
            f"policy one of {policy.config.max_positions}, which the teacher cannot read"
        )


def _held_out(
    config: Config,
    model: Model,
    task: Task,
    scorer: RewardScorer,
    reserved: int,
    dialogue: Dialogue | None,
) -> PeriodicEvaluation:
    plan = evaluation_plan(config)
    examples = list(task.held_out.examples[: config.evaluation.samples])
    tools = () if dialogue is None else dialogue.environments.tools
    prompts = [encode_prompt(example, model, tools) for example in examples]
    engine = sized_engine(
        config, model, prompts, len(examples) * max(1, plan.num_samples), reserved
    )
    held_out = PeriodicEvaluation(
        engine, examples, held_out_scorer(scorer), plan, model.ranks, dialogue
    )
    config.evaluation.check_metrics(held_out.metrics)
    return held_out


def evaluation_plan(config: Config) -> EvaluationPlan:
    """Return the plan by which a run's config asks held-out prompts."""
    evaluation, seed = config.evaluation, (config.seed + SEED_OFFSET) % 2**63
    given = {name: getattr(evaluation, name) for name in ("temperature", "top_p", "top_k")}
    asked = {name: value for name, value in given.items() if value is not None}
    return EvaluationPlan(
        replace(config.sampling, seed=seed, **asked),
        num_samples=evaluation.num_samples,
        ks=tuple(sorted(set(evaluation.pass_at))) or default_ks(evaluation.num_samples),
        tag=evaluation.tag,
        extract=answer_extractor(config.task.name, evaluation.answer_pattern),
    )


def held_out_scorer(scorer: RewardScorer) -> Scorer:
    """Return the scorer of held-out completions: functions and environments decide which are
    correct, and reward models where there are neither."""
    return scorer.without_models


def reward_models(config: Config, now: datetime, ranks: Ranks = ALONE) -> list[WeightedModel]:
    """Load the reward models of a config, whole on every rank; `now`: the run's date."""
    found = []
    for given in config.rewards.models:
        flow = given.precision, config.backend, config.consistency
        model = RewardModel.load(given.path, *flow, ranks, TextRules(now=now))
        found.append(WeightedModel(model, given.weight, given.name))
    return found


def sized_engine(
    config: Config,
    model: Model,
    prompts: Sequence[Prompt],
    sequences: int,
    reserved: int = 0,
    record_routes: bool = False,
) -> Engine:
    """Return an engine for any of the prompts, with a cache that holds `sequences` sequences,
    within the config's bounds; `reserved`: bytes that the first update will take; `record_routes`:
    whether the routes of a mixture of experts are recorded for its learner."""
    most = config.most_tokens
    return Engine.sized_for(model, prompts, sequences, most, config.engine, reserved, record_routes)
