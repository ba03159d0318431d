"""A config as plain values: of a YAML file, of a mapping or of a `Config`, with `key.sub=value`
overrides over it.

Left out: whether keys and values are right, which the schema says.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from isobit.config.places import placed
from isobit.config.schema import Config, SftConfig
from isobit.data import strict_yaml
from isobit.data.foreign import exists, read_bytes, reason_of
from isobit.errors import IsobitError, brief
from isobit.options.declare import Preprocess, options_of, plain, unwrapped
from isobit.rl.algorithm.objective import Objective, without_preset

Source = str | Path | Mapping[str, Any] | Config | SftConfig
"""Where a config comes from: a YAML file, a mapping of settings, or a config that was loaded
before."""
_MOST_BYTES = 1 << 20
_UNREADABLE = re.compile("[\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""Characters that JSON has in a text as they are, and YAML only in hexadecimal."""
_OTHER = {"steps": "epochs", "epochs": "steps"}
"""An override of one takes the place of the other."""
_KEY = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_NAME = re.compile(r"([^\s\[\]{}\"'][^\s\[\]{}]*)[\[{].*[\]}]", re.DOTALL)
"""A name with options in brackets, such as `fp8[wgrad=bf16]` and `math:{"tolerance": 1}`."""
_ITEM = re.compile(
    r"""("(?:[^"\\]|\\.)*"|'[^']*')|((?:[\[{,]|:(?=\s))\s*)([^\s,:\[\]{}"']+)(?=[\[{])"""
)
"""A text in quotes; or, in a list or mapping, the beginning of such a name."""


