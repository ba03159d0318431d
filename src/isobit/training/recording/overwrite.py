"""Make room for a run that is done again: remove a finished run of the same configuration, and
nothing else.

A run that was extended, interrupted or made by another configuration may still be needed: it stays,
and the message says what to do. A run that was deleted by mistake cannot be computed again from the
files that are left.
"""

import shutil
from dataclasses import replace
from pathlib import Path

from isobit.config import Config, SftConfig, is_supervised, load_config, load_sft_config
from isobit.errors import IsobitError
from isobit.run import directory as runs
from isobit.run.directory import RunDirectory


def clear_finished(config: Config | SftConfig) -> None:
    """Remove the run in `run.dir` if it has this configuration and has done exactly its steps, or
    none.

    Raises IsobitError for any other run there; leaves a directory alone that holds no run, or a run
    that a new run replaces.
    """
    directory = Path(config.run.dir)
    if not (directory / runs.CONFIG).is_file() or runs.occupied(directory) is None:
        return
    with RunDirectory(directory, {}):  # refuses a run that is at work
        done = max((int(row["step"]) for row in _metrics(directory)), default=0)
        load = load_sft_config if is_supervised(directory) else load_config
        finished: Config | SftConfig = load(directory / runs.CONFIG)
        config = _as_kept(config, finished)
        again = (
            f"go on with it: isobit train --resume {directory}, or move it or remove it "
            f"first: rm -r {directory}"
        )
        if finished.steps != config.steps or done > config.steps:
            raise IsobitError(
                f"{directory} holds a run of {max(finished.steps, done)} steps, and this one has "
                f"{config.steps}; {again}"
            )
        if finished != config:
            raise IsobitError(f"{directory} holds a run of another configuration; {again}")
        if done not in (0, config.steps):
            raise IsobitError(
                f"{directory} holds a run that has done {done} of its {config.steps} steps; {again}"
            )
        shutil.rmtree(directory)


def _as_kept(config: Config | SftConfig, finished: Config | SftConfig) -> Config | SftConfig:
    """Return `config` with the numbers that `auto` and `epochs` became in the `finished` run, so
    that both count as the same configuration."""
    if config.epochs is not None:
        config = replace(config, epochs=None, steps=finished.steps)
    if config.optimizer.micro_batch_tokens != "auto":
        return config
    tokens = finished.optimizer.micro_batch_tokens
    return replace(config, optimizer=replace(config.optimizer, micro_batch_tokens=tokens))


def _metrics(directory: Path) -> list[dict[str, float]]:
    path = directory / runs.METRICS
    return list(runs.read_jsonl(path)) if path.is_file() else []
