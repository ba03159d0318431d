"""Ranks that are threads of one process: what several ranks compute, without several processes."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from isobit.distributed import Ranks

T = TypeVar("T")
WHOLE_BLOCKS = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 32,
}
"""Sizes of a `tiny_model` whose matrices have several blocks of 128, so that ranks share them."""


class Meeting:
    """Where the threads of `size` ranks exchange what they give."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=300)
        self.lock = threading.Lock()
        self.places: list[Any] = [None] * size
        self.claimed: dict[str, int] = defaultdict(int)
        self.sets: dict[range, Meeting] = {}
        self.ended = False

    def of(self, among: range) -> "Meeting":
        """Where those of a set meet, whatever the others do."""
        with self.lock:
            meeting = self.sets.setdefault(among, Meeting(len(among)))
            if self.ended:
                meeting.barrier.abort()
            return meeting

    def end(self) -> None:
        """Let nobody wait any more."""
        with self.lock:
            self.ended = True
            for meeting in (self, *self.sets.values()):
                meeting.barrier.abort()

    def exchange(self, rank: int, given: Any) -> list[Any]:
        """What every rank gave."""
        self.places[rank] = given
        self.barrier.wait()
        found = list(self.places)
        self.barrier.wait()
        return found


class ThreadRanks(Ranks):
    """One of them. `bytes_sent` counts as `isobit.distributed.transport` does; `sent_to`: those of
    exchanges by rank; `met` is what it was asked, in order."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting
        self.bytes_sent, self.sent_to = 0, Counter[int]()
        self.met: list[str] = []

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        self.met.append("gather")
        return self._all("gather", data)

    def all_to_all(
        self, sent: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int], among: range
    ) -> Callable[[], Tensor]:
        assert sent.numel() == sum(sent_sizes)
        self.met.append(f"exchange {sum(sent_sizes)}")
        pieces = {
            rank: piece.clone()
            for rank, piece in zip(among, sent.split(list(sent_sizes)), strict=True)
        }
        for rank, piece in pieces.items():
            self.sent_to[rank] += piece.numel() * piece.element_size()
        self.bytes_sent += sum(
            p.numel() * p.element_size() for rank, p in pieces.items() if rank != self.rank
        )
        given = self._all("exchange", pieces)
        received = [given[rank][self.rank] for rank in among]
        assert [piece.numel() for piece in received] == list(received_sizes)
        return lambda: torch.cat(received)

    def share(self, buffers: Sequence[Tensor], among: range | None = None) -> Callable[[], None]:
        self.met.append("share")
        mine = buffers[self.rank if among is None else among.index(self.rank)].clone()
        self.bytes_sent += mine.numel() * mine.element_size() * (len(buffers) - 1)
        given = self._all("share", mine, among)

        def wait() -> None:
            for buffer, piece in zip(buffers, given):
                buffer.copy_(piece)

        return wait

    def claim(self, name: str) -> int:
        with self._meeting.lock:
            self._meeting.claimed[name] += 1
            return self._meeting.claimed[name] - 1

    def _all(self, what: str, given: Any, among: range | None = None) -> list[Any]:
        if among is None:
            found = self._meeting.exchange(self.rank, (what, given))
        else:
            found = self._meeting.of(among).exchange(among.index(self.rank), (what, given))
        assert {kind for kind, _ in found} == {what}, "the ranks do not meet for the same"
        return [value for _, value in found]


def run(size: int, work: Callable[[ThreadRanks], T]) -> list[T]:
    """What `work` returns on each of `size` ranks. Raises what the lowest rank that failed
    raised."""
    meeting, found, raised = Meeting(size), [None] * size, [None] * size

    def one(rank: int) -> None:
        try:
            found[rank] = work(ThreadRanks(meeting, rank))  # type: ignore[call-overload]
        except BaseException as error:
            raised[rank] = error  # type: ignore[call-overload]
            if not isinstance(error, threading.BrokenBarrierError):
                meeting.end()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [e for e in raised if e is not None]
    if errors:
        raise next(
            (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]
        )
    return found  # type: ignore[return-value]
