"""Completions of open requests, gathered into the groups of their prompts: what `Engine.generate`,
a rank that claims prompts, and an engine of a fleet have in common."""

from collections.abc import Collection, Sequence
from typing import Protocol

from isobit.engine.prompts import Prompt
from isobit.engine.sequences import Stats
from isobit.engine.types import Completion, Request, Sampling
from isobit.model import Model


class OpenEngine(Protocol):
    """What is asked of an engine here."""

    def step(self) -> Sequence[tuple[Request, Completion]]:
        """The completions that one step finishes."""

    def cancel(self, request: Request) -> None:
        """Drop what is open of a request."""


class AskedEngine(OpenEngine, Protocol):
    """What is asked of an engine whose answers may go on: one of this process, or a fleet."""

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
    """Requests of an engine by the place of their prompt. As a context manager it cancels those
    that are open at its end."""

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

    def add(self, place: int, *requests: Request, known: Sequence[Completion] = ()) -> None:
        """Requests that were submitted, whose completions are a group with those that are
        `known`."""
        self._places |= dict.fromkeys(requests, place)
        self._asked[place], self._groups[place] = requests, list(known)
        self._sizes[place] = len(known) + sum(request.sampling.n for request in requests)

    def step(self) -> list[tuple[int, list[Completion]]]:
        """One step of the engine: (place, completions in their order) of the groups that it
        finishes, by place."""
        finished, whole = self._engine.step(), list[int]()
        self.completed += len(finished)
        for request, completion in finished:
            place = self._places[request]
            self._groups[place].append(completion)
            if len(self._groups[place]) == self._sizes[place]:
                whole.append(place)
        found = [(place, self._taken(place)) for place in sorted(whole)]
        for _, group in found:
            group.sort(key=lambda completion: completion.sample_index)
        return found

    def drop(self, places: Collection[int]) -> None:
        """Cancel what is open of these."""
        for place in [place for place in self._groups if place in places]:
            for request in self._asked[place]:
                self._engine.cancel(request)
            self._taken(place)

    def _taken(self, place: int) -> list[Completion]:
        """What there is of a place, which is forgotten here."""
        for request in self._asked.pop(place):
            del self._places[request]
        del self._sizes[place]
        return self._groups.pop(place)
