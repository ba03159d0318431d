"""The training step of the benchmarks: 64 prompts x 8 completions of 5 tokens, as an open
session's."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import yaml

from benchmarks import rewards
from isobit.config import load_config
from isobit.distributed import ALONE, Ranks
from isobit.training.loop import training_step
from isobit.training.parts.sampled import SampledParts
from isobit.training.run import Run
from isobit.training.train import open_run as open_new_run

PROMPTS, GROUP, NEW = 64, 8, 5


def open_step(
    folder: Path, model: Path, precision: str, stack: ExitStack, consistency: str = "bitwise"
) -> Callable[[], None]:
    """A call makes one step of a run in `folder`, which `stack` closes."""
    session = open_run(folder, model, precision, stack, consistency)
    return lambda: training_step(session)


def open_run(
    folder: Path,
    model: Path,
    precision: str,
    stack: ExitStack,
    consistency: str = "bitwise",
    ranks: Ranks = ALONE,
) -> Run[SampledParts]:
    """An open run of such steps in `folder`, which `stack` closes."""
    name = f"{model.name}-{precision}-{consistency}"
    values = {
        "model": {"path": str(model)},
        "task": {"name": "arithmetic", "options": {"digits": 3}},
        "rewards": {"functions": [{"function": f"{rewards.__file__}:digits"}]},
        "precision": precision,
        "consistency": consistency,
        "prompts_per_step": PROMPTS,
        "sampling": {"group_size": GROUP, "max_new_tokens": NEW, "ignore_eos": True},
        "run": {"dir": str(folder / name), "checkpoint_every": 0, "report": False},
        "steps": 1_000_000,
    }
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(values))
    return stack.enter_context(open_new_run(load_config(config), quiet=True, ranks=ranks))
