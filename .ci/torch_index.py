"""Print pip's option for the index of PyTorch's builds, and say on stderr what is about to come.

`python .ci/torch_index.py INDEX [given]`. Without NVIDIA's driver on Linux, INDEX is PyTorch's own
of builds for the CPU, whose version `2.13.0+cpu` pip prefers to PyPI's `2.13.0`. It is asked first,
for at most a few seconds: where it does not answer, pip goes on without it, as in a network that
has another index. `given`: the user named INDEX, so neither the driver nor the index is asked.
"""

import glob
import os
import shutil
import sys
import threading
import urllib.request
from collections.abc import Callable
from http.client import HTTPException

SECONDS = 3.0
CPU = "PyTorch for the CPU alone: 0.2 GB to download, 0.8 GB on the disk"
CUDA = "about 3 GB to download, 4.6 GB on the disk"


def driver() -> bool:
    """Return whether NVIDIA's driver is here, also in WSL."""
    files = ("/proc/driver/nvidia/version", "/dev/nvidia[0-9]*", "/dev/dxg")
    return shutil.which("nvidia-smi") is not None or any(map(glob.glob, files))


def answers(index: str, seconds: float = SECONDS) -> bool:
    """Return whether an index has PyTorch, within some seconds in all: the look-up of a name has a
    time limit of its own, which is longer."""
    reached: list[bool] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(f"{index.rstrip('/')}/torch/", method="HEAD")
            with urllib.request.urlopen(request, timeout=seconds) as response:
                reached.append(response.status == 200)
        except (OSError, ValueError, HTTPException):
            reached.append(False)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return reached == [True]


def options(
    index: str,
    given: bool,
    system: str = sys.platform,
    has_driver: Callable[[], bool] = driver,
    reached: Callable[[str], bool] = answers,
) -> tuple[str, str]:
    """Return (pip's option or nothing, the line for the user or nothing)."""
    if index and given:
        return f"--extra-index-url={index}", f"PyTorch may come from {index} (TORCH_INDEX)"
    if system != "linux":
        return "", ""
    if has_driver():
        return "", f"NVIDIA's driver is here, so PyTorch comes with CUDA: {CUDA}"
    if not index:
        return "", f"TORCH_INDEX is empty: PyTorch as pip finds it. PyPI's has CUDA: {CUDA}"
    if reached(index):
        return f"--extra-index-url={index}", f"{CPU}. With CUDA: make TORCH_INDEX= ..."
    return "", (
        f"{index} does not answer: PyTorch as pip finds it. PyPI's has CUDA, which a machine "
        f"without NVIDIA's driver cannot use: {CUDA}"
    )


if __name__ == "__main__":
    option, line = options(sys.argv[1], "given" in sys.argv[2:])
    if line:
        print(line, file=sys.stderr)
    print(option, flush=True)
    os._exit(0)  # a look-up that still waits is not waited for
