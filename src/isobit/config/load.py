"""From a config and its overrides to a frozen value, or to one line that says what is wrong.

One file, or one mapping, describes a run; `key.sub=value` overrides change it; the *resolved* value
is what is used and what is written to the run directory. An unknown key, a wrong type, a value out
of range or a contradiction raises `IsobitError`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import yaml

from isobit.config.messages import describe, unknown_keys
from isobit.config.reading import Source, read_source
from isobit.config.schema import CompareConfig, Config, SftConfig
from isobit.config.sections import RewardsConfig
from isobit.errors import IsobitError, listed
from isobit.options.consistency import default_order
from isobit.options.declare import plain
from isobit.options.reading import OptionError, read
from isobit.run.directory import CONFIG, began_by, require_run

_Schema = TypeVar("_Schema")


_COMMANDS: dict[type, str] = {Config: "train", SftConfig: "sft", CompareConfig: "compare"}
"""What runs a config."""


def load_config(source: Source, overrides: Sequence[str] = ()) -> Config:
    """Return the config of a training run: of a YAML file, or of a mapping of settings such as
    `{"model": {"path": ...}}`, in which `"sampling.group_size"` is a key too; then the overrides
    `key.sub=value`, whose values are YAML; a later one wins.

    Raises IsobitError, in one line, for a missing or malformed file and for every key or value that
    is not right.
    """
    return _load(Config, source, overrides)


def load_run_config(directory: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config of a run directory, with the order of sums that it began with. Raises
    IsobitError as `load_config`, and for a directory that is not a run of this version, or a
    supervised one."""
    config = load_any_run_config(directory, overrides)
    if isinstance(config, SftConfig):
        raise IsobitError(
            f"{directory} is a run of `isobit sft`: it has no rollouts and no rewards; give one of "
            "`isobit train`"
        )
    return config


def load_any_run_config(directory: Path, overrides: Sequence[str] = ()) -> Config | SftConfig:
    """Return the config of a run directory as `load_run_config`, of a supervised run too."""
    require_run(directory)
    values, where = read_source(directory / CONFIG, ())
    schema: type[Config | SftConfig] = SftConfig if _of_sft(values) else Config
    values, _ = read_source(in_its_order(values, began_by(directory)), overrides)
    return parse_config(schema, values, where)


def is_supervised(directory: Path) -> bool:
    """Return whether a run directory is one of `isobit sft`."""
    return _of_sft(read_source(directory / CONFIG, ())[0])


def _of_sft(values: Mapping[str, Any]) -> bool:
    """Return whether a run's own config is one of `isobit sft`, which has a key that no other
    has."""
    return "batch_size" in values


def load_sft_config(
    source: Source, overrides: Sequence[str] = (), began: Mapping[str, Any] = MappingProxyType({})
) -> SftConfig:
    """Return the config of `isobit sft`; as `load_config`. `began`: the facts of a run whose base
    model it made."""
    file_values, where = read_source(source, ())
    settings = _with_run_dir(file_values)
    changes = [f"run.dir={o[4:]}" if o.startswith("out=") else o for o in overrides]
    values, _ = read_source(in_its_order(settings, began), changes)
    return _parse_own(SftConfig, values, where, source)


def load_train_or_sft_config(source: Source, overrides: Sequence[str] = ()) -> Config | SftConfig:
    """Return a config as `load_config`, or as `load_sft_config` where that command knows more of
    the source's keys."""
    values, _ = read_source(source, ())
    if len(_unknown(values, SftConfig)) < len(_unknown(values, Config)):
        return load_sft_config(source, overrides)
    return load_config(source, overrides)


def _with_run_dir(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with `run.dir` in place of its short name `out`."""
    if "out" not in values:
        return dict(values)
    run = values.get("run") or {}
    if not isinstance(run, Mapping) or "dir" in run:
        raise IsobitError("out and run.dir are one key: leave one of them out")
    rest = {key: value for key, value in values.items() if key != "out"}
    return {**rest, "run": {**run, "dir": values["out"]}}


def in_its_order(values: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, of a run or of the base model that it begins with, on any processor as on
    the one where it began: `consistency: bitwise` leaves the order of sums to the processor, and
    the `facts` that the run recorded there (`machine.json`) say which it was."""
    named, began = values.get("backend", "auto"), facts.get("bitwise")
    on_a_cpu = (facts.get("backend") if named == "auto" else named) in ("native", "reference")
    by_default = values.get("consistency", "bitwise") == "bitwise"
    if on_a_cpu and by_default and began not in (None, default_order()):
        return {**values, "consistency": f"bitwise-{began}"}
    return dict(values)


def load_compare_config(
    path: str | Path,
    presets: Sequence[str],
    seeds: int | None,
    out: str | None,
    changes: Sequence[str] = (),
) -> CompareConfig:
    """Read a config of `isobit compare`, or take a training config with the settings of the command
    line."""
    values, _ = read_source(path, ())
    if "presets" not in values and "train" not in values:
        _refuse_other(Config, values, str(path))
        if not presets:
            raise IsobitError(
                f"{path} is a training config: say what to compare with --presets bf16,fp8"
            )
        values = {"train": str(path)}
    options = {"presets": list(presets) or None, "seeds": seeds, "out": out}
    values |= {key: value for key, value in options.items() if value is not None}
    if changes:
        present = values.get("changes") or []
        values["changes"] = [*(present if isinstance(present, list) else [present]), *changes]
    return _parse_own(CompareConfig, values, str(path), path, values)


def dump_config(config: Config | SftConfig | CompareConfig) -> str:
    """Return the resolved config as YAML; reading it again gives an equal value."""
    return yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)


