"""How the C++ operators are compiled: files, flags, compiler, and the libraries for x86-64 that a
wheel carries.

Only the standard library is imported: `setup.py` runs this file before isobit and PyTorch are
installed. Left out: which library is loaded (`build.py`).
"""

import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock

HERE = Path(__file__).parents[1]
"""Where the sources are: beside the operators that they compute, in `kernels/`."""
PREBUILT = Path(__file__).parent / "prebuilt"
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vbmi")
_PATHS: dict[str, tuple[str, ...]] = {
    "product/ordered_portable.cpp": (),
    "product/ordered_neon.cpp": (),
    "product/ordered_avx2.cpp": _AVX2,
    "product/ordered_avx512.cpp": _AVX512,
    "product/ordered_amx.cpp": (*_AVX512, "-mamx-tile", "-mamx-bf16", "-mprfchw"),
    "product/ordered_bf16.cpp": (*_AVX512, "-mavx512bf16"),
}
"""Files for an instruction set of x86-64, chosen when they run, and their flags; on other
processors, and with a compiler that does not know the flags, such a file is empty."""
SOURCES = (
    "attention/attention.cpp", "attention/attention_backward.cpp",
    "delta/convolution.cpp", "delta/delta.cpp", "delta/delta_backward.cpp",
    "head/head.cpp", "heads/heads.cpp", "inference_engine/inference_engine.cpp",
    "low_rank/low_rank.cpp", "native/interface.cpp", "native/replay.cpp", "native/rows32.cpp",
    "native/threads.cpp", "norms/norms.cpp",
    "optim/squares.cpp", "optim/stochastic.cpp",
    "product/ordered.cpp", "product/product.cpp", "quantize/quantize.cpp", "sampling/sampling.cpp",
    *_PATHS,
)  # fmt: skip
HEADERS = (
    "attention/attention.h", "attention/attention_rows.h", "delta/delta.h", "heads/heads.h",
    "low_rank/low_rank.h", "native/native.h", "native/pointwise.h", "native/replay.h", "native/self_test.h",
    "native/threads.h", "native/tile.h", "native/vectors.h", "norms/norms.h",
    "product/nibbles.h", "product/ordered.h", "product/ordered_avx512.h", "product/ordered_kernel.h",
    "product/ordered_pairs.h", "product/ordered_registers.h", "product/ordered_rows.h",
    "product/product.h", "quantize/quantize.h", "sampling/philox.h",
)  # fmt: skip
FLAGS = (
    "-O3",
    "-std=c++17",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
)
WARNINGS = ("-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Werror")
"""Of the tests; the last but one is wrong about GCC's own AVX-512 headers. A user's build shows no
warnings: a newer compiler's would be no reason to do without the library."""
_V3 = ("avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe")
LEVELS: dict[str, tuple[str, ...]] = {
    "x86-64-v4": (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "x86-64-v3": _V3,
}
"""The libraries of a wheel, the best first: their `-march`, and what /proc/cpuinfo must list. Below
them the general files would have no fused multiply-add, and so other bits. The paths of ordered
products are in both."""
_COMPILERS = ("g++", "c++", "clang++")
_TIMEOUT_S = 300


class BuildFailed(Exception):
    """The library cannot be had here; the message says why, in one line. `said`: on stderr too."""

    said = False


def compiler() -> str:
    """Return the path of the C++ compiler: $CXX if set, else the first of g++, c++, clang++ that
    exists. Raises BuildFailed."""
    named = os.environ.get("CXX")
    for name in (named,) if named else _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise BuildFailed(
        f"CXX={named} is not a program"
        if named
        else f"no C++ compiler found ({', '.join(_COMPILERS)})"
    )


def digest(*further: str, sources: Path = HERE) -> str:
    """Hash what a library is made of, which names it: all files, the flags that never change, and
    `further` texts."""
    digester = hashlib.sha256()
    for name in (*SOURCES, *HEADERS):
        digester.update((sources / name).read_bytes())
    digester.update(
        "\n".join([*FLAGS, *(" ".join(flags) for flags in _PATHS.values()), *further]).encode()
    )
    return digester.hexdigest()[:24]


def prebuilt(level: str, folder: Path = PREBUILT) -> Path:
    """Return the path of a level's library, if it was made of the present files."""
    return folder / f"{level}-{digest(level)}.so"


def build_levels(folder: Path) -> list[Path]:
    """Compile the libraries that a wheel carries into `folder`, which then holds nothing else. They
    need the C library, nothing more. Raises BuildFailed, also where none are carried."""
    if platform.system() != "Linux" or not on_x86():
        raise BuildFailed(
            f"a wheel's libraries are for Linux on x86-64, not {platform.system()} on "
            f"{platform.machine()}"
        )
    program = compiler()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for level in LEVELS:
        path = prebuilt(level, folder)
        general = [f"-march={level}", "-mtune=generic"]
        compile_library(program, path, general, ["-static-libstdc++", "-static-libgcc", "-s"])
    return [prebuilt(level, folder) for level in LEVELS]


def on_x86() -> bool:
    """Return whether this machine's processor is an x86-64 one."""
    return platform.machine() in ("x86_64", "AMD64")


def compile_library(
    program: str, path: Path, general: Iterable[str], linking: Iterable[str], sources: Path = HERE,
    everywhere: Iterable[str] = (),
) -> None:  # fmt: skip
    """Write the library `path`, whole or not at all: several processes may do it at once. Compilers
    run in parallel on all processors, since each takes up to 0.3 GB.

    `general`: flags of the files that are compiled for one kind of processor only. Files of
    `_PATHS` have their own flags, plus those flags of `general` that name no processor.
    `everywhere`: flags of all commands. Raises BuildFailed.
    """
    general = list(general)
    plain = [flag for flag in general if not flag.startswith(("-march=", "-mcpu=", "-mtune="))]
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        objects = {name: os.path.join(folder, f"{Path(name).stem}.o") for name in SOURCES}

        paths: Mapping[str, tuple[str, ...]] = _PATHS if on_x86() else dict.fromkeys(_PATHS, ())
        compilers = _Compilers()

        def compile_one(name: str) -> None:
            def by(flags: Iterable[str]) -> None:
                command = [program, *FLAGS, f"-I{sources}", *flags, *everywhere]
                compilers.run([*command, "-c", str(sources / name), "-o", objects[name]])

            try:
                by([*plain, *paths[name]] if name in paths else general)
            except BuildFailed:
                if not paths.get(name):
                    raise
                by(plain)  # the compiler does not know the flags

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            waiting = [pool.submit(compile_one, name) for name in SOURCES]
            try:
                for compiled in waiting:
                    compiled.result()
            except BaseException:  # what still runs writes into the folder
                pool.shutdown(wait=False, cancel_futures=True)
                compilers.stop()
                raise
        target = os.path.join(folder, path.name)
        libraries = ["-shared", "-pthread", *objects.values(), *linking, *everywhere]
        compilers.run([program, *libraries, "-o", target])
        os.replace(target, path)


class _Compilers:
    """The compilers that run, in several threads, so that they can be stopped."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False
        self._lock = Lock()  # so that none begins while the others are stopped

    def stop(self) -> None:
        """End those that run; no further one begins."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                _kill(process)

    def run(self, command: list[str]) -> None:
        """Run one command to its end. Raises BuildFailed."""
        with self._lock:
            process = self._begin(command)
            self._running.add(process)
        try:
            _, errors = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise BuildFailed(f"{command[0]} took longer than {_TIMEOUT_S} s") from error
        finally:
            with self._lock:
                self._running.discard(process)
            _kill(process)
            process.wait()
        if process.returncode:
            lines = errors.splitlines()
            messages = [line for line in lines if "error:" in line] or lines[:1]
            ended = f"{command[0]} failed (exit {process.returncode})"
            raise BuildFailed(": ".join([ended, *messages[:1]]))

    def _begin(self, command: list[str]) -> "subprocess.Popen[str]":
        if self._stopped:
            raise BuildFailed("stopped")
        quiet, heard = subprocess.DEVNULL, subprocess.PIPE
        try:
            return subprocess.Popen(
                command, stdout=quiet, stderr=heard, text=True, start_new_session=True
            )
        except OSError as error:
            raise BuildFailed(f"{command[0]}: {error.strerror}") from error


def _kill(process: "subprocess.Popen[str]") -> None:
    """Kill a compiler with the programs that it has started, if it has not ended."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
