"""What a supervised run is put together from: the model, the samples to learn from each example,
the learner, and the held-out answers.

Everything here is opened before a run directory is written, so that a user's mistake costs nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from isobit.config import SftConfig
from isobit.data.columns import unread_line
from isobit.data.dataset import TEMPLATE_KWARGS, Dataset, Example
from isobit.data.messages import TOOLS
from isobit.distributed import ALONE, Ranks
from isobit.errors import IsobitError
from isobit.kernels import get_ops
from isobit.model import Model, ModelConfig
from isobit.model.described import Described
from isobit.monitor.trackers.process import check_trackers
from isobit.options.declare import plain
from isobit.rl.algorithm.given import supervised_objective
from isobit.rl.optim.sharded import ShardedOptimizer
from isobit.tasks.builtin import Task, load_task
from isobit.training.context import RunContext
from isobit.training.learning import Learning
from isobit.training.objects import OnStep
from isobit.training.parts.cautions import supervised_cautions
from isobit.training.parts.divided import held_by, holding_together
from isobit.training.parts.held_out import Asked, HeldOutAnswers
from isobit.training.parts.learner import frozen_reference, trained_by, with_micro_batches
from isobit.training.parts.model import (
    described_model,
    initial_model,
    model_named,
    model_warning,
)
from isobit.training.plan.cards import Machine
from isobit.training.plan.host import this_machine
from isobit.training.plan.job import Given, Job, supervised_job, supervised_job_of
from isobit.training.recording.evaluating import require_held_out
from isobit.training.recording.rollouts import LearnedAnswers
from isobit.training.rollouts.given import GivenAnswers, given
from isobit.training.rollouts.lengths import encode_prompt, keep, outside, say_special_tokens
from isobit.training.rollouts.taught import SupervisedSample, Teacher, is_text
from isobit.training.run import Source
from isobit.training.running.machine import ranks_caution
from isobit.training.running.resolved import in_steps
from isobit.training.sampled_ahead import SampledAhead
from isobit.training.saving.checkpoint import Trained
from isobit.training.saving.reference import FollowingReference, followed

Taught = Mapping[int, Sequence[SupervisedSample]]
"""The samples to learn from each example, by the example's index."""


@dataclass(frozen=True, eq=False)
class GivenParts:
    """The parts of a supervised run. `taught`: the samples to learn from each example; `held_out`:
    None where no example is held out."""

    config: SftConfig
    trained: Trained
    train: Dataset
    taught: Taught
    held_out: HeldOutAnswers | None

    kind, best_by = "supervised, ", None
    callbacks: ClassVar[Sequence[OnStep]] = ()

    def resolved_values(self) -> dict[str, Any]:
        """Return the values that the config leaves open, as `resolved.json` has them."""
        return {
            "loss": self.trained.objective.loss,
            "micro_batch_tokens": self.trained.learner.micro_batch_tokens,
            "order": self.trained.model.ops.order,
        }

    def memory_metrics(self) -> dict[str, float]:
        """Return the memory allocated for weights, moments and a reference, in MiB; not that of
        keys and values, which only an evaluation needs."""
        shared = self.config.adapter is not None
        return self.trained.memory_metrics(None if shared else self.trained.learner.reference)

    def notes(self) -> Iterator[str]:
        """Yield a line on the kernels and the consistency."""
        model = self.trained.model
        yield f"{model.ops.why}; consistency: {self.config.consistency}{held_by(model)}"

    def warnings(self) -> Iterator[str | None]:
        """Yield warnings of what the config probably does not mean."""
        yield model_warning(self.config, self.trained.model)
        yield ranks_caution(self.config.ranks)
        yield from supervised_cautions(self.config, self.train)

    def close(self) -> None:
        """End the processes of rewards. May be called again."""
        if self.held_out is not None:
            self.held_out.close()

    def learned(self, context: RunContext) -> LearnedAnswers:
        """Return what a step records of its answers."""
        return LearnedAnswers(self.config.loss)

    def source(self, context: RunContext) -> Source:
        """Return the source of given answers, which are compared with no rollout."""
        answers = GivenAnswers(self.train, self.taught, context.state, self.config.batch_size)
        learning = Learning(
            context,
            SampledAhead(context),
            quantization_every=self.config.run.quantization_every,
        )
        return Source(answers, learning)

    @property
    def result(self) -> str:
        """The word for what the newest checkpoint holds, in the run's last line."""
        return "model" if self.config.adapter is None else "adapter"


