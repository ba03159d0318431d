"""Compiles the C++ operators once and loads them: a shared library in the user's cache, called through ctypes.

The file is named for what it was made of (sources, flags, compiler, processor), so another version builds anew and no
stale one can be loaded. It is written under another name and moved into place: several processes may build at once.
OpenMP's symbols are left for the library that PyTorch has loaded, so that both share one pool of threads. Left out: the
operators themselves (`ops.py`). $ISOBIT_CXXFLAGS adds flags; `-DISOBIT_PORTABLE` leaves out all intrinsics.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

_HERE = Path(__file__).parent
_AVX512 = ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vbmi")
_PATHS: dict[str, tuple[str, ...]] = {
    "tdp32_portable.cpp": (),
    "tdp32_avx2.cpp": ("-mavx2", "-mfma", "-mf16c"),
    "tdp32_avx512.cpp": _AVX512,
    "tdp32_amx.cpp": (*_AVX512, "-mamx-tile", "-mamx-bf16"),
}
"""Files for an instruction set of x86-64, chosen when they run, and their flags; on other processors, and with a
compiler that does not know the flags, such a file is empty."""
_SOURCES = (
    "product.cpp", "quantize.cpp", "pointwise.cpp", "attention.cpp", "attention_backward.cpp", "sampling.cpp",
    "tdp32.cpp", *_PATHS,
)  # fmt: skip
_HEADERS = (
    "native.h", "tile.h", "product.h", "quantize.h", "attention.h", "attention_rows.h", "tdp32.h", "tdp32_kernel.h",
    "tdp32_avx512.h",
)  # fmt: skip
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-fvisibility=hidden")
_WARNINGS = ("-Wall", "-Wextra", "-Wno-maybe-uninitialized")  # the last is wrong about GCC's own AVX-512 headers
_COMPILERS = ("g++", "c++", "clang++")
_TIMEOUT_S = 300


class BuildFailed(Exception):
    """The library cannot be had here; the message says why, in one line."""


def compiler() -> str:
    """Path of the C++ compiler: $CXX if set, else the first of g++, c++, clang++ that exists. Raises BuildFailed."""
    named = os.environ.get("CXX")
    for name in (named,) if named else _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise BuildFailed(f"CXX={named} is not a program" if named else f"no C++ compiler found ({', '.join(_COMPILERS)})")


def cache_directory() -> Path:
    """The folder `native` in $ISOBIT_CACHE, or in ~/.cache/isobit; created for the user alone. Raises
    BuildFailed."""
    root = os.environ.get("ISOBIT_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "isobit")
    path = Path(root) / "native"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BuildFailed(f"cannot create the cache folder {path}: {error.strerror}") from error
    owner = getattr(os, "getuid", lambda: path.stat().st_uid)()
    if path.stat().st_uid != owner or path.stat().st_mode & 0o022:
        raise BuildFailed(f"the cache folder {path} can be written by others; set ISOBIT_CACHE to a folder of your own")
    return path


@cache
def library() -> ctypes.CDLL:
    """The operators, built now if they were not. Raises BuildFailed."""
    return build(compiler(), cache_directory())


def build(program: str, directory: Path) -> ctypes.CDLL:
    """Compile with `program` into `directory`, unless that was done before, and load. Raises BuildFailed."""
    extra = os.environ.get("ISOBIT_CXXFLAGS", "").split()
    flags = [*_FLAGS, *_WARNINGS, *_processor_flags(), *_openmp_flags(program), *extra]
    path = directory / f"isobit-{_fingerprint(program, flags)}.so"
    if not path.exists():
        _compile(program, flags, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildFailed(f"cannot load {path}: {error}") from error


def _processor_flags() -> list[str]:
    return ["-mcpu=native"] if platform.machine() in ("aarch64", "arm64") else ["-march=native"]


def _path_flags(name: str) -> tuple[str, ...]:
    return _PATHS[name] if platform.machine() in ("x86_64", "AMD64") else ()


def _openmp_flags(program: str) -> list[str]:
    """Compile for OpenMP, and link its library only where PyTorch's own does not offer GNU's symbols."""
    if platform.system() == "Darwin" or not torch.backends.openmp.is_available():
        return []
    loaded = ctypes.CDLL(None)
    if hasattr(loaded, "GOMP_parallel") and "clang" not in Path(program).name:
        return ["-fopenmp", "-Wl,--unresolved-symbols=ignore-all"]
    return ["-fopenmp"]


def _compile(program: str, flags: list[str], path: Path) -> None:
    """Objects side by side, then a library without OpenMP's own: `-fopenmp` at the link would add it."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        objects = {name: os.path.join(folder, f"{Path(name).stem}.o") for name in _SOURCES}
        own = [flag for flag in flags if not flag.startswith("-Wl,") and flag != "-shared"]
        general = [flag for flag in own if flag not in _processor_flags()]

        def start(name: str, chosen: Iterable[str]) -> "subprocess.Popen[str]":
            return _start([program, *chosen, "-c", str(_HERE / name), "-o", objects[name]])

        running = {n: start(n, [*general, *_path_flags(n)] if n in _PATHS else own) for n in _SOURCES}
        for name, process in running.items():
            try:
                _finish(process)
            except BuildFailed:
                if not _PATHS.get(name):
                    raise
                _finish(start(name, general))
        shares_openmp = any(flag.startswith("-Wl,") for flag in flags)
        linking = [flag for flag in flags if not (shares_openmp and flag == "-fopenmp")]
        target = os.path.join(folder, path.name)
        _finish(_start([program, *linking, *objects.values(), "-o", target]))
        os.replace(target, path)


def _start(command: list[str]) -> "subprocess.Popen[str]":
    try:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        raise BuildFailed(f"{command[0]}: {error.strerror}") from error


def _finish(process: "subprocess.Popen[str]") -> None:
    assert isinstance(process.args, list)
    program = str(process.args[0])
    try:
        _, errors = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        process.kill()
        raise BuildFailed(f"{program} took longer than {_TIMEOUT_S} s") from error
    if process.returncode:
        lines = [line for line in errors.splitlines() if "error" in line] or errors.splitlines()[:1]
        raise BuildFailed(f"{program} failed (exit {process.returncode})" + (f": {lines[0]}" if lines else ""))


def _fingerprint(program: str, flags: list[str]) -> str:
    digest = hashlib.sha256()
    for name in (*_SOURCES, *_HEADERS):
        digest.update((_HERE / name).read_bytes())
    digest.update("\n".join([*flags, _version(program), _processor()]).encode())
    return digest.hexdigest()[:24]


def _version(program: str) -> str:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{program}: {error}") from error
    if done.returncode != 0 or not done.stdout:
        raise BuildFailed(f"{program} --version failed (exit {done.returncode})")
    return done.stdout.splitlines()[0]


def _processor() -> str:
    """What `native` means here: the model and its features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip() in wanted}))
