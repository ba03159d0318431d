"""`isobit eval`: a model, a run or given completions on held-out prompts; and two of them compared.

The questions come from a configuration, the evaluated run's or an empty one, changed by the command
line: so a run's checkpoint is evaluated as training evaluated it. Left out: what is measured
(`evaluation/`), and the comparison of saved results (`evaluation/shown.py`).
"""

import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from isobit.config import Config, load_any_run_config, parse_config
from isobit.config.commands import check_read_by_eval
from isobit.config.reading import read_source
from isobit.data.answers import answer_in
from isobit.data.dataset import Example
from isobit.errors import IsobitError, brief, listed, printable
from isobit.evaluation.comparison import check_same_prompts
from isobit.evaluation.measure import grade_given, measure_each, tags_of
from isobit.evaluation.progress import ProgressLine
from isobit.evaluation.result import Question, Result, read_result, write_result
from isobit.evaluation.shown import is_saved, show, show_adapters
from isobit.model import Model
from isobit.model.described import described
from isobit.model.hub.checkpoint import model_folder
from isobit.options.declare import plain
from isobit.run import directory as runs
from isobit.tasks.builtin import Task
from isobit.training.commands.serving import open_serving
from isobit.training.parts.assembly import (
    evaluation_plan,
    held_out_scorer,
    open_dialogue,
    reward_models,
    sized_engine,
    task_of,
)
from isobit.training.parts.model import text_rules
from isobit.training.rollouts.lengths import (
    encode_prompt,
    endings,
    fit_prompts,
    say_ends,
    say_special_tokens,
)
from isobit.training.rollouts.processes import Processes, open_processes
from isobit.training.running.machine import date_of
from isobit.training.scoring import RewardScorer

DEFAULT_SAMPLES = 8
_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_OF_SAMPLES = (
    *(f"evaluation.{name}" for name in ("num_samples", "pass_at", "temperature", "top_k", "top_p")),
    *(f"sampling.{name}" for name in _SAMPLED),
)
_EMPTY: dict[str, Any] = {"model": {"path": "."}, "sampling": {"max_new_tokens": 256}}


@dataclass(frozen=True)
class Request:
    """The options of the command line. `overrides`: changes of a run's configuration; `best`: a
    run's best model instead of its newest; `completions`: a column to score instead of a model's
    answers; `adapters`: PEFT folders or runs by name, each asked over the model, which is asked
    alone too."""

    overrides: Sequence[str]
    best: bool = False
    completions: str | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)


def evaluate_command(
    first: Path | None, second: Path | None, request: Request, out: Path | None
) -> None:
    """Print what is found; with `out`, write it with every completion. A side is a model directory,
    a run, or a result that was written before. Raises IsobitError for contradictory arguments and
    for bad data."""
    if (first is None) == (request.completions is None) or (first is None and second is not None):
        raise IsobitError(
            "give a model to evaluate, a run, or a saved result; or none of them, and "
            "--completions COLUMN to score a column of the data"
        )
    if request.adapters and (first is None or second is not None or is_saved(first)):
        raise IsobitError(
            "--adapter: give the model that the adapters are for, without --against and "
            "--completions; each is compared with that model alone"
        )
    results = _evaluate([path for path in (first, second) if path is not None], request)
    _require_rewards(results, out)
    if request.adapters:
        show_adapters(results[0], dict(zip(request.adapters, results[1:])), out)
    else:
        show(results[0], results[1] if len(results) > 1 else None, out)


def evaluation_config(run: Path | None, overrides: Sequence[str]) -> Config:
    """Return a run's configuration, or an empty one, with overrides. Those of pass@k decide how many
    samples there are, and those of the samples which k. Other data than the run's have no held-out
    file unless one is given. Raises IsobitError for values that cannot be."""
    values, _ = read_source(_values_of(run) if run is not None else _EMPTY, overrides)
    changed, evaluation = _keys(overrides), values.get("evaluation")
    if changed & {"task.path", "task.files"} and "task.held_out_path" not in changed:
        values["task"].pop("held_out_path", None)
    if isinstance(evaluation, Mapping):
        if "evaluation.pass_at" in changed and not evaluation.get("num_samples"):
            evaluation = {**evaluation, "num_samples": DEFAULT_SAMPLES}
        if "evaluation.num_samples" in changed and "evaluation.pass_at" not in changed:
            evaluation = {**evaluation, "pass_at": []}
        values["evaluation"] = evaluation
    config = parse_config(Config, values, "isobit eval")
    check_read_by_eval(overrides)
    return config


