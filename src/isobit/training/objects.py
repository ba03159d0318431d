"""What a run takes as Python objects: reward functions, rows of data, callbacks and measures, as in
a notebook.

A run keeps its config in a file, where objects have no place. Names stand for them there,
`<python>:NAME` for a reward function and `<python>:HASH` for rows, so that a run that goes on needs
the objects again, and refuses others. Callbacks and measures change nothing that is learned, and
leave no name. Left out: how functions are called (`tasks/rewards/pool.py`).
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from isobit.config import Config, parse_config
from isobit.config.reading import read_source
from isobit.data.arrow_rows import plain
from isobit.errors import IsobitError, RunFailed
from isobit.rl import Sample
from isobit.rl.algorithm.advantages import Advantage
from isobit.tasks.rewards.spec import OBJECT

RewardFunction = Callable[..., Any]
Rewards = RewardFunction | str | Sequence[RewardFunction | str | tuple[RewardFunction | str, float]]
"""One reward or several: functions, or what a config calls a function; in a pair with a weight,
else weighing 1."""
Rows = Iterable[Mapping[str, Any] | str]
"""Rows of data: mappings of columns, or prompts."""
OnStep = Callable[[int, Mapping[str, float]], object]
"""Called after every step with its number and its row of metrics.jsonl; what it returns is
dropped."""
Measure = Callable[[Sequence[Sample], Sequence[Advantage]], Mapping[str, float]]
"""Numbers to log of the samples that a step learns from and their advantages, one of a completion
or one for each of its trained tokens: name to value."""
_SIGNATURE = "reward(prompts, completions, **columns) -> list of numbers"


@dataclass(frozen=True)
class Objects:
    """The objects of a run: functions and rows by the names that stand for them in its config."""

    functions: Mapping[str, RewardFunction] = field(default_factory=dict)
    rows: Mapping[str, Sequence[dict[str, Any]]] = field(default_factory=dict)
    callbacks: Sequence[OnStep] = ()
    measures: Sequence[Measure] = ()

    def require(self, config: Config) -> None:
        """Raise IsobitError if the config speaks of an object that is not here."""
        missing = [
            name for name in _names(config) if name not in self.functions and name not in self.rows
        ]
        if missing:
            rewards = [name.removeprefix(OBJECT) for name in missing if name != config.task.path]
            rewards = [name for name in rewards if f"{OBJECT}{name}" != config.task.held_out_path]
            arguments = [f"rewards=[{', '.join(rewards)}]"] if rewards else []
            arguments += ["data=rows"] if config.task.path in missing else []
            arguments += ["held_out=rows"] if config.task.held_out_path in missing else []
            raise IsobitError(
                f"run {config.run.dir} was given objects in Python, which no file keeps: go on in "
                f"Python, with isobit.resume({config.run.dir!r}, {', '.join(arguments)})"
            )


NO_OBJECTS = Objects()


@dataclass(frozen=True)
class Given:
    """The objects that the caller of `train` or `resume` passes, not yet checked."""

    rewards: Rewards = ()
    data: Rows | None = None
    held_out: Rows | None = None
    callbacks: Sequence[OnStep] = ()
    measures: Sequence[Measure] = ()

    def into(self, config: Config) -> tuple[Config, Objects]:
        """Return (the config with the objects' names in it, the objects). Raises IsobitError for an
        object that is not a reward, row or callback, and for what the config names already."""
        functions: dict[str, RewardFunction] = {}
        rows: dict[str, Sequence[dict[str, Any]]] = {}
        values, _ = read_source(config, ())
        if rewards := _listed(self.rewards):
            if config.rewards.functions:
                raise IsobitError(
                    "rewards: the settings have rewards.functions already; give all rewards in "
                    "one place"
                )
            values["rewards"]["functions"] = [_reward(reward, functions) for reward in rewards]
        for key, label, table in self._tables():
            if values["task"][key] is not None:
                raise IsobitError(f"{label}: the settings have task.{key} already; leave one out")
            table_rows = _rows(table, label)
            name = f"{OBJECT}{_digest(table_rows)}"
            rows[name], values["task"][key] = table_rows, name
        return parse_config(Config, values, "settings"), Objects(
            functions,
            rows,
            _functions(self.callbacks, "callbacks", "on_step(step, metrics)"),
            _functions(
                self.measures, "measures", "measure(samples, advantages) -> numbers by name"
            ),
        )

    def again(self, config: Config) -> Objects:
        """Return the objects for the names in the config of a run that goes on. Raises IsobitError
        for objects other than those that it began with."""
        run, began = config.run.dir, config.rewards.functions
        rewards = replace(config.rewards, functions=()) if _listed(self.rewards) else config.rewards
        nothing: dict[str, Any] = dict.fromkeys(key for key, _, _ in self._tables())
        task = replace(config.task, **nothing)
        renamed, objects = self.into(replace(config, rewards=rewards, task=task))
        for key, label, _ in self._tables():
            if getattr(renamed.task, key) != getattr(config.task, key):
                raise IsobitError(f"{label}: these are not the rows that run {run} began with")
        if [spec.function for spec in renamed.rewards.functions] != [
            spec.function for spec in began
        ]:
            names = ", ".join(spec.function.removeprefix(OBJECT) for spec in began)
            raise IsobitError(f"rewards: run {run} began with {names or 'none'}, in this order")
        for reward, recorded in zip(_listed(self.rewards), began):
            if isinstance(reward, tuple) and reward[1] != recorded.weight:
                raise IsobitError(
                    f"rewards: run {run} began with {recorded.weight:g} as the weight of "
                    f"{recorded.function}"
                )
        return objects

    def refuse(self, run: Path) -> None:
        """Raise IsobitError where anything is given to a run that takes no objects."""
        passed = [
            label for label in ("rewards", "callbacks", "measures") if _any(getattr(self, label))
        ]
        for label in (*passed, *(label for _, label, _ in self._tables())):
            hint = "; run.callbacks in its config names functions" if label == "callbacks" else ""
            raise IsobitError(
                f"{label}: {run} is a run of `isobit sft`, which takes no objects of Python; leave "
                f"{label} out{hint}"
            )

    def _tables(self) -> list[tuple[str, str, Rows]]:
        """Return (key of the task section, argument, rows) for each table that was passed."""
        both = (("path", "data", self.data), ("held_out_path", "held_out", self.held_out))
        return [(key, label, table) for key, label, table in both if table is not None]


NOTHING_GIVEN = Given()


def measured(
    measure: Measure, samples: Sequence[Sample], advantages: Sequence[Advantage]
) -> dict[str, float]:
    """Call a measure and return its numbers, by the names that they are logged under. Raises
    RunFailed for what cannot be logged."""
    label = f"measures: {_name(measure)}"
    try:
        numbers = measure(samples, advantages)
    except Exception as error:  # the user's function may raise anything
        raise RunFailed(f"{label}: {type(error).__name__}: {error}") from None
    if not isinstance(numbers, Mapping):
        raise RunFailed(
            f"{label}: returned {type(numbers).__name__}, expected a mapping of names to numbers"
        )
    for name, value in numbers.items():
        if not isinstance(name, str) or not re.fullmatch(r"[\w/-]+", name):
            raise RunFailed(f"{label}: metric {name!r}: expected letters, digits, _, - and /")
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise RunFailed(f"{label}: metric {name!r} is {value!r}, expected a number")
    return {f"custom/{name}": float(value) for name, value in numbers.items()}


def _name(function: Callable[..., Any]) -> str:
    inner = getattr(function, "func", function)  # of functools.partial
    return str(getattr(inner, "__name__", type(inner).__name__)).strip("<>")


def _any(argument: Any) -> bool:
    """Return whether an argument holds any object: an object alone, or some in a list."""
    return len(argument) > 0 if isinstance(argument, (list, tuple)) else argument is not None


def _names(config: Config) -> list[str]:
    """Return the names of objects in a config."""
    paths = [path for path in (config.task.path, config.task.held_out_path) if path is not None]
    return [
        name
        for name in [r.function for r in config.rewards.functions] + paths
        if name.startswith(OBJECT)
    ]


def _listed(rewards: Rewards) -> list[Any]:
    """Return rewards as a list: one alone, a pair of a function and a number, or several."""
    if rewards is not None and not callable(rewards) and not isinstance(rewards, Iterable):
        raise IsobitError(f"rewards: expected functions, {_SIGNATURE}, got {rewards!r}")
    pair = isinstance(rewards, tuple) and len(rewards) == 2 and isinstance(rewards[1], (int, float))
    return (
        [rewards] if callable(rewards) or isinstance(rewards, str) or pair else list(rewards or ())
    )  # type: ignore[arg-type]


def _reward(reward: object, functions: dict[str, RewardFunction]) -> dict[str, Any]:
    """Return an entry of `rewards.functions`; a function is stored in `functions` under its
    name."""
    function, weight = reward if isinstance(reward, tuple) and len(reward) == 2 else (reward, 1.0)
    if not isinstance(weight, (int, float)) or isinstance(weight, bool):
        raise IsobitError(f"rewards: expected (function, weight), and the weight is {weight!r}")
    if isinstance(function, str):
        return {"function": function, "weight": weight}
    if not callable(function) or isinstance(function, type):
        raise IsobitError(f"rewards: expected functions, {_SIGNATURE}, got {function!r}")
    name = _name(function)
    if f"{OBJECT}{name}" in functions:
        raise IsobitError(
            f"rewards: two functions are called {name!r}; give each a name of its own with def"
        )
    functions[f"{OBJECT}{name}"] = function
    return {"function": f"{OBJECT}{name}", "weight": weight}


def _rows(table: Rows, label: str) -> list[dict[str, Any]]:
    wanted = (
        "expected rows, each a mapping of columns such as {'prompt': ..., 'answer': ...}, "
        "or prompts"
    )
    if isinstance(table, (str, Mapping)) or not isinstance(table, Iterable):
        hint = "; a file is named with task.path in the settings" if isinstance(table, str) else ""
        raise IsobitError(f"{label}: {wanted}, got {type(table).__name__}{hint}")
    if hasattr(table, "to_dict") and hasattr(table, "iloc"):
        raise IsobitError(
            f"{label}: {wanted}, got a {type(table).__name__}; give its to_dict('records')"
        )
    rows = []
    for number, row in enumerate(table, 1):
        if isinstance(row, str):
            row = {"prompt": row}
        if not isinstance(row, Mapping):
            raise IsobitError(f"{label}, row {number}: {wanted}, got {type(row).__name__}")
        where = f"{label}, row {number}"
        if unnamed := [name for name in row if not isinstance(name, str)]:
            raise IsobitError(f"{where}: the name of a column must be text, got {unnamed[0]!r:.40}")
        rows.append({name: plain(value, where, name) for name, value in row.items()})
    return rows


def _digest(rows: Sequence[Mapping[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def _functions(functions: Any, label: str, form: str) -> Sequence[Callable[..., Any]]:
    """Return one function or several as a sequence. Raises IsobitError for what is not callable."""
    listed = (functions,) if callable(functions) else tuple(functions)
    for function in listed:
        if not callable(function):
            raise IsobitError(f"{label}: expected functions {form}, got {function!r}")
    return listed
