"""How Triton kernels are launched: one function, with everything pinned that could change a bit.

`enable_fp_fusion` is off: a multiplication and an addition become one instruction only where a
kernel says `tl.fma`, so the bits are those of the source, whatever surrounds an expression, and
whatever the default of a Triton version is. Nothing is autotuned.

Tiles and pipelines follow the architecture that kernels are compiled for, `target()`; a process has
one.

`record_launches` records launches instead of running them. With tensors on PyTorch's meta device it
lists the kernels that a model of any size needs, with their types and constants;
`benchmarks/kernel_table.py` compiles them without a GPU. Left out: the kernels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobit.errors import IsobitError, NonFiniteError
from isobit.kernels.gpu import HOPPER, Architecture
from isobit.precision import E4M3, Format, nonfinite_message
from isobit.precision.quantize import QuantSpec


@dataclass(frozen=True, eq=False)
class KernelLaunch:
    """A launch: the kernel, its arguments in order, its compile-time constants and compiler
    options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[object, ...]
    constants: dict[str, object]
    num_warps: int
    num_stages: int


_recorded: list[KernelLaunch] | None = None
_target = HOPPER


def target() -> Architecture:
    """Return the architecture that kernels are compiled for: an H100's, or the opened GPU's."""
    return _target


def compile_for(architecture: Architecture) -> None:
    """Choose tiles for an architecture from here on."""
    global _target
    _target = architecture


def roomy() -> bool:
    """Return whether a program may take the shared memory of a Hopper, in which large tiles of
    heads of 512 channels fit."""
    return _target.shared_kib >= HOPPER.shared_kib


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: object,
    num_warps: int,
    num_stages: int = 2,
    **constants: object,
) -> None:
    """Run `kernel` over `grid` with positional `arguments` and compile-time `constants`, and
    compiler options among them such as `maxnreg`; an empty grid runs nothing."""
    if 0 in grid:
        return
    if _recorded is not None:
        _recorded.append(KernelLaunch(kernel, grid, arguments, constants, num_warps, num_stages))
        return
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}
    try:
        kernel[grid](*arguments, **constants, **options)
    except Exception as error:
        if (line := _does_not_fit(kernel, error)) is None:
            raise
        raise IsobitError(line) from None


def _does_not_fit(kernel: Any, error: Exception) -> str | None:
    """Return what a kernel takes and this GPU has not, as Triton says of what it has compiled; None
    for another error."""
    if type(error).__name__ != "OutOfResources":
        return None
    needed, limit, resource = (getattr(error, name, "?") for name in ("required", "limit", "name"))
    return (
        f"this GPU cannot run {kernel.__name__.strip('_')}, which needs {needed} of {resource}, and has "
        f"{limit}: the model is too wide for it in this precision; use precision: fp8 or "
        "bf16, or backend: native"
    )


@contextmanager
def record_launches() -> Iterator[list[KernelLaunch]]:
    """Collect launches in the list inside this context instead of running them; outputs stay
    unwritten."""
    global _recorded
    previous, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = previous


class Faults:
    """Flags that kernels set when they meet NaN or infinity, checked where results are read.

    A flag for every name, 16 bytes apart so that all pointers are aligned alike.
    """

    _STRIDE = 4

    def __init__(self, device: torch.device, capacity: int = 4096) -> None:
        self._flags = torch.zeros(capacity * self._STRIDE, dtype=torch.int32, device=device)
        self._names: dict[tuple[str, Format], int] = {}

    def of(self, name: str, form: Format = E4M3) -> Tensor:
        """Return the flag [1] int32 of a tensor's name, and what it is quantized to; names beyond
        the capacity share the last one."""
        most = self._flags.numel() // self._STRIDE - 1
        index = min(self._names.setdefault((name, form), len(self._names)), most)
        return self._flags[index * self._STRIDE :]

    def raise_first(self) -> None:
        """Wait for the GPU; raise NonFiniteError for the first name with a flag, and clear all."""
        if self._flags.is_meta:  # launches are recorded, and nothing has run
            return
        raised = self._flags.nonzero()[:, 0].tolist()
        if not raised:
            return
        self._flags.zero_()
        keys = (key for key, i in self._names.items() if i == raised[0] // self._STRIDE)
        name, form = next(keys, ("a tensor", E4M3))
        raise NonFiniteError(nonfinite_message(name, QuantSpec(form)))
