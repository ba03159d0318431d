"""Choosing a backend: what `auto` takes and says, and what is refused."""

import inspect

import pytest

from isobit.errors import IsobitError
from isobit.kernels import BACKENDS, Ops, get_ops, native
from isobit.kernels.reference import ReferenceOps


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: (False, "no C++ compiler found"))


@pytest.mark.parametrize("name", ["cuda", "Reference", ""])
def test_an_unknown_backend_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(IsobitError) as caught:
        get_ops(name)
    assert str(caught.value) == f"unknown backend {name!r}: choose from {', '.join(BACKENDS)}"


def test_an_unknown_consistency_is_refused_with_the_choices() -> None:
    with pytest.raises(IsobitError, match=r"unknown consistency 'loose': choose from bitwise, fast"):
        get_ops("reference", "loose")


@pytest.mark.usefixtures("_no_compiler")
def test_without_a_compiler_auto_is_the_reference_and_says_why() -> None:
    ops = get_ops()
    assert ops.backend == "reference"
    assert "no C++ compiler found" in ops.why
    with pytest.raises(IsobitError, match="native cannot be built: no C\\+\\+ compiler found; use backend: auto"):
        get_ops("native")


def test_auto_is_native_where_it_works() -> None:
    works, _ = native.available()
    assert get_ops("auto").backend == ("native" if works else "reference")


@pytest.mark.parametrize("consistency", ["bitwise", "fast"])
def test_operators_say_what_they_are(consistency: str) -> None:
    ops = get_ops("reference", consistency)
    assert (ops.backend, ops.consistency) == ("reference", consistency)
    assert len(ops.why.splitlines()) == 1


def test_every_operator_is_there_with_its_signature() -> None:
    """A class that lacked one would have the protocol's, which returns None."""
    operators = [name for name, member in vars(Ops).items() if inspect.isfunction(member) and name[0] != "_"]
    assert "product" in operators
    for backend in (ReferenceOps, native.NativeOps):
        for name in operators:
            own, wanted = getattr(backend, name), getattr(Ops, name)
            assert own is not wanted, f"{backend.__name__}.{name}"
            pairs = zip(inspect.signature(own).parameters.values(), inspect.signature(wanted).parameters.values())
            assert all((a.name, a.default, a.kind) == (b.name, b.default, b.kind) for a, b in pairs), name
