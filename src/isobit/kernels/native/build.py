"""Compile the C++ kernels once, for this machine, into a cache; load them through ctypes.

No torch headers, so it takes seconds. The library's name is a hash of the sources, the flags, the compiler and the CPU.
OpenMP symbols are left for the loader to find in the runtime that torch has already loaded, so that both share one
pool.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch  # loads the OpenMP runtime that the library uses

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-w")
_COMPILERS = ("g++", "c++", "clang++")


@lru_cache(maxsize=1)
def load() -> tuple[ctypes.CDLL | None, str]:
    """The library, and which compiler made it; or None, and why there is none."""
    compiler = _compiler()
    if compiler is None:
        return None, f"no C++ compiler found ($CXX, {', '.join(_COMPILERS)})"
    try:
        path = _library(compiler)
        return ctypes.CDLL(str(path)), f"compiled by {Path(compiler).name}"
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines()
        reason = lines[0] if lines else f"exit code {error.returncode}"
        return None, f"{compiler} failed: {reason}"
    except OSError as error:
        return None, f"{compiler}: {error.strerror or error}"


def _compiler() -> str | None:
    chosen = os.environ.get("CXX")
    if chosen:
        return shutil.which(chosen)
    return next((found for name in _COMPILERS if (found := shutil.which(name))), None)


def _library(compiler: str) -> Path:
    folder = Path(__file__).parent
    sources = sorted(folder.glob("*.cpp"))
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    identity = [*_FLAGS, version, _cpu(), torch.__version__, *(p.read_text() for p in [*sources, folder / "common.h"])]
    name = f"isobit-{hashlib.sha256(chr(0).join(identity).encode()).hexdigest()[:16]}.so"
    cache = Path(os.environ.get("ISOBIT_CACHE") or Path.home() / ".cache" / "isobit") / "native"
    path = cache / name
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            objects = [Path(temporary) / f"{source.stem}.o" for source in sources]
            builds = [_start([compiler, *_FLAGS, "-c", str(s), "-o", str(o)]) for s, o in zip(sources, objects)]
            for build in builds:
                _finish(build)
            made = Path(temporary) / name
            # without -fopenmp: no second OpenMP runtime is linked
            _finish(_start([compiler, "-shared", *map(str, objects), "-o", str(made)]))
            ctypes.CDLL(str(made))  # one that cannot be loaded must not enter the cache
            made.replace(path)
    return path


def _start(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _finish(process: "subprocess.Popen[str]") -> None:
    _, errors = process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args, stderr=errors)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(next((line for line in lines if line.startswith(key)), "") for key in ("model name", "flags"))
