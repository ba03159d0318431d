"""Files that a config names: relative to the folder of the config, or else to the present directory.

A config can so be used from anywhere, with what lies next to it. Left out: what a run writes, which
is relative to the present directory, as overrides are, and the config of a run directory, which
keeps what was found when the run began.
"""

import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from isobit.config.schema import CompareConfig, Config
from isobit.data.foreign import exists
from isobit.errors import IsobitError, brief
from isobit.options.declare import FileName, Preprocess, is_union, options_of, unwrapped
from isobit.run.directory import CONFIG
from isobit.run.format import FORMAT


def placed(values: Mapping[str, Any], config: Path) -> dict[str, Any]:
    """Return the values of a config file, in which names of files that lie next to it are those of
    the files from here. `isobit sft` has keys of `isobit train`."""
    if config.name == CONFIG and exists(config.with_name(FORMAT)):
        return dict(values)
    options = {**options_of(CompareConfig), **options_of(Config)}
    return {
        key: _placed(options[key].kind, value, config) if key in options else value
        for key, value in values.items()
    }


def _placed(kind: Any, value: Any, config: Path) -> Any:
    """Return a value of a type; where nothing in it is a file next to the config, as it stands."""
    kind, marks = unwrapped(kind)
    whole = value
    for mark in marks:
        if isinstance(mark, Preprocess):
            try:
                whole = mark.change(whole)
            except IsobitError:  # which the reader of options says
                return value
    found = whole
    for mark in marks:
        if isinstance(mark, FileName) and isinstance(whole, str):
            found = _beside(whole, config, mark.functions)
    found = _inside(kind, found, config)
    return value if found == whole else found


def _inside(kind: Any, value: Any, config: Path) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if is_union(kind):
        for part in parts:
            value = _placed(part, value, config)
    elif origin is tuple and isinstance(value, (list, tuple)):
        value = [_placed(parts[0], inner, config) for inner in value]
    elif origin is tuple and value is not None:
        value = _placed(parts[0], value, config)
    elif isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        value = {name: _placed(parts[1], inner, config) for name, inner in value.items()}
    elif isinstance(kind, type) and hasattr(kind, "__dataclass_fields__"):
        options = options_of(kind) if isinstance(value, Mapping) else {}
        if options:
            value = {
                key: _placed(options[key].kind, inner, config) if key in options else inner
                for key, inner in value.items()
            }
    return value


def _beside(text: str, config: Path, functions: bool) -> str:
    """Return the name from here of a file that lies next to the config."""
    name, colon, function = text.rpartition(":") if functions else (text, "", "")
    if not name or (functions and not name.endswith(".py")) or Path(name).is_absolute():
        return text
    there = config.parent / name
    if not exists(there) or _same(config.parent, Path()):
        return text
    plain = Path(os.path.normpath(there))
    there = plain if _same(there, plain) else there
    if exists(Path(name)) and not _same(Path(name), there):
        _say_which(str(config), name, str(there))
    return f"{there}{colon}{function}"


def _same(a: Path, b: Path) -> bool:
    return exists(b) and os.path.samefile(a, b)


@cache
def _say_which(config: str, name: str, there: str) -> None:
    print(
        f"warning: {config}: {brief(name)} is {brief(there)}, next to the config, and not the one "
        "of the present directory",
        file=sys.stderr,
    )
