"""Seconds of learning where about half of the groups teach nothing: with what is left out, and computing all, in turns.

16 prompts x 8 completions of 96 tokens, hidden 128, 4 layers, `fp8`. A micro-batch is smaller than a group, as where
completions are long, or holds several groups. Without leaving anything out weights have the same bits; with
`optimizer.idle_apart` their last bits are others. The claims are ratios of the time for learning.
"""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import yaml

from benchmarks import rewards
from benchmarks.common import Claim, Result, race
from benchmarks.models import save_model
from isobit.config import load_config
from isobit.run.directory import read_jsonl
from isobit.training.loop import training_step
from isobit.training.objects import NO_OBJECTS
from isobit.training.session.opening import open_session

WARMUP = 1
CASES = {"micro-batches below a group": 256, "micro-batches of several groups": 4096}
CONTESTANTS = ("all computed", "left out", "left out, apart")


def run(rounds: int) -> Result:
    result = Result("idle_groups")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = save_model(folder / "model", 128, 4, 64, 128)
        for case, tokens in CASES.items():
            runs = {kind: folder / f"{kind} {tokens}" for kind in CONTESTANTS}
            steps = {kind: _open_step(path, model, kind, tokens, stack) for kind, path in runs.items()}
            result.rows += race(f"step, {case}", steps, rounds, warmup=WARMUP)
            found = {kind: list(read_jsonl(path / "metrics.jsonl"))[WARMUP:] for kind, path in runs.items()}
            learn = {kind: median(line["time/learn"] for line in lines) for kind, lines in found.items()}
            for kind, most in (("left out", 0.75 if tokens < 1000 else 1.05), ("left out, apart", 0.7)):
                share = median(line["learn/skipped_share"] for line in found[kind])
                what = f"learning, {kind} ({share:.0%} of the tokens) over all, {case}"
                result.claims.append(Claim(what, learn[kind] / learn["all computed"], "<=", most))
    return result


def _open_step(path: Path, model: Path, kind: str, tokens: int, stack: ExitStack) -> Callable[[], None]:
    """A call makes one step of a run in `path`, which `stack` closes."""
    values: dict[str, Any] = {
        "model": {"path": str(model)},
        "task": {"name": "arithmetic", "options": {"digits": 3}},
        "rewards": {"functions": [{"function": f"{rewards.__file__}:digits_of_half"}]},
        "prompts_per_step": 16,
        "sampling": {"group_size": 8, "max_new_tokens": 96, "ignore_eos": True},
        "optimizer": {"micro_batch_tokens": tokens, "idle_apart": "apart" in kind},
        "run": {"dir": str(path), "checkpoint_every": 0, "report": False, "quantization_every": 0},
        "steps": 1_000_000,
    }
    config = path.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(values))
    session = stack.enter_context(open_session(load_config(config), NO_OBJECTS, quiet=True))

    def computing_all() -> None:
        with patch("isobit.rl.learner.schedule.without_teaching", lambda micro, zero: frozenset()):
            training_step(session)

    return computing_all if kind == CONTESTANTS[0] else lambda: training_step(session)
