"""Values of a config.json, read strictly: one of a wrong type is refused, never converted.
`"false"` is not a boolean and 48.0 no size."""

import math
from collections.abc import Mapping
from typing import Any

from isobit.errors import IsobitError

MOST = 2**31 - 1
"""No size in a config.json is larger; sizes that the tensors decide are compared with them
(`names.check_shapes`)."""
MOST_LAYERS = 65536


def whole(
    values: Mapping[str, Any],
    key: str,
    where: str,
    default: int | None = None,
    least: int = 1,
    most: int = MOST,
) -> int:
    """Return an integer from `least` to `most`; IsobitError that names key and file for anything
    else, or if it is missing."""
    if key not in values and default is None:
        raise IsobitError(f"{where}: key {key!r} is missing")
    value = values.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise IsobitError(
            f"{where}: {key} has the wrong type: expected an integer, got {value!r:.80}"
        )
    if value < least:
        raise IsobitError(f"{where}: {key} must be at least {least}, got {value}")
    if value > most:
        raise IsobitError(f"{where}: {key} must be at most {most:,}, got {value!r:.80}")
    return value


def optional_whole(
    values: Mapping[str, Any], key: str, where: str, nullable: tuple[str, ...], default: int | None
) -> int | None:
    """Return `whole`; or None where the key and its default are missing, or where it is null and
    one of the `nullable`."""
    if values.get(key, default) is None and (key not in values or key in nullable):
        return None
    return whole(values, key, where, default)


def real(values: Mapping[str, Any], key: str, where: str, default: float) -> float:
    """Return a number with a decimal point, finite and not negative; IsobitError for anything
    else."""
    value = values.get(key, default)
    if not isinstance(value, float) or not 0 <= value < float("inf"):
        raise IsobitError(
            f"{where}: {key} has the wrong type: expected a number such as {default}, got "
            f"{value!r:.80}"
        )
    return value


def number(values: Mapping[str, Any], key: str, where: str, default: float) -> float:
    """Return a number above 0, whole or not, finite; IsobitError for anything else."""
    value = values.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise IsobitError(f"{where}: {key} must be a number above 0, got {value!r:.80}")
    return float(value)


def flag(values: Mapping[str, Any], key: str, where: str, default: bool = False) -> bool:
    """Return true or false; IsobitError for anything else."""
    value = values.get(key, default)
    if not isinstance(value, bool):
        raise IsobitError(
            f"{where}: {key} has the wrong type: expected true or false, got {value!r:.80}"
        )
    return value
