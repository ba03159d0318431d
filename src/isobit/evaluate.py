"""Accuracy on held-out examples: greedy, and pass@k from samples, with intervals; or of completions that are given.

A completion is correct if its reward is at least 1. Left out: majority voting and paired tests.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from isobit.engine import Engine, Sampling
from isobit.errors import IsobitError
from isobit.intervals import Estimate, pass_at_k_estimate, proportion
from isobit.model import Model
from isobit.tasks import Example, RewardSpec, TaskSettings, load_task
from isobit.tasks.data import Prompt
from isobit.tasks.rewards import Reward, RewardPool


@dataclass(frozen=True)
class Evaluation:
    """`greedy` or given completions: their accuracy and mean reward; `passes`: k to pass@k; `rows`: every
    completion."""

    accuracy: Estimate
    mean_reward: float
    passes: dict[int, Estimate] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)


class Judge(Protocol):
    """What gives completions their rewards: functions, or functions and models."""

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        columns: Sequence[Mapping[str, Any]],
        completion_ids: Sequence[Sequence[int]] | None = None,
    ) -> list[Reward]: ...


def evaluate_greedy(engine: Engine, examples: Sequence[Example], pool: Judge, sampling: Sampling) -> Evaluation:
    """Greedy accuracy; `sampling` gives the length and the stop strings."""
    greedy = Sampling(1, sampling.max_new_tokens, 0.0, stop=sampling.stop, ignore_eos=sampling.ignore_eos)
    groups = engine.generate([e.prompt for e in examples], greedy)
    return score_completions(examples, [group[0].text for group in groups], pool, [g[0].token_ids for g in groups])


def evaluate_samples(
    engine: Engine, examples: Sequence[Example], pool: Judge, sampling: Sampling, ks: Sequence[int]
) -> tuple[dict[int, Estimate], list[dict[str, Any]]]:
    """pass@k for every k, from `sampling.n` samples of each prompt."""
    groups = engine.generate([e.prompt for e in examples], sampling)
    repeated = [example for example in examples for _ in range(sampling.n)]
    sampled = [completion for group in groups for completion in group]
    rows = score_completions(repeated, [c.text for c in sampled], pool, [c.token_ids for c in sampled]).rows
    correct = [sum(bool(row["correct"]) for row in rows[i : i + sampling.n]) for i in range(0, len(rows), sampling.n)]
    return {k: pass_at_k_estimate(correct, sampling.n, k) for k in ks}, rows


def score_completions(
    examples: Sequence[Example],
    completions: Sequence[str],
    pool: Judge,
    completion_ids: Sequence[Sequence[int]] | None = None,
) -> Evaluation:
    """Accuracy of given completions, one per example. An unscored one counts as wrong and has reward null."""
    rewards = pool.score([e.prompt for e in examples], completions, [e.columns for e in examples], completion_ids)
    rows = [
        {"prompt": e.prompt, "completion": text, "reward": r.total, "correct": r.total is not None and r.total >= 1}
        for e, text, r in zip(examples, completions, rewards)
    ]
    scored = [r.total for r in rewards if r.total is not None]
    mean = sum(scored) / len(scored) if scored else float("nan")
    return Evaluation(proportion(sum(bool(row["correct"]) for row in rows), len(rows)), mean, rows=rows)


def evaluate_command(
    model: Path | None,
    settings: TaskSettings,
    rewards: Sequence[RewardSpec],
    sampling: Sampling,
    pass_at: str,
    samples: int | None,
    completions: str | None,
    out: Path | None,
    flow: tuple[str, str, str],
) -> None:
    """`isobit eval`: print the result; with `out`, write it with every completion. `flow`: precision, backend,
    consistency. Raises IsobitError for contradictory arguments and for bad data."""
    ks = _parse_ks(pass_at, sampling.n)
    if (model is None) == (completions is None):
        raise IsobitError("give a model to evaluate, or --completions COLUMN to score a column of the data")
    task = load_task(settings)
    examples = task.held_out.examples[:samples]
    if not examples:
        raise IsobitError("there is nothing to evaluate: the held-out split is empty")
    if not rewards and not task.rewards:
        raise IsobitError("no reward function: give --reward FILE.py:FUNCTION, or use a task that has one of its own")
    with RewardPool(list(rewards) or task.rewards, on_error="skip") as pool:
        pool.start()
        if completions is not None:
            result = score_completions(examples, [_column(e, completions, i) for i, e in enumerate(examples)], pool)
        else:
            assert model is not None
            result = _evaluate_model(model, flow, examples, pool, sampling, ks)
    print(f"{'accuracy' if completions is not None else 'greedy accuracy'}  {result.accuracy}")
    print(f"mean reward  {result.mean_reward:.4f}")
    for k, estimate in result.passes.items():
        print(f"pass@{k}  {estimate}")
    if out is not None:
        _write(out, result)


def _evaluate_model(
    path: Path,
    flow: tuple[str, str, str],
    examples: Sequence[Example],
    pool: RewardPool,
    sampling: Sampling,
    ks: Sequence[int],
) -> Evaluation:
    model = Model.load(path, *flow)
    sequences = len(examples) * (sampling.n if ks else 1)
    prompts = [e.prompt for e in examples]
    engine = Engine.sized_for(model, prompts, sequences, sampling.max_new_tokens)
    engine.calibrate(prompts)
    greedy = evaluate_greedy(engine, examples, pool, sampling)
    if not ks:
        return greedy
    passes, rows = evaluate_samples(engine, examples, pool, sampling, ks)
    return Evaluation(greedy.accuracy, greedy.mean_reward, passes, greedy.rows + rows)


def _parse_ks(text: str, n: int) -> list[int]:
    try:
        ks = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise IsobitError(f"--pass-at {text!r}: expected whole numbers, such as 1,4") from None
    for k in ks:
        if not 1 <= k <= n:
            raise IsobitError(f"--pass-at {k}: needs 1 to -n samples, and -n is {n}")
    return ks


def _column(example: Example, column: str, index: int) -> str:
    if column not in example.columns:
        raise IsobitError(
            f"--completions {column}: example {index} has no such column; it has {', '.join(example.columns)}"
        )
    return str(example.columns[column])


def _write(path: Path, result: Evaluation) -> None:
    estimates = {"accuracy": result.accuracy, **{f"pass@{k}": e for k, e in result.passes.items()}}
    values = {name: vars(estimate) for name, estimate in estimates.items()}
    path.write_text(json.dumps({**values, "mean_reward": result.mean_reward, "rows": result.rows}, indent=1) + "\n")
