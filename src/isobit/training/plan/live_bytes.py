"""Bytes of tensors that are alive, and the most at a time: counted as PyTorch's operators return
them, on any device.

Counting does not depend on the machine, as resident memory does: an allocator keeps what was
freed. Left out: what operators in C++ take for themselves and free, and weights that a library
has reordered, which have no storage.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """A counter of bytes in tensors' storages, used as a context manager. `live` counts storages
    made since it was entered; `peak` is the most since `take`."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._known: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell PyTorch not to skip this: True would import torch._dynamo, for seconds, to keep it
        from compiling."""
        return False

    def take(self) -> int:
        """Return the peak in bytes since the last call."""
        peak, self.peak = self.peak, self.live
        return peak

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {_key(tensor) for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            if (key := _key(tensor)) not in inputs and key not in self._known:
                storage = tensor.untyped_storage()
                self._known[key] = storage.nbytes()
                self._made(storage.nbytes())
                weakref.finalize(storage, self._free, key)
        return result

    def _made(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def _free(self, key: int) -> None:
        self.live -= self._known.pop(key, 0)


class LiveTrace(LiveBytes):
    """A count of live bytes that also records how it came to a peak: `moments` are `live` at each
    storage made since `take`, and before."""

    def __init__(self) -> None:
        super().__init__()
        self.moments = [0]

    def take(self) -> int:
        self.moments = [self.live]
        return super().take()

    def _made(self, size: int) -> None:
        super()._made(size)
        self.moments.append(self.live)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield those in a nest of tuples, lists and mappings that have a storage."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch._mkldnn:  # type: ignore[attr-defined]
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
