"""The import of objects that a user names, `path/to/file.py:name` or `package.module:name`, in a
worker; and errors of their code in one line.

A file is imported under a module name made for it, and may import its neighbours. Left out: the
required type of the object, which the caller checks.
"""

import asyncio
import concurrent.futures
import importlib
import importlib.util
import os
import re
import sys
import threading
import traceback
import zlib
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from isobit.data.foreign import exists
from isobit.errors import IsobitError, brief, listed

# Frames that do not help the author of a function: the import system, and the callers in isobit.
# Files below `rewards/named` are a reward's own code.
_ISOBIT = os.path.dirname(os.path.dirname(__file__))
_OURS = (
    "workers/",
    "environments/",
    "rewards/worker.py",
    "rewards/awaiting.py",
    "rewards/functions.py",
)
_MACHINERY = (
    "<frozen",
    os.path.dirname(importlib.__file__),
    os.path.dirname(asyncio.__file__),
    os.path.dirname(concurrent.futures.__file__),
    threading.__file__,
    *(os.path.join(_ISOBIT, *name.split("/")) for name in _OURS),
)


_MODULE = re.compile(r"^(?:isobit\.[a-z_.]+\.|isobit_reward_\w+_[0-9a-f]{8}\.)")
"""The module of a class of isobit, or of a file that isobit imported."""
_ENVIRON = ("<frozen os>", os.__file__)


def split_reference(reference: str, what: str = "reward function") -> tuple[str, str]:
    """Return (file or module, function) of `path/to/file.py:function` or
    `package.module:function`. `what`: the word for the reference in errors. Raises IsobitError for
    another text."""
    home, colon, function = reference.rpartition(":")
    named = home.endswith(".py") or all(name.isidentifier() for name in home.split("."))
    if not colon or not named or not function.isidentifier():
        raise IsobitError(
            f"{what} {brief(reference, 300)!r}: expected path/to/file.py:function or "
            "package.module:function"
        )
    return home, function


def check_reference(reference: str, what: str = "reward function") -> tuple[str, str]:
    """Return a reference as `split_reference` does, without importing anything. Raises IsobitError
    also for a file that does not exist."""
    home, function = split_reference(reference, what)
    if home.endswith(".py") and not (exists(Path(home)) and Path(home).is_file()):
        raise IsobitError(f"{what} {brief(reference, 300)!r}: no file {home}")
    return home, function


def find_function(reference: str, what: str = "reward function") -> tuple[Callable[..., Any], str]:
    """Import and return (the function that a reference names, its file). `what`: the word for the
    reference in errors. Raises IsobitError for every error on the way."""
    function, file = find_object(reference, what, "function")
    if not callable(function) or isinstance(function, type):
        home, name = split_reference(reference, what)
        raise IsobitError(
            f"{what} {brief(reference, 300)!r}: {brief(name)!r} in {brief(home, 300)} is not a "
            "function"
        )
    return function, file


def find_object(reference: str, what: str, kind: str) -> tuple[Any, str]:
    """Import and return (the object that a reference names, its file). The object may be of any
    type; `kind`: the word for it in errors. Raises IsobitError for every error on the way."""
    home, name = check_reference(reference, what)
    try:
        module = _import_file(Path(home)) if home.endswith(".py") else _import_module(home)
    except (
        BaseException
    ) as error:  # the user's module may raise anything while it is imported, also SystemExit
        raise IsobitError(f"{what} {brief(reference, 300)!r}: {last_line(error, home)}") from None
    names = [
        key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
    ]
    function = getattr(module, name, None)
    if function is None:
        close = get_close_matches(name, names, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has: {listed(names) or 'none'}"
        raise IsobitError(
            f"{what} {brief(reference, 300)!r}: {brief(home, 300)} has no {kind} "
            f"{brief(name)!r}; {hint}"
        )
    return function, getattr(module, "__file__", None) or home


def last_line(error: BaseException, file: str) -> str:
    """Return the last line of an error's traceback, with the place in `file` where it arose, or
    else the innermost place outside of isobit and the import system."""
    if isinstance(error, SyntaxError):
        position = f"{os.path.basename(error.filename or file)}, line {error.lineno}"
        return f"{type(error).__name__}: {error.msg} ({position})"
    text = " ".join("".join(traceback.format_exception_only(type(error), error)).split())
    text = _MODULE.sub("", text)
    frames = traceback.extract_tb(error.__traceback__)
    inside = [
        frame for frame in frames if os.path.realpath(frame.filename) == os.path.realpath(file)
    ]
    theirs = [frame for frame in frames if not frame.filename.startswith(_MACHINERY)]
    at = inside[-1] if inside else theirs[-1] if theirs else None
    where = f" ({os.path.basename(at.filename)}, line {at.lineno})" if at is not None else ""
    return f"{text:.300}{_of_variable(error)}{where}"


def lacks_variable(error: BaseException) -> bool:
    """Return whether an error says that an environment variable is not set."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, KeyError) and bool(frames) and frames[-1].filename in _ENVIRON


def _of_variable(error: BaseException) -> str:
    """Return the end of a message (read by `variables.hint`) for an error that says that an
    environment variable is not set, or that was caused by such an error; else an empty text."""
    cause: BaseException | None = error
    for _ in range(8):
        if cause is None:
            break
        if lacks_variable(cause):
            return " of os.environ" if cause is error else f", of {cause!r} of os.environ"
        cause = cause.__cause__ or cause.__context__
    return ""


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    digest = zlib.crc32(
        path.read_bytes(), zlib.crc32(str(path).encode())
    )  # a file that has changed is another module
    name = f"isobit_reward_{path.stem}_{digest:08x}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # so that the file can import its neighbours
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = (
        module  # before the file runs: dataclasses and the like look their module up
    )
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: what lies there takes no installed module's place
    return importlib.import_module(name)
