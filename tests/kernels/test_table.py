"""Choosing a backend: what `auto` takes and says, and what is refused."""

import inspect
from collections.abc import Iterator

import pytest
import torch

from isobit.errors import IsobitError
from isobit.kernels import BACKENDS, Ops, get_ops, gpu, native, table
from isobit.kernels.backends import self_check
from isobit.kernels.backends.native import NativeOps
from isobit.kernels.backends.reference import ReferenceOps
from isobit.kernels.backends.triton import TritonOps
from isobit.kernels.gpu import Gpu
from isobit.kernels.inference_engine.definition import InferenceEngineOps
from isobit.kernels.inference_engine.native import NativeInferenceEngineOps
from isobit.kernels.triton import launch
from isobit.options.consistency import default_order, resolved
from isobit.precision import PRESETS, precision_from

KNOWN = (
    "sm_80 (A100), sm_86 (RTX 30, A40), sm_89 (RTX 40, L4, L40S), sm_90 (H100, H200), sm_100 "
    "(B200), sm_120 (RTX 50, RTX PRO 6000)"
)


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: (False, "no C++ compiler found"))


@pytest.mark.parametrize("name", ["cuda", "Reference", ""])
def test_an_unknown_backend_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(IsobitError) as caught:
        get_ops(name)
    assert str(caught.value) == f"unknown backend {name!r}: choose from {', '.join(BACKENDS)}"


def test_an_unknown_consistency_is_refused_with_the_choices() -> None:
    with pytest.raises(
        IsobitError,
        match=r"unknown consistency 'loose': choose from exact, bitwise, bitwise-tdp32, "
        r"bitwise-vdp32, fast",
    ):
        get_ops("reference", "loose")


@pytest.mark.usefixtures("_no_compiler")
def test_without_a_compiler_auto_is_the_reference_and_says_why() -> None:
    ops = get_ops()
    assert ops.backend == "reference"
    assert "no C++ compiler found" in ops.why
    assert (ops.consistency, ops.order) == (
        "exact",
        "exact",
    )  # ordered sums in PyTorch are for tests
    assert get_ops("reference").order == f"{default_order()}-v1+rows32-v1"
    assert get_ops("reference", "bitwise-vdp32").order == "vdp32-v1+rows32-v1"
    with pytest.raises(
        IsobitError, match="native cannot be built: no C\\+\\+ compiler found; use backend: auto"
    ):
        get_ops("native")


def test_auto_is_native_where_it_works() -> None:
    works, _ = native.available()
    assert get_ops("auto").backend == ("native" if works else "reference")


@pytest.mark.parametrize(
    "consistency", ["exact", "bitwise", "bitwise-tdp32", "bitwise-vdp32", "fast"]
)
def test_operators_say_what_they_are(consistency: str) -> None:
    ops = get_ops("reference", consistency)
    assert (ops.backend, ops.consistency) == ("reference", resolved(consistency))
    assert len(ops.why.splitlines()) == 1


OPERATORS = [name for name, it in vars(Ops).items() if inspect.isfunction(it) and name[0] != "_"]


class Declared(Ops):
    """Has every operator as it is declared."""


def parameters(ops: Ops, name: str) -> list[tuple[object, ...]]:
    """As a caller sees them: name, default and kind."""
    found = inspect.signature(getattr(ops, name)).parameters.values()
    return [(each.name, each.default, each.kind) for each in found]


def tables() -> dict[str, Ops]:
    """Each table of operators, and what takes the place of some of them."""
    cpu = torch.device("cpu")
    found: dict[str, Ops] = {level: ReferenceOps(level) for level in ("exact", "bitwise", "fast")}
    found |= {"engine": InferenceEngineOps(ReferenceOps()), "triton": TritonOps("bitwise", "", cpu)}
    if native.available()[0]:
        learner = NativeOps()
        found |= {"native": learner, "native engine": NativeInferenceEngineOps(learner)}
    return found


def test_every_operator_is_there_with_its_signature() -> None:
    """A table that lacked one would have the protocol's, which returns None. What a backend takes
    besides, its callers may leave out. The control: a function with another default is another
    signature."""
    declared = Declared()  # type: ignore[abstract]  # nothing of it is called
    assert "product" in OPERATORS
    assert len(OPERATORS) == 51
    for backend, ops in tables().items():
        for name in OPERATORS:
            of_class = getattr(type(ops), name)
            assert of_class is not getattr(Ops, name), f"{backend}: {name}"
            wanted, own = parameters(declared, name), parameters(ops, name)
            assert own[: len(wanted)] == wanted, f"{backend}: {name}"
            besides = [default for _, default, _ in own[len(wanted) :]]
            assert inspect.Parameter.empty not in besides, f"{backend}: {name}"
    odd = ReferenceOps()
    vars(odd)["rotary"] = lambda x, cos, sin, positions, inverse=True: x
    assert parameters(odd, "rotary") != parameters(declared, "rotary")


