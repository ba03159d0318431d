"""A library's products in place of the kernels': only where every byte is theirs, and only where it
is faster."""

import itertools
from collections.abc import Callable
from functools import partial, reduce

import pytest
import torch
from torch import Tensor

from isobit.kernels.backends.triton import TritonOps
from isobit.kernels.matrices import LIBRARY_ROWS, Operand
from isobit.kernels.product.triton import library
from isobit.kernels.product.triton.library import (
    FEWEST,
    ROUND,
    Call,
    LibraryProducts,
    revealing,
)
from isobit.kernels.product.triton.product import product
from isobit.precision import QTensor, QuantSpec, quantize

from ..helpers import draw, same
from .helpers import DEVICE, there
from .test_product import ROWS, ROWS32, WEIGHT, WEIGHT32, needs_gpu

ROWS_HERE, COLUMNS, INNER = 128, 64, 512
KINDS = {"fp8": (ROWS, WEIGHT), "fp8 with fp32 scales": (ROWS32, WEIGHT32), "bf16": (None, None)}


def _operands(
    kind: str, rows: int = ROWS_HERE, inner: int = INNER, columns: int = COLUMNS
) -> tuple[Operand, Operand]:
    def operand(seed: int, count: int, spec: QuantSpec | None) -> Operand:
        x = draw(seed, count, inner)
        return there(x.bfloat16() if spec is None else quantize(x, spec))

    specs = KINDS[kind]
    return operand(0, rows, specs[0]), operand(1, columns, specs[1])


def _tried(
    library: Call, cost: float = 1.0, out: torch.dtype = torch.bfloat16, kind: str = "fp8"
) -> tuple[str, int]:
    """What is chosen where the library takes `cost` seconds and Triton 2, and how often the library
    was called. Both products that are asked for must have Triton's bytes."""
    calls = 0

    def counted(a: Operand, b: Operand, bias: Tensor | None, out: torch.dtype) -> Tensor | None:
        nonlocal calls
        calls += 1
        return library(a, b, bias, out)

    def seconds(call: Callable[[], object]) -> float:
        assert isinstance(call, partial)
        return 2.0 if call.args[0] is product else cost

    products = LibraryProducts({"it": counted}, seconds, step=ROWS_HERE)
    a, b = _operands(kind)
    wanted = product(a, b, None, out)
    for _ in range(2):
        assert same(products.product(a, b, None, out), wanted)
    (chosen,) = products.chosen.values()
    return chosen, calls


def _slice(x: Operand, block: int) -> Operand:
    columns = slice(128 * block, 128 * (block + 1))
    if isinstance(x, QTensor):
        return QTensor(x.data[:, columns].contiguous(), x.scale[:, block : block + 1], x.spec)
    return x[:, columns].contiguous()


def _in_order(blocks: Callable[[int], list[int]]) -> Call:
    """Blocks of 128 along K, each from zero, added in float32 in this order."""

    def call(a: Operand, b: Operand, bias: Tensor | None, out: torch.dtype) -> Tensor:
        parts = [
            product(_slice(a, i), _slice(b, i), bias, torch.float32)
            for i in blocks(a.shape[1] // 128)
        ]
        return reduce(torch.add, parts).to(out)

    return call


def _one_bit_off(a: Operand, b: Operand, bias: Tensor | None, out: torch.dtype) -> Tensor:
    y = product(a, b, bias, out)
    y.view(torch.uint8)[-1, 0] ^= 1
    return y


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bytes_are_taken(kind: str, out: torch.dtype) -> None:
    assert _tried(product, out=out, kind=kind) == ("it", 4), "a trial of two products, and two more"


def test_ascending_order_by_another_route_is_taken() -> None:
    assert _tried(_in_order(lambda count: list(range(count))))[0] == "it"


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["fp8", "fp8 with fp32 scales"])
def test_another_order_is_not(kind: str, out: torch.dtype) -> None:
    """The controls: descending, and the second block last."""
    assert (
        _tried(_in_order(lambda count: list(range(count))[::-1]), out=out, kind=kind)[0] == "triton"
    )
    assert _tried(_in_order(lambda count: [0, 2, 3, 1]), out=out, kind=kind)[0] == "triton"


def test_one_bit_is_enough() -> None:
    assert _tried(_one_bit_off) == ("triton", 1)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[1:], ids=str)
def test_every_other_order_shows(order: tuple[int, ...]) -> None:
    """Also where the result is rounded to BF16, which hides most of it in a product of ordinary
    numbers. The first two blocks alone may change places."""
    swapped, ordinary = _in_order(lambda count: list(order)), _operands("fp8")
    shares = []
    for given in (revealing(*ordinary), ordinary):
        found = swapped(*given, None, torch.bfloat16)
        assert found is not None
        shares.append(float(torch.ne(found, product(*given, None, torch.bfloat16)).float().mean()))
    assert shares[0] == 0 if order[2:] == (2, 3) else shares[0] > 0.05 > 10 * shares[1]


@pytest.mark.slow
def test_a_library_gets_whole_steps_and_triton_the_rest() -> None:
    """So packs of any length need one trial for each number of steps."""
    rows: list[int] = []

    def noted(a: Operand, b: Operand, bias: Tensor | None, out: torch.dtype) -> Tensor:
        rows.append(a.shape[0])
        return product(a, b, bias, out)

    products = LibraryProducts({"it": noted}, lambda call: float(call.args[0] is product), step=32)  # type: ignore[attr-defined]
    for count in (64, 70, 95, 96):
        a, b = _operands("fp8", count)
        assert same(products.product(a, b, None, torch.float32), product(a, b, None, torch.float32))
    assert rows == [64, 64, 64, 64, 64, 96, 96, 96]
    assert [size[0] for size in products.chosen] == [64, 96]


