"""Processor time for texts of clients: parsing bodies, rendering templates, encoding tokens,
writing long answers.

This work runs in a few threads next to the event loop, in turns of tenants. No tenant has all
threads: eight long texts of one tenant delay another tenant by one of these texts at most. Where
the server shares its process with a run that trains, an `Account` says when the next piece of work
may begin, and is charged with the time of each piece. Left out: work that lets no other thread run
meanwhile; the code that does such work avoids it itself (`model/text/escape_special.py`,
`data/foreign.py`).
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from isobit.serve.jobs import Turns

_T = TypeVar("_T")
_THREADS = 3
_RETRY_SECONDS = 0.05  # until an account that is not open is checked again
_SLICE = 1 << 12  # entries of a list of integers that are written at once
LIGHT_BYTES = 1 << 14
"""A body of at most this many bytes is read in the event loop."""
SWITCH_SECONDS = 5e-4
"""The time in Python after which another thread has its turn. A thread that computes needs the
interpreter's lock for each of its products, and would wait ten times as long for the lock next to
threads that read texts."""


class Account(Protocol):
    """Time that may be spent on texts of clients."""

    def open(self) -> bool:
        """Tell whether a piece of work may begin."""

    def charge(self, seconds: float) -> None:
        """Add the time that a piece of work has taken. Called in the thread that did the work."""


class Unbounded:
    """The account of a server that has its process to itself."""

    def open(self) -> bool:
        return True

    def charge(self, seconds: float) -> None:
        """Do nothing: no time is counted."""


@dataclass(frozen=True, eq=False)
class _Piece:
    tenant: str
    work: Callable[[], Any]
    result: "asyncio.Future[Any]"


class Desk:
    """`threads` threads that work for tenants. Its methods are called in the event loop's
    thread."""

    def __init__(
        self, threads: int = _THREADS, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.account: Account = Unbounded()
        self._threads, self._clock = threads, clock
        self._pool = ThreadPoolExecutor(threads, "texts")
        self._waiting, self._running = Turns[_Piece](), Counter[str]()
        self._open = set[_Piece]()
        self._ended: Exception | None = None
        self._tasks = set[asyncio.Future[None]]()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    async def do(self, tenant: str, function: Callable[..., _T], *given: Any) -> _T:
        """Return the result of `function(*given)`, called in a thread when it is the tenant's turn.
        Raises what the function raises, and the error of `end` once the desk has ended."""
        if self._ended is not None:
            raise self._ended
        result = asyncio.get_running_loop().create_future()
        piece = _Piece(tenant, partial(function, *given), result)
        self._waiting.put(piece)
        self._open.add(piece)
        self._begin()
        try:
            output: _T = await result
        finally:
            self._open.remove(piece)
            self._waiting.remove(piece)  # of a client that went away before its turn
        return output

    def end(self, error: Exception) -> None:
        """Answer all open work, and all work that comes later, with an error."""
        self._ended = error
        for piece in self._open:
            if not piece.result.done():
                piece.result.set_exception(error)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        most = max(self._threads - 1, 1)  # threads of one tenant
        while self._running.total() < self._threads and self._ended is None:
            if self._waiting and not self.account.open():
                self._later()
                return
            piece = self._waiting.take_of(lambda tenant: self._running[tenant] < most)
            if piece is None:
                return
            self._running[piece.tenant] += 1
            task = asyncio.ensure_future(self._do(piece))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _later(self) -> None:
        """Call `_begin` again after a while, when the account may be open."""
        loop = asyncio.get_running_loop()
        if self._timer is None or self._timer.when() <= loop.time():
            self._timer = loop.call_later(_RETRY_SECONDS, self._begin)

    async def _do(self, piece: _Piece) -> None:
        def timed() -> Any:
            began = self._clock()
            try:
                return piece.work()
            finally:
                self.account.charge(self._clock() - began)

        try:
            result = await asyncio.get_running_loop().run_in_executor(self._pool, timed)
        except BaseException as error:
            if not piece.result.done():
                piece.result.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            if not piece.result.done():
                piece.result.set_result(result)
        finally:
            self._running[piece.tenant] -= 1
            self._begin()


def written(value: Mapping[str, Any]) -> bytes:
    """Write an object as JSON, a slice of each long list at a time, so that other threads run."""
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

    def pieces(item: Any) -> str:
        if not isinstance(item, list) or len(item) <= 1:
            return encode(item)
        size = _SLICE if isinstance(item[0], int) else 1
        slices = (item[start : start + size] for start in range(0, len(item), size))
        return f"[{','.join(encode(entry)[1:-1] for entry in slices)}]"

    return (
        "{" + ",".join(f"{encode(key)}:{pieces(entry)}" for key, entry in value.items()) + "}"
    ).encode()
