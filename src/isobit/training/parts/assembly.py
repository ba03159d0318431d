"""Open what a config names: models, task, rewards, engine, optimizer, learner.

Everything here runs before a run directory is written, so that a user's mistake costs nothing. Left
out: the directory (`run.py`).
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from isobit.config import Config
from isobit.data.dataset import Example
from isobit.data.episodes import RecordedEnvironments
from isobit.data.turns import Environments
from isobit.distributed import ALONE, Ranks
from isobit.distributed.launch import check_alike
from isobit.engine.dialogue import Dialogue
from isobit.engine.engine import Engine
from isobit.engine.group import GroupEnvironments
from isobit.engine.prompts import Prompt
from isobit.engine.types import Sampling
from isobit.errors import IsobitError
from isobit.evaluation.answers import answer_extractor
from isobit.evaluation.measure import EvaluationPlan, Scorer, default_ks
from isobit.evaluation.periodic import SEED_OFFSET, PeriodicEvaluation
from isobit.kernels import computed_by, get_ops
from isobit.model import Model, RewardModel, TextRules
from isobit.model.adapters.peft import is_adapter
from isobit.model.divided.by_rows import rollout_model
from isobit.monitor.trackers.process import check_trackers
from isobit.options.declare import plain
from isobit.rl import ResolvedObjective
from isobit.rl.algorithm.functions import check_functions
from isobit.rl.optim.sharded import ShardedOptimizer
from isobit.tasks.builtin import Task, load_task
from isobit.tasks.environments.pool import EnvironmentPool
from isobit.tasks.environments.settings import EnvironmentConfig
from isobit.training.measuring.agreement import unlike
from isobit.training.objects import NO_OBJECTS, Objects
from isobit.training.parts.base import cached_model
from isobit.training.parts.divided import holding_together
from isobit.training.parts.learner import frozen_reference, trained_by, with_micro_batches
from isobit.training.parts.model import load_trained, model_named, shared_vocabulary
from isobit.training.parts.sampled import SampledParts
from isobit.training.plan.advice import cannot_fit
from isobit.training.plan.host import this_machine
from isobit.training.plan.job import Job, architecture, assumed_prompt, job_with
from isobit.training.recording.evaluating import require_held_out
from isobit.training.rollouts.asynchronous import open_fleet
from isobit.training.rollouts.lengths import encode_prompt, fit_prompts
from isobit.training.rollouts.processes import Processes, no_processes, open_processes
from isobit.training.rollouts.serving import open_serving, take_place
from isobit.training.rollouts.teaching import Teaching
from isobit.training.running.machine import date_of, machine_facts
from isobit.training.running.resolved import in_steps, resolve
from isobit.training.saving.reference import FollowingReference, followed
from isobit.training.scoring import RewardScorer, WeightedModel


def open_parts(
    config: Config,
    ranks: Ranks = ALONE,
    began: Mapping[str, Any] = MappingProxyType({}),
    checkpoint: Path | None = None,
    *,
    quiet: bool,
    objects: Objects = NO_OBJECTS,
    recorded: Path | None = None,
    before_weights: Callable[[Task, Path, Processes], None] | None = None,
) -> SampledParts:
    """Open all parts of a run and return them. `began`: the facts of the run that goes on, or is
    replayed; `checkpoint`: where the weights are read from, if given; `recorded`: the run whose
    rollouts this run learns from: no environment is opened then, unless held-out prompts are asked.
    `before_weights`, of a dry run, is called with the task, the model's directory and the processes
    of the user's code before a weight is read, and replaces the warning that the run cannot fit; no
    fleet and no server is opened then. Several `ranks` share the masters, and the config says how
    many of them hold each model together. Raises IsobitError for anything that does not fit."""
    objects.require(config)
    samples = recorded is None and before_weights is None
    with ExitStack() as held:
        address = take_place(config) if samples else None
        if address is not None:
            held.callback(address.listener.close)
        check_trackers(plain(config.tracking))
        task = task_of(config, objects)
        require_held_out(config, task)
        if recorded is None or config.evaluation.every or not config.environment.used:
            processes = open_processes(config, task, objects)
        else:
            processes = no_processes(config, task, recorded)
        held.callback(processes.close)
        processes.check(config, task, quiet=not ranks.first)
        base = base_of(config, began, quiet)
        if before_weights is not None:
            before_weights(task, base, processes)
        vocabulary = shared_vocabulary(config, base)
        divided = 1
        if not is_adapter(base):  # refused below
            divided = holding_together(config, ranks, lambda: _job(config, base))
            if before_weights is None and checkpoint is None:
                ranks.on_first(lambda: _say_what_cannot_fit(_job(config, base).together(divided)))
        model = load_trained(
            config, base, checkpoint, ranks, date_of(began, ranks), vocabulary, divided
        )
        check_alike(ranks, computed_by(model.ops))  # a machine may lack a compiler
        run_parts = _put_together(config, task, processes, base, model, objects, recorded)
        if samples:
            fleet = ranks.run_on_all(
                lambda: open_fleet(run_parts.config, run_parts.sampling, run_parts.engine, ranks)
            )
            if fleet is not None:
                held.callback(fleet.close)
            coming = run_parts.optimizer.nbytes + run_parts.optimizer.gradient_bytes
            serving = open_serving(run_parts.config, model, coming, address)
            run_parts = replace(run_parts, fleet=fleet, serving=serving)
        held.pop_all()  # the run closes them
        return run_parts


def task_of(config: Config, objects: Objects = NO_OBJECTS) -> Task:
    """Load the task of a run that samples, or of an evaluation. Raises IsobitError for bad data."""
    by_columns = config.environment.factory is not None
    return load_task(
        replace(config.task, seed=config.seed, rows=objects.rows, by_columns=by_columns)
    )


def _say_what_cannot_fit(job: Job) -> None:
    if (line := cannot_fit(job)) is not None:
        print(line, file=sys.stderr)


def _job(config: Config, base: Path) -> Job:
    """Return the job of a run whose prompts and weights are not read yet."""
    machine = this_machine(get_ops(config.backend, config.consistency), config.ranks)
    model = architecture(str(base))
    prompt = min(assumed_prompt(config, model), model.max_positions - 1)
    return job_with(config, model, prompt, machine)


def _put_together(
    config: Config,
    task: Task,
    processes: Processes,
    base: Path,
    model: Model,
    objects: Objects,
    recorded: Path | None,
) -> SampledParts:
    ranks, divided = model.ranks, model.transformer.group.size
    tools, most = processes.tools, config.sampling.max_new_tokens
    fitted = fit_prompts(task, model, config.task, most, tools, quiet=not ranks.first)
    task, dialogue = fitted.task, None
    if processes.environments is not None:
        dialogue = open_dialogue(
            config.environment, config.most_tokens, model, processes.environments, fitted.longest
        )
    scorer = RewardScorer(
        processes.rewards,
        () if processes.recorded else reward_models(config, model.tokenizer.now, ranks, divided),
        config.rewards.on_error == "stop",
        processes.earned,
        required=config.needs_rewards,
        tokenizer=model.tokenizer,
    )
    longest = encode_prompt(fitted.longest, model, tools)
    config, differences = in_steps(config, len(task.train)), tuple[str, ...]()
    if recorded is not None:
        differences = tuple(unlike(recorded, config, machine_facts(model, config.algorithm)))
    resolved = resolve(config, model, scorer.weights, learns_like_recorded=not differences)
    _check_router(resolved.objective, model)
    check_functions(resolved.objective)
    precision = config.reference.precision or config.precision
    reference: Model | FollowingReference | None = followed(model, precision, config, task)
    if reference is None and resolved.objective.kl_coefficient > 0:
        reference = _reference(config, base, model, task)
    settings = replace(config.optimizer, total_steps=config.steps, seed=config.seed)
    optimizer = ShardedOptimizer.of(model, settings)
    coming = optimizer.nbytes + optimizer.gradient_bytes
    sampling = rollout_sampling(config)
    sequences = config.prompts_under_way * sampling.n
    engine = sized_engine(config, model, [longest], sequences, coming, resolved.record_routes)
    held_out = None
    if config.evaluation.every:
        held_out = _held_out(config, model, task, scorer, coming, dialogue)
    config = with_micro_batches(
        config,
        model,
        lambda machine: job_with(
            config, model.config, engine.longest_prompt, machine, ranks=ranks.size
        ),
    )
    judges = [weighted.model.transformer for weighted in scorer.models]
    expects, objective = resolved.expects_equal_bits, resolved.objective
    trained = trained_by(config, optimizer, model, objective, reference, judges, expects)
    teacher, shown, teaching = trained.learner.reference, config.reference.shown, None
    if shown is not None and teacher is not None and recorded is None:
        teaching = Teaching.of(shown, task, teacher, ranks, most)
    return SampledParts(
        config,
        replace(resolved, micro_batch_tokens=trained.learner.micro_batch_tokens),
        trained,
        task,
        held_out,
        processes,
        scorer,
        engine,
        sampling,
        differences,
        dialogue,
        teaching,
        recorded,
        objects,
    )


def _check_router(objective: ResolvedObjective, model: Model) -> None:
    if model.config.routed is None and (
        objective.router_replay or objective.router_aux_coefficient
    ):
        key = "router_replay" if objective.router_replay else "router_aux_coefficient"
        raise IsobitError(
            f"algorithm.{key}: the model is dense ({model.config.family}): it has no router"
        )


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
    ranks hold together as they hold the policy's, made of masters that no rank had whole; or the
    policy's base without its adapter; or the policy itself. Raises IsobitError for a teacher that
    cannot be compared with the policy."""
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
        divided = model.transformer.group.size
        reference = Model.load(path, *flow, masters=masters, vocabulary=ids, divided=divided)
        longest, needed = reference.config.max_positions, model.config.max_positions
        if teacher is not None and longest < needed:
            raise IsobitError(
                f"reference.path: {teacher} has a context of {longest} tokens, and the policy one "
                f"of {needed}, which the teacher cannot read"
            )
        reference.tokenizer = model.tokenizer  # with its chat template
    return frozen_reference(reference, task)


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
    options = {name: getattr(evaluation, name) for name in ("temperature", "top_p", "top_k")}
    overrides = {name: value for name, value in options.items() if value is not None}
    return EvaluationPlan(
        replace(config.sampling, seed=seed, **overrides),
        num_samples=evaluation.num_samples,
        ks=tuple(sorted(set(evaluation.pass_at))) or default_ks(evaluation.num_samples),
        tag=evaluation.tag,
        extract=answer_extractor(config.task.name, evaluation.answer_pattern),
    )