def _quick(noted: list[int]) -> LibraryProducts:
    """Products of a library that is always the faster one; the rows of its calls are noted."""

    def multiply(a: Operand, b: Operand, bias: Tensor | None, out: torch.dtype) -> Tensor:
        noted.append(a.shape[0])
        return product(a, b, bias, out)

    return LibraryProducts({"it": multiply}, lambda call: float(call.args[0] is product))  # type: ignore[attr-defined]


@pytest.mark.slow
def test_fewer_rows_are_tried_where_a_captured_step_may_have_so_many() -> None:
    """As one product, so that no weight is read twice. The controls: fewer, and a number that no
    step is padded to."""
    rows: list[int] = []
    products = _quick(rows)
    for count in (FEWEST, FEWEST + ROUND, FEWEST - ROUND, FEWEST + 1):
        a, b = _operands("fp8", count)
        assert same(products.product(a, b, None, torch.float32), product(a, b, None, torch.float32))
    assert [size[0] for size in products.chosen] == [FEWEST, FEWEST + ROUND]
    assert rows == [FEWEST] * 3 + [FEWEST + ROUND] * 3, "two of a trial, and what was asked for"


def test_a_graph_that_is_captured_takes_what_was_chosen_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trial waits for the GPU, which a capture must not."""
    rows: list[int] = []
    products = _quick(rows)
    a, b = _operands("fp8")
    monkeypatch.setattr(library, "_capturing", lambda x: True)
    products.product(a, b, None, torch.bfloat16)
    assert (rows, products.chosen) == ([], {}), "not tried"
    monkeypatch.setattr(library, "_capturing", lambda x: False)
    products.product(a, b, None, torch.bfloat16)
    monkeypatch.setattr(library, "_capturing", lambda x: True)
    products.product(a, b, None, torch.bfloat16)
    assert rows == [ROWS_HERE] * 4


def test_a_slower_library_is_not_taken() -> None:
    assert _tried(product, cost=3.0)[0] == "triton"


def test_a_library_that_fails_is_not_asked_again() -> None:
    def broken(a: Operand, b: Operand, bias: Tensor | None, out: torch.dtype) -> Tensor:
        raise RuntimeError("no kernel image")

    products = LibraryProducts({"it": broken}, step=ROWS_HERE)
    a, b = _operands("fp8")
    assert same(products.product(a, b, None, torch.float32), product(a, b, None, torch.float32))
    assert products.refused == {"it": "RuntimeError: no kernel image"}
    products.product(a, b, None, torch.float32)
    assert list(products.chosen.values()) == ["triton"], (
        "the second size is not tried: there is no library left"
    )


def test_what_a_library_does_not_have_stays_with_triton() -> None:
    assert _tried(lambda a, b, bias, out: None) == ("triton", 1)


@pytest.mark.parametrize("change", ["few rows", "chunks", "strided", "mixed"])
def test_what_is_not_tried(change: str) -> None:
    products = LibraryProducts({"it": _one_bit_off}, step=ROWS_HERE)
    a, b = _operands(
        "fp8", 100 if change == "few rows" else ROWS_HERE, 8192 if change == "chunks" else INNER
    )
    if change == "strided":
        assert isinstance(a, QTensor)
        wide = torch.zeros(ROWS_HERE, INNER + 16, dtype=torch.uint8, device=DEVICE)[:, :INNER]
        a = QTensor(wide.copy_(a.data.view(torch.uint8)).view(a.data.dtype), a.scale, a.spec)
    if change == "mixed":
        a = a.dequantize().bfloat16() if isinstance(a, QTensor) else a
    if change == "chunks":
        a, b = (
            QTensor(x.data.to("meta"), x.scale.to("meta"), x.spec)
            for x in (a, b)
            if isinstance(x, QTensor)
        )
        assert not products._may_be_tried(a, b)
        return
    assert same(products.product(a, b, None, torch.float32), product(a, b, None, torch.float32))
    assert products.chosen == {}


def test_the_backend_asks_libraries_on_a_gpu_alone() -> None:
    installed = (
        TritonOps("bitwise", "a test", torch.device("cuda")).libraries
        if torch.cuda.is_available()
        else None
    )
    interpreted = TritonOps("bitwise", "a test", torch.device("cpu")).libraries
    assert not interpreted._may_be_tried(*_operands("fp8", LIBRARY_ROWS))
    assert installed is None or "cublas" in installed._libraries


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "inner"), [(6144, 4096), (4096, 12288), (1024, 1024)])
def test_rows_of_a_library_have_the_bits_of_rows_alone(
    kind: str, columns: int, inner: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU, by whichever is chosen there; what that is, is printed."""
    ops = TritonOps("bitwise", "a test", DEVICE)
    a, b = _operands(kind, 4096, inner, columns)
    for out in (torch.bfloat16, torch.float32):
        assert same(ops.product(a, b, None, out), product(a, b, None, out))
    with capsys.disabled():
        print(
            f"\n{kind}, {columns} x {inner}: {list(ops.libraries.chosen.values())} "
            f"{ops.libraries.refused}"
        )
