"""The files that a run reads besides its checkpoints, as SHA-256 hashes: kept in `inputs.json` when
the run begins, and compared when it goes on.

Data, reward functions, tools, environments, losses, advantages and templates are hashed whole. Of a
model's directory, the files that say how it is computed (config and tokenizer) are hashed whole,
and of the weights the size, the header and samples, which any training changes: a single flipped
bit between the samples is not seen. Files that a reward file imports, and the directories of
Python's packages, are not followed. `inputs.json` also holds the config as the run has it, section
by section, so that an edit of `config.yaml` is seen, and its key. Left out: a file that is gone,
which the code that reads it reports.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from isobit.config import Config, SftConfig, load_sft_config, repeated
from isobit.data.foreign import BadJson, check_readable, exists, parse_json
from isobit.errors import IsobitError, brief, listed
from isobit.model.hub.folders import from_hub_cache
from isobit.options.declare import plain
from isobit.rl.algorithm.functions import ADVANTAGES
from isobit.rl.algorithm.loss import LOSSES
from isobit.run.checkpoints import file_digest
from isobit.run.directory import CONFIG, INPUTS, RunDirectory, model_directory, object_in
from isobit.tasks.builtin import TaskSettings
from isobit.tasks.environments.settings import EnvironmentConfig
from isobit.tasks.rewards.spec import OBJECT
from isobit.tasks.workers.loading import split_reference

Inputs = dict[str, dict[str, str]]
"""Key of the config -> file -> SHA-256; for `config.yaml` a section -> its values as JSON."""
_DESCRIPTIONS = ("*.json", "*.jinja", "*.model", "*.txt")
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def inputs_of(config: Config | SftConfig) -> Inputs:
    """Return the hashes of all files that a config names, as the files are now."""
    hashes = {
        key: dict(_hashed(from_hub_cache(path) if weights else path, weights))
        for key, path, weights in _places(config)
    }
    return {key: files for key, files in hashes.items() if files}


def config_of(config: Config | SftConfig) -> Inputs:
    """Return, by section, the values of the config that a run that goes on repeats."""
    values = repeated(plain(config))
    return {CONFIG: {key: json.dumps(value, default=str) for key, value in values.items()}}


def check_inputs(run: Path, now: Inputs, on_change: str) -> list[str]:
    """Return a warning where files or the config have changed since the run began, or since it was
    made to go on with changed ones, or where the record of them is missing or cannot be read.
    Changes raise IsobitError instead, unless `on_change` is warn."""
    old = _recorded(run)
    if CONFIG not in old:
        how = "cannot be read" if exists(run / INPUTS) else "is missing"
        return [
            f"warning: {run / INPUTS} {how}: whether data, reward functions and config are what the "
            "run began with is not known"
        ]
    changed = {key: _changed(old.get(key), files) for key, files in now.items() if key != CONFIG}
    changed[CONFIG] = _edited(old.get(CONFIG, {}), now.get(CONFIG, {}))
    if not any(changed.values()):
        return []
    changes = listed(
        f"{key} ({', '.join(sorted(files)[:3])})" for key, files in changed.items() if files
    )
    if on_change == "warn":
        return [
            f"warning: {run}: changed since the run began: {changes}: from here on the new files count"
        ]
    raise IsobitError(
        f"{run}: changed since the run began: {changes}; bring the files back, or go on with the new "
        f"ones: isobit train --resume {run} run.on_change=warn"
    )


def record_inputs(run: RunDirectory, now: Inputs) -> None:
    """Write the hashes to the record of a run, the newest last: hashes with which the run has gone
    on before stay, and files that are gone are removed."""
    recorded = _recorded(run.directory)
    for key, files in now.items():
        old = recorded.setdefault(key, {})
        for file, digest in files.items():
            if old.get(file, [])[-1:] != [digest]:
                old[file] = [*old.get(file, []), digest]
        for gone in [file for file in old if file not in files]:
            del old[gone]
    run.write_object(INPUTS, recorded)


def _recorded(run: Path) -> dict[str, dict[str, list[str]]]:
    """Return the digests that are kept in `run`; entries of an edited file that are not lists of
    digests by file are left out."""
    by_key: dict[str, dict[str, list[str]]] = {}
    for key, files in (object_in(run / INPUTS) or {}).items():
        if isinstance(files, dict):
            by_key[key] = {
                f: [str(digest) for digest in digests]
                for f, digests in files.items()
                if isinstance(digests, list)
            }
    return by_key


def _changed(recorded: Mapping[str, list[str]] | None, now: Mapping[str, str]) -> list[str]:
    """Return the files of a recorded place that have changed, are new, or are missing; none where
    the place was not recorded."""
    if recorded is None:
        return []
    return [file for file in {**recorded, **now} if recorded.get(file, [])[-1:] != [now.get(file)]]


def _edited(recorded: Mapping[str, list[str]], now: Mapping[str, str]) -> list[str]:
    """Return a line for each key of the config whose value differs from the one that was kept, with
    both values. A key that is in only one of the two comes from another version and is not
    compared, nor is a record that is damaged."""
    lines: list[str] = []
    for section, text in now.items():
        with suppress(BadJson, IndexError):
            old = parse_json(recorded.get(section, [])[-1])
            lines += _differing(old, parse_json(text), section)
    return lines


def _differing(old: Any, now: Any, key: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(now, dict):
        for name in [name for name in now if name in old]:
            yield from _differing(old[name], now[name], f"{key}.{name}")
    elif old != now:
        yield f"{key}: {brief(json.dumps(now), 60)}, and it began with {brief(json.dumps(old), 60)}"


def _places(config: Config | SftConfig) -> Iterator[tuple[str, Path, bool]]:
    """Yield (key, file or directory, whether it is a model's) of every place that a config
    names."""
    yield from _of_task("task", config.task)
    model = config.model
    if model.path is not None:
        yield "model.path", model_directory(Path(model.path)), True
    if model.chat_template is not None:
        yield "model.chat_template", Path(model.chat_template), False
    if config.adapter is not None and config.adapter.init is not None:
        yield "adapter.init", model_directory(Path(config.adapter.init)), True
    if isinstance(config, Config):
        yield from _of_rollouts(config)


def _of_rollouts(config: Config) -> Iterator[tuple[str, Path, bool]]:
    """Yield the places, as `_places` does, that only the config of a run that samples names."""
    model, algorithm = config.model, config.algorithm
    if config.reference.path is not None:
        yield "reference.path", model_directory(Path(config.reference.path)), True
    if model.sft is not None:
        yield "model.sft", Path(model.sft), False
        yield from _of_task("model.sft: task", load_sft_config(model.sft).task)
    for judge in config.rewards.models:
        yield f"rewards.models: {judge.name}", Path(judge.path), True
    functions = [
        (f"rewards.functions: {s.label}", s.function)
        for s in config.rewards.functions
        if not s.by_name
    ]
    functions += _of_environment(config.environment)
    algorithm_functions = (
        ("algorithm.loss", algorithm.loss, LOSSES),
        ("algorithm.advantage", algorithm.advantage, ADVANTAGES),
    )
    functions += [(key, name) for key, name, named in algorithm_functions if name not in named]
    if config.reference.shown is not None and config.reference.shown.feedback is not None:
        functions.append(("reference.shown.feedback", config.reference.shown.feedback))
    for key, reference in functions:
        option = key.partition(":")[0]
        label = "reward function" if option == "rewards.functions" else option
        if not reference.startswith(OBJECT) and (file := _file_of(reference, label)) is not None:
            yield key, file, False


def _of_environment(config: EnvironmentConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, reference) of each tool and factory."""
    for tool in config.tools:
        yield f"environment.tools: {tool.rpartition(':')[2]}", tool
    if isinstance(config.factory, str):
        yield "environment.factory", config.factory
    for name, factory in config.factory.items() if isinstance(config.factory, dict) else ():
        yield f"environment.factory: {name}", factory


def _of_task(section: str, task: TaskSettings) -> Iterator[tuple[str, Path, bool]]:
    files = [(f"{section}.files.{i}", file.path) for i, file in enumerate(task.files)]
    for key, path in (
        (f"{section}.path", task.path),
        (f"{section}.held_out_path", task.held_out_path),
        *files,
    ):
        if path is not None and not path.startswith(OBJECT):
            yield key, Path(path), False


def _file_of(reference: str, what: str) -> Path | None:
    """Return the file of `file.py:function` or `package.module:function`, without importing it;
    None if the file cannot be found. Raises IsobitError for a reference of another form; `what`
    names it in the message."""
    home, _ = split_reference(reference, what)
    if home.endswith(".py"):
        return Path(home)
    where, name, origin = None, "", None
    for component in home.split("."):
        name = f"{name}.{component}" if name else component
        spec = PathFinder.find_spec(name, where)
        if spec is None:  # a module built into Python, or none: the loader reports it
            return None
        where, origin = spec.submodule_search_locations, spec.origin
    return None if origin is None else Path(origin)


def _hashed(path: Path, model: bool) -> Iterator[tuple[str, str]]:
    try:
        folder = path.is_dir()
        files = sorted(path.rglob("*")) if folder and not model else [path]
        if folder and model:
            files = sorted(
                {
                    file
                    for pattern in (*_DESCRIPTIONS, "*.safetensors")
                    for file in path.glob(pattern)
                }
            )
    except (OSError, ValueError):
        return
    for file in files:
        try:
            size = check_readable(file)
            digest = (
                _sampled(file, size)
                if file.suffix == ".safetensors" and model
                else file_digest(file)
            )
        except OSError:  # a directory, or not readable: the loader reports it
            continue
        yield str(file.relative_to(path)) if folder else file.name, digest


def _sampled(file: Path, size: int) -> str:
    """Return the SHA-256 of the size, the header and evenly spread samples of a safetensors
    file."""
    digest = hashlib.sha256(f"{size}\n".encode())
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        digest.update(os.pread(opened.fileno(), min(length + 8, 1 << 24), 0))
        for number in range(_SAMPLES):
            offset = number * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1)
            digest.update(os.pread(opened.fileno(), _SAMPLE_BYTES, offset))
    return digest.hexdigest()
