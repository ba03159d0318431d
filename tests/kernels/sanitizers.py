"""The operators' tests over a library that a sanitizer watches: `python -m tests.kernels.sanitizers
address thread`.

`address` finds reads and writes outside of tensors and scratch, and undefined behaviour. `thread`
finds data races between the threads that share an operator. Only the operators are watched, with
shapes of the tests: not PyTorch or Python, nor the paths of instruction sets that this processor
lacks, but for AMX's, whose tiles `amx.h` computes on any with AVX-512. Before the tests each
sanitizer must report the faults that are planted in the same library (`sanitized.cpp`).
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from isobit.kernels.native.recipe import HERE, WARNINGS, compiler
from tests.kernels.libraries import EMULATED_AMX

ROOT = Path(__file__).parents[2]
_SELECTED = (
    "not compiler and not cache and not old_address and not every_finite and not definition and "
    "not control and not shape6 and not 50000 and not broken and not error_of and not fused and "
    "not controls and not every_instruction_set and not transformers and (not (random_shapes or "
    "any_chunk) or [7] or [12] or [23] or [34])"
)
"""Not what starts processes, is about memory that comes back to its place, or takes long and calls
the same code."""
TESTS = (
    "tests/kernels/test_native.py", "tests/kernels/test_native_invariance.py",
    "tests/kernels/test_ordered.py",
    "tests/kernels/test_rows32.py", "tests/kernels/test_head_inputs.py",
    "tests/kernels/test_requantization.py",
    "tests/kernels/test_native_inference_engine.py", "tests/kernels/test_squares.py",
    "tests/kernels/test_windows.py",
    "tests/kernels/test_stochastic.py", "tests/kernels/test_packed_fp4.py",
    "tests/kernels/test_probabilities.py",
    "tests/kernels/test_delta.py", "tests/kernels/test_low_rank.py",
    "-m", "not slow", "-k", _SELECTED,
)  # fmt: skip
_BUILD = (
    "from isobit.kernels.native import build, recipe; build.compiled(recipe.compiler(), "
    "build.cache_directory('native'))"
)
_FAULT = (
    "import sys, torch; from isobit.kernels.native.build import library;data = "
    "torch.zeros(int(sys.argv[2]), dtype=torch.uint8);count = {'read': (data.data_ptr(), "
    "len(data)), 'overflow': (2**31 - 1,), 'race': (1000,)}[sys.argv[1]];getattr(library(), "
    "'isobit_fault_' + sys.argv[1])(*map(__import__('ctypes').c_int64, count))"
)


@dataclass(frozen=True)
class Sanitizer:
    flags: tuple[str, ...]
    runtime: str
    options: dict[str, str]
    faults: dict[str, str]
    """A planted fault, and what its report says."""


SANITIZERS = {
    "address": Sanitizer(
        ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
        "libasan.so",
        {"ASAN_OPTIONS": "detect_leaks=0"},
        {
            "read": "AddressSanitizer: heap-buffer-overflow",
            "overflow": "runtime error: signed integer overflow",
        },
    ),
    "thread": Sanitizer(
        ("-fsanitize=thread",),
        "libtsan.so",
        {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1 halt_on_error=1"},
        {"race": "ThreadSanitizer: data race"},
    ),
}


def prepare(sanitizer: Sanitizer, folder: Path) -> dict[str, str]:
    """Compile the library into `folder`; returns the environment in which it is the one that is
    loaded."""
    # also where there is AMX: nothing watches what tile instructions read
    flags = ["-O1", "-g1", "-fno-omit-frame-pointer", *WARNINGS, *sanitizer.flags, *EMULATED_AMX]
    planted, program = folder / "sanitized.o", compiler()
    command = [
        program,
        *flags,
        "-std=c++17",
        "-fPIC",
        "-fvisibility=hidden",
        f"-I{HERE}",
        "-c",
        "-o",
        str(planted),
    ]
    subprocess.run([*command, str(Path(__file__).with_name("sanitized.cpp"))], check=True)
    worker = (
        "PYTEST_XDIST_WORKER",
        "PYTEST_XDIST_WORKER_COUNT",
    )  # the tests of one compute with one thread
    environment = {name: value for name, value in os.environ.items() if name not in worker} | {
        "ISOBIT_CACHE": str(folder / "cache"),
        "ISOBIT_CXXFLAGS": " ".join([*flags, f"-Wl,{planted}"]),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    subprocess.run([sys.executable, "-c", _BUILD], env=environment, check=True)
    runtime = subprocess.run(
        [program, f"-print-file-name={sanitizer.runtime}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return environment | sanitizer.options | {"LD_PRELOAD": runtime.stdout.strip()}


def reports(sanitizer: Sanitizer, environment: dict[str, str]) -> list[str]:
    """Planted faults that are not reported as they should be: none, or the tests prove nothing."""
    missed = []
    for fault, wanted in sanitizer.faults.items():
        command = [sys.executable, "-c", _FAULT, fault, "4096"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode == 0 or wanted not in done.stderr:
            missed.append(f"{fault}: exit {done.returncode}, {done.stderr[-2000:]}")
    return missed


def run(name: str, folder: Path) -> list[str]:
    """What is wrong, one text each: faults that are missed, tests that fail."""
    sanitizer = SANITIZERS[name]
    environment = prepare(sanitizer, folder)
    wrong = reports(sanitizer, environment)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-s",
        "-p",
        "no:cacheprovider",
        *TESTS,
    ]  # -s: a report outlives its process
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    print(f"{name}: {done.stdout.splitlines()[-1] if done.stdout else 'no output'}")
    return wrong + ([(done.stdout + done.stderr)[-8000:]] if done.returncode else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.kernels.sanitizers")
    parser.add_argument("names", nargs="*", choices=[[], *SANITIZERS])
    wrong = []
    for name in parser.parse_args().names or SANITIZERS:
        with tempfile.TemporaryDirectory(prefix="isobit-sanitizer-") as folder:
            wrong += run(name, Path(folder))
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
