"""Which GPU is here, and whether the Triton backend runs on it.

`sm_90` (H100, H200) is what the kernels are written for: their FP8 products run on warpgroup matrix instructions, one
class for every batch. Elsewhere the backend is refused, with the reason: before `sm_89` there is no FP8; `sm_89` (Ada)
has less shared memory than the tiles of products take; for `sm_100` and later (Blackwell) Triton 3.6 does not compile
all of them (docs/log.md). Left out: several GPUs, and other vendors.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from isobit.kernels.types import Ops

OLDEST_TRITON, NEWEST_TRITON = (3, 6), (3, 9)
"""The range of Triton versions that the kernels are written for; both ends belong to it."""


@dataclass(frozen=True)
class Gpu:
    """One GPU: its name, compute capability, memory in bytes, and number of multiprocessors."""

    name: str
    capability: tuple[int, int]
    memory: int
    multiprocessors: int

    @property
    def architecture(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"

    def __str__(self) -> str:
        return f"{self.name} ({self.architecture})"


def find_gpu() -> Gpu | None:
    """The GPU that PyTorch would use, or None."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(found.name, (found.major, found.minor), found.total_memory, found.multi_processor_count)


def versions() -> dict[str, str]:
    """Of what can change a bit: PyTorch, and Triton, CUDA and the GPU where they are."""
    gpu = find_gpu()
    found = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": None if gpu is None else str(gpu)}
    with suppress(PackageNotFoundError):
        found["triton"] = version("triton")
    return {name: text for name, text in found.items() if text is not None}


def computed_by(ops: Ops) -> dict[str, str]:
    """All that can change a bit of what a backend computes here."""
    return {"backend": ops.backend, "consistency": ops.consistency, "order": ops.order} | versions()


def refusal(gpu: Gpu) -> str | None:
    """Why the backend does not run on this GPU, or None if it does."""
    if gpu.capability < (8, 9):
        return f"{gpu} has no FP8, which begins with sm_89"
    if gpu.capability < (9, 0):
        return f"{gpu} has 99 KiB of shared memory, and the kernels' tiles are for sm_90 (H100, H200) with 227"
    if gpu.capability[0] > 9:
        return f"{gpu}: the kernels are written for sm_90 (H100, H200), and not all of them compile for later ones"
    return None


def triton_refusal() -> str | None:
    """Why the installed Triton cannot be used, or None if it can."""
    try:
        found = version("triton")
    except PackageNotFoundError:
        return "Triton is not installed; it comes with PyTorch's CUDA builds"
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or not OLDEST_TRITON <= (int(numbers[1]), int(numbers[2])) <= NEWEST_TRITON:
        known = " to ".join(".".join(map(str, end)) for end in (OLDEST_TRITON, NEWEST_TRITON))
        return f"Triton {found} is installed, and the kernels are written for {known}"
    return None
