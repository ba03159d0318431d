"""Loads the C++ operators, called through ctypes: the library that a wheel carries, or one compiled
here once.

A wheel for x86-64 has a library for each level of processors (`recipe.LEVELS`), used where it was
made of the sources that are here and neither CXX nor ISOBIT_CXXFLAGS is set. Otherwise one is
compiled into the user's cache, for this processor, which a line on stderr says. Its file is named
after sources, flags, compiler and processor, so another version builds anew and no stale one can be
loaded; those that no process has loaded for a day go when one is built. Left out: the commands
(`recipe.py`) and the operators (`ops.py`). $ISOBIT_CXXFLAGS adds flags; `-DISOBIT_PORTABLE` leaves
out all intrinsics.
"""

import ctypes
import errno
import hashlib
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

from isobit.errors import IsobitError
from isobit.kernels.cache import CacheUnusable, alone, cache_directory, unless_passed
from isobit.kernels.native.heap import keep_freed_memory
from isobit.kernels.native.interface import declare
from isobit.kernels.native.openmp import keep_from_spinning
from isobit.kernels.native.recipe import (
    HERE,
    LEVELS,
    PREBUILT,
    BuildFailed,
    compile_library,
    compiler,
    digest,
    on_x86,
    prebuilt,
)
from isobit.options.consistency import processor_features

__all__ = [
    "BuildFailed",
    "available",
    "cache_directory",
    "compiled",
    "differing",
    "library",
    "load",
    "origin",
    "prebuilt_here",
]

