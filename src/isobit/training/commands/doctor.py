"""`isobit doctor`: what this machine computes with and why, what makes it slow, and everything that
a bug report needs.

It calls the code that runs call: the backend that `get_ops` chooses, the order of sums, the memory
that plans count with. Choosing compiles the operators where that was never done. Left out: facts of
a run, which has a `machine.json`.
"""

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path

import torch

from isobit import __version__
from isobit.engine.memory import memory_limit
from isobit.errors import IsobitError
from isobit.kernels import get_ops
from isobit.kernels.backends.native import unsupported
from isobit.kernels.gpu import find_gpu, refusal, triton_refusal
from isobit.kernels.ops import Ops
from isobit.options.consistency import order, processor_features, resolved
from isobit.precision import PRESETS
from isobit.training.plan.host import cores

_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "fma")
_EXTRAS = {
    "data": "datasets",
    "images": "PIL",
    "math": "math_verify",
    "text": "rapidfuzz",
    "ray": "ray",
    "track": "wandb",
    "trackio": "trackio",
    "serve": "starlette",
    "tinker": "tinker",
}
_LIBRARIES = ("torch", "triton", "numpy", "safetensors", "tokenizers")
_GIB = 1 << 30


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a machine. `facts`: its properties by name, in the order of the table;
    `advice`: lines on what is slow or missing, and what helps."""

    facts: dict[str, str]
    advice: list[str]


def diagnose() -> Diagnosis:
    """Return the diagnosis of this process on this machine."""
    chosen: Ops | IsobitError
    try:
        chosen = get_ops()
    except IsobitError as error:
        chosen = error
    memory, kind = memory_limit(torch.device("cpu"))
    facts = {
        "isobit": f"{__version__}, {_installed()}",
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "libraries": ", ".join(f"{name} {_version(name)}" for name in _LIBRARIES),
        "extras": ", ".join(
            f"{name} {'yes' if _found(module) else 'no'}" for name, module in _EXTRAS.items()
        ),
        "processor": f"{_processor()}, {cores()} cores, {_instructions()}",
        "memory": f"{memory / _GIB:.1f} GiB ({kind})",
        "GPU": _gpu(),
        "backend": str(chosen) if isinstance(chosen, IsobitError) else chosen.why,
        "in PyTorch": _left(chosen),
        "order of sums": order(resolved("bitwise")) or "",
        "threads": f"{torch.get_num_threads()} for PyTorch; "
        f"{_settings() or 'nothing set by the environment'}",
    }
    return Diagnosis(facts, _advice(chosen))


def doctor(as_json: bool) -> None:
    """Print the diagnosis, as a table or as JSON."""
    diagnosis = diagnose()
    if as_json:
        print(json.dumps(asdict(diagnosis), indent=1))
        return
    width = max(map(len, diagnosis.facts))
    for name, text in diagnosis.facts.items():
        print(f"{name:<{width}}  {text}")
    print()
    for line in diagnosis.advice or ["nothing here is known to be slow"]:
        print(f"- {line}")


def _advice(chosen: Ops | IsobitError) -> list[str]:
    lines = []
    if isinstance(chosen, IsobitError):
        lines.append(f"nothing can be computed: {chosen}")
    elif chosen.backend == "reference":
        lines.append(
            "the operators run in PyTorch, much slower than in C++: install a compiler (Debian: "
            "g++), or a wheel of isobit that carries them"
        )
    features = processor_features()
    if platform.machine() in ("x86_64", "AMD64") and not features & {"amx_bf16", "avx512_bf16"}:
        lines.append(
            "the processor has no BF16 instructions: products under consistency: bitwise take up "
            "to twice the time, and consistency: fast is the faster there"
        )
    if (
        find_gpu() is not None
        and not isinstance(chosen, IsobitError)
        and chosen.backend != "triton"
    ):
        lines.append(
            "there is a GPU, and the backend does not use it: the line of the backend says why"
        )
    busy, there = os.getloadavg()[0], cores()
    if busy > 0.5 * there:
        lines.append(
            f"other work runs here: {busy:.1f} processes were busy in the last minute, on "
            f"{there} cores"
        )
    if os.environ.get("ISOBIT_CXXFLAGS"):
        lines.append(
            "ISOBIT_CXXFLAGS is set: the operators are compiled with flags that isobit was not "
            "tested with"
        )
    if "torch" in sys.modules and torch.get_num_threads() > there:
        lines.append(
            f"PyTorch has {torch.get_num_threads()} threads for {there} cores: set "
            f"OMP_NUM_THREADS={there}"
        )
    return lines


def _left(chosen: Ops | IsobitError) -> str:
    """Return, by preset, the parts that C++ leaves to operators in PyTorch, which are slower."""
    if isinstance(chosen, IsobitError) or chosen.backend == "triton":
        return "nothing"
    if chosen.backend == "reference":
        return "everything"
    fallbacks = {name: unsupported(preset, chosen.consistency) for name, preset in PRESETS.items()}
    return "; ".join(f"{name}: {', '.join(left)}" for name, left in fallbacks.items() if left)


def _installed() -> str:
    """Return, in words, where the package is installed."""
    folder = Path(__file__).resolve().parents[1]
    try:
        editable = '"editable": true' in (distribution("isobit").read_text("direct_url.json") or "")
    except PackageNotFoundError:
        return f"not installed, read from {folder}"
    return f"{'editable, ' if editable else ''}in {folder}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _found(module: str) -> bool:
    return find_spec(module) is not None


def _processor() -> str:
    lines = (
        Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    )
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _instructions() -> str:
    present = [name for name in _INSTRUCTIONS if name in processor_features()]
    return " ".join(present) or platform.machine()


def _gpu() -> str:
    gpu = find_gpu()
    if gpu is None:
        return f"none that PyTorch {torch.__version__} sees"
    return (
        f"{gpu}, {gpu.memory / _GIB:.0f} GiB; "
        f"{refusal(gpu) or triton_refusal() or 'its kernels are written for it'}"
    )


def _settings() -> str:
    """Return a line of the environment variables that change what is computed or how fast."""
    begins = ("ISOBIT_", "OMP_", "MKL_", "CUDA_VISIBLE", "TRITON_")
    names = sorted(name for name in os.environ if name.startswith(begins) or name == "CXX")
    return ", ".join(f"{name}={os.environ[name]}" for name in names)
