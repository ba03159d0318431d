"""Seconds of a GRPO step on episodes of four turns whose environment sleeps 50 ms after each, beside
the same step without the sleep; and how many tokens are prefilled for each that is new.

32 prompts x 8 episodes, each of four turns of 32 tokens, with observations of some 60 tokens
between them, on a random model (hidden 256, 4 layers) under `fp8`. Environments are in two worker
processes. New are the tokens of the prompts, once for a group,
and those of observations; prefilled is what the engine computed of them and, again, of what it had
not kept. Left out: tools that compute, which would take the processor from the engine.
"""

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import yaml

from benchmarks.common import Claim, Result, race
from benchmarks.models import save_model
from isobit.config import load_config
from isobit.run.completions import COMPLETIONS, read
from isobit.run.directory import METRICS, read_jsonl
from isobit.training.loop import training_step
from isobit.training.train import open_run

PROMPTS, GROUP, TURNS, NEW = 32, 8, 4, 32
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role[0] }} {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>a {% endif %}"
)
ENVIRONMENT = """
import asyncio
from isobit.data.turns import Step


class Sleeping:
    def reset(self, **columns):
        self.number = 0

    async def step(self, turn):
        await asyncio.sleep(SECONDS)
        self.number += 1
        digits = sum(c.isdigit() for c in turn.text)
        message = {"role": "user", "content": f"{digits:060d}"}
        return Step((message,), float(digits), done=self.number == TURNS)
"""


def run(rounds: int) -> Result:
    result = Result("turns")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        path = save_model(folder / "model", 256, 4, 64, 1024)
        (path / "chat_template.jinja").write_text(TEMPLATE)
        rows = ({"prompt": f"{a}*{b}="} for a in range(100) for b in range(100))
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        contestants = {
            f"tools that sleep {seconds * 1000:.0f} ms": _step(folder, path, seconds, stack)
            for seconds in (0.0, 0.05)
        }
        amount = float(PROMPTS * GROUP * TURNS * NEW)
        result.rows += race("GRPO step", contestants, rounds, amount=amount, unit="tokens")
        prefilled, new = _prefilled(folder / "0.05")
    ratio = result.median("tools that sleep 50 ms") / result.median("tools that sleep 0 ms")
    result.claims.append(
        Claim("a step whose tools sleep 50 ms over one without", ratio, "<=", 1.15)
    )
    result.claims.append(Claim("prefilled tokens over new ones", prefilled / new, "<=", 1.1))
    return result


def _step(folder: Path, model: Path, seconds: float, stack: ExitStack) -> Callable[[], None]:
    """A call makes one step of a run whose environment sleeps so long."""
    source = ENVIRONMENT.replace("SECONDS", str(seconds)).replace("TURNS", str(TURNS))
    own = folder / str(seconds)
    own.mkdir()
    (own / "sleeping.py").write_text(source)
    values = {
        "model": {"path": str(model)},
        "task": {"path": str(folder / "prompts.jsonl"), "chat": True, "held_out_size": 1},
        "environment": {
            "factory": f"{own / 'sleeping.py'}:Sleeping",
            "max_turns": TURNS,
            "workers": 2,
        },
        "prompts_per_step": PROMPTS,
        "sampling": {"group_size": GROUP, "max_new_tokens": NEW, "ignore_eos": True},
        "run": {"dir": str(own / "run"), "checkpoint_every": 0, "report": False},
        "steps": 1_000_000,
    }
    config = own / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    session = stack.enter_context(open_run(load_config(config), quiet=True))
    return lambda: training_step(session)


def _prefilled(folder: Path) -> tuple[float, float]:
    """Of all steps of a run: tokens that were prefilled, and those that were new."""
    steps = read_jsonl(folder / "run" / METRICS)
    prefilled = sum(row["rollout/prompt_tokens"] - row["env/cached_tokens"] for row in steps)
    new = 0
    for row in read(folder / "run" / COMPLETIONS):
        new += row["completion_mask"].count(False)
        new += len(row["prompt_ids"]) if row["sample_index"] == 0 else 0
    return prefilled, new
