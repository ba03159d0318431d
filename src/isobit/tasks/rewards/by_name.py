"""How a reward is written with its options, `math:{"option": value}` or
`file.py:function:{"option": value}`, and what one by name may return.

Left out: the rewards (`named/`), which the worker of a user's own function does not import.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isobit.errors import IsobitError, brief

_REFERENCE = re.compile(r"([A-Za-z_]\w*)(?::(\{.*\}))?", re.DOTALL)
_OWN = re.compile(r"([^{]*:[A-Za-z_]\w*):(\{.*\})", re.DOTALL)


@dataclass(frozen=True)
class Unscored:
    """The result of `score` for a completion that has no reward although row and function are in
    order: the reason, in place of a number."""

    reason: str


def is_named(text: str) -> bool:
    """Return whether a reference is a bare name, possibly with options, rather than file:function
    or module:function."""
    return _REFERENCE.fullmatch(text) is not None


def parse_reference(text: str) -> tuple[str, dict[str, Any]]:
    """Split `name` or `name:{"option": value}` into (name, options); the name may be
    file.py:function. Raises IsobitError if the options are not a JSON object."""
    match = _REFERENCE.fullmatch(text) or _OWN.fullmatch(text)
    if match is None:  # a function of the user's own, without options
        return text, {}
    try:
        return match[1], json.loads(match[2] or "{}")
    except ValueError as error:
        raise IsobitError(
            f"reward {brief(text)!r}: the options are not a JSON object: {error}"
        ) from None


def reference(name: str, options: Mapping[str, Any]) -> str:
    """Join a name and options into the text that `parse_reference` splits."""
    return f"{name}:{json.dumps(dict(options))}" if options else name
