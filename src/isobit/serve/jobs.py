"""Jobs for the device thread, the events of jobs, and the turns of tenants.

A job goes in, events come out. A job is a frozen value with a `post`, a function of the main thread
that gets the job's events in their order. Left out: doing a job (`device.py`).
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from isobit.engine.types import Completion, Sampling, Top
from isobit.serve.scoring import Scores, Scoring
from isobit.serve.snapshots import Snapshot


@dataclass(frozen=True)
class Begun:
    """A request was given to the engine; its tokens are sampled from these weights: how many times
    the base, or the adapter that it names, has changed."""

    weights_version: int


@dataclass(frozen=True)
class Scored:
    """The scores of a request's prompt, by the weights that its answers are sampled from; they come
    before its first token."""

    scores: Scores


@dataclass(frozen=True)
class Token:
    """A token that a sample has drawn, its log-probability, and the likeliest tokens there, where
    the request asks for them."""

    sample_index: int
    token: int
    logprob: float
    top: Top


@dataclass(frozen=True)
class Done:
    """A sample is complete, or a piece of work, whose result is `value`. `cached`: the number of
    tokens of a sample's prompt that were found in the cache."""

    value: Any
    cached: int = 0

    @property
    def completion(self) -> Completion:
        """The completion that is the value of a sample's event."""
        assert isinstance(self.value, Completion)
        return self.value


@dataclass(frozen=True)
class Failed:
    """A job has ended without a result. `status`: of HTTP."""

    status: int
    message: str


Event = Begun | Scored | Token | Done | Failed
Post = Callable[[Event], None]


@dataclass(frozen=True, eq=False)
class SampleJob:
    """A request for `sampling.n` answers to a prompt by an `adapter`, its name or a snapshot that
    is held, None: the base alone; for a `tenant`. Each token has an event where it is `streamed`.
    `scoring`: the scores to compute of the prompt itself, None: none; without `sampled`, only
    these. `salt`: the request shares cached pages only with the tenant's others of the same
    salt."""

    tenant: str
    prompt: tuple[int, ...]
    sampling: Sampling
    adapter: str | Snapshot | None
    streamed: bool
    post: Post
    scoring: Scoring | None = None
    sampled: bool = True
    salt: bytes | None = None

    @property
    def num_answers(self) -> int:
        """The number of answers that are sampled."""
        return self.sampling.n if self.sampled else 0


@dataclass(frozen=True, eq=False)
class WorkJob:
    """Work that is done between two steps of the engine, on its thread: adding an adapter,
    training. Jobs of one `tenant` are done in the order in which they came. `work` that returns a
    generator is done from one `yield` to the next; between these parts others have their turns, and
    the result is the generator's return value. `alone`: the job changes the weights of the model
    itself, so samples that came before it, and work that has begun, are finished first, and samples
    that come later begin after it."""

    tenant: str
    work: Callable[[], Any]
    post: Post
    alone: bool = False


class _OfTenant(Protocol):
    @property
    def tenant(self) -> str:
        """The tenant whose job this is."""


_Job = TypeVar("_Job", bound=_OfTenant)


class Turns(Generic[_Job]):
    """Jobs that wait. Tenants take turns; of one tenant the oldest job is first."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[_Job]] = {}

    def __len__(self) -> int:
        return sum(map(len, list(self._waiting.values())))  # other threads ask too

    def __iter__(self) -> Iterator[_Job]:
        return (job for jobs in self._waiting.values() for job in jobs)

    def put(self, job: _Job) -> None:
        """Add a job behind those of its tenant."""
        self._waiting.setdefault(job.tenant, deque()).append(job)

    def put_first(self, job: _Job) -> None:
        """Add a job in front of all of its tenant, whose turn stays where it is in the line."""
        self._waiting.setdefault(job.tenant, deque()).appendleft(job)

    def first(self) -> _Job:
        """Return the next job, which stays."""
        return next(iter(self._waiting.values()))[0]

    def take(self) -> _Job:
        """Take out the next job, and return it; its tenant goes to the end of the line."""
        return self._take(next(iter(self._waiting)))

    def take_of(self, may: Callable[[str], bool]) -> _Job | None:
        """Take out the next job of a tenant that `may` have a turn, as `take` does; None: there is
        no such job."""
        tenant = next(filter(may, self._waiting), None)
        return None if tenant is None else self._take(tenant)

    def _take(self, tenant: str) -> _Job:
        jobs = self._waiting.pop(tenant)
        job = jobs.popleft()
        if jobs:
            self._waiting[tenant] = jobs
        return job

    def remove(self, job: _Job) -> bool:
        """Take out a job wherever it waits; return False where it does not wait."""
        jobs = self._waiting.get(job.tenant, deque())
        if job not in jobs:
            return False
        jobs.remove(job)
        if not jobs:
            del self._waiting[job.tenant]
        return True
