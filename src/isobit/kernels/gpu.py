"""Which GPU is here, and whether the Triton backend runs on it.

`sm_90` (H100, H200) is what the kernels are written for: their FP8 products run on warpgroup matrix
instructions, one class for every batch. On the other architectures of the table they compile with
their own tiles; what they compute there is checked at the first start
(`kernels/backends/self_check.py`). Left out: several GPUs, and other vendors.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import torch

from isobit.kernels.ops import Ops


@dataclass(frozen=True)
class Architecture:
    """A GPU's properties that decide tiles and pipelines: the KiB of shared memory of one program,
    and where matrix units have operands and sums: in registers of one warp; operands in shared
    memory, for four warps at once (`warpgroup`), so that large tiles need few registers; or sums in
    their own memory (`tensor`). `fp8`: whether they multiply FP8."""

    cards: str
    shared_kib: int
    matrix: Literal["warp", "warpgroup", "tensor"] = "warp"
    fp8: bool = True


ARCHITECTURES = {
    (8, 0): Architecture("A100", 163, fp8=False),
    (8, 6): Architecture("RTX 30, A40", 99, fp8=False),
    (8, 9): Architecture("RTX 40, L4, L40S", 99),
    (9, 0): Architecture("H100, H200", 227, "warpgroup"),
    (10, 0): Architecture("B200", 227, "tensor"),
    (12, 0): Architecture("RTX 50, RTX PRO 6000", 99),
}
"""By compute capability. Shared memory: CUDA C++ Programming Guide, table of technical
specifications."""
HOPPER = ARCHITECTURES[9, 0]

OLDEST_TRITON, NEWEST_TRITON = (3, 6), (3, 9)
"""The range of Triton versions that the kernels are written for; both ends belong to it."""


@dataclass(frozen=True)
class Gpu:
    """A GPU: its name, compute capability, memory in bytes, and number of multiprocessors."""

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
    """Return the GPU that PyTorch would use, or None."""
    if not torch.cuda.is_available():
        return None
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(gpu.name, (gpu.major, gpu.minor), gpu.total_memory, gpu.multi_processor_count)


def versions() -> dict[str, str]:
    """Return the versions that can change a bit: PyTorch's, and Triton's, CUDA's and the GPU's
    where they are present."""
    gpu = find_gpu()
    numbers = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": None if gpu is None else str(gpu),
    }
    with suppress(PackageNotFoundError):
        numbers["triton"] = version("triton")
    return {name: text for name, text in numbers.items() if text is not None}


def computed_by(ops: Ops) -> dict[str, str]:
    """Return the facts that can change a bit of what a backend computes here, by name."""
    return {"backend": ops.backend, "consistency": ops.consistency, "order": ops.order} | versions()


def refusal(gpu: Gpu) -> str | None:
    """Return why the backend does not run on this GPU, or None if it does."""
    if gpu.capability in ARCHITECTURES:
        return None
    known = ", ".join(
        f"sm_{major}{minor} ({architecture.cards})"
        for (major, minor), architecture in ARCHITECTURES.items()
    )
    return f"{gpu}: the kernels have tiles for {known}"


def triton_refusal() -> str | None:
    """Return why the installed Triton cannot be used, or None if it can."""
    try:
        release = version("triton")
    except PackageNotFoundError:
        return "Triton is not installed; it comes with PyTorch's CUDA builds"
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers is None or not OLDEST_TRITON <= (int(numbers[1]), int(numbers[2])) <= NEWEST_TRITON:
        known = " to ".join(".".join(map(str, end)) for end in (OLDEST_TRITON, NEWEST_TRITON))
        return f"Triton {release} is installed, and the kernels are written for {known}"
    return None