def parse_config(schema: type[_Schema], values: Mapping[str, Any], where: str) -> _Schema:
    """Validate plain values; `where` names their origin in messages."""
    if "steps" in values and values.get("epochs") is not None:
        raise IsobitError(f"{where}: steps and epochs: give one of the two")
    try:
        config = read(schema, values)
    except OptionError as error:
        raise IsobitError(f"{where}: {describe(error, schema)}") from None
    _check_precision(config, where)
    if isinstance(config, Config):
        _check_rewards(config.rewards, where)
    return config


def _load(schema: type[_Schema], source: Source, overrides: Sequence[str]) -> _Schema:
    values, where = read_source(source, overrides)
    return _parse_own(schema, values, where, source)


def _parse_own(
    schema: type[_Schema],
    values: Mapping[str, Any],
    where: str,
    source: Source,
    given: Mapping[str, Any] | None = None,
) -> _Schema:
    """Parse a config as `parse_config`, with a message that says where a file is meant for another
    command. `given`: keys and values in the place of those of the file."""
    try:
        return parse_config(schema, values, where)
    except IsobitError as error:
        if isinstance(source, (str, Path)):
            _refuse_other(schema, given or read_source(source, ())[0], where, str(error))
        raise


def _refuse_other(schema: type, given: Mapping[str, Any], where: str, reason: str = "") -> None:
    """Raise IsobitError where a file is a config of another command: all that it has another has,
    and this one has not. `reason`: what is wrong with it as one of this command, which is said too
    where a single key decides."""
    unknown = _unknown(given, schema)
    left = {nearest: _unknown(given, nearest) for nearest in _COMMANDS}
    nearest = min(left, key=lambda each: len(left[each]))
    if left[nearest] < unknown:
        keys, command = sorted(unknown - left[nearest]), _COMMANDS[nearest]
        text = (
            f"{where}: a config of `isobit {command}`, and not of `isobit "
            f"{_COMMANDS[schema]}`: it has {listed(keys)}"
        )
        meant = (
            f", or else: {reason.removeprefix(f'{where}: ')}" if reason and len(keys) == 1 else ""
        )
        raise IsobitError(f"{text}; run isobit {command} {where}{meant}") from None


def _unknown(given: Mapping[str, Any], schema: type) -> set[str]:
    """Return the keys of a file that a command does not know."""
    if schema is not SftConfig or "out" not in given:
        return unknown_keys(given, schema)
    return unknown_keys({key: value for key, value in given.items() if key != "out"}, schema)


def _check_precision(config: Any, where: str) -> None:
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
    if config.consistency != "fast" and reason is not None:
        raise IsobitError(
            f"{where}: consistency: {config.consistency} cannot hold: {reason}; "
            "use activation_granularity: 1x128 or row, or consistency: fast"
        )
    if isinstance(config, Config) and config.sampling.filtered:
        _check_filtering(config, precision.unified, where)


def _check_filtering(config: Config, unified: bool, where: str) -> None:
    """Raise IsobitError unless the learner's logits are the rollout's, bit for bit, and so the
    tokens that are kept."""
    if unified and config.consistency != "fast":
        return
    reason = f"consistency: {config.consistency}" if unified else "a precision with two engines"
    raise IsobitError(
        f"{where}: sampling.top_k, top_p, min_p and repetition_penalty cannot be used in training "
        f"with {reason}, whose learner may keep other tokens than the rollout drew from; use a "
        "unified precision such as fp8 and consistency: bitwise, or set top_k: 0, top_p: 1, "
        "min_p: 0, repetition_penalty: 1"
    )


def _check_rewards(rewards: RewardsConfig, where: str) -> None:
    for i, spec in enumerate(rewards.functions):
        try:
            spec.build(rewards.deadline_s)
        except OptionError as error:
            raise IsobitError(f"{where}: rewards.functions.{i}.{error}") from None
