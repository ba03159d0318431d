"""What crosses between Python and C++ is the same on both sides: the structs, compared when a
library is loaded, and the signatures of the functions."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from isobit.errors import IsobitError
from isobit.kernels.native import available, interface
from isobit.kernels.native.build import BuildFailed, load
from isobit.kernels.native.recipe import HEADERS, HERE, SOURCES, compile_library, compiler
from tests.kernels.libraries import write

pytestmark = pytest.mark.skipif(not available()[0], reason=f"native backend: {available()[1]}")

Library = Callable[..., ctypes.CDLL]

PRODUCT = "product/product.h"


@pytest.fixture(scope="module")
def interface_alone(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Compile only what says how structs are laid out, from sources in which `old` is `new`."""

    def compiled(file: str = PRODUCT, old: str = "", new: str = "") -> ctypes.CDLL:
        folder = tmp_path_factory.mktemp("sources")
        for name in (*SOURCES, *HEADERS):
            read = name in HEADERS or name == "native/interface.cpp"
            text = (HERE / name).read_text() if read else ""
            if name == file:
                assert text.count(old) == 1 or not old
                text = text.replace(old, new) if old else text
            write(folder / name, text)
        compile_library(compiler(), folder / "library.so", ["-O0"], [], folder)
        return ctypes.CDLL(str(folder / "library.so"))

    return compiled


@pytest.mark.parametrize(
    ("file", "old", "new", "odd"),
    [
        (
            PRODUCT,
            "    int64_t adds;",
            "    int64_t adds, more;",
            r"ProductArguments.size has \(offset, size\) \(0, 2",
        ),
        (
            PRODUCT,
            "kind_a, m, n, k;",
            "kind_a, n, m, k;",
            r"ProductArguments.m has \(offset, size\) \(16, 8\)",
        ),
        (
            "attention/attention.h",
            "    double scale;",
            "    float scale;",
            r"AttentionArguments.scale has .*, 4\) in C\+\+",
        ),
        (
            "native/interface.cpp",
            "FIELD(bias_kind), ",
            "",
            r"ProductArguments.bias_kind has \(offset, size\) None in C\+\+",
        ),
    ],
    ids=["added", "swapped", "narrower", "not listed"],
)
def test_a_struct_that_differs_in_cpp_is_refused(
    interface_alone: Library, file: str, old: str, new: str, odd: str
) -> None:
    with pytest.raises(IsobitError, match=odd):
        interface.compare_structs(interface_alone(file, old, new))


def test_a_struct_that_differs_in_python_is_refused(
    interface_alone: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the control: as they are, the two sides agree."""
    library = interface_alone()
    interface.compare_structs(library)

    class Longer(interface.ProductArguments):
        _fields_ = [("added", ctypes.c_int64)]

    monkeypatch.setitem(interface._STRUCTS, "isobit_product_fields", Longer)
    with pytest.raises(
        IsobitError,
        match=r"Longer.* in Python: interface.py, interface.cpp and the struct must list",
    ):
        interface.compare_structs(library)


_EXPORTED = re.compile(r"^EXPORT ([\w ]+?\*?) ?(isobit_\w+)\(([^)]*)\)", re.M)
_TYPES = {"int64_t": ctypes.c_int64, "double": ctypes.c_double, "void": None}


def signatures(text: str) -> dict[str, tuple[object, list[object]]]:
    """Result and arguments of each exported function, as ctypes has them."""

    def type_of(declared: str) -> object:
        return ctypes.c_void_p if "*" in declared else _TYPES[declared.split()[0]]

    found = {}
    for result, name, arguments in _EXPORTED.findall(text):
        found[name] = (
            type_of(result),
            [type_of(one.strip()) for one in arguments.split(",") if one.strip()],
        )
    return found


def test_the_signatures_are_those_of_the_sources() -> None:
    """The control: another type, or another argument, is another signature."""
    text = "\n".join((HERE / name).read_text() for name in SOURCES)
    exported = {
        name: found for name, found in signatures(text).items() if name not in interface._STRUCTS
    }
    assert exported == interface._SIGNATURES
    for old, new in (
        ("int64_t order)", "double order)"),
        ("int64_t order)", "int64_t order, int64_t more)"),
    ):
        assert signatures(text.replace(old, new)) != signatures(text)


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_text("nothing")
    with pytest.raises(BuildFailed, match=r"cannot load .*broken.so"):
        load(tmp_path / "broken.so")