@dataclass(frozen=True, eq=False)
class Lessons:
    """The examples that fit, the samples to learn from each, and the held-out examples or None."""

    train: Dataset
    taught: Taught
    asked: Asked | None
    questions: Sequence[int]
    """Tokens of the held-out prompts that are answered too."""

    def first(self, model: Model | Described) -> str:
        """Return a text of the example that a run starts with, as the model reads it, with the
        tokens learned from it."""
        example = self.train.at(0)
        sample = self.taught[example.index][0]
        mask = sample.completion_mask or (True,) * len(sample.completion_ids)
        prompt, learned = (
            model.tokenizer.decode(list(ids), special=True)
            for ids in (sample.prompt_ids, sample.completion_ids)
        )
        return (
            f"first example ({example.place}, {len(sample.prompt_ids)} tokens):\n{prompt}\n"
            f"and after it, {sum(mask)} of {len(mask)} tokens learned:\n{learned}"
        )

    def job(
        self, config: SftConfig, model: ModelConfig, machine: Machine, ranks: int | None = None
    ) -> Job:
        """Return the job of the run, for which memory is planned."""
        rows = [sample for samples in self.taught.values() for sample in samples]
        longest = max(rows, key=lambda sample: len(sample.prompt_ids) + len(sample.completion_ids))
        shape = Given(
            len(longest.completion_ids),
            max(map(len, self.taught.values())),
            len(self.questions),
            max(self.questions, default=1),
        )
        return supervised_job(config, model, len(longest.prompt_ids), shape, machine, ranks)


def lessons_of(task: Task, model: Model | Described, config: SftConfig, quiet: bool) -> Lessons:
    """Return the lessons of a task. Raises IsobitError for an example that is too long, unless such
    examples are dropped, or from which nothing can be learned."""
    train, taught = _fitted(task.train, "training", task, model, config, quiet)
    held_out = _asked(task, model, config, quiet)
    questions = [] if held_out is None or not held_out.rewards else held_out.examples
    lengths = [len(encode_prompt(example, model)) for example in questions]
    return Lessons(train, taught, held_out, lengths)


def open_given(
    config: SftConfig,
    ranks: Ranks = ALONE,
    began: Mapping[str, Any] = MappingProxyType({}),
    checkpoint: Path | None = None,
    *,
    quiet: bool = False,
) -> GivenParts:
    """Open all parts of a supervised run and return them. `checkpoint`: where the weights are read
    from, if given; `began`: the facts of the run that goes on. Raises IsobitError for anything that
    does not fit."""
    check_trackers(plain(config.tracking))
    task = load_supervised(config)
    check_evaluation(config, task)
    divided = holding_together(config, ranks, lambda: _job(config, task))
    model = initial_model(config, task, ranks, began, checkpoint, divided)
    lessons = lessons_of(task, model, config, quiet or not ranks.first)
    config = in_steps(config, len(lessons.train))
    config = with_micro_batches(
        config, model, lambda machine: lessons.job(config, model.config, machine, ranks.size)
    )
    reference: Model | FollowingReference | None
    reference = followed(model, config.precision, config, task)
    if config.compares and reference is None:
        reference = _reference(config, model, task)
    settings = replace(config.optimizer, total_steps=config.steps, seed=config.seed)
    if not config.of_pairs:  # answers share prompts only by chance
        settings = replace(settings, share_prompts=False)
    optimizer = ShardedOptimizer.of(model, settings)
    weights = config.desirable_weight, config.undesirable_weight
    objective = supervised_objective(config.loss, config.beta, weights)
    trained = trained_by(config, optimizer, model, objective, reference)
    answers = lessons.asked
    held_out = None if answers is None else HeldOutAnswers(model, trained.learner, answers)
    return GivenParts(config, trained, lessons.train, lessons.taught, held_out)


