"""Plain values as JSON, and messages over a pipe: what the process of the tests (`examiner.py`) and
that of the program (`harness.py`) say to each other. A copy of this file goes into each of the two
cages.

Plain are None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset,
range, the containers of `collections`, Fraction, Decimal and dates, nested, each of exactly that
class: what is decoded is made anew, by the reader, and has no method of the writer's. All else is
handed to `foreign`. Nothing is pickled or imported by a name from the other side, and a message
that is not in order raises ValueError or what its parts raise.
"""

import builtins
import collections
import json
import os
from collections.abc import Callable
from typing import Any

LARGE = 1 << 53  # integers from here on are written in base 16, which is linear
LARGEST = 1 << 28  # bytes of a message
CLASSES = {name: value for name, value in vars(builtins).items() if isinstance(value, type)}


class Gone(BaseException):
    """Raised when the other side has closed its pipe or sent something that is not a message."""


def send(pipe: int, message: Any) -> None:
    """Write one message. Raises Gone, and what `json` raises for a message that it cannot write."""
    data = json.dumps(message).encode()
    view = memoryview(len(data).to_bytes(8, "big") + data)
    try:
        while view:
            view = view[os.write(pipe, view) :]
    except OSError:
        raise Gone from None


def receive(pipe: int) -> Any:
    """Read one message. Raises Gone."""
    try:
        count = int.from_bytes(_exactly(pipe, 8), "big")
        if count > LARGEST:
            raise Gone
        return json.loads(_exactly(pipe, count))
    except (OSError, ValueError, MemoryError, OverflowError, RecursionError):
        raise Gone from None


def _exactly(pipe: int, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        chunk = os.read(pipe, min(count - len(data), 1 << 20))
        if not chunk:
            raise Gone
        data += chunk
    return bytes(data)


def encode(value: Any, foreign: Callable[[Any], Any]) -> Any:
    """Return a value as JSON: itself, a list, or an object of one key, which is its class.
    `foreign` encodes values of other classes."""
    kind: Any = type(value)
    if (
        value is None
        or kind is bool
        or kind is str
        or kind is float
        or (kind is int and -LARGE < value < LARGE)
    ):
        return value
    if kind is list:
        return [encode(item, foreign) for item in value]
    name = kind.__name__
    if CODERS.get(name, (None,))[0] != kind.__module__:
        return foreign(value)
    return {name: encode(CODERS[name][1](value), foreign)}


def decode(body: Any, foreign: Callable[[str, Any], Any]) -> Any:
    """Return the value of some JSON; `foreign` is called with the key and the content of an object
    that is not plain."""
    if type(body) is list:
        return [decode(item, foreign) for item in body]
    if type(body) is not dict:
        return body
    ((name, content),) = body.items()
    if name not in CODERS:
        return foreign(name, content)
    return CODERS[name][2](decode(content, foreign))


def _pairs(value: Any) -> list[Any]:
    return [[key, item] for key, item in dict.items(value)]


def _of(module: str, name: str, how: str = "") -> Callable[[Any], Any]:
    """Return a function that makes an object of a class of a module, which is imported at the first
    call."""

    def make(content: Any) -> Any:
        kind = getattr(__import__(module), name)
        if how:
            return getattr(kind, how)(content)
        return kind(*content) if isinstance(content, list) else kind(str(content))

    return make


# name of a class: its module, its value as something simpler, and that made into it again
CODERS: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "int": ("builtins", hex, lambda text: int(text, 16)),
    "complex": ("builtins", lambda z: [z.real, z.imag], lambda items: complex(*items)),
    "bytes": ("builtins", bytes.hex, bytes.fromhex),
    "bytearray": ("builtins", bytearray.hex, bytearray.fromhex),
    "tuple": ("builtins", list, tuple),
    "set": ("builtins", list, set),
    "frozenset": ("builtins", list, frozenset),
    "dict": ("builtins", _pairs, dict),
    "range": ("builtins", lambda r: [r.start, r.stop, r.step], lambda items: range(*items)),
    "defaultdict": ("collections", _pairs, dict),
    "OrderedDict": ("collections", _pairs, collections.OrderedDict),
    "Counter": ("collections", _pairs, lambda pairs: collections.Counter(dict(pairs))),
    "deque": ("collections", list, collections.deque),
    "Fraction": ("fractions", str, _of("fractions", "Fraction")),
    "Decimal": ("decimal", str, _of("decimal", "Decimal")),
    "date": ("datetime", str, _of("datetime", "date", "fromisoformat")),
    "time": ("datetime", str, _of("datetime", "time", "fromisoformat")),
    "datetime": ("datetime", str, _of("datetime", "datetime", "fromisoformat")),
    "timedelta": (
        "datetime",
        lambda t: [t.days, t.seconds, t.microseconds],
        _of("datetime", "timedelta"),
    ),
}
BASES: tuple[Any, ...] = (
    str,
    int,
    float,
    complex,
    bytes,
    bytearray,
    tuple,
    list,
    dict,
    set,
    frozenset,
)
SHARED = {kind.__name__ for kind in (*BASES, bool, range)}
SHARED |= {name for name, kind in CLASSES.items() if issubclass(kind, BaseException)}
SHARED -= {kind.__name__ for kind in AssertionError.__mro__}
"""Builtin classes that the program may hand to the tests by name: of plain values, and exceptions
that no failed assertion is one of."""
_PLAIN: dict[Any, Any] = {str: str.__str__, int: int.__int__, float: float.__float__}


def builtin_class(value: Any) -> str | None:
    """Return the name of a builtin class; None for any other object."""
    return (
        value.__name__ if isinstance(value, type) and CLASSES.get(value.__name__) is value else None
    )


def content(value: Any) -> Any:
    """Return the plain value that an object of a derived class holds. Raises TypeError for an
    object whose class derives from no plain one."""
    for base in BASES:
        if isinstance(value, base):
            return _PLAIN.get(base, base)(value)
    raise TypeError(f"a value of class {type(value).__name__!r} is not plain")


def error(raised: BaseException) -> list[Any]:
    """Return the name of an exception's nearest builtin class, and its arguments: as they are where
    all are plain, else as one text."""
    name = next(
        kind.__name__ for kind in type(raised).__mro__ if CLASSES.get(kind.__name__) is kind
    )
    try:
        return [name, encode(list(raised.args), _refuse)]
    except Exception:
        return [name, [str(raised)[:1000]]]


def _refuse(value: Any) -> Any:
    raise TypeError("not plain")
