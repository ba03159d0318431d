"""The kinds of environments that a worker can make, and their tools.

A factory is TRL's `environment_factory`: called without arguments it returns an object whose
`reset` begins an episode and whose other public methods are tools; a method `get_reward` scores the
episode. A dict of factories has one for each value of the column `environment`. Three kinds of
objects are told apart: an object whose `step` takes a `turn` is an `Environment` (`data/turns.py`) and
answers turns itself, an object with OpenEnv's `_step_payload` is a client of OpenEnv
(`openenv.py`), and every other object is TRL's. An object is made once and reset often, as in TRL.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from isobit.errors import IsobitError, brief
from isobit.tasks.environments import openenv
from isobit.tasks.environments.home import Home
from isobit.tasks.environments.tools import Tool, by_name, method_tools
from isobit.tasks.workers.loading import find_object, last_line, split_reference

RESERVED = ("reset", "get_reward")
"""Methods that are not tools."""
_FACTORY = "environment.factory"


@dataclass
class Instance:
    """An environment: the object (None: an episode with tools alone), the home in which its code
    runs, and its tools."""

    value: Any
    home: Home
    tools: Mapping[str, Tool]

    @property
    def answers_turns(self) -> bool:
        """Whether the object is an `Environment`, which answers turns itself."""
        return answers_turns(self.value)


@dataclass
class Kind:
    """Environments of one name, and those of them (`idle`) that wait for an episode. `schemas`: the
    schemas of the tools that an episode shows to the model."""

    name: str | None
    factory: Callable[[], Any] | None
    label: str
    file: str
    shared: Sequence[Tool]
    idle: list[Instance] = field(default_factory=list)
    schemas: Sequence[Mapping[str, Any]] = ()
    reward: str | None = None
    """The name of the environment's own reward: the name of its class."""
    answers_turns: bool = False
    """Whether the objects of this kind are `Environment`s, which answer turns themselves."""
    worked: set[str] = field(default_factory=set)
    """The methods and tools that have come back at least once."""

    async def probe(self, until: float) -> None:
        """Make the first environment of this kind before the time `until` (of the event loop), and
        keep its schemas and the name of its reward. Raises IsobitError, and Late."""
        instance = await self.instance(until)
        self.idle.append(instance)
        value, shown = instance.value, instance.tools.values()
        self.schemas = tuple(tool.schema for tool in shown)
        self.answers_turns = instance.answers_turns
        if instance.answers_turns:
            if self.shared:
                raise IsobitError(
                    f"{self.label}: its step(turn) answers calls itself; give no tools beside it"
                )
            self.schemas = tuple(getattr(value, "tools", ()))
        if instance.answers_turns or callable(getattr(value, "get_reward", None)):
            self.reward = getattr(value, "label", type(value).__name__)

    async def instance(self, until: float) -> Instance:
        """Return an environment that waits for an episode, or make a new one before the time
        `until` (of the event loop). Raises IsobitError if the factory fails, and Late."""
        if self.idle:
            return self.idle.pop()
        home = Home()
        if self.factory is None:
            return Instance(None, home, by_name(self.shared, "environment.tools"))
        outcome = await home.run(self.factory, until)
        if outcome.error is not None:
            raise IsobitError(f"{self.label}: {last_line(outcome.error, self.file)}")
        value = outcome.result
        own_tools: Sequence[Tool] = ()
        if openenv.is_client(value):
            outcome = await home.run(partial(_client, value), until)
            if isinstance(outcome.error, IsobitError):
                raise outcome.error
            if outcome.error is not None:
                raise IsobitError(f"{self.label}: {last_line(outcome.error, self.file)}")
            value, own_tools = outcome.result
        elif not callable(getattr(value, "reset", None)):
            raise IsobitError(
                f"{self.label}: {type(value).__name__} has no method reset; it begins an episode, "
                "as reset(self, **columns)"
            )
        elif not answers_turns(value):
            own_tools = method_tools(value, RESERVED, f"{self.label}: {type(value).__name__}")
        return Instance(value, home, by_name([*self.shared, *own_tools], self.label))


def _client(value: Any) -> tuple[openenv.Client, list[Tool]]:
    client = openenv.Client(value)
    return client, client.tools()


def answers_turns(value: Any) -> bool:
    """Return whether an object is an `Environment`: its `step` takes a `turn`, and nothing else."""
    step = getattr(type(value), "step", None)
    if not inspect.isfunction(step):
        return False
    return list(inspect.signature(step).parameters)[1:] == ["turn"]


def load_kinds(
    factory: str | Mapping[str, str] | None, shared: Sequence[Tool]
) -> dict[str | None, Kind]:
    """Return the kinds by the value of the column `environment`, or a single kind under None.
    Raises IsobitError if a factory cannot be found."""
    if factory is None:
        return {None: Kind(None, None, "environment.tools", "", shared)}
    named: Mapping[str | None, Any]
    if isinstance(factory, str):
        factories, file = _found(factory, _FACTORY)
        named = factories if isinstance(factories, Mapping) else {None: factories}
        files = dict.fromkeys(named, file)
        labels = {name: f"{_FACTORY} {brief(factory, 300)!r}" for name in named}
    else:
        pairs = {
            name: _found(maker, f"{_FACTORY}.{brief(name)}") for name, maker in factory.items()
        }
        named, files = {n: p[0] for n, p in pairs.items()}, {n: p[1] for n, p in pairs.items()}
        labels = {name: f"{_FACTORY}.{brief(name)} {maker!r}" for name, maker in factory.items()}
    if not named:
        raise IsobitError(f"{_FACTORY} {factory!r}: a dict without environments")
    for name, maker in named.items():
        if not callable(maker) or not (name is None or isinstance(name, str)):
            raise IsobitError(
                f"{labels[name]}: expected a class, a function or a dict of them by names; it is "
                f"{type(maker).__name__}"
            )
    return {
        name: Kind(name, maker, labels[name], files[name], shared) for name, maker in named.items()
    }


def _found(reference: str, option: str) -> tuple[Any, str]:
    split_reference(reference, option)
    return find_object(reference, option, "factory")
