"""The reader of clients' requests: a JSON object becomes the frozen dataclass that declares its keys.

A field of the dataclass says a key's type, default and bounds; `Declared.neutral` lists the keys that
are taken only where they ask for nothing. An unknown key is refused with the nearest known one: a
misspelt option must not vanish. An error is one line (`BadRequest`), which names the client's key.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from typing import (
    Annotated,
    Any,
    ClassVar,
    TypeVar,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
)

from isobit.data.foreign import BadJson, parse_json
from isobit.errors import IsobitError, brief, did_you_mean
from isobit.options.declare import REQUIRED, Preprocess, at_least, is_union, options_of, unwrapped

_Schema = TypeVar("_Schema")


@dataclass(frozen=True)
class Limits:
    """Limits on the requests of each client, and of all together."""

    body_bytes: Annotated[int, at_least(1024)] = 8 << 20
    body_seconds: Annotated[float, at_least(0.1)] = 30.0  # and for the lines in front of it
    reader_seconds: Annotated[float, at_least(0.1)] = 60.0  # that an answer waits for its reader
    connections: Annotated[int, at_least(1)] = 2048
    held_bytes: Annotated[int, at_least(1024)] = 512 << 20  # of a tenant's bodies, all together
    open_samples: Annotated[int, at_least(1)] = 1024  # of a tenant
    samples: Annotated[int, at_least(1)] = 256  # of one request: prompts times n
    stop_strings: Annotated[int, at_least(1)] = 16
    stop_characters: Annotated[int, at_least(1)] = 1024  # of all stop strings of a request
    runs: Annotated[int, at_least(1)] = 16  # of a tenant, that train at the same time
    adapter_bytes: Annotated[int, at_least(1)] = 32 << 30  # of all that trains; shared equally
    snapshot_bytes: Annotated[int, at_least(1)] = (
        32 << 30
    )  # of what is sampled from; shared equally
    run_requests: Annotated[int, at_least(1)] = 1024  # that wait for their turn in a run
    waiting_bytes: Annotated[int, at_least(1)] = (
        256 << 20
    )  # of a tenant's bodies that wait, unpacked
    all_waiting_bytes: Annotated[int, at_least(1)] = 1 << 30  # of those of all tenants together


class BadRequest(IsobitError):
    """An error of a request that cannot be done: the `status` of HTTP, as `param` the key that is
    wrong, and a `code` by which clients tell errors apart."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


@contextmanager
def named_as_sent(
    names: Mapping[str, str], message: Callable[[int], str] | None = None
) -> Iterator[None]:
    """Change keys in the errors of what is done meanwhile into the `names` by which the client sent
    them; `message` returns the name of what has this index among the messages."""
    keys = sorted(names, key=len, reverse=True)
    patterns = [r"^messages\[(\d+)\]"] if message is not None else []
    patterns += [rf"\b{key}\b" if "_" in key else rf"^{key}(?=[:.\[ ])" for key in keys]

    def sent(match: re.Match[str]) -> str:
        return names[match[0]] if message is None or not match[1] else message(int(match[1]))

    try:
        yield
    except IsobitError as error:
        if not names or type(error) not in (IsobitError, BadRequest):
            raise
        text = re.sub("|".join(patterns), sent, str(error))
        if not isinstance(error, BadRequest):
            raise BadRequest(text) from None
        param = None if error.param is None else names.get(error.param, error.param)
        raise BadRequest(text, param, error.status, error.code) from None


@dataclass(frozen=True)
class Neutral:
    """A key that is not served: `what` it asks for, and the values next to null with which it asks
    for nothing, None: every value."""

    what: str
    values: tuple[Any, ...] | None = ()


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Declared:
    """The base of requests, which are frozen dataclasses; a whole number's first marks are its
    bounds. `neutral`: further keys, each with the values that are taken; `strict`: whether any
    other key is refused, and not passed over."""

    neutral: ClassVar[Mapping[str, Neutral]] = {}
    strict: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


