"""A function whose calls were recorded gives, on other inputs, the bits that it gives anew; and what
cannot be repeated is refused."""

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from isobit.errors import NonFiniteError
from isobit.kernels import get_ops
from isobit.kernels.native import available
from isobit.kernels.native.arena import Arena
from isobit.kernels.native.recording import Recording
from isobit.precision import QuantSpec
from isobit.precision.formats import E4M3

pytestmark = pytest.mark.skipif(not available()[0], reason=f"native backend: {available()[1]}")

SPEC = QuantSpec(E4M3, "1x128", "ue8m0")
ROWS, COLUMNS = 3, 192


@pytest.fixture
def ops():  # type: ignore[no-untyped-def]
    return get_ops("native", "bitwise")


@torch.no_grad()
def recorded(function: Callable[[], None], ops, arena: Arena | None = None) -> Recording:  # type: ignore[no-untyped-def]
    return Recording(function, ops.lib, arena or Arena())


def test_a_recording_gives_the_bits_of_the_function_on_other_inputs(ops) -> None:  # type: ignore[no-untyped-def]
    """Operators in C++, of PyTorch between them, views, and a result in place."""
    weight = torch.randn(COLUMNS).bfloat16()
    matrix = ops.prepare(torch.randn(2 * COLUMNS, COLUMNS).bfloat16())
    x, y = torch.randn(ROWS, COLUMNS).bfloat16(), torch.zeros(ROWS, COLUMNS)

    def function() -> None:
        normed, _, rstd = ops.rms_norm(x, weight, 1e-6)
        wide = ops.product(normed, matrix)
        gate, up = wide.split(COLUMNS, dim=1)
        gated = ops.gate_mul("silu", torch.cat((up, gate), dim=1)).float()
        gated[:, 0] += rstd
        y.copy_(gated * 2)

    recording = recorded(function, ops)
    assert recording.refused is None
    for seed in range(3):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        recording.run()
        found = y.clone()
        function()
        assert torch.equal(found, y)
        assert found.abs().sum() > 0
        y.zero_()


def nothing(_: object) -> None:
    """A recorded function returns nothing."""


PLACES = torch.tensor([2, 0, 2])
COPIES: dict[str, tuple[Callable[[Tensor, Tensor], object], bool]] = {
    "whole": (lambda x, y: y.copy_(x), True),
    "rows": (lambda x, y: y.copy_(x.index_select(0, PLACES)), True),
    "into rows": (lambda x, y: y[1:].copy_(x[:2]), True),
    "columns": (lambda x, y: y.copy_(x.index_select(1, PLACES)), False),
    "strided": (lambda x, y: y.copy_(x.t()), False),
    "repeated": (lambda x, y: y.copy_(x[1]), False),
    "of another type": (lambda x, y: y.copy_(x.double()), False),
    "of narrow places": (lambda x, y: y.copy_(x.index_select(0, PLACES.int())), False),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_made_without_pytorch_where_they_are_plain(name: str, ops) -> None:  # type: ignore[no-untyped-def]
    copy, plain = COPIES[name]
    x, y = torch.randn(3, 3), torch.zeros(3, 3)
    recording = recorded(lambda: nothing(copy(x, y)), ops)
    assert recording.refused is None
    others = [part for part in recording._parts if not isinstance(part, partial)]
    assert (not others) is plain
    x.neg_()
    recording.run()
    found = y.clone()
    copy(x, y)
    assert torch.equal(found, y)
    assert found.abs().sum() > 0


@pytest.mark.parametrize("outside", [-1, 3])
def test_a_row_that_is_not_there_is_said_as_pytorch_says_it(outside: int, ops) -> None:  # type: ignore[no-untyped-def]
    x, y, places = torch.randn(3, 2), torch.zeros(2, 2), torch.tensor([0, 2])
    recording = recorded(lambda: nothing(y.copy_(x.index_select(0, places))), ops)
    recording.run()
    places[1] = outside
    with pytest.raises(IndexError, match="out of range"):
        recording.run()


def test_memory_is_taken_again_within_a_recording_and_by_the_next(ops) -> None:  # type: ignore[no-untyped-def]
    weight, arena = torch.randn(1024).bfloat16(), Arena()
    x, y = torch.randn(512, 1024).bfloat16(), torch.zeros(512, 1024).bfloat16()

    def function() -> None:
        rows = x
        for _ in range(12):
            rows = ops.rms_norm(rows, weight, 1e-6)[0]
        y.copy_(rows)

    first = recorded(function, ops, arena)
    size = arena.nbytes
    assert 2 * x.nbytes <= size <= 4 * x.nbytes, "of twelve results two are there at a time"
    second = recorded(function, ops, arena)
    assert arena.nbytes == size
    gc.collect()
    assert arena.num_free == size
    for recording in (first, second):
        x.normal_()
        recording.run()
        found = y.clone()
        function()
        assert torch.equal(found, y)


def _reads_a_value(x: Tensor, y: Tensor) -> None:
    y.fill_(float(x.sum()))


def _goes_another_way(x: Tensor, y: Tensor) -> None:
    y.fill_(1 if (x > 0).any() else 0)


def _has_as_many_rows_as_values(x: Tensor, y: Tensor) -> None:
    y.fill_(len((x > 0).nonzero().tolist()))


def _counts_in_numpy(x: Tensor, y: Tensor) -> None:
    y.fill_(x.numpy().sum())


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (_reads_a_value, "__float__"),
        (_goes_another_way, "__bool__"),
        (_has_as_many_rows_as_values, "tolist"),
        (_counts_in_numpy, "numpy"),
    ],
)
def test_a_function_that_reads_values_is_refused_and_runs_as_it_is(
    given: Callable[[Tensor, Tensor], None],
    what: str,
    ops,  # type: ignore[no-untyped-def]
) -> None:
    x, y = torch.ones(4), torch.zeros(4)
    recording = recorded(lambda: given(x, y), ops)
    assert recording.refused == f"{what} of a tensor"
    x.neg_()
    recording.run()
    found = y.clone()
    given(x, y)
    assert torch.equal(found, y)


