"""Records what a function does with tensors of the CPU, and does it again without the function.

Calls of C++ operators are recorded with their arguments and made again from one call
(`replay.cpp`); plain copies of tensors or rows likewise. Everything else that PyTorch computes
is computed again by PyTorch, into the same memory; views and allocations are not repeated, since
memory keeps its addresses (`arena.py`). So a function that goes the same way each time, and whose
inputs change in place, gives the bits that it would give anew (`tests/kernels/test_recording.py`).

What would make it go another way is the value of a tensor that Python reads. A function that reads
one, or calls an operator that cannot be repeated, is `refused`, and runs as it is. What the
recorder cannot see is the caller's to know: numbers of Python that change between calls.
"""

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from isobit.errors import NonFiniteError
from isobit.kernels.native.arena import Arena
from isobit.kernels.native.interface import OPERATORS

_RECORDING = threading.Lock()  # the hook is the library's, put there by one recorder at a time
_THREAD = threading.local()  # `recorder`: the one that the thread is in
_ALLOCATE = {"empty", "empty_like", "new_empty", "empty_strided"}
_DESCRIBE = {
    "__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "is_floating_point",
    "ndimension", "nelement", "numel", "size", "storage_offset", "stride", "untyped_storage",
}  # fmt: skip
"""What says something of a tensor that does not depend on its values."""
_NOT_IN_PLACE = {"__int__", "__index__", "__invert__"}


class Recording:
    """A function that was called once, and what it did. `refused`: what of it cannot be repeated,
    or None."""

    def __init__(self, function: Callable[[], None], library: ctypes.CDLL, arena: Arena) -> None:
        """Call `function`, which must write its results into tensors of its caller, and record what
        it does."""
        self._function = function
        recorder = _Recorder(library, arena)
        with _RECORDING, recorder.hooked(), recorder:
            function()
        recorder.close()
        self.refused = recorder.refused
        self._parts = [] if self.refused else recorder.parts
        self._kept, self._arena = recorder.kept, arena  # recorded calls have addresses in both

    def run(self) -> None:
        """Do it again. Raises what the function raises: where an operator fails, the function is
        called to say how."""
        if self.refused:
            self._function()
        elif any(call() for call in self._parts):
            self._function()
            raise NonFiniteError("a captured step met NaN or infinity, and did not meet it again")


class _Recorder(TorchFunctionMode):
    """A recorder of everything that its thread does with tensors, and with a library, while it is
    active."""

    def __init__(self, library: ctypes.CDLL, arena: Arena) -> None:
        super().__init__()
        self.refused: str | None = None
        self.parts: list[Callable[[], Any]] = []  # each returns something true where it fails
        self.kept: list[object] = []
        """What recorded calls have the addresses of."""
        self._library, self._arena = library, arena
        self._calls: list[tuple[int, list[int]]] = []  # not yet among the parts
        self._constants: set[int] = set()  # storages that Python's numbers were written to

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Record the calls of the library's operators inside this context."""
        functions = [getattr(self._library, name) for name in OPERATORS]
        _THREAD.recorder = self
        for function in functions:
            function.errcheck = _hook
        try:
            yield
        finally:
            for function in functions:
                del function.errcheck
            _THREAD.recorder = None

    def close(self) -> None:
        """End the recording: the function has returned."""
        if not self._calls:
            return
        words = [(ctypes.c_int64 * len(arguments))(*arguments) for _, arguments in self._calls]
        calls = (ctypes.c_int64 * (2 * len(words)))()
        calls[::2] = [function for function, _ in self._calls]
        calls[1::2] = [ctypes.addressof(buffer) for buffer in words]
        self.kept += [words, calls]
        self.parts.append(partial(self._library.isobit_replay, ctypes.addressof(calls), len(words)))
        self._calls = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", str(function))
        result = function(*args, **kwargs)
        if self.refused:
            return result
        if name == "data_ptr" and not self._arena.holds(args[0]):
            self.kept.append(args[0])
        if name in _ALLOCATE:
            return self._arena.like(result)
        if _in_place(name, kwargs):
            self._constants -= {_storage(x) for x in tensors_of((args, kwargs))}
            self._repeat(function, args, kwargs, [])
        elif not (results := tensors_of(result)):
            read = {_storage(x) for x in tensors_of((args, kwargs))}
            if name not in _DESCRIBE and not read <= self._constants:
                self._refuse(f"{name} of a tensor")
        elif name == "tensor" and not tensors_of(args):
            self._constants.add(_storage(result))
            self.kept.append(result)
        else:
            sources = {_storage(x) for x in tensors_of((args, kwargs))}
            new = [_storage(x) not in sources for x in results]
            if all(new):
                return self._computed(function, args, kwargs, result)
            if any(new):
                self._refuse(name)
        return result

    def _computed(
        self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], results: Any
    ) -> Any:
        """Copy what PyTorch has computed into the arena, where it is computed again, and return the
        copies."""
        copies = mapped(results, lambda x: self._arena.like(x).copy_(x))
        self._repeat(function, args, kwargs, tensors_of(copies))
        return copies

    def _repeat(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Mapping[str, Any],
        results: list[Tensor],
    ) -> None:
        args, kwargs, targets = mapped((args, kwargs, results), self._arena.alias)
        copy = None if kwargs else _as_copy(getattr(function, "__name__", ""), args, targets)
        if copy is not None:
            self.kept.append((args, targets))
            self._calls.append((_address(self._library.copy_rows_replayed), copy))
            return

        def again() -> None:
            result = function(*args, **kwargs)
            for target, x in zip(targets, tensors_of(result) if targets else ()):
                assert target.shape == x.shape, f"{function}: a result of another shape"
                target.copy_(x)

        self.close()
        self.parts.append(again)

    def called(self, function: Any, arguments: tuple[Any, ...]) -> None:
        """Record a call of an operator of the library."""
        if self.refused:
            return
        again = getattr(self._library, f"{function.__name__}_replayed", None)
        if again is None:
            self._refuse(function.__name__)
        else:
            words = [self._word(*pair) for pair in zip(function.argtypes, arguments)]
            self._calls.append((_address(again), words))

    def _word(self, kind: type, argument: Any) -> int:
        """Return an argument as its eight bytes."""
        if kind is ctypes.c_double:
            (word,) = struct.unpack("q", struct.pack("d", argument))
            return int(word)
        if argument is None or isinstance(argument, int):
            return int(argument or 0)
        self.kept.append(argument._obj)  # of ctypes.byref
        return ctypes.addressof(argument._obj)

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        self._calls, self.parts, self.kept = [], [], []


