"""The evaluation of the held-out prompts, when it is due, and its records."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from isobit.config import Config, SftConfig
from isobit.errors import IsobitError
from isobit.evaluation.periodic import PeriodicEvaluation
from isobit.evaluation.result import Question
from isobit.run.completions import conversation
from isobit.tasks.builtin import Task
from isobit.training.context import RunContext
from isobit.training.policy import Policy
from isobit.training.recording.rows import shortened

if TYPE_CHECKING:
    from isobit.training.parts.held_out import HeldOutAnswers


def require_held_out(config: Config | SftConfig, task: Task) -> None:
    """Raise IsobitError where the run is to be evaluated and the held-out split is empty."""
    if config.evaluation.every and not len(task.held_out):
        raise IsobitError(
            "evaluation.every: the held-out split is empty; set task.held_out_size or "
            "task.held_out_path"
        )


def evaluated_only_as_the_last(config: Config | SftConfig, step: int) -> bool:
    """Return whether a step is evaluated only because it is the last, so that a run of more steps
    would not evaluate it: also without `evaluation.every` if the run is supervised."""
    every = config.evaluation.every
    evaluated = bool(every) or isinstance(config, SftConfig)
    return evaluated and step == config.steps and not _due(step, every)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def rows_of(step: int, questions: Sequence[Question]) -> Iterator[dict[str, Any]]:
    """Yield the rows of held_out.jsonl.gz: for each prompt the greedy completion, whose
    `sample_index` is 0, and the samples; each with the columns of the data, whose `answer` is the
    right answer, and with the model's answer under the key `found`."""
    for number, question in enumerate(questions):
        prompt = question.prompt
        if not isinstance(prompt, str):
            prompt = conversation(prompt)
        columns = {name: shortened(value) for name, value in question.columns.items()}
        for sample, graded in enumerate((question.greedy, *question.samples)):
            values = graded.to_json()
            answer = values.pop("answer")
            yield {
                "step": step,
                "prompt_index": number,
                "sample_index": sample,
                "prompt": prompt,
                "tag": question.tag,
                "columns": columns,
                **values,
                "found": answer,
            }


class Evaluating:
    """The evaluations of a run. `held_out`: None where the run evaluates nothing."""

    def __init__(
        self,
        config: Config | SftConfig,
        held_out: "PeriodicEvaluation | HeldOutAnswers | None",
        policy: Policy,
        context: RunContext,
    ) -> None:
        self._held_out, self._every, self._steps = held_out, config.evaluation.every, config.steps
        self._policy, self._context = policy, context

    def metrics(self, last: bool) -> dict[str, float]:
        """Evaluate the present weights if the step is due or the `last`, write the answers, and
        return the metrics; return none for any other step."""
        context, step = self._context, self._context.state.step
        if self._held_out is None or not (_due(step, self._every) or last):
            return {}
        self._policy.refresh()
        context.meter.phase("evaluate")
        with context.saver.broken_weights_end_the_run():
            progress = context.state.progress(self._steps, len(context.train))
            values, line, answered = self._held_out.evaluate(progress)
        context.trained.learner.check_memory()
        context.display.note(f"step {step}: {line}")
        context.run.write_held_out(rows_of(step, answered))
        context.best.consider(step, values)
        return values