def test_an_operator_that_cannot_be_repeated_is_refused(ops) -> None:  # type: ignore[no-untyped-def]
    x, sums = torch.randn(2, 8), torch.zeros(2, dtype=torch.float64)

    def function() -> None:
        sums.copy_(ops.square_sums(x))

    recording = recorded(function, ops)
    assert recording.refused == "isobit_square_sums"


def test_a_number_of_python_may_be_read(ops) -> None:  # type: ignore[no-untyped-def]
    x, y = torch.ones(4), torch.zeros(4)

    def function() -> None:
        y.copy_(x * float(torch.tensor(0.1, dtype=torch.bfloat16)))

    recording = recorded(function, ops)
    assert recording.refused is None
    x.fill_(3)
    recording.run()
    assert torch.equal(y, x * float(torch.tensor(0.1, dtype=torch.bfloat16)))


def test_what_fails_is_said_as_the_function_says_it(ops) -> None:  # type: ignore[no-untyped-def]
    x, y = torch.ones(2, 128).bfloat16(), torch.zeros(2, 128)

    def function() -> None:
        y.copy_(ops.quantize(x, SPEC, "somebody's rows").dequantize())

    recording = recorded(function, ops)
    assert recording.refused is None
    x[1, 5] = float("nan")
    with pytest.raises(NonFiniteError, match="somebody's rows"):
        recording.run()


def test_calls_of_other_threads_are_not_recorded(ops) -> None:  # type: ignore[no-untyped-def]
    """The control: those of the own thread are."""
    x, y, counted = torch.randn(2, 64).bfloat16(), torch.zeros(2, 64).bfloat16(), []
    weight = torch.ones(64).bfloat16()

    def other() -> None:
        ops.rms_norm(x, weight, 1e-6)

    def function(work: Callable[[], None]) -> None:
        work()
        y.copy_(ops.rms_norm(x, weight, 1e-6)[0])

    def elsewhere() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    for work in (elsewhere, other):
        recording = recorded(lambda work=work: function(work), ops)  # type: ignore[misc]
        words, _ = recording._kept[-2:]
        counted.append(len(words))  # type: ignore[arg-type]
    assert counted == [2, 3]  # with the copy
    assert ops.lib.isobit_rms_norm.errcheck is None, "no hook is left"


def test_a_recording_may_end_while_another_thread_is_in_an_operator(ops) -> None:  # type: ignore[no-untyped-def]
    """Calls of ctypes keep the hook that they find at their beginning without a reference: a hook
    of the recorder's own would be gone when they end, and the process with it."""
    x, weight, done = torch.randn(2000, 64).bfloat16(), torch.ones(64).bfloat16(), []
    y = torch.zeros(2, 64).bfloat16()

    def others() -> None:
        while not done:
            ops.rms_norm(x, weight, 1e-6)

    threads = [threading.Thread(target=others) for _ in range(3)]
    for thread in threads:
        thread.start()
    hooks = set()
    for _ in range(100):

        def function() -> None:
            hooks.add(ops.lib.isobit_rms_norm.errcheck)
            y.copy_(ops.rms_norm(x[:2], weight, 1e-6)[0])

        assert recorded(function, ops).refused is None
    done.append(True)
    for thread in threads:
        thread.join()
    assert len(hooks) == 1


def test_a_recording_keeps_the_memory_that_its_calls_have_addresses_of(ops) -> None:  # type: ignore[no-untyped-def]
    """The control: without it the memory is given back."""
    x, y, weight = torch.randn(2, 64).bfloat16(), torch.zeros(2, 64), torch.ones(64).bfloat16()
    arena = Arena()
    there = weakref.ref(arena)

    def function() -> None:
        y.copy_(ops.rms_norm(x, weight, 1e-6)[0])

    recording = recorded(function, ops, arena)
    assert arena.nbytes
    del arena
    gc.collect()
    assert there() is not None
    recording.run()
    del recording
    gc.collect()
    assert there() is None


def test_a_tensor_that_is_freed_while_another_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the garbage collector may, or another thread."""
    arena = Arena()
    held = [arena.like(torch.zeros(1 << 20, dtype=torch.uint8))]
    grow = Arena._grow

    def grown(self: Arena, size: int) -> int:
        index = grow(self, size)
        held.clear()
        return index

    monkeypatch.setattr(Arena, "_grow", grown)
    large = arena.like(torch.zeros(1 << 21, dtype=torch.uint8)).fill_(1)
    small = arena.like(torch.zeros(1 << 20, dtype=torch.uint8)).fill_(2)
    assert large.sum() == large.numel(), "no byte is another's"
    assert small.sum() == 2 * small.numel()
    assert arena.num_free == 0, "the place of what was freed was taken again"
