"""The command that goes on from a run with another config: a new run, which begins with the weights
of its newest checkpoint. What else a run keeps, the optimizer's moments and its place in the data,
begins anew."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from isobit.config.load import load_any_run_config
from isobit.config.schema import Config
from isobit.options.declare import plain
from isobit.run.directory import CHECKPOINTS, CONFIG

_OBJECT = "<python>:"


def command(run: Path, overrides: Sequence[str]) -> str | None:
    """Return the command line, as it is typed; None where the run has no checkpoint, or was given
    objects of Python."""
    if not any((run / CHECKPOINTS).glob("step-*")):
        return None
    config = load_any_run_config(run)
    if _OBJECT in str(plain(config)):
        return None
    changed = {override.partition("=")[0] for override in overrides}
    begins = [f"model.path={run}"]
    if config.adapter is not None:
        begins = [f"adapter.init={run}"]
    elif isinstance(config, Config):
        begins += ["model.sft=null"] if config.model.sft is not None else []
        if config.algorithm.kl_coefficient and None is config.reference.path != config.model.path:
            begins.append(f"reference.path={config.model.path}")
    elif config.model.init is not None:
        begins.append("model.init=null")
    settings = [change for change in begins if change.partition("=")[0] not in changed]
    verb = "train" if isinstance(config, Config) else "sft"
    words = ["isobit", verb, str(run / CONFIG), *settings, *overrides, "--out", str(_free(run))]
    return shlex.join(words)


def _free(run: Path) -> Path:
    """Return a new directory name next to the run."""
    number = 2
    while (path := run.with_name(f"{run.name}-{number}")).exists():
        number += 1
    return path