@dataclass(frozen=True)
class Most:
    """The upper bound of a whole number that `Limits` has under this name."""

    limit: str


def parse_body(body: bytes) -> Any:
    """Return the JSON value of a request's body. Raises BadRequest for other bytes."""
    try:
        return parse_json(body.decode("utf-8"), patient=True, finite=True)
    except UnicodeDecodeError:
        raise BadRequest("the body is not UTF-8 text") from None
    except BadJson as error:
        position = "" if error.line is None else f", line {error.line} column {error.column}"
        raise BadRequest(f"the body is not JSON{position}: {error.reason}") from None


def read(schema: type[_Schema], value: Any, limits: Limits, where: str = "the body") -> _Schema:
    """Return a JSON object as the dataclass that declares its keys. A key with null counts as
    absent, except for a number, since NaN becomes null. Raises BadRequest."""
    if not isinstance(value, dict):
        raise BadRequest(f"{where}: expected a JSON object, got {kind(value)}")
    options, values = options_of(cast(Any, schema)), dict[str, Any]()
    for key, option in options.items():
        if key in value or option.default is REQUIRED:
            typed = _typed(option.kind, value.get(key), key, limits)
            if typed is not None:
                values[key] = typed
            elif option.default is REQUIRED:
                raise BadRequest(f"{key}: required, but not given", key)
    neutral = getattr(schema, "neutral", {})
    for key in value if getattr(schema, "strict", True) else ():
        if key in options:
            continue
        if key in neutral:
            _check_neutral(neutral[key], value[key], key)
        elif value[key] is not None:
            hint = did_you_mean(key[:200], sorted(options.keys() | neutral))
            raise BadRequest(f"{where}: unknown key {brief(key)!r}; {hint}", key)
    return schema(**values)


def _typed(declared: Any, value: Any, key: str, limits: Limits) -> Any:
    """Return the value of a key by its declaration, None for null where a default replaces it."""
    declared, marks = unwrapped(declared)
    for mark in marks:
        value = mark.change(value) if isinstance(mark, Preprocess) else value
    if declared is float and value is None:
        raise BadRequest(f"{key}: expected a number, got null, which NaN becomes", key)
    if declared in (Any, float) or value is None:
        return value
    if is_union(declared):
        first, *alternatives = (member for member in get_args(declared) if member is not type(None))
        if alternatives and isinstance(value, bool) and first is bool:
            return value
        return _typed((alternatives or [first])[-1], value, key, limits)
    if is_dataclass(declared):
        return read(cast(type, declared), value, limits, key)
    if declared is int:
        low, high = (
            getattr(limits, mark.limit) if isinstance(mark, Most) else int(mark.bound)
            for mark in marks[:2]
        )
        check_whole(key, value, low, high)
    elif not isinstance(value, get_origin(declared) or declared):
        raise BadRequest(f"{key}: expected {_WANTED[declared]}, got {kind(value)}", key)
    return value


def check_whole(key: str, value: Any, lowest: int, highest: int) -> None:
    """Raise BadRequest for other than a whole number within bounds, both included."""
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise BadRequest(
            f"{key}: expected a whole number from {lowest} to {highest:,}, got {kind(value)}", key
        )


def _check_neutral(neutral: Neutral, value: Any, key: str) -> None:
    """Raise BadRequest for a value that asks for what is not served."""
    nothing = neutral.values
    same = (isinstance(value, bool) == isinstance(x, bool) and value == x for x in nothing or ())
    if value is not None and nothing is not None and not any(same):  # in JSON 0 is not false
        wanted = " or ".join(map(repr, nothing)) or "null"
        raise BadRequest(
            f"{key}: {neutral.what}: not served; expected {wanted}, got {kind(value)}", key
        )


def kind(value: Any) -> str:
    """Return the words by which an error names a value."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "an object"
    return f"a list of {len(value):,}" if isinstance(value, list) else brief(repr(value), 80)


_WANTED = {bool: "true or false", str: "a string", Mapping[str, Any]: "a JSON object"}