def held_out_scorer(scorer: RewardScorer) -> Scorer:
    """Return the scorer of held-out completions: functions and environments decide which are
    correct, and reward models where there are neither."""
    return scorer.without_models


def reward_models(
    config: Config, now: datetime, ranks: Ranks = ALONE, divided: int = 1
) -> list[WeightedModel]:
    """Load the reward models of a config, each held together by `divided` of the ranks; `now`: the
    run's date."""
    models = []
    for entry in config.rewards.models:
        flow = entry.precision, config.backend, config.consistency
        model = RewardModel.load(entry.path, *flow, ranks, TextRules(now=now), divided)
        models.append(WeightedModel(model, entry.weight, entry.name))
    return models


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
    model = rollout_model(model)
    return Engine.sized_for(model, prompts, sequences, most, config.engine, reserved, record_routes)


def open_dialogue(
    settings: EnvironmentConfig,
    max_tokens: int | None,
    model: Model,
    environments: EnvironmentPool,
    example: Example,
) -> Dialogue:
    """Return the dialogue with `environments`, checked on the prompt of the example. Raises
    IsobitError for a prompt that is not a chat, and for a template with which the answers of tools,
    or without tools any message, cannot be appended; other messages are checked when they come."""
    dialogue = _dialogue(settings, max_tokens, model, environments)
    if isinstance(example.prompt, str):
        raise IsobitError(
            f"environment: {example.place} has a text as its prompt, and turns need chats; set "
            "task.chat: true"
        )
    if environments.tools:
        appending = dialogue.appending(example.prompt)
        (appending.check_shown if dialogue.forks else appending.check)("tool")
    elif environments.answers_turns and environments.max_turns > 1 and not dialogue.forks:
        dialogue.appending(example.prompt).check_end()
    return dialogue


def recorded_dialogue(config: Config, model: Model) -> Dialogue:
    """Return a dialogue with environments that answer as the run recorded."""
    settings = config.environment
    environments = RecordedEnvironments(settings.max_turns)
    return _dialogue(settings, config.most_tokens, model, environments)


def _dialogue(
    settings: EnvironmentConfig, max_tokens: int | None, model: Model, environments: Environments
) -> Dialogue:
    if (group := model.transformer.group).size > 1:
        environments = GroupEnvironments(environments, group)
    parser, forks = settings.parser or "auto", settings.history == "fork"
    return Dialogue.of(model.tokenizer, environments, parser, max_tokens, forks=forks)