def read_source(source: Source, overrides: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return (the values, the name of their origin in messages). Raises IsobitError for a source
    that is neither a file nor a mapping."""
    if isinstance(source, (str, Path)):
        values, where = placed(_read_yaml(Path(source)), Path(source)), str(source)
    elif isinstance(source, (Config, SftConfig)):
        values, where = plain(source), "config"
    elif isinstance(source, Mapping):
        values, where = _settings(source), "settings"
    else:
        raise IsobitError(
            f"config: expected the path of a YAML file or a mapping of settings, got {source!r:.80}"
        )
    if isinstance(overrides, (str, Mapping)) or not all(
        isinstance(override, str) for override in overrides
    ):
        raise IsobitError(
            f'overrides: expected a list of texts, such as ["steps=10"], got {overrides!r:.80}'
        )
    algorithm = values.get("algorithm")
    whole = isinstance(algorithm, Mapping) and set(options_of(Objective)) <= set(algorithm)
    if whole and any(override.startswith("algorithm.preset=") for override in overrides):
        values["algorithm"] = without_preset(
            algorithm
        )  # a run's own config, which says every part of its preset
    changed = {override.partition("=")[0] for override in overrides} & {"steps", "epochs"}
    earlier = {key: values.pop(key, None) for key in _OTHER if changed == {_OTHER[key]}}
    for index, override in enumerate(overrides):
        _refuse_to_drop(override, overrides[:index])
        _override(values, override)
    if "epochs" in changed and values["epochs"] is None and earlier.get("steps") is not None:
        values["steps"] = earlier["steps"]
    if isinstance(source, (Config, SftConfig)) and not changed and values["epochs"] is not None:
        del values["steps"]  # a loaded config always has it
    return values, where


def override(key: str, value: object) -> str:
    """Return `key=value` with the text of the value, or the texts of a list or mapping, in quotes: a
    path may hold text that YAML reads as a comment, a number or a mapping, and characters that it
    refuses."""
    texts = value if isinstance(value, (list, dict)) else str(value)
    quoted = json.dumps(texts, ensure_ascii=False)
    return f"{key}={_UNREADABLE.sub(lambda match: f'{chr(92)}u{ord(match[0]):04x}', quoted)}"


def _read_yaml(path: Path) -> dict[str, Any]:
    if exists(path) and path.is_dir():
        hint = f"; a run goes on with --resume {path}" if (path / "config.yaml").is_file() else ""
        raise IsobitError(f"cannot read config {path}: it is a directory, not a YAML file{hint}")
    try:
        text = read_bytes(path, _MOST_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise IsobitError(f"cannot read config {path}: {reason_of(error)}") from None
    try:
        values = strict_yaml.load(text)
    except strict_yaml.DuplicateKey as error:
        raise IsobitError(
            f"{path}, line {error.line}: key {brief(error.key)!r} was given before, in line "
            f"{error.first_line}; leave one"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = brief(getattr(error, "problem", None) or "syntax error", 200)
        if problem == "mapping values are not allowed here":
            problem += "; a text with ': ' in it needs quotes around it"
        raise IsobitError(f"{path}{line}: not valid YAML: {problem}") from None
    if not isinstance(values, dict):
        raise IsobitError(f"{path}: expected a mapping of keys, got {type(values).__name__}")
    return values


def _refuse_to_drop(override: str, earlier: Sequence[str]) -> None:
    """Raise IsobitError where a section is given whole after one of its keys."""
    key = override.partition("=")[0]
    if dropped := next((o for o in earlier if o.startswith(f"{key}.")), None):
        raise IsobitError(
            f"override {brief(override)!r} takes the place of {brief(dropped)!r}, which comes before "
            f"it; give {key} first"
        )


def _override(values: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not _KEY.fullmatch(key):
        raise IsobitError(
            f"override {brief(override)!r}: expected key.sub=value, such as sampling.temperature=0.8"
        )
    try:
        value = _yaml(text)
    except strict_yaml.DuplicateKey as error:
        raise IsobitError(
            f"override {brief(override)!r}: key {brief(error.key)!r} comes twice; leave one"
        ) from None
    if (
        key.rpartition(".")[2] == "precision"
        and isinstance(value, str)
        and "[" in value
        and not value.endswith("]")
    ):
        raise IsobitError(
            f"override {brief(override)!r}: its [ is not closed; expected {key}=PRESET[option=value, "
            "option=value], in quotes where a shell would cut it at a space"
        )
    section = key.partition(".")[0]
    if section != key:
        _expand(values, section)
    _set(values, key, value, f"override {brief(override)!r}")


def _yaml(text: str) -> Any:
    """Return the value of an override. A name with options in brackets, alone or in a list, is
    text, although YAML has no such plain text; what YAML cannot read is text too."""
    text = text.strip()
    if (name := _NAME.fullmatch(text)) and _closing(text, name.end(1)) == len(text):
        return text
    for form in (text, _with_quotes(text)):
        try:
            return strict_yaml.load(form)
        except strict_yaml.DuplicateKey:
            raise
        except yaml.YAMLError:
            continue
    return text


def _with_quotes(text: str) -> str:
    """Return a list or mapping with its names with brackets in quotes."""
    quoted, end = list[str](), 0
    for match in _ITEM.finditer(text):
        if match[3] and match.start() >= end:
            close = _closing(text, match.end())
            if not close:
                break
            quoted += [text[end : match.start(3)], json.dumps(text[match.start(3) : close])]
            end = close
    return "".join([*quoted, text[end:]])


def _closing(text: str, start: int) -> int:
    """Return where the bracket at `start` has been closed; 0 where it never is."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] in "[{") - (text[index] in "]}")
        if not depth:
            return index + 1
    return 0


def _expand(values: dict[str, Any], name: str) -> None:
    """Replace the short form of a section, such as `model: DIR`, by the section, so that an
    override may set more of its keys."""
    options = {**options_of(Config), **options_of(SftConfig)}
    if name in options and isinstance(values.get(name), (str, list, tuple)):
        for mark in unwrapped(options[name].kind)[1]:
            if isinstance(mark, Preprocess):
                values[name] = mark.change(values[name])


def _set(values: dict[str, Any], key: str, value: Any, what: str) -> None:
    """Put a value at `section.key`; sections on the way are copied, so that those of the caller do
    not change."""
    *parents, last = key.split(".")
    node: Any = values
    for depth, parent in enumerate(parents):
        child = node.get(parent) if isinstance(node, dict) else None
        if parent == "precision" and isinstance(child, str):
            child = {"preset": child}
        if isinstance(child, (list, tuple)) or (
            not child and (*parents, last)[depth + 1].isdigit()
        ):
            named = ".".join(parents[: depth + 1])
            raise IsobitError(f"{what}: {named} is a list, which is given whole: {named}=[...]")
        if child is None:
            child = {}
        if not isinstance(child, dict):
            raise IsobitError(f"{what}: {brief(parent)} is not a section of keys")
        node[parent] = child = dict(child)
        node = child
    node[last] = value


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a mapping that was written in Python, in which `section.key` names a key
    of a section."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if not isinstance(key, str):
            raise IsobitError(f"settings: a key must be text, got {key!r:.80}")
        _set(values, key, _plain(value, key), f"settings: {brief(key)!r}")
    return values


def _plain(value: Any, key: str) -> Any:
    """Return a value as YAML would have it: paths and precisions are their names."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, key) for inner in value]
    from isobit.precision import (
        Precision,
        precision_from,
    )  # here, so that --help does not import torch

    if isinstance(value, Precision):
        try:
            same = precision_from(value.name) == value
        except IsobitError:
            same = False
        if not same:
            raise IsobitError(
                f"settings: {brief(key)}: a run keeps its flow by name, and "
                f"{brief(value.name)!r} names no flow equal "
                "to this one; give a preset's name, or {'preset': NAME, option: value}"
            )
        return value.name
    if callable(value):
        raise IsobitError(
            f"settings: {brief(key)}: a function is no setting; reward functions go into "
            "train(..., rewards=[f])"
        )
    raise IsobitError(
        f"settings: {brief(key)}: expected text, numbers, lists or mappings, got "
        f"{type(value).__name__}"
    )