def _keys(overrides: Sequence[str]) -> set[str]:
    """Return the keys that overrides change."""
    return {override.partition("=")[0] for override in overrides}


def _values_of(run: Path) -> dict[str, Any]:
    """Return what a run says of an evaluation; of a supervised one all but how it samples."""
    config = load_any_run_config(run)
    values: dict[str, Any] = plain(config)
    if isinstance(config, Config):
        return values
    shared = ("task", "precision", "consistency", "backend", "seed")
    return {
        **{key: values[key] for key in shared},
        "model": {
            **_EMPTY["model"],
            "chat_template_kwargs": values["model"]["chat_template_kwargs"],
        },
        "sampling": {"max_new_tokens": config.max_new_tokens},
        "evaluation": {"samples": config.evaluation.samples},
    }


def _evaluate(sides: Sequence[Path], request: Request) -> list[Result]:
    """Return the result of each side; of given completions where there is none; after a side those
    of its adapters."""
    for path in (
        path for path in sides if not is_saved(path)
    ):  # before what is asked of it, which may be a run's
        model_folder(path)
    run = next(
        (path for path in (*sides, *request.adapters.values()) if (path / runs.CONFIG).is_file()),
        None,
    )
    if request.best and run is None:
        raise IsobitError("--best: there is no run whose best model could be taken")
    config = evaluation_config(run, request.overrides)
    _check_used(config, request)
    now = date_of({} if run is None else runs.began_by(run))
    folders = {
        path: runs.model_directory(path, request.best) for path in sides if not is_saved(path)
    }
    adapters = {
        name: runs.model_directory(path, request.best) for name, path in request.adapters.items()
    }
    saved = {path: read_result(path) for path in sides if is_saved(path)}
    task, plan = task_of(config), evaluation_plan(config)
    if not len(task.held_out):
        raise IsobitError("there is nothing to evaluate: the held-out split is empty")
    with _processes(config, task) as processes:
        pool = processes.rewards
        if run is not None and config.task.too_long == "drop":  # as training left them out
            model = described(
                folders.get(run, next(iter(folders.values()))), None, text_rules(config, now)
            )
            room = config.sampling.max_new_tokens
            task = fit_prompts(task, model, config.task, room, processes.tools, quiet=True).task
        limit = _limit(config, run is not None, request.overrides)
        examples = list(task.held_out.examples[:limit])
        tags_of(examples, plan.tag)  # what is wrong is found before a model is loaded
        for path, result in saved.items():
            check_same_prompts(
                str(path), result.prompts, "the data", [example.prompt for example in examples]
            )
        pool.check_columns(examples[0].columns)
        pool.check_rows((example.place, example.columns) for example in examples)
        unread = None if request.completions else processes.unread_columns(config, examples)
        if unread is not None:
            print(printable(unread), file=sys.stderr)
        if request.completions is not None:
            if config.environment.used:
                raise IsobitError(
                    "--completions: a text has no turns to be answered by the run's environment; "
                    "leave its rewards and environment out with --reward and a task"
                )
            texts = [_column(example, request.completions, i) for i, example in enumerate(examples)]
            return [
                _result(
                    f"column {request.completions}",
                    config,
                    grade_given(examples, texts, pool, plan),
                    processes,
                )
            ]
        models = [] if pool.specs or processes.earned else reward_models(config, now)
        scorer = RewardScorer(pool, models, stop_on_error=False, earned=processes.earned)
        results = []
        for path in sides:
            if path in saved:
                results.append(saved[path])
            else:
                answered = _ask(folders[path], adapters, config, examples, scorer, processes, now)
                for answerer, questions in zip((folders[path], *adapters.values()), answered):
                    results.append(_result(str(answerer), config, questions, processes))
    return results


