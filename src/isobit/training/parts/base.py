"""The base model of a run, trained once by a config of `isobit sft` and cached by a hash of
everything that it is made from.

It is made by a supervised run in a directory next to its place in the cache. A run that was
interrupted goes on from its newest checkpoint.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from isobit import __version__
from isobit.config import SftConfig, dump_config, load_sft_config
from isobit.errors import IsobitError
from isobit.kernels.cache import alone, cache_directory
from isobit.options.consistency import resolved
from isobit.precision import precision_from
from isobit.run import checkpoints, durable
from isobit.run.directory import CHECKPOINTS
from isobit.tasks.builtin import Task
from isobit.training.loop import training_loop
from isobit.training.parts.given import GivenParts, load_supervised, open_given
from isobit.training.parts.model import model_named
from isobit.training.run import Run, open_again, open_new


def cached_model(
    path: str, began: Mapping[str, Any] = MappingProxyType({}), *, quiet: bool = False
) -> Path:
    """Return the directory of the model of a config of `isobit sft`: from the cache if it was made
    before; otherwise it is made now, by one process at a time. `began`: the facts of the run that
    goes on with it. Raises IsobitError for a config that trains an adapter or leaves
    optimizer.micro_batch_tokens to the machine, and where the cache cannot be written; and
    KeyboardInterrupt where a signal ends the making."""
    config = load_sft_config(path, began=began)
    if config.adapter is not None:
        raise IsobitError(
            f"model.sft: {path} trains an adapter; run isobit sft, and take its folder as "
            "adapter.init"
        )
    if config.optimizer.micro_batch_tokens == "auto":
        raise IsobitError(
            f"model.sft: {path} has optimizer.micro_batch_tokens: auto, which each machine resolves "
            "by its memory; the base model of a run is the same everywhere, so give a number"
        )
    task = load_supervised(config)
    name = _identity(config, task)
    directory = cache_directory("sft", f"{name}/config.json") / name
    made = directory / "config.json"
    if made.is_file():
        return directory
    with ExitStack() as held:
        try:
            held.enter_context(alone(directory.parent / f".{directory.name}.lock"))
        except OSError as error:
            raise IsobitError(
                f"cannot write the cache {directory.parent}: {error.strerror}; set ISOBIT_CACHE"
            ) from None
        if not made.is_file():
            if not quiet:
                print(f"making the base model of {path}, once", file=sys.stderr)
            _make(config, directory, quiet)
    return directory


def _make(config: SftConfig, target: Path, quiet: bool) -> None:
    """Make the model at `target` by a run in a directory next to it, of which only the model is
    kept. Raises KeyboardInterrupt, after a checkpoint is saved, where a signal ends the run."""
    directory = target.parent / f"{target.name}.run"
    with _opened(_alone(config, directory), quiet) as run:
        training_loop(run)
        if run.interruption.signal is not None:
            run.saver.save()
            raise KeyboardInterrupt
        run.trained.save_model(directory / "model")
    durable.put_in_place(directory / "model", target)
    shutil.rmtree(directory, ignore_errors=True)


def _opened(config: SftConfig, quiet: bool) -> Run[GivenParts]:
    """Open the run that makes the model: from its newest checkpoint if it had begun and can go on,
    otherwise from the start."""
    directory = Path(config.run.dir)
    if checkpoints.all_checkpoints(directory / CHECKPOINTS):
        try:
            return open_again(directory, (), lambda config, source: open_given, quiet=quiet)
        except IsobitError:
            pass  # a run of another version, or damaged: begin anew
    shutil.rmtree(directory, ignore_errors=True)
    return open_new(config, open_given, quiet=quiet)


def _alone(config: SftConfig, directory: Path | None) -> SftConfig:
    """Return the config with defaults for the options that do not change the model: those of `run`
    and `tracking`, without a report, and on one rank. Its run directory is `directory`, or the
    default for None."""
    where = SftConfig.run.dir if directory is None else str(directory)
    run = replace(SftConfig.run, dir=where, report=False)
    tracking, divided = SftConfig.tracking, SftConfig.divided
    return replace(config, run=run, tracking=tracking, ranks=1, divided=divided)


def _identity(config: SftConfig, task: Task) -> str:
    """Return a hash of everything that the model is made from: the config, the formats of its
    precision, the examples, the weights and the chat template it starts from, isobit's version; and
    the held-out examples, where an evaluation may end its making."""
    settings = dump_config(_alone(config, None))
    auto, actual = (
        f"consistency: {order}\n" for order in (config.consistency, resolved(config.consistency))
    )
    settings = settings.replace(auto, actual)
    digest = hashlib.sha256()

    def add(text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        digest.update(len(data).to_bytes(8, "little"))  # so that no part ends within another
        digest.update(data)

    for item in (__version__, settings, str(precision_from(config.precision).formats())):
        add(item)
    for dataset in (task.train, *([task.held_out] if config.evaluation.stops else [])):
        add(str(len(dataset)))
        for example in dataset.examples:
            content = [example.prompt, example.columns, example.answer, example.source]
            add(json.dumps(content, sort_keys=True, default=str))
    files = [] if config.model.path is None else sorted(model_named(config.model.path).glob("*.*"))
    if config.model.chat_template is not None:
        files.append(Path(config.model.chat_template))
    for file in files:
        add(file.name)
        add(checkpoints.file_digest(file) if file.is_file() else "")
    return digest.hexdigest()[:16]