def _hook(result: Any, function: Any, arguments: tuple[Any, ...]) -> Any:
    """Return a hook of ctypes. A call takes it down when it begins, without a reference, so that it
    has to outlive what other threads have begun: it is a function of this module, and no
    recorder's."""
    recorder = getattr(_THREAD, "recorder", None)
    if recorder is not None:
        recorder.called(function, arguments)
    return result


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _as_copy(name: str, args: Sequence[Any], targets: Sequence[Tensor]) -> list[int] | None:
    """Return the arguments of `copy_rows` (`replay.cpp`) that do what a function of PyTorch does;
    None where it does something else, or copies what does not lie one behind the other."""
    if name == "copy_" and len(args) == 2:
        to, source, index = *args, None
        same = to.shape == source.shape
    elif name == "index_select" and args[1] == 0 and args[0].dim() and targets:
        (to,), (source, _, index) = targets, args
        same = index.dtype == torch.int64 and index.is_contiguous()
    else:
        return None
    plain = all(not x.is_mkldnn and x.is_contiguous() for x in (to, source))
    if not (plain and same and to.dtype == source.dtype):
        return None
    if index is None:
        return [to.data_ptr(), source.data_ptr(), 0, 1, source.nbytes, 1]
    count, rows = index.numel(), source.shape[0]
    row = source.nbytes // max(rows, 1)
    return [to.data_ptr(), source.data_ptr(), index.data_ptr(), count, row, rows]


def _in_place(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function of PyTorch writes to a tensor that it is given."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.endswith("_") or kwargs.get("out") is not None


def _storage(x: Tensor) -> int:
    """Return what tells the memory of one tensor from that of another; oneDNN hides its own."""
    return id(x) if x.is_mkldnn else x.untyped_storage().data_ptr()


def tensors_of(nested: Any) -> list[Tensor]:
    """Return all tensors in nested lists, tuples and mappings, depth first; other values are
    skipped."""
    if isinstance(nested, Tensor):
        return [nested]
    if isinstance(nested, Mapping):
        nested = list(nested.values())
    if isinstance(nested, (list, tuple)):
        return [x for item in nested for x in tensors_of(item)]
    return []


def mapped(nested: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return nested lists, tuples and mappings with every tensor in them changed."""
    if isinstance(nested, Tensor):
        return change(nested)
    if isinstance(nested, Mapping):
        return {key: mapped(item, change) for key, item in nested.items()}
    if isinstance(nested, (list, tuple)) and not isinstance(nested, torch.Size):
        return type(nested)([mapped(item, change) for item in nested])
    return nested
