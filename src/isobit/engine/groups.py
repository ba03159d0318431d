"""Completions of open requests, gathered into the groups of their prompts: what `Engine.generate`,
a rank that claims prompts, and an engine of a fleet have in common."""

from collections.abc import Collection, Sequence
from typing import Protocol

from isobit.engine.prompts import Prompt
from isobit.engine.sequences import Stats
from isobit.engine.types import Completion, Request, Sampling
from isobit.model import Model


class OpenEngine(Protocol):
    """The part of an engine that groups need: steps and cancelling."""

    def step(self) -> Sequence[tuple[Request, Completion]]:
        """Compute one step and return the completions that it finishes."""

    def cancel(self, request: Request) -> None:
        """Drop what is open of a request."""


class AskedEngine(OpenEngine, Protocol):
    """An engine whose completions can be continued: one of this process, or a fleet."""

    @property
    def model(self) -> Model: ...
    @property
    def num_open(self) -> int: ...
    @property
    def stats(self) -> Stats: ...
    @property
    def clamped(self) -> tuple[int, int]: ...
    def submit(
        self,
        prompt: Prompt,
        sampling: Sampling,
        prompt_id: int = 0,
        sample_index: int = 0,
        adapter: str | None = None,
    ) -> Request: ...
    def continue_from(
        self, completion: Completion, tokens: Sequence[int], sampling: Sampling
    ) -> Request: ...


class OpenGroups:
    """The groups of an engine's requests, by the index of their prompt. As a context manager it
    cancels the open requests at its end."""

    def __init__(self, engine: OpenEngine) -> None:
        self._engine = engine
        self._places: dict[Request, int] = {}
        self._groups: dict[int, list[Completion]] = {}
        self._asked: dict[int, tuple[Request, ...]] = {}
        self._sizes: dict[int, int] = {}
        self.completed = 0  # completions

    def __enter__(self) -> "OpenGroups":
        return self

    def __exit__(self, *_: object) -> None:
        self.drop(list(self._groups))

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def places(self) -> Collection[int]:
        return self._groups.keys()

    def add(self, index: int, *requests: Request, known: Sequence[Completion] = ()) -> None:
        """Open group `index`: requests that were submitted, whose completions are a group with the
        `known` ones."""
        self._places |= dict.fromkeys(requests, index)
        self._asked[index], self._groups[index] = requests, list(known)
        self._sizes[index] = len(known) + sum(request.sampling.n for request in requests)

    def step(self) -> list[tuple[int, list[Completion]]]:
        """Compute one step of the engine. Return (index, completions by sample) of the groups that
        it finishes, by index."""
        finished, whole = self._engine.step(), list[int]()
        self.completed += len(finished)
        for request, completion in finished:
            index = self._places[request]
            self._groups[index].append(completion)
            if len(self._groups[index]) == self._sizes[index]:
                whole.append(index)
        groups = [(index, self._taken(index)) for index in sorted(whole)]
        for _, group in groups:
            group.sort(key=lambda completion: completion.sample_index)
        return groups

    def drop(self, indices: Collection[int]) -> None:
        """Cancel the open requests of these groups and forget them."""
        for index in [index for index in self._groups if index in indices]:
            for request in self._asked[index]:
                self._engine.cancel(request)
            self._taken(index)

    def _taken(self, index: int) -> list[Completion]:
        """Remove a group and return its completions so far."""
        for request in self._asked.pop(index):
            del self._places[request]
        del self._sizes[index]
        return self._groups.pop(index)
