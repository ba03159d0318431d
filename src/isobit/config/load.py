"""A config file and its overrides to a frozen value, or to one line that says what is wrong.

One file describes a run; `key.sub=value` overrides change it; the *resolved* value is what is used and what is written
to the run directory. An unknown key, a wrong type, a value out of range or a contradiction raises `IsobitError`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from isobit.config.schema import CompareConfig, Config, SftConfig
from isobit.config.sections import RewardsConfig, TaskConfig
from isobit.errors import IsobitError
from isobit.tasks.data import TaskSettings
from isobit.tasks.named import OptionError
from isobit.tasks.task import RewardSpec

_Schema = TypeVar("_Schema", Config, SftConfig, CompareConfig)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a training config and apply `key.sub=value` overrides; the values are YAML.

    Raises IsobitError, in one line, for a missing or malformed file and for every key or value that is not right.
    """
    return _load(Config, path, overrides)


def load_sft_config(path: str | Path, overrides: Sequence[str] = ()) -> SftConfig:
    """Read a config of `isobit sft`; as `load_config`."""
    return _load(SftConfig, path, overrides)


def load_compare_config(
    path: str | Path, presets: Sequence[str], seeds: int | None, out: str | None, changes: Sequence[str] = ()
) -> CompareConfig:
    """Read a config of `isobit compare`, or take a training config with what the command line gives beside it."""
    values = _read_yaml(Path(path))
    if "presets" not in values and "train" not in values:
        if not presets:
            raise IsobitError(f"{path} is a training config: say what to compare with --presets bf16,fp8")
        values = {"train": str(path)}
    given = {"presets": list(presets) or None, "seeds": seeds, "out": out}
    values |= {key: value for key, value in given.items() if value is not None}
    if changes:
        values["changes"] = [*values.get("changes", ()), *changes]
    return parse_config(CompareConfig, values, str(path))


def task_settings(task: TaskConfig, seed: int) -> TaskSettings:
    """The task section, as the tasks take it."""
    known = {field.name for field in fields(TaskSettings)}
    return TaskSettings(**task.model_dump(include=known), seed=seed)


def reward_specs(rewards: RewardsConfig) -> list[RewardSpec]:
    """The reward functions that a config names; none means the task's own."""
    return [RewardSpec(r.function, r.weight, r.name, r.options, r.deadline_s) for r in rewards.functions]


def dump_config(config: BaseModel) -> str:
    """The resolved config as YAML; reading it again gives an equal value."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def parse_config(schema: type[_Schema], values: Mapping[str, Any], where: str) -> _Schema:
    """Validate plain values; `where` names their origin in messages."""
    try:
        config = schema.model_validate(values)
    except ValidationError as error:
        raise IsobitError(f"{where}: {_message(error, schema)}") from None
    _check_precision(config, where)
    if isinstance(config, Config):
        _check_rewards(config.rewards, where)
    return config


def _load(schema: type[_Schema], path: str | Path, overrides: Sequence[str]) -> _Schema:
    values = _read_yaml(Path(path))
    for override in overrides:
        _override(values, override)
    return parse_config(schema, values, str(path))


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise IsobitError(f"cannot read config {path}: {reason}") from None
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise IsobitError(
            f"{path}{line}: not valid YAML: {getattr(error, 'problem', None) or 'syntax error'}"
        ) from None
    if not isinstance(values, dict):
        raise IsobitError(f"{path}: expected a mapping of keys, got {type(values).__name__}")
    return values


def _override(values: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key):
        raise IsobitError(f"override {override!r}: expected key.sub=value, such as sampling.temperature=0.8")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    *parents, last = key.split(".")
    node: Any = values
    for parent in parents:
        child = node.get(parent) if isinstance(node, dict) else None
        if parent == "precision" and isinstance(child, str):
            child = {"preset": child}
        if child is None:
            child = {}
        if not isinstance(child, dict):
            raise IsobitError(f"override {override!r}: {parent} is not a section of keys")
        node[parent] = child = dict(child)
        node = child
    node[last] = value


def _check_precision(config: Config | SftConfig | CompareConfig, where: str) -> None:
    from isobit.precision import precision_from  # here, so that --help does not import torch

    try:
        if isinstance(config, CompareConfig):
            for preset in config.presets:
                precision_from(preset)
            return
        precision = precision_from(config.precision)
        if isinstance(config, Config):
            for model in config.rewards.models:
                precision_from(model.precision)
            if config.reference.precision is not None:
                precision_from(config.reference.precision)
    except IsobitError as error:
        raise IsobitError(f"{where}: {error}") from None
    reason = precision.varies_with_batch()
    if config.consistency == "bitwise" and reason is not None:
        raise IsobitError(
            f"{where}: consistency: bitwise cannot hold: {reason}; "
            "use activation_granularity: 1x128 or row, or consistency: fast"
        )


def _check_rewards(rewards: RewardsConfig, where: str) -> None:
    for i, spec in enumerate(reward_specs(rewards)):
        try:
            spec.build(rewards.deadline_s)
        except OptionError as error:
            raise IsobitError(f"{where}: rewards.functions.{i}.{error}") from None


def _message(error: ValidationError, schema: type[BaseModel]) -> str:
    first = error.errors()[0]
    location = [part for part in first["loc"] if not str(part).startswith("<")]  # tags of a union
    key = ".".join(str(part) for part in location)
    if first["type"] == "extra_forbidden":
        known = _known_keys(schema, location[:-1])
        close = get_close_matches(str(location[-1]), known, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else f"; known here: {', '.join(known)}"
        return f"unknown key {key!r}{hint}"
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return f"{key}: required, but not given"
    if first["type"] == "value_error":
        return f"{key}: {text}" if key else text
    return f"{key}: {text[0].lower()}{text[1:]}, got {first['input']!r}"


def _known_keys(schema: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    for part in location:
        if isinstance(part, int):
            continue
        sections = [c for c in _inside(schema.model_fields[part].annotation) if issubclass(c, BaseModel)]
        if not sections:
            return []
        schema = sections[0]
    return list(schema.model_fields)


def _inside(annotation: Any) -> Iterator[type]:
    """The classes in a type, however deep in unions and annotations."""
    if isinstance(annotation, type) and not get_args(annotation):
        yield annotation
    for part in get_args(annotation):
        yield from _inside(part)
