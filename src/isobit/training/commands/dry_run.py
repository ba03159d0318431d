"""`--dry-run` of `isobit train` and `isobit sft`: check everything that a run would open, and say
what it is and what memory it takes.

The checks that need no weights come first: data, rewards, prompts, and the memory plan, which is
most useful where the weights do not fit. Then the weights are read, and everything is opened.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

from isobit.config import Config, SftConfig
from isobit.errors import IsobitError
from isobit.kernels import Ops, get_ops
from isobit.model.adapters.low_rank import Adapter
from isobit.model.adapters.targets import targeted
from isobit.model.described import Described
from isobit.precision import Precision, precision_from
from isobit.run.directory import refuse_existing
from isobit.tasks.builtin import Task
from isobit.training.parts.assembly import open_parts
from isobit.training.parts.cautions import cautions, supervised_cautions
from isobit.training.parts.given import (
    check_evaluation,
    lessons_of,
    load_supervised,
    open_given,
    unread_columns,
)
from isobit.training.parts.model import described_model, described_policy, model_warning
from isobit.training.parts.sampled import SampledParts
from isobit.training.plan.advice import advice, not_loaded
from isobit.training.plan.divided import resolved
from isobit.training.plan.host import this_machine
from isobit.training.plan.job import Job, job_with
from isobit.training.plan.memory import num_parameters, plan
from isobit.training.recording.callbacks import named_callbacks
from isobit.training.rollouts.lengths import encode_prompt, endings, first_prompt, fit_prompts
from isobit.training.rollouts.processes import Processes
from isobit.training.running.resolved import in_steps, objective_of

Say = Callable[[str], None]
_LEFT_OUT = (
    "the rest of the check, which needs them, is left out; lower the plan, or take a larger machine"
)


def dry_run(config: Config, say: Say) -> None:
    """Check everything that the run would open, and describe it to `say`, block by block; the only
    file written is the cached base model. Raises IsobitError for anything that does not fit, and
    for weights that are more than the memory."""
    refuse_existing(Path(config.run.dir))
    named_callbacks(config.run.callbacks)
    blocks = count()

    def separated(block: str) -> None:
        say(block if next(blocks) == 0 else f"\n{block}")

    prompts: list[str] = []

    def before_weights(task: Task, base: Path, processes: Processes) -> None:
        prompts.append(_say_without_weights(config, task, base, processes, separated))

    opened = open_parts(config, quiet=False, before_weights=before_weights)
    opened.close()
    separated(_opened(opened))
    separated(prompts[0])


def supervised_dry_run(config: SftConfig, say: Say) -> None:
    """Check everything that a supervised run would open, as `dry_run` does, and describe it to
    `say`; nothing is written."""
    refuse_existing(Path(config.run.dir))
    named_callbacks(config.run.callbacks)
    task = load_supervised(config)
    check_evaluation(config, task)
    model = described_model(config, task)
    lessons = lessons_of(task, model, config, quiet=False)
    config = in_steps(config, len(lessons.train))
    ops, precision = get_ops(config.backend, config.consistency), precision_from(config.precision)
    loss = f"{config.loss} with beta {config.beta}" if config.compares else config.loss
    held_out = 0 if lessons.asked is None else len(lessons.asked.examples)
    say(
        f"{_model_text(config, model)}; task {task.name}: {len(lessons.train)} training and "
        f"{held_out} held-out examples\n{config.steps} steps of {config.batch_size} examples; loss: "
        f"{loss}\n{ops.why}; consistency: {config.consistency}"
    )
    trained = f"{config.optimizer.masters}, {config.optimizer.state}"
    for line in (*supervised_cautions(config, lessons.train), unread_columns(config, task)):
        if line is not None:
            say(line)
    say(f"\n{precision.table(model.config.num_layers, trained)}")
    job = lessons.job(config, model.config, this_machine(ops, config.ranks))
    job = resolved(job)
    say(f"\n{_memory(job)}")
    first = f"\n{lessons.first(model)}"
    if (reason := not_loaded(job)) is not None:
        say(first)
        raise IsobitError(f"{reason}: {_LEFT_OUT}")
    tokens = open_given(config, quiet=True).trained.learner.micro_batch_tokens
    say(
        f"\nweights are read; longest example: {job.longest} tokens; micro-batches of {tokens} "
        f"tokens\n{first}"
    )


def _say_without_weights(
    config: Config, task: Task, base: Path, processes: Processes, say: Say
) -> str:
    """Describe to `say` everything that needs no weights, and return the text of the first prompt,
    which is to be printed last. Where the weights do not fit into the memory, the prompt is printed
    and IsobitError raised."""
    model = described_policy(config, base)
    new_tokens, tools = config.sampling.max_new_tokens, processes.tools
    fitted = fit_prompts(task, model, config.task, new_tokens, tools, quiet=True)
    config = in_steps(config, len(fitted.task.train))
    ops, precision = get_ops(config.backend, config.consistency), precision_from(config.precision)
    say(_heading(config, precision, model, fitted.task, ops))
    if (line := processes.unread_columns(config, fitted.task.train.examples)) is not None:
        say(line)
    trained = f"{config.optimizer.masters}, {config.optimizer.state}"
    say(precision.table(model.config.num_layers, trained))
    longest = len(encode_prompt(fitted.longest, model, tools))
    job = job_with(config, model.config, longest, this_machine(ops, config.ranks))
    job = resolved(job)
    say(_memory(job))
    first = fitted.task.train.at(0)
    stop = config.rewards.on_error == "stop"
    begun = processes.begun(first.place, first.prompt, first.columns, stop)
    prompt = first_prompt(replace(first, prompt=begun), model, tools)
    if (reason := not_loaded(job)) is not None:
        say(prompt)
        raise IsobitError(f"{reason}: {_LEFT_OUT}")
    return prompt


def _heading(config: Config, precision: Precision, model: Described, task: Task, ops: Ops) -> str:
    """Return a dry run's heading: the model, its task, steps and computation, and warnings."""
    rule = objective_of(config, precision).rule
    heading = (
        f"{_model_text(config, model)}; "
        f"task {task.name}: {len(task.train)} training and {len(task.held_out)} held-out prompts\n"
        f"{config.steps} steps of {config.prompts_per_step} prompts x "
        f"{config.sampling.group_size} completions; "
        f"correction: {rule}\n{ops.why}; consistency: {config.consistency}"
    )
    for warning in (
        *endings(model, config.sampling),
        model_warning(config, model),
        *cautions(config, task, model),
    ):
        if warning is not None:
            heading += f"\n{warning}"
    return heading