def _gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """As if PyTorch saw a GPU of this capability."""
    monkeypatch.setattr(table, "find_gpu", lambda: Gpu("A GPU", capability, 1 << 30, 132))


@pytest.mark.parametrize("consistency", ["bitwise", "fast"])
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_an_older_gpu_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, backend: str, consistency: str
) -> None:
    """`auto` goes on without it, and says so."""
    _gpu(monkeypatch, (7, 5))
    reason = f"A GPU (sm_75): the kernels have tiles for {KNOWN}"
    if backend == "auto":
        ops = get_ops("auto", consistency)
        assert ops.backend != "triton"
        assert ops.why.endswith(f"the GPU is not used: {reason}")
    else:
        with pytest.raises(IsobitError) as caught:
            get_ops("triton", consistency)
        assert str(caught.value) == f"backend: triton cannot be used: {reason}"


@pytest.mark.parametrize("capability", gpu.ARCHITECTURES)
def test_gpus_with_tiles_are_not_refused(capability: tuple[int, int]) -> None:
    assert gpu.refusal(Gpu("A GPU", capability, 1 << 30, 132)) is None


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """As if PyTorch saw an A100, whose kernels' check finds what is in the list."""
    found: list[str] = []
    _gpu(monkeypatch, (8, 0))
    monkeypatch.setattr(table, "triton_refusal", lambda: None)
    monkeypatch.setattr(table, "_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(
        self_check, "remembered", lambda ops, fp8: ["FP8 on an A100"] if fp8 else list(found)
    )
    table._failing.cache_clear()
    yield found
    table._failing.cache_clear()
    launch.compile_for(gpu.HOPPER)


def test_a_gpu_is_taken_after_its_check(checked: list[str]) -> None:
    ops = get_ops("auto")
    assert (ops.backend, ops.why) == ("triton", "triton backend: A GPU (sm_80)")
    assert launch.target().cards == "A100"
    for precision in ("bf16", "bf16[kv_cache=int8]"):  # which needs no FP8
        ops.check_precision(precision_from(precision))
    with pytest.raises(
        IsobitError,
        match=r"in FP8 \(preset fp8\) from sm_89 on, and this GPU is older; use precision: bf16",
    ):
        ops.check_precision(PRESETS["fp8"])


def test_a_gpu_whose_kernels_fail_is_not_taken(checked: list[str]) -> None:
    checked += ["output head: off by 1", "another"]
    reason = "A GPU (sm_80): the kernels fail their check here: output head: off by 1 (2 in all)"
    ops = get_ops("auto")
    assert ops.backend != "triton"
    assert ops.why.endswith(f"the GPU is not used: {reason}")
    with pytest.raises(IsobitError) as caught:
        get_ops("triton")
    assert str(caught.value) == f"backend: triton cannot be used: {reason}"


def test_a_check_that_ends_with_an_error_is_a_reason(
    checked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> list[str]:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(self_check, "remembered", broken)
    with pytest.raises(
        IsobitError,
        match="the kernels' check ended with RuntimeError: no kernel image is available",
    ):
        get_ops("triton")
    table._failing.cache_clear()
    monkeypatch.setenv("ISOBIT_GPU_CHECK", "skip")
    assert get_ops("triton").backend == "triton"


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_exact_sums_are_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    _gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(table, "triton_refusal", lambda: None)
    with pytest.raises(
        IsobitError, match="consistency: exact is a CPU's; on a GPU use consistency: bitwise"
    ):
        get_ops(backend, "exact")


def test_an_order_of_a_cpus_sums_is_computed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a run has it that began on a CPU of another kind and is evaluated beside a GPU."""
    _gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(table, "triton_refusal", lambda: None)
    monkeypatch.setattr(table, "_failing", lambda gpu: None)
    ops = get_ops("auto", "bitwise-tdp32")
    assert ops.backend in ("native", "reference")
    assert (
        "the GPU is not used: consistency: bitwise-tdp32 names an order of a CPU's sums" in ops.why
    )
    with pytest.raises(IsobitError, match="consistency: bitwise-tdp32 is a CPU's"):
        get_ops("triton", "bitwise-tdp32")


def test_without_a_gpu_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "find_gpu", lambda: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        IsobitError, match="triton needs an NVIDIA GPU, and PyTorch sees none; use backend: auto"
    ):
        get_ops("triton")


@pytest.mark.parametrize(
    ("found", "accepted"), [("3.5.1", False), ("3.6.0", True), ("3.9.0", True), ("3.10.0", False)]
)
def test_only_known_versions_of_triton_are_taken(
    monkeypatch: pytest.MonkeyPatch, found: str, accepted: bool
) -> None:
    monkeypatch.setattr(gpu, "version", lambda _: found)
    reason = gpu.triton_refusal()
    assert (reason is None) == accepted
    assert accepted or f"Triton {found} is installed" in str(reason)