_WITHOUT = "without them PyTorch computes, many times as slowly"
_CPU_SECONDS = 50
"""That compilers take for all files together, about."""
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""The errors of file systems without locks."""
_KEPT, _UNUSED_S = 4, 24 * 3600
"""Libraries in the cache that always stay, and how long another was not loaded before it goes."""


class NoOperators(IsobitError, BuildFailed):
    """The operators in C++ cannot be had here; the message says why, in one line."""


def library() -> ctypes.CDLL:
    """Return the operators, compiled now if need be. Raises NoOperators."""
    return _opened()[0]


def origin() -> str:
    """Return a text for users that says where the operators are from. Raises NoOperators."""
    return _opened()[1]


@cache
def available() -> tuple[bool, str]:
    """Return (whether the backend works here, why); the first call loads or compiles it."""
    try:
        return True, origin()
    except NoOperators as error:
        if not error.said:
            _say(f"there are no operators in C++: {error}; {_WITHOUT}")
        return False, str(error)


@cache
def _opened() -> tuple[ctypes.CDLL, str]:
    keep_from_spinning()
    keep_freed_memory()
    unusable = ""
    if not os.environ.get("CXX") and not os.environ.get("ISOBIT_CXXFLAGS"):
        library_path = prebuilt_here(_features())
        if library_path is not None:
            level, path = library_path
            try:
                return load(path), f"prebuilt for {level}"
            except BuildFailed as error:
                unusable = f"; {error}"
    try:
        program = compiler()
        directory = cache_directory("native", _file_name(program))
        return _loaded(program, directory), f"compiled by {Path(program).name}"
    except (BuildFailed, CacheUnusable) as error:
        failed = NoOperators(f"{error}{unusable}")
        failed.said = isinstance(error, BuildFailed) and error.said
        raise failed from error


def _loaded(program: str, directory: Path) -> ctypes.CDLL:
    path = compiled(program, directory)
    try:
        return load(path)
    except BuildFailed:
        if path.exists():
            raise
        return load(compiled(program, directory))  # another process has just removed it as old


def prebuilt_here(features: frozenset[str], folder: Path = PREBUILT) -> tuple[str, Path] | None:
    """Return the level and the file of the best library in `folder` for a processor with these
    features, if it was made of the present sources; None in a checkout, whose sources change."""
    if not folder.is_dir():
        return None
    folders = {
        level: prebuilt(level, folder)
        for level, needed in LEVELS.items()
        if features.issuperset(needed)
    }
    return next(((level, path) for level, path in folders.items() if path.is_file()), None)


def compiled(program: str, directory: Path, sources: Path = HERE) -> Path:
    """Return the library in `directory` that `program` makes of `sources`, compiled now if it is
    not there; then stderr says so, and what becomes of it where it fails. Raises BuildFailed."""
    general, extra = _flags()
    path = directory / _file_name(program, sources)
    if not path.exists():
        with ExitStack() as held:
            try:
                held.enter_context(alone(directory / "compiling.lock", _wait))
            except OSError as error:
                if error.errno not in _NO_LOCKS:  # without one, each compiles its own
                    raise BuildFailed(f"cannot write to {directory}: {error.strerror}") from error
            if not path.exists():
                _compile(program, path, general, sources, extra)
    with suppress(OSError):  # in a folder that is only read
        os.utime(path)
    return path


def _file_name(program: str, sources: Path = HERE) -> str:
    general, extra = _flags()
    name = digest(*general, *extra, _version(program), _processor(), sources=sources)
    return f"isobit-{name}.so"


def _flags() -> tuple[list[str], list[str]]:
    """Return what is compiled for this processor alone, and $ISOBIT_CXXFLAGS."""
    arm = platform.machine() in ("aarch64", "arm64")
    general = ["-mcpu=native" if arm else "-march=native"]
    return general, os.environ.get("ISOBIT_CXXFLAGS", "").split()


def _wait() -> None:
    _say("waiting for another process, which compiles the operators")


def _compile(program: str, path: Path, general: list[str], sources: Path, extra: list[str]) -> None:
    clear_old(path.parent)
    about = 10 * math.ceil(_CPU_SECONDS / (os.cpu_count() or 1) / 10)
    _say(f"compiling the operators for this processor (once, about {about} s)")
    try:
        compile_library(program, path, general, [], sources, extra)
    except BuildFailed as error:
        _say(f"the operators were not compiled: {error}; {_WITHOUT}; the next start tries again")
        error.said = True
        raise


def clear_old(directory: Path) -> None:
    """Remove the libraries that no process has loaded for a day, except the newest by use, and the
    folders that killed compilations have left. A process that has loaded a library keeps it in
    memory."""
    old = time.time() - _UNUSED_S
    libraries = sorted(directory.glob("isobit-*.so"), key=_used, reverse=True)
    for library in libraries[_KEPT:]:
        if _used(library) < old:
            for file in (library, *directory.glob(f"{library.stem}.*.passed")):
                with suppress(OSError):
                    file.unlink()
    for folder in directory.glob("build-*"):
        if _used(folder) < old:
            shutil.rmtree(folder, ignore_errors=True)


def _used(path: Path) -> float:
    """Return the time when a file was made, or loaded last; now if it was removed."""
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()


def load(path: Path) -> ctypes.CDLL:
    """Load a library, declare its interface and compare it. Raises BuildFailed, IsobitError where
    the interface differs."""
    try:
        return declare(ctypes.CDLL(str(path)))
    except OSError as error:
        raise BuildFailed(f"cannot load {path}: {error}") from error


def differing(lib: ctypes.CDLL, test: str, run: Callable[[], int]) -> int:
    """Count the results of a self-test of the library that differ; 0 at once where it has passed on
    this processor, which a file in the cache marks. Without a cache, each start tests."""
    processor = hashlib.sha256(_processor().encode()).hexdigest()[:8]
    mark = f"{Path(lib._name).stem}.{processor}.{test}.passed"
    try:
        return unless_passed(cache_directory("native", mark) / mark, run, 0)
    except CacheUnusable:
        return run()


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # the first rank speaks for all
        print(f"isobit: {line}", file=sys.stderr, flush=True)


def _version(program: str) -> str:
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{program}: {error}") from error
    if done.returncode != 0 or not done.stdout:
        raise BuildFailed(f"{program} --version failed (exit {done.returncode})")
    return done.stdout.splitlines()[0]


def _processor() -> str:
    """Return what `native` means here: the model of the processor and its features."""
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    lines = {line for line in _cpuinfo() if line.split("\t")[0].strip() in wanted}
    return "\n".join(sorted(lines)) or platform.processor() + platform.machine()


def _features() -> frozenset[str]:
    """Return the features of an x86 processor that /proc/cpuinfo lists; empty where that file is
    missing, or on another kind of processor."""
    return processor_features() if on_x86() else frozenset()


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
