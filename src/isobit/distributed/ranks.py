"""The processes of a run, as one of them sees the others: all_gather, all_to_all, share, claim, and
one error for all.

A rank's work is local between two meetings. Whatever goes wrong locally is carried to the next
meeting (`run_on_all`) and raised there on every rank, so that none waits for one that has left.
What ranks say to each other is plain values as JSON and tensors as safetensors, never pickle. Left
out: the transport of several processes (`transport.py`), and who starts them (`launch.py`).
"""

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load as tensors_from
from safetensors.torch import save as bytes_of
from torch import Tensor

from isobit import errors
from isobit.errors import IsobitError

T = TypeVar("T")
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        IsobitError,
        errors.RunFailed,
        errors.Corruption,
        errors.RankLost,
        errors.NonFiniteError,
        OSError,
    )
}


class Ranks(ABC):
    """The processes of a run, as one of them sees it. Rank `rank` of `size`. All ranks must call
    the methods that meet in the same order; `claim` may be called at any time."""

    rank: int
    size: int
    device = torch.device("cpu")
    """Where tensors are that ranks exchange."""

    @property
    def first(self) -> bool:
        """Whether this rank writes the run's files and has the screen."""
        return self.rank == 0

    @abstractmethod
    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes that every rank passed, by rank."""

    @abstractmethod
    def all_to_all(
        self, sent: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int], among: range
    ) -> Callable[[], Tensor]:
        """Send `sent` [sum of sent_sizes], a piece to each of the ranks `among`: all, or those of a
        set that was prepared, while the others exchange in their sets. The result waits for the
        pieces that they sent here [sum of received_sizes], by rank."""

    @abstractmethod
    def share(self, buffers: Sequence[Tensor], among: range | None = None) -> Callable[[], None]:
        """Give buffers[rank] to all, or to a set that was prepared, buffers[place in it], into their
        buffers of the same place. The result waits for it."""

    @abstractmethod
    def claim(self, name: str) -> int:
        """Return 0 for the first rank that asks under this name, then 1, 2, ...; the ranks take a
        name for one purpose only, such as `fresh_name` with a number."""

    def prepare(self, sets: Sequence[range]) -> None:  # noqa: B027 (a transport may need nothing)
        """Make ready to exchange in these sets of ranks; every rank names the same, in the same
        order."""

    def group(self, size: int) -> "Ranks":
        """Return this rank's neighbours, of groups of `size` consecutive ranks that meet by
        themselves; all ranks ask for the same sizes, in the same order. Raises IsobitError for a
        size that does not divide them."""
        if size < 1 or self.size % size:
            raise IsobitError(
                f"divided: {size} ranks cannot be a group of {self.size}: choose a divisor"
            )
        if size in (1, self.size):
            return ALONE if size == 1 else self
        groups = [range(first, first + size) for first in range(0, self.size, size)]
        self.prepare(groups)
        return Neighbours(self, groups[self.rank // size])

    def fresh_name(self) -> str:
        """Return a name that no rank has used, the same on all."""
        return str(self.all_gather_json(secrets.token_hex(8))[0])

    def meet(self, verb: str) -> None:  # noqa: B027 (a rank that is alone has nobody to tell)
        """Note what the rank is doing, for the ranks that wait for it."""

    def print_to(self, path: Path) -> None:  # noqa: B027
        """Send what this rank prints from now on to a file, unless it is the first rank."""

    def all_gather_json(self, value: Any) -> list[Any]:
        """Return the plain values that every rank passed, by rank."""
        return [json.loads(data) for data in self.all_gather_bytes(json.dumps(value).encode())]

    def all_gather_tensors(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the tensors that every rank passed, by rank, on the CPU."""
        local = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        if self.size == 1:
            return [local]
        return [tensors_from(data) for data in self.all_gather_bytes(bytes_of(local))]

    def run_on_all(self, compute: Callable[[], T]) -> T:
        """Return what `compute`, which does not meet the others, returns, once it has returned on
        every rank. If it raised IsobitError or OSError on some, every rank raises that of the
        lowest of them."""
        result: T | None = None
        mine: IsobitError | OSError | None = None
        try:
            result = compute()
        except (IsobitError, OSError) as error:
            if self.size == 1:
                raise
            mine = error
        self.raise_on_all(mine)
        return result  # type: ignore[return-value]

    def on_first(self, compute: Callable[[], T]) -> T | None:
        """Return what `compute` returns on the first rank, once it has returned there; None on the
        others. Errors as `run_on_all`."""
        return self.run_on_all(lambda: compute() if self.first else None)

    def broadcast_result(self, compute: Callable[[], T]) -> T:
        """Return what `compute` returns on the first rank, sent to all as JSON; errors as in
        `run_on_all`."""
        result: T = self.all_gather_json(self.on_first(compute))[0]
        return result

    def raise_on_all(self, mine: IsobitError | OSError | None) -> None:
        """Raise on every rank the error of the lowest rank that has one."""
        if self.size == 1:
            if mine is not None:
                raise mine
            return
        try:
            reports = self.all_gather_json(None if mine is None else _said(mine))
        except errors.RankLost:
            if mine is None:
                raise
            raise mine from None  # for which the others may wait in their group
        for rank, error in enumerate(reports):
            if error is not None:
                raised = (
                    mine if rank == self.rank and mine is not None else _KINDS[error[0]](*error[1:])
                )
                if isinstance(raised, IsobitError):
                    raised.shared = True
                raise raised


