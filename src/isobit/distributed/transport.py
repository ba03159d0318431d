"""Ranks over torch.distributed: gloo on CPUs, NCCL on GPUs, with a separate place for texts
(`board.py`).

A process that connects to a rank's port must know a secret of the run: on one machine that is in a
folder which no other user may enter; torchrun's store shows it to every process that reaches the
store. Counts, errors and completions always go over gloo; gradients and weights go over NCCL where
the tensors are on GPUs. NCCL has not been run: no machine with two GPUs was at hand. Left out:
order (`exchange.py`).
"""

import hashlib
import hmac
import os
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from isobit.distributed.board import Board, StoreBoard
from isobit.distributed.ranks import Ranks
from isobit.distributed.siblings import end_siblings
from isobit.errors import RankLost, RunFailed

_FAILED = "failed"
_PADDED_BYTES = 1 << 20
# in which a rank that failed says why, before the others report that its connection is gone
_GRACE_S = 3.0


class TorchRanks(Ranks):
    """The ranks that meet at a store, on which they find each other's addresses. `board`: the place
    for what they tell each other outside their meetings; by default it is on the store.

    `bytes_sent` counts gradients and weights that this rank has sent to others. A rank that waits
    longer than `timeout_s` raises RankLost, which names the ranks that did not come.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        board: Board | None = None,
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._timeout_s, self._verb = timeout_s, "start"
        self._met, self._waits = Counter[range](), range(size)
        self._log = False
        self.bytes_sent = 0
        self._limit = limit = timedelta(seconds=timeout_s)
        store.set_timeout(limit)
        self._board = board or StoreBoard(dist.PrefixStore("isobit", store))
        with self._failures("start"):
            if self.first:
                store.set("isobit/secret", secrets.token_hex(32))
            self._secret = store.get("isobit/secret")
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
            self._ask(range(size), dist.group.WORLD)
            self._tensors = (
                dist.new_group(backend="nccl") if device.type == "cuda" else dist.group.WORLD
            )
        self._sets = {range(size): self._tensors}

    def _ask(self, among: range, group: dist.ProcessGroup | None) -> None:
        """Require that each process that connected to this rank's port as another rank knows the
        secret of this run. Raises RunFailed for one that does not."""

        def tag(sender: int, receiver: int) -> bytes:
            return hmac.digest(
                self._secret, f"{among} {sender} {receiver}".encode(), hashlib.sha256
            )

        mine = torch.tensor(
            [list(tag(self.rank, peer)) for peer in among], dtype=torch.uint8
        ).flatten()
        answers = torch.empty_like(mine)
        dist.all_to_all_single(answers, mine, group=group)
        for peer, reply in zip(among, answers.view(len(among), -1)):
            if not hmac.compare_digest(bytes(reply.tolist()), tag(peer, self.rank)):
                raise RunFailed(
                    f"a stranger connected to the port of rank {self.rank} as rank {peer}; "
                    "start again"
                )

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        self._arrive()
        mine = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(0, dtype=torch.uint8)
        )
        with self._failures("gather"):
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([len(data)]))
            lengths = [int(size) for size in sizes]
            bytes_ = self._of_all(mine, lengths)
        return [row[:length].numpy().tobytes() for row, length in zip(bytes_, lengths)]

    def _of_all(self, mine: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Return the bytes of each rank. Messages may differ in length, and often one rank alone
        has something to say: where they are not short, each rank sends its own, so that no rank
        receives more than was said; short ones are padded, for one exchange among all."""
        longest = max(lengths)
        if longest * self.size <= _PADDED_BYTES:
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(mine)] = mine
            buffers = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(buffers, padded)
            return buffers
        buffers = [
            mine if rank == self.rank else torch.empty(length, dtype=torch.uint8)
            for rank, length in enumerate(lengths)
        ]
        for rank, buffer in enumerate(buffers):
            if buffer.numel():
                dist.broadcast(buffer, rank)
        return buffers

    def prepare(self, sets: Sequence[range]) -> None:
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        with self._failures("start"):
            for members in sets:
                if members not in self._sets:
                    group = self._sets[members] = dist.new_group(
                        list(members), timeout=self._limit, backend=backend
                    )
                    if backend == "gloo" and self.rank in members:
                        self._ask(members, group)

    def all_to_all(
        self, sent: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int], among: range
    ) -> Callable[[], Tensor]:
        self._arrive(among)
        received = sent.new_empty(sum(received_sizes))
        self.bytes_sent += (
            sum(sent_sizes) - sent_sizes[among.index(self.rank)]
        ) * sent.element_size()
        with self._failures("exchange gradients"):
            work = dist.all_to_all_single(
                received,
                sent,
                list(received_sizes),
                list(sent_sizes),
                group=self._sets[among],
                async_op=True,
            )

        def wait() -> Tensor:
            with self._failures("exchange gradients", among):
                work.wait()
            return received

        return wait

    def share(self, buffers: Sequence[Tensor], among: range | None = None) -> Callable[[], None]:
        among = among or range(self.size)
        self._arrive(among)
        sent = buffers[among.index(self.rank)]
        self.bytes_sent += sent.numel() * sent.element_size() * (len(among) - 1)
        with self._failures("share weights"):
            works = [
                dist.broadcast(buffer, rank, group=self._sets[among], async_op=True)
                for rank, buffer in zip(among, buffers, strict=True)
                if buffer.numel()
            ]

        def wait() -> None:
            with self._failures("share weights", among):
                for work in works:
                    work.wait()

        return wait

    def claim(self, name: str) -> int:
        with self._failures("claim work"):
            return self._board.add(f"claim/{name}")

    def meet(self, verb: str) -> None:
        self._verb = verb
        self._arrive()

    def _arrive(self, among: range | None = None) -> None:
        """Write on the board how many meetings of all, or of a set, this rank has come to, for ranks
        that wait for it there."""
        self._waits = among = among or range(self.size)
        self._met[among] += 1
        with self._failures(self._verb):
            self._board.set(self._place(self.rank, among), f"{self._met[among]} {self._verb}")

    def _place(self, rank: int, among: range) -> str:
        """Return the key of a rank's count of the meetings of a set."""
        few = len(among) < self.size
        return f"at-{rank}" + f"-of-{among.start}-{among.stop}-{among.step}" * few

    def print_to(self, path: Path) -> None:
        if self.first:
            return
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as file:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(file.fileno(), stream.fileno())
        self._log = True

    def fail(self, reason: str) -> None:
        """Tell the other ranks why this rank ends, and write it to this rank's log, if no command
        of this process does."""
        if self._log and not isinstance(self._board, StoreBoard):
            print(f"isobit: {reason}", file=sys.stderr)
        with suppress(RuntimeError, OSError):  # the place itself is gone
            self._board.set(_FAILED, f"rank {self.rank}: {reason}")

    def close(self) -> None:
        """Leave the group. Its threads end with the last reference to it; one that still frees a
        tensor when Python has ended aborts the process."""
        del self._tensors, self._sets
        dist.destroy_process_group()

    @contextmanager
    def _failures(self, verb: str, among: range | None = None) -> Iterator[None]:
        """Turn what torch raises where another rank is gone or late into a RankLost that says which
        rank and why. `among`: the set whose meeting this is, by default that of the last one."""
        self._waits = among or self._waits
        started = time.monotonic()
        try:
            yield
        except OSError as error:
            raise RunFailed(f"cannot write {error.filename}: {error.strerror}") from None
        except RuntimeError as error:
            text = str(error).lower()
            late = (
                time.monotonic() - started > 0.9 * self._timeout_s
                or "timeout" in text
                or "timed out" in text
            )
            raise RankLost(self._why(verb, late)) from None

    def _why(self, verb: str, late: bool) -> str:
        try:
            until = time.monotonic() + (0 if late else _GRACE_S)
            while (cause := self._board.get(_FAILED)) is None and time.monotonic() < until:
                time.sleep(0.1)
            if cause is not None:
                return cause
            if late:
                missing = self._missing()
                end_siblings([rank for rank, _ in self._behind()], self._board)
                return f"{verb}: waited {self._timeout_s:g} s for {missing}"
            return f"{verb}: another rank is gone; {self._missing()} did not come"
        except (RuntimeError, OSError):
            return (
                f"{verb}: the ranks cannot reach each other: the first one is gone, or the network"
            )

    def _missing(self) -> str:
        """Return the ranks that met fewer times than this one, and where they were last seen; where
        all have come to this meeting, all the others, one of which stands still in it."""
        peers = [(rank, self._verb) for rank in self._waits if rank != self.rank]
        return ", ".join(
            f"rank {rank} (last seen in: {verb or 'start'})"
            for rank, verb in self._behind() or peers
        )

    def _behind(self) -> list[tuple[int, str]]:
        """Return (rank, verb) of the ranks that have come to fewer meetings than this one, without
        those that wait for another rank themselves, in a smaller set."""
        behind = {rank: verb for rank, (_, verb) in self._late(self._waits, self._met[self._waits])}
        waiting = {
            rank
            for members in self._sets
            for rank in behind.keys() & members
            if len(members) < len(self._waits) and self._late(members, self._seen(rank, members)[0])
        }
        return [(rank, verb) for rank, verb in behind.items() if rank not in waiting]

    def _late(self, among: range, met: int) -> list[tuple[int, tuple[int, str]]]:
        """Return (rank, count and verb) of those of a set that have met fewer times."""
        seen = [(rank, self._seen(rank, among)) for rank in among]
        return [(rank, counted) for rank, counted in seen if counted[0] < met]

    def _seen(self, rank: int, among: range) -> tuple[int, str]:
        """Return how many meetings of a set a rank has come to, and in which verb."""
        text = self._board.get(self._place(rank, among)) or ""
        match = re.fullmatch(r"(\d{1,18}) ([a-z ]*)", text)
        return (int(match[1]), match[2]) if match else (0, "")
