"""Shell completion: config files, `key.sub=value` overrides, presets.

The keys come from the declarations of `isobit.config`, which import neither torch nor numpy.
Install with `isobit --install-completion`.
"""

from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path

import typer

from isobit.options.precisions import PRECISIONS

Key = tuple[str, tuple[str, ...]]
"""A dotted key, and the values that can be named: its choices, or its default alone."""


def config_files(incomplete: str) -> list[str]:
    """YAML files, and directories to go on in; the content of a directory where it is the only
    match."""
    folder, _, start = incomplete.rpartition("/")
    where = Path(f"{folder}/" if "/" in incomplete else ".")
    if not where.is_dir():
        return []
    paths = [
        p
        for p in sorted(where.iterdir())
        if p.name.startswith(start) and not p.name.startswith(".")
    ]
    prefix = f"{folder}/" if "/" in incomplete else ""
    names = [f"{prefix}{p.name}" for p in paths if p.suffix in (".yaml", ".yml") and p.is_file()]
    folders = [f"{prefix}{p.name}/" for p in paths if p.is_dir()]
    if not names and len(folders) == 1 and folders[0] != incomplete:
        return config_files(folders[0]) or folders
    return names + folders


def overrides(ctx: typer.Context, incomplete: str) -> list[str]:
    """Keys, then values. Bash passes what follows the `=` as a separate word, other shells pass the
    whole."""
    from isobit.config import commands, schema  # here, so that --help does not import it

    own = {
        "sft": schema.SftConfig,
        "generate": commands.GenerateConfig,
        "serve": commands.ServerConfig,
    }
    keys = dict(schema_keys(own.get(ctx.info_name or "", schema.Config)))
    if ctx.info_name == "eval":
        keys = {key: values for key, values in keys.items() if commands.is_read_by_eval(key)}
    key, sign, start = incomplete.partition("=")
    if sign:
        return [f"{key}={value}" for value in keys.get(key, ()) if value.startswith(start)]
    typed = [word for word in ctx.params.get("overrides") or () if word != "="]
    if typed and typed[-1] in keys:
        return [value for value in keys[typed[-1]] if value.startswith(incomplete)]
    names = [key for key in keys if key.startswith(incomplete)]
    if len(names) == 1:  # more than one candidate, or the shell would put a space after the `=`
        return [f"{names[0]}=", *(f"{names[0]}={value}" for value in keys[names[0]] or ("...",))]
    return [f"{key}=" for key in names]


def presets(incomplete: str) -> list[str]:
    """Names of precision flows; after a comma, another."""
    prefix, comma, start = incomplete.rpartition(",")
    return [f"{prefix}{comma}{name}" for name in PRECISIONS if name.startswith(start)]


def backends(incomplete: str) -> list[str]:
    """Return the values of --backend that begin so."""
    return [
        name for name in ("auto", "triton", "native", "reference") if name.startswith(incomplete)
    ]


_CARDS = ("rtx4090", "rtx5090", "a100-40", "l40s", "a100-80", "h100", "h200", "b200")


def devices(incomplete: str) -> list[str]:
    """Values of --device of `isobit plan`; tests/plan compares them with what it knows."""
    return [name for name in _CARDS if name.startswith(incomplete)]


def schema_keys(schema: type, prefix: str = "") -> Iterator[Key]:
    """Every dotted key of a config that takes a value, and those of its sections; not those of
    sections in a list."""
    from isobit.options.declare import choices, members, options_of

    for name, option in options_of(schema).items():
        inner = [
            kind for kind in members(option.kind) if isinstance(kind, type) and is_dataclass(kind)
        ]
        default = option.default if isinstance(option.default, (int, float, str)) else ""
        values = choices(option.kind) or ((str(default),) if default != "" else ())
        if values or not inner:
            yield f"{prefix}{name}", values
        for section in inner:
            yield from schema_keys(section, f"{prefix}{name}.")
