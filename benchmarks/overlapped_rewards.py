"""Seconds of a step with a slow reward function, scored beside the rollout or after it, in turns.

The function sleeps 20 ms a sample, in 4 workers: 64 samples a step, so at least 0.32 s of scoring. The model is
hidden 128, 2 layers; 8 prompts x 8 completions of 32 tokens of which 16 decode at a time, so that groups end one after
another. Both contestants make the same calls and the same steps; only when a group is handed over differs.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks import rewards
from benchmarks.common import Claim, Result, race
from benchmarks.models import save_model
from isobit.config import load_config
from isobit.run.directory import read_jsonl
from isobit.training.loop import training_step
from isobit.training.objects import NO_OBJECTS
from isobit.training.session.opening import open_session

WARMUP = 2


def run(rounds: int) -> Result:
    result = Result("overlapped_rewards")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = save_model(folder / "model", 128, 2, 64, 64)
        steps = {kind: _open_step(folder, model, kind, stack) for kind in ("beside the rollout", "after the rollout")}
        result.rows += race("64 completions, 20 ms each", steps, rounds, warmup=WARMUP, amount=64, unit="completions")
        beside, after = (list(read_jsonl(folder / kind / "metrics.jsonl"))[WARMUP:] for kind in steps)
    waited = median(line["time/score"] for line in beside) / median(line["time/score"] for line in after)
    times = {row.contestant: row.median_s for row in result.rows}
    result.claims += [
        Claim("waiting for rewards, beside over after", waited, "<=", 0.6),
        Claim("step, beside over after", times["beside the rollout"] / times["after the rollout"], "<=", 1.0),
    ]
    return result


def _open_step(folder: Path, model: Path, kind: str, stack: ExitStack) -> Callable[[], None]:
    """A call makes one step of a run in `folder / kind`, which `stack` closes."""
    values = {
        "model": {"path": str(model)},
        "task": {"name": "arithmetic", "options": {"digits": 3}},
        "rewards": {"functions": [{"function": f"{rewards.__file__}:slow_digits"}], "num_workers": 4},
        "prompts_per_step": 8,
        "sampling": {"group_size": 8, "max_new_tokens": 32, "ignore_eos": True},
        "engine": {"max_sequences": 16},
        "run": {"dir": str(folder / kind), "checkpoint_every": 0, "report": False},
        "steps": 1_000_000,
    }
    config = folder / f"{kind}.yaml"
    config.write_text(yaml.safe_dump(values))
    session = stack.enter_context(open_session(load_config(config), NO_OBJECTS, quiet=True))
    if kind == "after the rollout":
        generate = session.parts.engine.generate

        def generate_first(*arguments: Any, on_group: Callable[[int, Sequence[Any]], None]) -> list[Any]:
            groups = generate(*arguments)
            for index, group in enumerate(groups):
                on_group(index, group)
            return groups

        session.parts.engine.generate = generate_first  # type: ignore[assignment,method-assign]
    return lambda: training_step(session)
