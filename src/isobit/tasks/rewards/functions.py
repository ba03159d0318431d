"""The user's reward functions, as the worker sees them: load, call, and check the result.

A function has TRL's signature, `def reward(prompts, completions, **columns) -> list[float | None]`.
It is given, as keywords and where its signature takes them, the prompts, the completions, every
column of the data as a list, `completion_answers` (what each completion says without its
thoughts), and TRL's `completion_ids`, `trainer_state` (`global_step`,
`max_steps`, `epoch`; 0 outside a run), `log_extra` and `log_metric` (which do nothing here). It may
be `async`. A function with verl's parameters `solution_str` and `ground_truth` is called once a
sample, with those of `data_source` and `extra_info` that it takes; it may be `async` too. All calls
of a process are awaited on one event loop (`awaiting.py`). A bare name is a built-in reward of
`isobit.tasks.rewards.named`. Left out: classes that must be constructed first.
"""

import asyncio
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from isobit.data.answers import ANSWERS, completion_text
from isobit.errors import IsobitError, listed
from isobit.tasks.rewards.awaiting import LOOP
from isobit.tasks.rewards.by_name import Unscored, is_named, parse_reference
from isobit.tasks.rewards.own_options import check_options
from isobit.tasks.workers.loading import find_function, last_line


class MalformedResult(ValueError):
    """Raised for a reward function's result that is not a sequence with one entry for each
    completion."""


# Given to a function where its signature names them or takes any keyword; the first two always
# come.
ALWAYS = ("prompts", "completions")
ON_REQUEST: dict[str, Any] = {
    "completion_ids": None,
    ANSWERS: None,
    "trainer_state": [{"global_step": 0, "max_steps": 0, "epoch": 0.0}],
    "log_extra": lambda *args, **kwargs: None,
    "log_metric": lambda *args, **kwargs: None,
}


_OF_VERL = ("solution_str", "ground_truth", "data_source", "extra_info")


@dataclass(frozen=True)
class LoadedFunction:
    """A function and what its signature says: columns it needs, all names in it, whether it takes
    any more; `options`: names that have values already."""

    call: Callable[..., Any]
    file: str
    required: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    takes_more: bool = True
    options: frozenset[str] = frozenset()

    @property
    def signature(self) -> dict[str, Any]:
        """Return the columns and names that it takes, as plain values for JSON."""
        names = sorted(self.names)
        return {"required": self.required, "names": names, "takes_more": self.takes_more}

    def __call__(self, arguments: dict[str, Any]) -> Any:
        """Call the function with those of the keyword arguments that it takes, and return its
        result; the result of an `async` function is waited for."""
        result = self.begin(arguments)
        return LOOP.wait_for(result) if inspect.isawaitable(result) else result

    def begin(self, arguments: dict[str, Any]) -> Any:
        """Call the function with those of the keyword arguments that it takes; an `async`
        function's result is still to be awaited."""
        taken = {
            name: value
            for name, value in arguments.items()
            if name not in self.options and (name in self.names or self.takes_more)
        }
        for name, value in ON_REQUEST.items():
            taken.pop(name, None)
            if name in self.names:
                taken[name] = arguments.get(name, value)
        if "trainer_state" in taken:
            taken["trainer_state"] = SimpleNamespace(**taken["trainer_state"][0])
        return self.call(**taken)


def loaded_object(function: Callable[..., Any], name: str) -> LoadedFunction:
    """Wrap a function that is an object of this process. Raises IsobitError for a signature of
    another form."""
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


def load_function(reference: str) -> LoadedFunction:
    """Import the function, or make the reward by name. Raises IsobitError, with file and line, for
    whatever goes wrong on the way."""
    if is_named(reference):
        return _by_name(reference)
    name, options = parse_reference(reference)
    function, file = find_function(name)
    if not options:
        return _inspect(function, name, file)
    check_options(function, name, options, reserved=(*ALWAYS, *ON_REQUEST, *_OF_VERL))
    return _inspect(partial(function, **options), name, file, frozenset(options))


def take_unscored(result: Any) -> tuple[Any, dict[int, str]]:
    """Return (the result with None for each Unscored in it, {index: reason}); only rewards by name
    give any."""
    if not isinstance(result, list):
        return result, {}
    reasons = {i: entry.reason for i, entry in enumerate(result) if isinstance(entry, Unscored)}
    return [
        None if i in reasons else entry for i, entry in enumerate(result)
    ] if reasons else result, reasons


LARGEST = 1e30
"""A reward beyond it would overflow in a sum of squares."""


def checked_values(result: Any, count: int) -> tuple[list[float | None], dict[int, str]]:
    """Return (values, {index: what is wrong with that value}); a wrong value is None in the list.

    Raises MalformedResult unless the result is a sequence of `count` entries. Numbers are all that
    `float` takes, text aside: also booleans, numpy's numbers and tensors of one element.
    """
    if (
        isinstance(result, str | bytes | dict | set | frozenset)
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


def _inspect(
    function: Callable[..., Any], reference: str, file: str, options: frozenset[str] = frozenset()
) -> LoadedFunction:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return LoadedFunction(function, file)
    named = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in options
    ]
    names = frozenset(p.name for p in named)
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if {"solution_str", "ground_truth"} <= names:
        wanted = frozenset(_OF_VERL) if takes_more else names.intersection(_OF_VERL)
        columns = {"completions", "answer", *wanted}
        called = _from_verl(function, wanted)
        return LoadedFunction(called, file, ("answer",), frozenset(columns), takes_more=False)
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
        function,
        file,
        required,
        names.union(ON_REQUEST.keys() - {ANSWERS}) if takes_more else names,
        takes_more,
        options,
    )


def _by_name(reference: str) -> LoadedFunction:
    # here, since a worker of users' functions needs none of it, and so starts sooner
    from isobit.options.reading import OptionError
    from isobit.tasks.rewards import named

    name, options = parse_reference(reference)
    try:
        reward = named.build(name, options)
    except OptionError as error:
        raise IsobitError(f"reward {name}: {error}") from None
    reward.prepare()
    names = frozenset(
        {"completions", *reward.columns}
        | ({"completion_ids"} if reward.wants_tokens else set())
        | ({ANSWERS} if reward.wants_answers else set())
    )
    return LoadedFunction(reward, reference, reward.columns, names, takes_more=False)


def _from_verl(function: Callable[..., Any], names: frozenset[str]) -> Callable[..., Any]:
    """Wrap verl's compute_score(data_source, solution_str, ground_truth, extra_info) as a reward
    function; it is given those of the four that are in `names`."""

    def reward(completions: list[Any], answer: list[Any], **columns: Any) -> list[Any]:
        nothing = [None] * len(completions)
        sources, infos = columns.get("data_source", nothing), columns.get("extra_info", nothing)
        scores = []
        for source, completion, gold, info in zip(sources, completions, answer, infos, strict=True):
            sample = {"data_source": source, "extra_info": info}
            sample |= {"solution_str": completion_text(completion), "ground_truth": gold}
            scores.append(function(**{key: sample[key] for key in sample if key in names}))
        if any(inspect.isawaitable(score) for score in scores):
            scores = LOOP.wait_for(_all_of(scores))
        return [_of_verl(score) if isinstance(score, dict) else score for score in scores]

    return reward


def _of_verl(score: dict[str, Any]) -> Any:
    if "score" not in score:
        raise MalformedResult(
            f"returned a dict without the key 'score'; it has {listed(score) or 'none'}"
        )
    return score["score"]


async def _all_of(scores: list[Any]) -> list[Any]:
    return await asyncio.gather(*scores)
