"""The differences between the configurations of several runs: a line for each key whose values are
not all the same."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from isobit.errors import IsobitError


def flattened(text: str, where: str) -> dict[str, str]:
    """Return a YAML mapping as dotted keys to values as text. Raises IsobitError for a text that is
    not a mapping in YAML."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        values = None
    if not isinstance(values, Mapping):
        raise IsobitError(f"{where} is not a configuration: expected keys and values in YAML")
    return dict(_flat(values, ""))


def differing(configs: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Return [key, value in each run], of the keys that differ, `run.dir` left out; a key that a
    run lacks has the value –."""
    keys = dict.fromkeys(key for config in configs for key in config if key != "run.dir")
    rows = [[key, *(config.get(key, "–") for config in configs)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _flat(value: Any, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield (
            prefix,
            yaml.safe_dump(value, default_flow_style=True, width=10_000)
            .removesuffix("...\n")
            .strip(),
        )