def _model_text(config: Config | SftConfig, model: Described) -> str:
    """Return the family and number of parameters of the model, and those of an adapter."""
    text = f"{model.config.family}, {num_parameters(model.config):,} parameters"
    if (settings := config.adapter) is not None:
        chosen = targeted(model.config, settings.targets)
        adapter = Adapter(settings.rank, settings.alpha, chosen, {}, rslora=settings.rslora)
        text += f", frozen, and an {adapter}: {num_parameters(model.config, settings):,} parameters"
    return text


def _memory(job: Job) -> str:
    """Return the memory plan as text, and whether it fits."""
    planned, whose = plan(job), "" if job.ranks == 1 else f" of each of {job.ranks} ranks"
    whose += "" if job.divided == 1 else f", {job.divided} of which hold a model together"
    return f"memory{whose}, planned from config.json\n{planned.table()}\n{advice(job, planned)}"


def _opened(run: SampledParts) -> str:
    """Return a line on the sizes that the weights and the memory decided."""
    prompt, positions = run.engine.longest_prompt, run.model.config.max_positions
    longest = prompt + min(run.config.most_tokens, positions - prompt)
    return (
        f"weights are read; longest sequence: {longest} tokens; cache: "
        f"{run.engine.pages.num_pages} pages; micro-batches of {run.learner.micro_batch_tokens} tokens"
    )
