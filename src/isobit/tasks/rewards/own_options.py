"""The options of a user's own reward function: values for its parameters, checked against its
signature before anything is scored."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from isobit.errors import IsobitError, did_you_mean

_KINDS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "list": (list,),
    "dict": (dict,),
}
"""What a value may be for a parameter with this annotation; others are not checked."""


def check_options(
    function: Callable[..., Any],
    reference: str,
    options: Mapping[str, Any],
    reserved: Collection[str],
) -> None:
    """Raise IsobitError for an option that the function has no parameter for, that isobit gives
    itself (`reserved`), or whose value is not what the parameter's annotation says."""
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    free = [name for name in parameters if name not in reserved]
    for name, value in options.items():
        label = f"reward function {reference!r}: options.{name}"
        if name in reserved:
            raise IsobitError(f"{label}: is what isobit gives the function itself")
        if name not in parameters:
            hint = did_you_mean(name, free) if free else "it has none but what isobit gives"
            raise IsobitError(f"{label}: the function has no such parameter; {hint}")
        annotation = parameters[name].annotation
        kind = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
        wanted = _KINDS.get(kind)
        wrong = wanted is not None and not isinstance(value, wanted)
        if wrong or (isinstance(value, bool) and kind in ("int", "float")):
            raise IsobitError(f"{label}: expected {kind}, got {value!r:.80}")
