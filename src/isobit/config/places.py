"""Files that a config names: relative to the config's folder, or else to the present directory.

So a config can be used from any directory, together with the files that lie next to it. Left out:
files that a run writes, which are relative to the present directory, as overrides are; and the
config of a run directory, which keeps the names that were found when the run began.
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
    """Return the values of a config file with each name of a file next to it rewritten to be valid
    from the present directory. The values of the config in a run directory are returned unchanged.
    Keys of `isobit compare` are known too; those of `isobit sft` are keys of `isobit train`."""
    if config.name == CONFIG and exists(config.with_name(FORMAT)):
        return dict(values)
    options = {**options_of(CompareConfig), **options_of(Config)}
    return {
        key: _placed(options[key].kind, value, config) if key in options else value
        for key, value in values.items()
    }


def _placed(kind: Any, value: Any, config: Path) -> Any:
    """Return a value of type `kind` with the names of files next to the config rewritten; unchanged
    where it has no such name."""
    kind, marks = unwrapped(kind)
    whole = value
    for mark in marks:
        if isinstance(mark, Preprocess):
            try:
                whole = mark.change(whole)
            except IsobitError:  # the reader of options reports it
                return value
    rewritten = whole
    for mark in marks:
        if isinstance(mark, FileName) and isinstance(whole, str):
            rewritten = _beside(whole, config, mark.functions)
    rewritten = _inside(kind, rewritten, config)
    return value if rewritten == whole else rewritten


def _inside(kind: Any, value: Any, config: Path) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if is_union(kind):
        for member in arguments:
            value = _placed(member, value, config)
    elif origin is tuple and isinstance(value, (list, tuple)):
        value = [_placed(arguments[0], inner, config) for inner in value]
    elif origin is tuple and value is not None:
        value = _placed(arguments[0], value, config)
    elif isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        value = {name: _placed(arguments[1], inner, config) for name, inner in value.items()}
    elif isinstance(kind, type) and hasattr(kind, "__dataclass_fields__"):
        options = options_of(kind) if isinstance(value, Mapping) else {}
        if options:
            value = {
                key: _placed(options[key].kind, inner, config) if key in options else inner
                for key, inner in value.items()
            }
    return value


def _beside(text: str, config: Path, functions: bool) -> str:
    """Return the name, from the present directory, of a file that lies next to the config; with
    `functions`, of the file in `FILE.py:NAME`. Any other text is returned unchanged. Warns where
    another file of that name is in the present directory."""
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
