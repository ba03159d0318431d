"""What a captured step is: a CUDA graph on a GPU, and on a CPU the calls of its operators.

Both run one function again and again on what its inputs hold by then, at fixed addresses. A CUDA
graph is costly to capture, and computed behind the host's back; calls on a CPU are taken down from
a step that is computed anyway, and are made at once. Left out: the inputs, and when a step is
captured (`graphs.py`).
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from isobit.kernels.native.arena import Arena
from isobit.kernels.native.base import NativeBase
from isobit.kernels.native.build import library
from isobit.kernels.native.recording import Recording
from isobit.model import Model


class Graph(Protocol):
    """A captured function that is computed again and again, from the same inputs to the same
    outputs in memory."""

    asynchronous: bool
    """Whether `replay` returns before the function is computed. Such a graph is captured on padded
    rows, for few numbers of rows, and steps may be launched ahead of their tokens; others are
    captured on the rows of a step, which is then computed."""
    most_rows: int
    """Larger steps are computed without one."""

    def __init__(self, peer: Any) -> None:
        """Make an empty graph. `peer`: another graph, whose memory it may share, since no two run
        at a time; or None."""

    def capture(self, function: Callable[[], None]) -> None:
        """Capture a function. An asynchronous graph may run it meanwhile, so its inputs must be
        harmless; others run it once."""

    def replay(self) -> None:
        """Compute the captured function again, from the present contents of its inputs."""


class CudaGraph:
    """A decode step captured as a CUDA graph, which `replay` launches as one."""

    asynchronous, most_rows = True, 1 << 30

    def __init__(self, peer: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = None if peer is None else peer._graph.pool()
        # one for all: PyTorch keeps the memory that was used on a stream for that stream
        self._stream = torch.cuda.Stream() if peer is None else peer._stream

    def capture(self, function: Callable[[], None]) -> None:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):  # kernels are compiled, and workspaces allocated
            function()
        current.wait_stream(self._stream)
        # other threads may allocate meanwhile
        with torch.cuda.graph(
            self._graph, self._pool, self._stream, capture_error_mode="thread_local"
        ):
            function()

    def replay(self) -> None:
        self._graph.replay()


class RecordedCalls:
    """A decode step as a list of calls of C++ operators, made again from one call. A step that
    cannot be recorded (`kernels/native/recording.py`), as with experts, whose rows Python counts,
    is computed eagerly. Recording takes as long as several steps, so a step is recorded at its
    second use."""

    asynchronous, most_rows = False, 64

    def __init__(self, peer: Any) -> None:
        self._arena: Arena = Arena() if peer is None else peer._arena
        self._function: Callable[[], None] | None = None
        self._recording: Recording | None = None

    @property
    def refused(self) -> str | None:
        """The reason why the step is computed eagerly; None where its calls are recorded."""
        return None if self._recording is None else self._recording.refused

    def capture(self, function: Callable[[], None]) -> None:
        self._function = function
        function()

    def replay(self) -> None:
        assert self._function is not None
        if self._recording is None:
            self._recording = Recording(self._function, library(), self._arena)
        else:
            self._recording.run()


def graph_kind(model: Model, wanted: bool) -> type[Graph] | None:
    """Return the class by which decode steps are captured, or None where they are not.

    Captured are steps of operators that never wait for a GPU, or of those in C++. Where the rows
    belong to several adapters, to other rows in each step, only the latter, which read the rows
    from memory. Not of ranks that hold a model together, which wait for each other.
    """
    ops = model.transformer.ops["rollout"]
    if not wanted or model.transformer.group.size > 1:
        return None
    if ops.device.type == "cuda":
        several = model.transformer.served is not None
        return CudaGraph if ops.backend == "triton" and not several else None
    return RecordedCalls if isinstance(ops, NativeBase) else None
