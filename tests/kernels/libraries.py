"""Libraries of some of the C++ files, compiled with a test's flags, and copies of the files with
one line changed."""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from isobit.kernels.native import build, interface, recipe
from isobit.options.consistency import processor_features

DELTA = ("delta/convolution.cpp", "delta/delta.cpp", "delta/delta_backward.cpp")
ROWS = (
    "norms/norms.cpp",
    "heads/heads.cpp",
    "attention/attention.cpp",
    "attention/attention_backward.cpp",
    *DELTA,
    "native/rows32.cpp",
)
TILES = Path(__file__).with_name("amx.h")
EMULATED_AMX = ("-include", str(TILES)) if "avx512vbmi" in processor_features() else ()
"""Flags by which a library has AMX's products on a processor with AVX-512; none on another."""
PRODUCTS = tuple(name for name in recipe.SOURCES if name.startswith("product/ordered"))


def library_of(
    files: Sequence[str],
    folder: Path,
    flags: str,
    monkeypatch: pytest.MonkeyPatch,
    sources: Path = recipe.HERE,
) -> ctypes.CDLL:
    """A library of these files and the threads that they share, with the signatures of what is in
    it."""
    monkeypatch.setenv("ISOBIT_CXXFLAGS", flags)
    monkeypatch.setattr(recipe, "SOURCES", (*files, "native/threads.cpp"))
    library = ctypes.CDLL(str(build.compiled(recipe.compiler(), folder, sources)))
    for name, (result, arguments) in interface._SIGNATURES.items():
        if hasattr(library, name):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    return library


def changed_copy(folder: Path, files: Sequence[str], right: str, wrong: str) -> None:
    """All sources in `folder`, these with another line in the place of a line that each holds
    once."""
    changed_copies(folder, dict.fromkeys(files, (right, wrong)))


def changed_copies(folder: Path, changes: Mapping[str, tuple[str, str]]) -> None:
    """The same with a line of its own for each file."""
    for name in (*recipe.SOURCES, *recipe.HEADERS):
        text = (recipe.HERE / name).read_text()
        if name in changes:
            right, wrong = changes[name]
            assert text.count(right) == 1
            text = text.replace(right, wrong)
        write(folder / name, text)


def write(path: Path, text: str) -> None:
    """A file, in a folder that may have to be made."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