class Alone(Ranks):
    """The only process of a run."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self._name, self._claimed = (
            "",
            0,
        )  # one name at a time: there is nobody who could be elsewhere

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def all_gather_json(self, value: Any) -> list[Any]:
        return [value]

    def all_to_all(
        self, sent: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int], among: range
    ) -> Callable[[], Tensor]:
        assert list(sent_sizes) == list(received_sizes) == [sent.numel()]
        return lambda: sent

    def share(self, buffers: Sequence[Tensor], among: range | None = None) -> Callable[[], None]:
        assert len(buffers) == 1
        return lambda: None

    def claim(self, name: str) -> int:
        self._name, self._claimed = name, self._claimed + 1 if name == self._name else 1
        return self._claimed - 1


ALONE = Alone()


class Neighbours(Ranks):
    """The ranks `among` all that are a prepared set; they exchange on the device of all."""

    def __init__(self, everyone: Ranks, among: range) -> None:
        self._everyone, self._among = everyone, among
        self.rank, self.size = among.index(everyone.rank), len(among)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        device = self._everyone.device
        lengths = list(torch.zeros(self.size, 1, dtype=torch.int64, device=device))
        lengths[self.rank].fill_(len(data))
        self.share(lengths)()
        buffers = [torch.zeros(int(n), dtype=torch.uint8, device=device) for n in lengths]
        if data:
            buffers[self.rank].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.share(buffers)()
        return [buffer.cpu().numpy().tobytes() for buffer in buffers]

    def all_to_all(
        self, sent: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int], among: range
    ) -> Callable[[], Tensor]:
        members = self._among[among.start : among.stop : among.step]
        return self._everyone.all_to_all(sent, sent_sizes, received_sizes, members)

    def share(self, buffers: Sequence[Tensor], among: range | None = None) -> Callable[[], None]:
        assert among is None
        return self._everyone.share(buffers, self._among)

    def claim(self, name: str) -> int:
        return self._everyone.claim(f"{self._among.start} {name}")


def _said(error: IsobitError | OSError) -> list[Any]:
    """Return the kind of an error with the arguments from which another rank makes it again."""
    if isinstance(error, OSError):
        return ["OSError", error.errno, error.strerror or str(error)]
    return [
        next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS),
        str(error),
    ]