def _job(config: SftConfig, task: Task) -> Job:
    """Return the job of a run whose examples are not measured yet."""
    model, prompt = described_model(config, task).config, config.task.max_prompt_tokens
    machine = this_machine(get_ops(config.backend, config.consistency), config.ranks)
    prompt = None if prompt is None else min(prompt, model.max_positions // 2)
    return supervised_job_of(config, machine, model, prompt)


def _reference(config: SftConfig, model: Model, task: Task) -> Model:
    """Return the model that the run began with, frozen: working weights under the policy's flow, or
    the policy's base without its adapter."""
    if config.adapter is not None:
        return frozen_reference(model.without_adapter(), task)
    assert config.model.path is not None
    flow = config.precision, config.backend, config.consistency, model.ranks
    masters, divided = config.optimizer.masters, model.transformer.group.size
    path = model_named(config.model.path)
    return frozen_reference(Model.load(path, *flow, masters=masters, divided=divided), task)


def load_supervised(config: SftConfig) -> Task:
    """Load the task of a supervised run, whose files may have any of the columns that supervised
    sets have. Raises IsobitError for bad data."""
    return load_task(replace(config.task, seed=config.seed, supervised=True))


def unread_columns(config: SftConfig, task: Task) -> str | None:
    """Return a line about columns of the data that nothing in a supervised run reads; None without
    any."""
    answers = {"chosen", "rejected"} if config.of_pairs else {task.gold or "completion"}
    read = {TEMPLATE_KWARGS, TOOLS, *answers}
    read |= {"label", "completion"} if config.loss == "kto" else set()
    return unread_line(task.train.examples, read, supervised=True)


def check_evaluation(config: SftConfig, task: Task) -> None:
    """Raise IsobitError for an evaluation that has no held-out examples, or whose metrics the run
    does not have."""
    require_held_out(config, task)
    evaluation, accuracy = config.evaluation, "accuracy/held_out"
    known = ["loss/held_out", *([accuracy] if task.rewards else [])]
    known += ["preference/held_out_accuracy"] if config.compares else []
    if evaluation.stops and evaluation.stop_by == accuracy and not task.rewards:
        key = "patience" if evaluation.stop_at is None else "stop_at"
        raise IsobitError(
            f"evaluation.{key}: task {config.task.name!r} has no reward, so there is no accuracy "
            "to reach; set evaluation.stop_by: loss/held_out"
        )
    evaluation.check_metrics(known)


def _asked(task: Task, model: Model | Described, config: SftConfig, quiet: bool) -> Asked | None:
    if not len(task.held_out):
        return None
    chosen = replace(task.held_out, examples=task.held_out.examples[: config.evaluation.samples])
    fitted, taught = _fitted(chosen, "held-out", task, model, config, quiet)
    samples = [s for i, e in enumerate(fitted.examples) for s in given(taught[e.index], i)]
    return Asked(fitted.examples, samples, task.rewards, config.max_new_tokens)


def _fitted(
    data: Dataset,
    name: str,
    task: Task,
    model: Model | Described,
    config: SftConfig,
    quiet: bool,
) -> tuple[Dataset, dict[int, Sequence[SupervisedSample]]]:
    """Return the examples that are not too long, and the samples to learn from each, by its index.
    Raises IsobitError for an example that is too long, unless the task drops such examples."""
    context, teacher = model.config.max_positions, Teacher(task, model, config.turns)
    taught: list[tuple[Example, list[SupervisedSample]]] = []

    def problem(example: Example) -> str | None:
        samples = teacher.lesson(example, config.loss)
        taught.append((example, samples))
        longest = max(samples, key=lambda each: len(each.prompt_ids) + len(each.completion_ids))
        prompt, completion = len(longest.prompt_ids), len(longest.completion_ids)
        if prompt + completion > context:
            if not config.of_pairs and is_text(example, task):
                both = f"a text of {prompt + completion} tokens"
            else:
                both = f"a prompt of {prompt} tokens with a completion of {completion}"
            return f"{both} exceeds the model's context of {context}"
        return outside(prompt, config.task)

    fitted = keep(data, problem, config.task, name, quiet)
    within = {example.index for example in fitted.examples}
    taught = [(example, samples) for example, samples in taught if example.index in within]
    if not quiet and name == "training":
        say_special_tokens(fitted.examples, model)
        teacher.say([(example, sample) for example, samples in taught for sample in samples])
    return fitted, {example.index: samples for example, samples in taught}
