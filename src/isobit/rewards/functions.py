"""The user's reward functions, as the worker sees them: find, import, call, and check the result.

A function has TRL's signature, `def reward(prompts, completions, **columns) -> list[float | None]`.
It is given, as keywords and where its signature takes them, the prompts, the completions, every
column of the data as a list, and TRL's `completion_ids`, `trainer_state` (`global_step`,
`max_steps`, `epoch`; 0 outside a run), `log_extra` and `log_metric` (which do nothing here). It may
be `async`. A function with verl's parameters `solution_str` and `ground_truth` is called once a
sample, with those of `data_source` and `extra_info` that it takes; it may be `async` too. All calls
of a process are awaited on one event loop (`awaiting.py`). A bare name is a built-in reward of
`isobit.rewards.named`. Left out: classes that must be constructed first.
"""

import asyncio
import importlib
import importlib.util
import inspect
import math
import os
import sys
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from isobit.data.answers import completion_text
from isobit.data.foreign import exists
from isobit.errors import IsobitError, brief, listed
from isobit.options.reading import OptionError
from isobit.rewards import named
from isobit.rewards.awaiting import LOOP


class MalformedResult(ValueError):
    """What a reward function returned is not a sequence with one entry for each completion."""


# Given to a function where its signature names them or takes any keyword; the first two always
# come.
ALWAYS = ("prompts", "completions")
ON_REQUEST: dict[str, Any] = {
    "completion_ids": None,
    "trainer_state": [{"global_step": 0, "max_steps": 0, "epoch": 0.0}],
    "log_extra": lambda *args, **kwargs: None,
    "log_metric": lambda *args, **kwargs: None,
}
# Frames that say nothing to the author of a function: the import system, and the caller in this
# folder.
_HERE = os.path.dirname(__file__)
_OURS = tuple(os.path.join(_HERE, name) for name in ("worker.py", "awaiting.py"))
_MACHINERY = (
    "<frozen",
    os.path.dirname(importlib.__file__),
    os.path.dirname(asyncio.__file__),
    __file__,
    *_OURS,
)


@dataclass(frozen=True)
class LoadedFunction:
    """A function and what its signature says: columns it needs, all names in it, whether it takes
    any more."""

    call: Callable[..., Any]
    file: str
    required: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    takes_more: bool = True

    def __call__(self, arguments: dict[str, Any]) -> Any:
        """Call the function with those of the keyword arguments that it takes."""
        given = {
            name: value
            for name, value in arguments.items()
            if name in self.names or self.takes_more
        }
        for name, value in ON_REQUEST.items():
            given.pop(name, None)
            if name in self.names:
                given[name] = arguments.get(name, value)
        if "trainer_state" in given:
            given["trainer_state"] = SimpleNamespace(**given["trainer_state"][0])
        result = self.call(**given)
        return LOOP.wait_for(result) if inspect.isawaitable(result) else result


def loaded_object(function: Callable[..., Any], name: str) -> LoadedFunction:
    """A function that is an object of this process. Raises IsobitError for a signature of another
    form."""
    code = getattr(function, "__code__", None)
    return _inspect(function, name, code.co_filename if code is not None else "")


def answer(
    function: LoadedFunction, arguments: dict[str, Any], count: int, caught: type[BaseException]
) -> dict[str, Any]:
    """Call the function on `count` completions; what came of it, in the words of the workers'
    protocol (`worker.py`).

    What it raises is part of the answer if it is a `caught`.
    """
    try:
        result, unscored = take_unscored(function(arguments))
        values, wrong = checked_values(result, count)
    except MalformedResult as error:
        return {"malformed": str(error)}
    except caught as error:
        return {"raised": last_line(error, function.file)}
    return {"values": values, "wrong": wrong, "unscored": unscored}


def split_reference(reference: str, what: str = "reward function") -> tuple[str, str]:
    """(file or module, function) of `path/to/file.py:function` or `package.module:function`; `what`
    it is, in errors."""
    home, colon, function = reference.rpartition(":")
    named = home.endswith(".py") or all(part.isidentifier() for part in home.split("."))
    if not colon or not named or not function.isidentifier():
        raise IsobitError(
            f"{what} {brief(reference, 300)!r}: expected path/to/file.py:function or "
            "package.module:function"
        )
    return home, function


def check_reference(reference: str, what: str = "reward function") -> tuple[str, str]:
    """`split_reference`, without importing anything. Raises IsobitError also for a file that is not
    there."""
    home, function = split_reference(reference, what)
    if home.endswith(".py") and not (exists(Path(home)) and Path(home).is_file()):
        raise IsobitError(f"{what} {brief(reference, 300)!r}: no file {home}")
    return home, function


def load_function(reference: str) -> LoadedFunction:
    """Import the function, or make the reward by name. Raises IsobitError, with file and line, for
    whatever goes wrong on the way."""
    if named.is_named(reference):
        return _by_name(reference)
    function, file = find_function(reference)
    return _inspect(function, reference, file)


def find_function(reference: str, what: str = "reward function") -> tuple[Callable[..., Any], str]:
    """(the function that a reference names, its file), imported. Raises IsobitError for whatever
    goes wrong on the way; `what` it is, in errors."""
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
            f"{what} {brief(reference, 300)!r}: {brief(home, 300)} has no function "
            f"{brief(name)!r}; {hint}"
        )
    if not callable(function) or isinstance(function, type):
        raise IsobitError(
            f"{what} {brief(reference, 300)!r}: {brief(name)!r} in {brief(home, 300)} is not a "
            "function"
        )
    return function, getattr(module, "__file__", None) or home


