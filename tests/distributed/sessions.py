"""Whole runs on several ranks: as threads of this process, or as processes that torchrun starts."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isobit.config import load_config
from isobit.distributed import ALONE, Ranks
from isobit.training.loop import training_loop
from isobit.training.objects import Given
from isobit.training.train import open_replay, open_resumed, open_run
from tests.distributed.threads import WHOLE_BLOCKS, run
from tests.models import tiny_model
from tests.runs import fingerprint, without_memory, write_config

SMALL = ["optimizer.micro_batch_tokens=32", "run.quantization_every=2"]


def written(folder: Path, family: str = "qwen3", **changes: object) -> Path:
    """A config whose model has several blocks of 128 rows in each matrix, and several micro-batches
    a step."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_model("fp8", family, seed=5, scale=3.0, **WHOLE_BLOCKS).save(folder / "base")
    return write_config(folder, folder / "base", **changes)


def session(config: Path, overrides: Sequence[str], ranks: Ranks = ALONE) -> None:
    """One rank's part of a new run."""
    with open_run(load_config(config, [*SMALL, *overrides]), quiet=True, ranks=ranks) as opened:
        training_loop(opened)
        opened.finish()


def resumed(directory: Path, overrides: Sequence[str], ranks: Ranks = ALONE) -> None:
    """One rank's part of a run that goes on."""
    with open_resumed(directory, overrides, Given(), quiet=True, ranks=ranks) as opened:
        training_loop(opened)
        opened.finish()


def replayed(
    recorded: Path, out: Path, overrides: Sequence[str] = (), ranks: Ranks = ALONE
) -> None:
    """One rank's part of a run that learns from what another has recorded."""
    with open_replay(recorded, out, overrides, quiet=True, ranks=ranks) as opened:
        training_loop(opened)
        opened.finish()


def bits(directory: Path) -> dict[str, Any]:
    """The fingerprint of a run, alike at any number of ranks."""
    return without_memory(fingerprint(directory))


def trained(
    config: Path, directory: Path, size: int, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """The bits of a new run on `size` ranks; 0: without any of their code."""
    given = [*overrides, f"run.dir={directory}"]
    if size == 0:
        session(config, given)
    else:
        run(size, lambda ranks: session(config, given, ranks))
    return bits(directory)


def started(arguments: Sequence[str], torchrun: Sequence[str] = ()) -> "subprocess.Popen[str]":
    """`isobit ARGUMENTS` in a separate process, with one thread for each rank; or in those of a
    torchrun."""
    launcher = ["-m", "torch.distributed.run", *torchrun] if torchrun else []
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "isobit", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
