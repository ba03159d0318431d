"""Seconds of learning where the completions of a prompt share its rows, over those where each has its own, in turns.

Hidden 256, 4 layers, `fp8`, one optimizer step on 8 prompts. What can be saved depends on how long prompts are beside
completions, and on how many completions share them. Log-probabilities have the same bits
(tests/rl/test_shared_prompts.py).
"""

import json
import random
import tempfile
from collections.abc import Callable
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

WARMUP = 1
CASES = {(64, 64, 8): 0.75, (256, 64, 8): 0.45, (256, 64, 16): 0.45, (32, 256, 8): 1.0}
"""Tokens of a prompt and of a completion, completions of a prompt; the most that learning may take of its time."""


def run(rounds: int) -> Result:
    result = Result("shared_prompts")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = save_model(folder / "model", 256, 4, 64, 512)
        for (prompt, completion, group), most in CASES.items():
            case = f"prompts of {prompt}, {group} completions of {completion}"
            runs = {kind: folder / f"{kind} {case}" for kind in ("apart", "shared")}
            sizes = (prompt, completion, group)
            steps = {kind: _open_step(path, model, kind, sizes, stack) for kind, path in runs.items()}
            result.rows += race(f"step, {case}", steps, rounds, warmup=WARMUP)
            found = {kind: list(read_jsonl(path / "metrics.jsonl"))[WARMUP:] for kind, path in runs.items()}
            learn = {kind: median(line["time/learn"] for line in lines) for kind, lines in found.items()}
            share = median(line["learn/shared_share"] for line in found["shared"])
            what = f"learning, shared ({share:.0%} of the tokens) over apart, {case}"
            result.claims.append(Claim(what, learn["shared"] / learn["apart"], "<=", most))
    return result


def _open_step(path: Path, model: Path, kind: str, sizes: tuple[int, int, int], stack: ExitStack) -> Callable[[], None]:
    """A call makes one step of a run in `path`, which `stack` closes."""
    prompt, completion, group = sizes
    chosen = random.Random(0)
    rows = [{"prompt": "".join(chosen.choices("0123456789", k=prompt))} for _ in range(200)]
    data = path.with_suffix(".jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "model": {"path": str(model)},
        "task": {"path": str(data), "held_out_size": 0},
        "rewards": {"functions": [{"function": f"{rewards.__file__}:in_turn"}]},
        "prompts_per_step": 8,
        "sampling": {"group_size": group, "max_new_tokens": completion, "ignore_eos": True},
        "optimizer": {"share_prompts": kind == "shared"},
        "run": {"dir": str(path), "checkpoint_every": 0, "report": False, "quantization_every": 0},
        "steps": 1_000_000,
    }
    config = path.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(values))
    session = stack.enter_context(open_session(load_config(config), NO_OBJECTS, quiet=True))
    return lambda: training_step(session)