def take_unscored(result: Any) -> tuple[Any, dict[int, str]]:
    """(the result with None for each Unscored in it, {index: reason}); only rewards by name give
    any."""
    if not isinstance(result, list):
        return result, {}
    reasons = {
        i: entry.reason for i, entry in enumerate(result) if isinstance(entry, named.Unscored)
    }
    return [
        None if i in reasons else entry for i, entry in enumerate(result)
    ] if reasons else result, reasons


def last_line(error: BaseException, file: str) -> str:
    """The last line of the traceback, with the place in `file` that it came from, else the
    innermost place."""
    if isinstance(error, SyntaxError):
        place = f"{os.path.basename(error.filename or file)}, line {error.lineno}"
        return f"{type(error).__name__}: {error.msg} ({place})"
    text = " ".join("".join(traceback.format_exception_only(type(error), error)).split())
    frames = traceback.extract_tb(error.__traceback__)
    inside = [
        frame for frame in frames if os.path.realpath(frame.filename) == os.path.realpath(file)
    ]
    theirs = [frame for frame in frames if not frame.filename.startswith(_MACHINERY)]
    at = inside[-1] if inside else theirs[-1] if theirs else None
    where = f" ({os.path.basename(at.filename)}, line {at.lineno})" if at is not None else ""
    return f"{text:.300}{where}"


LARGEST = 1e30
"""A reward beyond it would overflow in a sum of squares."""


def checked_values(result: Any, count: int) -> tuple[list[float | None], dict[int, str]]:
    """(values, {index: what is wrong with that value}); a wrong value is None in the list.

    Raises MalformedResult unless the result is a sequence of `count` entries. Numbers are all that
    `float` takes, text aside: also booleans, numpy's numbers and tensors of one element.
    """
    if (
        isinstance(result, str | bytes | dict)
        or not hasattr(result, "__len__")
        or not hasattr(result, "__iter__")
    ):
        raise MalformedResult(f"returned {_described(result)}, expected a list of {count} numbers")
    if len(result) != count:
        raise MalformedResult(
            f"returned {len(result)} values for {count} completion{'s' if count != 1 else ''}"
        )
    values: list[float | None] = []
    wrong: dict[int, str] = {}
    for i, entry in enumerate(result):
        value = None if entry is None else _number(entry)
        if entry is not None and (value is None or not math.isfinite(value)):
            wrong[i] = (
                f"returned {_described(entry) if value is None else value}, expected a finite "
                "number or None"
            )
            value = None
        elif value is not None and abs(value) > LARGEST:
            wrong[i], value = (
                f"returned {value}, expected a number within ±{LARGEST:g} or None",
                None,
            )
        values.append(value)
    return values, wrong


def _number(entry: Any) -> float | None:
    if isinstance(entry, str | bytes):
        return None
    try:
        return float(entry)
    except (
        TypeError,
        ValueError,
        OverflowError,
        RuntimeError,
    ):  # RuntimeError: a tensor of several elements
        return None


def _described(value: Any) -> str:
    return (
        f"{type(value).__name__} {value!r:.40}"
        if isinstance(value, str | int | float)
        else type(value).__name__
    )


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


def _inspect(function: Callable[..., Any], reference: str, file: str) -> LoadedFunction:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return LoadedFunction(function, file)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = frozenset(p.name for p in named)
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if {"solution_str", "ground_truth"} <= names:
        return LoadedFunction(
            _from_verl(function, None if takes_more else names), file, ("answer",)
        )
    positional = any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters)
    if positional or not (takes_more or "completions" in names):
        raise IsobitError(
            f"reward function {reference!r}: expected def {getattr(function, '__name__', 'reward')}"
            "(prompts, completions, **columns) -> list of numbers"
        )
    required = tuple(
        p.name for p in named if p.default is p.empty and p.name not in (*ALWAYS, *ON_REQUEST)
    )
    return LoadedFunction(
        function, file, required, names.union(ON_REQUEST) if takes_more else names, takes_more
    )


def _by_name(reference: str) -> LoadedFunction:
    name, options = named.parse_reference(reference)
    try:
        reward = named.build(name, options)
    except OptionError as error:
        raise IsobitError(f"reward {name}: {error}") from None
    reward.prepare()
    names = frozenset(
        {"completions", *reward.columns} | ({"completion_ids"} if reward.wants_tokens else set())
    )
    return LoadedFunction(reward, reference, reward.columns, names, takes_more=False)


def _from_verl(function: Callable[..., Any], names: frozenset[str] | None) -> Callable[..., Any]:
    """verl's compute_score(data_source, solution_str, ground_truth, extra_info) as a reward
    function; it is given those of the four that are in `names` (None: all)."""

    def reward(completions: list[Any], answer: list[Any], **columns: Any) -> list[Any]:
        nothing = [None] * len(completions)
        sources, infos = columns.get("data_source", nothing), columns.get("extra_info", nothing)
        scores = []
        for source, completion, gold, info in zip(sources, completions, answer, infos, strict=True):
            sample = {"data_source": source, "extra_info": info}
            sample |= {"solution_str": completion_text(completion), "ground_truth": gold}
            scores.append(
                function(**{key: sample[key] for key in sample if names is None or key in names})
            )
        if any(inspect.isawaitable(score) for score in scores):
            scores = LOOP.wait_for(_all_of(scores))
        return [score["score"] if isinstance(score, dict) else score for score in scores]

    return reward


async def _all_of(scores: list[Any]) -> list[Any]:
    return await asyncio.gather(*scores)