def _check_used(config: Config, request: Request) -> None:
    """Raise IsobitError for an option that nothing would read: of samples where there are none, and
    of a model where a column is scored."""
    changed = _keys(request.overrides)
    unused = [key for key in _OF_SAMPLES if key in changed]
    if request.completions is not None and unused:
        raise IsobitError(f"{unused[0]}: with --completions nothing is sampled; leave it out")
    if not config.evaluation.num_samples and {*unused} - {"sampling.repetition_penalty"}:
        raise IsobitError(
            f"{unused[0]} is for samples, and the greedy completion is the only one; give "
            "evaluation.num_samples, such as -n 8, or leave it out"
        )


def _ask(
    path: Path,
    adapters: Mapping[str, Path],
    config: Config,
    examples: Sequence[Example],
    scorer: RewardScorer,
    processes: Processes,
    now: datetime,
) -> list[tuple[Question, ...]]:
    """Return the answers of a model and its adapters; `now`: the date in prompts."""
    gc.collect()  # of a model that was asked before
    plan, names, rules = evaluation_plan(config), [None, *adapters], text_rules(config, now)
    flow = (config.precision, config.backend, config.consistency)
    model = (
        open_serving(path, adapters, flow, rules)
        if adapters
        else Model.load(path, *flow, rules=rules)
    )
    say_ends(model)
    for line in endings(model, plan.asked):
        print(printable(line), file=sys.stderr)
    say_special_tokens(examples, model)
    sequences = len(names) * len(examples) * max(1, plan.num_samples)
    environments, dialogue = processes.environments, None
    if environments is not None:
        dialogue = open_dialogue(
            config.environment, config.most_tokens, model, environments, examples[0]
        )
    tools = () if environments is None else environments.tools
    prompts = [encode_prompt(example, model, tools) for example in examples]
    engine = sized_engine(config, model, prompts, sequences)
    engine.calibrate([example.prompt for example in examples])
    with ProgressLine(str(path)) as progress:
        arguments = engine, examples, held_out_scorer(scorer), plan, names, progress.update
        return measure_each(*arguments, dialogue=dialogue)


def _limit(config: Config, of_run: bool, overrides: Sequence[str]) -> int | None:
    """Return how many examples: as given; of a run's own task as many as its evaluations take; else
    all."""
    changed = _keys(overrides)
    names = "task task.name task.path task.files task.held_out_path"
    own_task = of_run and not changed & {*names.split()}
    return config.evaluation.samples if own_task or "evaluation.samples" in changed else None


def _processes(config: Config, task: Task) -> Processes:
    processes = open_processes(config, task, on_error="skip")
    if processes.rewards.specs or processes.earned or config.rewards.models:
        return processes
    processes.close()
    raise IsobitError(
        "no reward function: give --reward FILE.py:FUNCTION, or use a task that has one of its own"
    )


def _result(
    model: str, config: Config, questions: tuple[Question, ...], processes: Processes
) -> Result:
    plan = evaluation_plan(config)
    names = [spec.label for spec in processes.rewards.specs] + [n for n, _ in processes.earned]
    names = names or [reward.name for reward in config.rewards.models]
    settings = {
        "task": plain(config.task),
        "precision": config.precision,
        "consistency": config.consistency,
        "seed": config.seed,
        "max_new_tokens": plan.asked.max_new_tokens,
        "stop": list(plan.asked.stop),
        **{name: getattr(plan.asked, name) for name in _SAMPLED},
        "tag": plan.tag,
        "answer_pattern": config.evaluation.answer_pattern,
    }
    return Result(model, questions, plan.ks, tuple(names), settings)


def _column(example: Example, column: str, index: int) -> str:
    if column not in example.columns:
        raise IsobitError(
            f"--completions {brief(column)}: example {index} has no such column; it has "
            f"{listed(example.columns)}"
        )
    return answer_in(example.columns, column, example.place)


def _require_rewards(results: Sequence[Result], out: Path | None) -> None:
    """Raise IsobitError where no completion has a reward, since an accuracy of 0 would say another
    thing; what was answered first is in `out` then."""
    graded = [a for result in results for q in result.questions for a in (q.greedy, *q.samples)]
    if any(a.reward is not None for a in graded):
        return
    if out is not None:
        write_result(out, results[0].to_json())
    raise IsobitError(
        f"{results[0].model}: none of {len(graded):,} completions was scored, so there is no "
        f"accuracy: {graded[0].error or 'every reward function returned None'}"
    )
