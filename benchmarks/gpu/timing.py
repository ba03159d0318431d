"""Seconds of a call on a GPU: a captured graph of at least 20 calls is replayed between two events,
and medians taken.

Timed one by one, calls of some microseconds measure Python's launches. In a graph the GPU goes from
one to the next by itself. A call whose result is all zeros has computed nothing, and is not timed.
The calls rotate among *sets* of inputs that together are four times as large as the L2 cache, so
that none of them finds its inputs there; how many sets there were and their bytes stand beside each
result. Where a call cannot be captured, at least 20 calls are launched between the events, and the
result says so, with the reason.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch
from torch import Tensor

from isobit.precision import QTensor

CALLS = 20
_SAMPLE_S = 0.1  # of all samples of a contestant, if they are not fewer than the least
_SAMPLES = (5, 40)
_SHORT_S = 5e-3
_Set = TypeVar("_Set")


@dataclass(frozen=True)
class Rotation:
    """Calls of one kind over different inputs, one after the other; `nbytes` of one call's inputs.

    `eager`: launched by Python in a run too, and timed so. `calls`: in one graph, at least.
    """

    over: Sequence[Callable[[], object]]
    nbytes: int = 0
    eager: bool = False
    calls: int = CALLS


@dataclass(frozen=True)
class Timing:
    """Median, least and most seconds of a call; how it was timed."""

    seconds: float
    least_s: float
    most_s: float
    samples: int
    calls: int  # between two events
    sets: int
    set_bytes: int  # of all sets together
    how: str

    def fields(self) -> dict[str, object]:
        return asdict(self)


def rotation(call: Callable[[_Set], object], sets: Sequence[_Set], nbytes: int) -> Rotation:
    """`call` over each of the sets."""
    return Rotation([lambda given=given: call(given) for given in sets], nbytes)


def computed_nothing(result: object) -> bool:
    """Whether a call's result, a tensor or several, plain or quantized, is zero everywhere, as that
    of kernels that do nothing; what returns no tensor is not known."""
    found, left = list[Tensor](), [result]
    while left:
        one = left.pop()
        if isinstance(one, QTensor):
            left += [one.data.view(torch.uint8), one.scale]
        elif isinstance(one, tuple | list):
            left += one
        elif isinstance(one, Tensor):
            found.append(one)
    return bool(found) and not any(bool((one != 0).any()) for one in found)


def l2_bytes() -> int:
    """Of the GPU that PyTorch would use."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def num_sets(nbytes: int) -> int:
    """How many sets of inputs of this size are four times the L2 cache; two at least, and no more
    than 256. Without a GPU, two."""
    if not torch.cuda.is_available():
        return 2
    return min(max(2, -(-4 * l2_bytes() // max(nbytes, 1))), 256)


class Timer:
    """One contestant, warmed up and ready: `sample` gives the seconds of a call."""

    def __init__(self, contestant: Rotation, rehearsal: bool) -> None:
        self.contestant, self.rehearsal = contestant, rehearsal
        self.rounds = max(1, -(-contestant.calls // len(contestant.over)))
        self.repeats = 1  # of all that, between two events
        self.how = "eager, as a run launches it" if contestant.eager else "graph"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._first = self._warm_up()

    def _warm_up(self) -> float:
        """Every call once: kernels are compiled, workspaces allocated. Returns the seconds of the
        first. Raises RuntimeError where nothing was computed."""
        start = time.perf_counter()
        result: object = None
        if self.rehearsal:
            result = self.contestant.over[0]()
            self.how = "rehearsal"
            took = time.perf_counter() - start
            _refuse(result)
            return took
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in self.contestant.over:
                result = call()
        torch.cuda.synchronize()
        _refuse(result)
        del result
        if not self.contestant.eager:
            try:
                self._graph = self._captured(side)
            except RuntimeError as error:  # PyTorch's for anything that cannot be captured
                # an error that stays is not the capture's, and ends the case
                torch.cuda.synchronize()
                self.how = (
                    f"eager, the capture failed: {type(error).__name__}: "
                    f"{str(error).splitlines()[0][:200]}"
                )
        return time.perf_counter() - start

    def _captured(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._launch()
        return graph

    def _launch(self) -> None:
        for _ in range(self.rounds):
            for call in self.contestant.over:
                call()

    def settle(self) -> None:
        """A first sample, not counted: it uploads the graph. Short calls are then repeated to be at
        least 20."""
        if self.rehearsal or self.contestant.eager:
            return
        if self.sample() * self.num_calls < _SHORT_S:
            self.repeats = -(-CALLS // self.num_calls)

    def sample(self) -> float:
        """Mean seconds of a call, of all between two events."""
        if self.rehearsal:
            return self._first
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(self.repeats):
            if self._graph is not None:
                self._graph.replay()
            else:
                self._launch()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / self.num_calls

    @property
    def num_calls(self) -> int:
        """Between two events."""
        return 1 if self.rehearsal else self.repeats * self.rounds * len(self.contestant.over)

    def timing(self, samples: Sequence[float]) -> Timing:
        sets = len(self.contestant.over)
        return Timing(
            statistics.median(samples), min(samples), max(samples), len(samples), self.num_calls,
            sets,
            sets * self.contestant.nbytes, self.how,
        )  # fmt: skip


def _refuse(result: object) -> None:
    if computed_nothing(result):
        raise RuntimeError("every number of its result is 0: it computed nothing")


def _enough(timer: Timer) -> int:
    """Samples of a tenth of a second together, 5 to 40."""
    each = max(timer.sample() * timer.num_calls, 1e-6)
    return min(max(int(_SAMPLE_S / each), _SAMPLES[0]), _SAMPLES[1])


def race(timers: Mapping[str, Timer], samples: int | None = None) -> dict[str, Timing]:
    """The contestants in turns, so that whatever else the machine does hits all of them."""
    found: dict[str, list[float]] = {}
    for name, timer in timers.items():
        timer.settle()
        found[name] = [0.0] * (1 if timer.rehearsal else samples or _enough(timer))
    for turn in range(max(map(len, found.values()), default=0)):
        for name, timer in timers.items():
            if turn < len(found[name]):
                found[name][turn] = timer.sample()
    return {name: timers[name].timing(times) for name, times in found.items()}
