"""Linear attention by the gated delta rule: the reference against transformers, C++ against the
reference bit for bit, and the promise of both, that bits do not depend on how a batch's tokens are
divided.

Negative controls beside them: sums in another order, states of another page, earlier inputs that
are dropped.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from isobit.kernels import DeltaHeads, Layout, Ops, StateStore, get_ops
from isobit.kernels.backends.native import NativeOps
from isobit.kernels.delta import definition as delta
from isobit.kernels.delta import native as in_cpp
from isobit.kernels.native import available, recipe
from isobit.kernels.native.base import NativeBase
from isobit.precision import BF16, FP32

from .helpers import same, threads
from .libraries import DELTA, changed_copy, library_of

needs_native = pytest.mark.skipif(not available()[0], reason=f"native backend: {available()[1]}")
BACKENDS = ["reference", pytest.param("native", marks=needs_native)]
DTYPES = (torch.bfloat16, torch.float32)
PAGE_SIZES = (1, 3, 16)
SIZES = (
    (2, 4, 16, 32, 4),
    (1, 1, 128, 144, 4),
    (1, 2, 7, 33, 3),
    (2, 2, 13, 80, 1),
    (1, 1, 256, 16, 2),
)
"""Key heads, value heads, key_dim, value_dim, width of the convolution."""
SMALL = SIZES[2]
Step = dict[int, int]
"""New rows of some sequences, which are one batch."""


class Case:
    """Whole sequences: rows before the convolution, gates, and pages in a shuffled table."""

    def __init__(
        self, lengths: Sequence[int], sizes: tuple[int, int, int, int, int] = SMALL,
        dtype: torch.dtype = torch.float32,
        page_size: int = 16, seed: int = 0,
    ) -> None:  # fmt: skip
        key_heads, value_heads, key_dim, value_dim, width = sizes
        random = torch.Generator().manual_seed(seed)
        self.lengths, self.page_size = list(lengths), page_size
        rows, channels = sum(lengths), 2 * key_heads * key_dim + value_heads * value_dim
        fading = torch.randn(2, value_heads, generator=random)
        self.heads = DeltaHeads(key_heads, value_heads, key_dim, value_dim, fading[0], fading[1])
        self.x = torch.randn(rows, channels, generator=random).to(dtype)
        self.gates = 3 * torch.randn(rows, 2 * value_heads, generator=random)
        self.gates[::7] *= 12  # where softplus is linear, and where all is forgotten
        self.weight = torch.randn(channels, width, generator=random) / width
        pages = max(-(-length // page_size) for length in lengths)
        self.table = (
            torch.randperm(len(lengths) * pages, generator=random).view(len(lengths), pages).int()
        )

    def empty(self) -> StateStore:
        heads, compute = self.heads, BF16 if self.x.dtype == torch.bfloat16 else FP32
        inputs = (self.weight.shape[1] - 1, self.x.shape[1])
        state = (heads.value_heads, heads.key_dim, heads.value_dim)
        return StateStore.allocate(self.table.numel(), inputs, state, compute, "cpu")

    def computed(
        self, ops: Ops, store: StateStore | None, rows: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """These rows of all, as one batch."""
        mixed = ops.short_convolution(self.x[rows], self.weight, store, layout)
        return mixed, ops.delta_rule(mixed, self.gates[rows], self.heads, store, layout)

    def divided(
        self, ops: Ops, steps: Sequence[Step], forget: bool = False, table: Tensor | None = None
    ) -> list[Tensor]:
        """Results of all rows, computed in these steps, and what the store has in the end. `forget`
        drops the inputs of earlier rows, `table` takes the place of the own one after the first
        step."""
        starts = [sum(self.lengths[:s]) for s in range(len(self.lengths))]
        done, store, parts, found = [0] * len(starts), self.empty(), [], []
        for number, step in enumerate(steps):
            chosen = self.table if table is None or not number else table
            layout = Layout.build(
                list(step.values()),
                [done[s] for s in step],
                chosen[list(step)].contiguous(),
                self.page_size,
            )
            rows = torch.cat([torch.arange(n) + starts[s] + done[s] for s, n in step.items()])
            if forget:
                store.inputs.zero_()
            parts.append(rows)
            found.append(self.computed(ops, store, rows, layout))
            for s, n in step.items():
                done[s] += n
        assert done == self.lengths
        back = torch.cat(parts).argsort()
        return [*(torch.cat(one)[back] for one in zip(*found)), *store.tensors]

    def at_once(self, ops: Ops) -> list[Tensor]:
        return self.divided(ops, [dict(enumerate(self.lengths))])

    def random_steps(self, random: torch.Generator, most: int) -> list[Step]:
        """Sequences in any mixture, each `most` rows at a time or fewer."""
        left, steps = list(self.lengths), []
        while any(left):
            open_ones = [
                s for s, n in enumerate(left) if n and torch.rand((), generator=random) < 0.7
            ]
            step = {
                s: int(torch.randint(1, min(left[s], most) + 1, (), generator=random))
                for s in open_ones
            }
            for s, n in step.items():
                left[s] -= n
            steps += [step] if step else []
        return steps


def alike(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(same(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_and_gradients_are_those_of_transformers(backend: str) -> None:
    """Its form in chunks of 64 tokens, in float32: another order of the same sums. The control:
    without the division of queries and keys by their lengths nothing agrees."""
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    ops, case = get_ops(backend), Case([70, 5, 1], (2, 4, 16, 32, 4))
    leaves = [
        x.clone().requires_grad_()
        for x in (case.x, case.weight, case.gates, case.heads.decay, case.heads.step_bias)
    ]

    def theirs(normed: bool) -> Tensor:
        x, weight, gates, decay, step_bias = leaves
        out, heads = [], case.heads
        widths = (heads.key_heads * heads.key_dim,) * 2 + (heads.value_heads * heads.value_dim,)
        for rows, b_and_a in zip(x.split(case.lengths), gates.split(case.lengths)):
            padded = functional.pad(rows.t()[None], (weight.shape[1] - 1, 0))
            mixed = functional.silu(functional.conv1d(padded, weight[:, None], groups=x.shape[1]))[
                0
            ].t()
            q, k, v = mixed.split(widths, -1)
            q, k = (
                y.view(1, len(rows), heads.key_heads, -1).repeat_interleave(2, 2) for y in (q, k)
            )
            b, a = b_and_a.chunk(2, -1)
            g = -decay.exp() * functional.softplus(a + step_bias)
            found, _ = qwen.torch_chunk_gated_delta_rule(
                q, k, v.view(1, len(rows), heads.value_heads, -1), g=g[None],
                beta=b.sigmoid()[None],
                use_qk_l2norm_in_kernel=normed,
            )  # fmt: skip
            out.append(found[0])
        return torch.cat(out)

    layout, wanted = Layout.packed(case.lengths), theirs(True)
    mixed, found = case.computed(ops, None, torch.arange(len(case.x)), layout)
    dout = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    dmixed, *rest = ops.delta_rule_backward(dout, mixed, case.gates, case.heads, layout)
    dx, dweight = ops.short_convolution_backward(dmixed, case.x, case.weight, layout)
    gradients = torch.autograd.grad(wanted, leaves, dout)
    for ours, one in zip((found, dx, dweight, *rest), (wanted, *gradients), strict=True):
        torch.testing.assert_close(
            ours, one, rtol=1e-4, atol=2e-4 * float(one.detach().abs().max())
        )
    assert not torch.allclose(found, theirs(False), rtol=0.1, atol=0.1 * float(found.abs().max()))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_cpp_is_the_reference_bit_for_bit(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    """Whole sequences, chunks with rows of others between them, single rows; and no store. The
    first row of the control has a number that differs in its last bit."""
    native, reference = get_ops("native"), get_ops("reference")
    for page_size in PAGE_SIZES:
        case = Case([38, 1, 4], sizes, dtype, page_size)
        steps: list[Step] = [{0: 35, 2: 2}, {0: 1, 1: 1, 2: 1}, {2: 1, 0: 1}, {0: 1}]
        wanted = case.divided(reference, steps)
        assert alike(case.divided(native, steps), wanted)
        with threads(5):  # more than heads: each has some columns
            assert alike(case.divided(native, steps), wanted)
    rows, layout = torch.arange(len(case.x)), Layout.packed(case.lengths)
    assert alike(case.computed(native, None, rows, layout), wanted[:2])
    case.x[0, 0] = torch.nextafter(case.x[0, 0], torch.tensor(9.0, dtype=dtype))
    assert not alike(case.computed(native, None, rows, layout), wanted[:2])


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_how_tokens_are_divided(backend: str, dtype: torch.dtype) -> None:
    """Random mixtures and chunks, page by page, and token by token: results, and all that the store
    has in the end."""
    ops, random = get_ops(backend), torch.Generator().manual_seed(3)
    for page_size in PAGE_SIZES:
        case = Case([19, 7, 33], dtype=dtype, page_size=page_size, seed=page_size)
        wanted = case.at_once(ops)
        for most in (3, 12, 40, 40):
            assert alike(case.divided(ops, case.random_steps(random, most)), wanted)
        whole = [
            {s: min(page_size, n - i)}
            for s, n in enumerate(case.lengths)
            for i in range(0, n, page_size)
        ]
        assert alike(case.divided(ops, whole), wanted)
        assert alike(
            case.divided(ops, [{s: 1} for s in (2, 0, 1) for _ in range(case.lengths[s])]), wanted
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_earlier_rows_left_is_read_from_where_it_is(backend: str) -> None:
    """The controls of the divisions: with a state of another page, or without the inputs of earlier
    rows, nothing agrees in the next row."""
    ops, case = get_ops(backend), Case([19, 7], page_size=3)
    steps: list[Step] = [{0: 5, 1: 7}, {0: 14}]
    mixed, out, *_ = case.at_once(ops)
    for found in (
        case.divided(ops, steps, table=case.table.roll(1, 1)),
        case.divided(ops, steps, forget=True),
    ):
        assert same(found[0][:5], mixed[:5])
        assert same(found[1][:5], out[:5])
        assert not (found[0][5] == mixed[5]).any()
        assert not torch.isclose(found[1][5], out[5], rtol=1e-3, atol=0).all(-1).any()


@needs_native
@pytest.mark.parametrize("sizes", SIZES)
def test_gradients_in_cpp_are_as_near_to_float64_as_the_reference(
    sizes: tuple[int, int, int, int, int],
) -> None:
    """The control: without one row's gradient."""
    assert_near_to_float64(Case([50, 1, 16, 17], sizes), without=40)


def assert_near_to_float64(case: Case, without: int) -> None:
    """Both sum in float32, in orders of their own: C++ may be twice as far from the reference's
    recurrence in float64 as that in float32 is, all elements together; `without` one row's gradient
    it is not."""
    native, corrects = get_ops("native"), case.heads.corrects
    layout = Layout.packed(case.lengths)
    assert isinstance(native, NativeBase)
    parts = delta.Parts(
        *(part.contiguous() for part in delta._parts(case.x, case.gates, case.heads))
    )
    dout = torch.randn(parts.v.shape, generator=torch.Generator().manual_seed(2))
    doubled = delta.Parts(*(part.double() for part in parts))
    true = delta._backward(doubled, dout.double(), layout, corrects)
    single = delta._backward(parts, dout, layout, corrects)
    found = in_cpp.backward(native, parts, dout, layout, corrects)
    missing = dout.index_fill(0, torch.tensor(without), 0.0)
    wrong = in_cpp.backward(native, parts, missing, layout, corrects)
    for ours, other, theirs, exact in zip(found, wrong, single, true):
        bound = 2 * (theirs - exact).norm() + 1e-7 * exact.norm()
        assert (ours - exact).norm() <= bound
        assert (other - exact).norm() > 100 * bound


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_in_cpp_repeat(dtype: torch.dtype) -> None:
    """On one thread and on more; those of the convolution are near the true ones. The control:
    another last bit."""
    native, case = get_ops("native"), Case([50, 1, 17], (2, 4, 32, 80, 4), dtype)
    layout = Layout.packed(case.lengths)
    dout = torch.randn(len(case.x), 4, 80, generator=torch.Generator().manual_seed(2)).to(dtype)

    def gradients() -> list[Tensor]:
        mixed = case.computed(native, None, torch.arange(len(case.x)), layout)[0]
        dmixed, *rest = native.delta_rule_backward(dout, mixed, case.gates, case.heads, layout)
        return [
            dmixed,
            *native.short_convolution_backward(dmixed, case.x, case.weight, layout),
            *rest,
        ]

    with threads(1):
        wanted = gradients()
    for count in (1, 2, 3):
        with threads(count):
            assert alike(gradients(), wanted)
    theirs = get_ops("reference").short_convolution_backward(wanted[0], case.x, case.weight, layout)
    for ours, one in zip(
        wanted[1:3], theirs
    ):  # rounded to the type of x; of the weight, sums of 68 rows in float32
        step = 2**-8 if ours.dtype == torch.bfloat16 else 2**-19
        torch.testing.assert_close(ours, one, rtol=step, atol=2**-19 * float(one.abs().max()))
    case.x[40, 3] = torch.nextafter(case.x[40, 3], torch.tensor(9.0, dtype=dtype))
    assert not any(same(ours, one) for ours, one in zip(gradients()[:3], wanted))


@needs_native
def test_another_order_of_a_sum_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    native, reference, case = get_ops("native"), get_ops("reference"), Case([40], (1, 1, 64, 64, 4))
    monkeypatch.setattr(delta, "LANES", 8)
    mixed, out, *_ = case.at_once(native)
    others = case.at_once(reference)
    assert same(mixed, others[0])
    assert not same(out, others[1])
    torch.testing.assert_close(out, others[1])


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize("flags", ["-march=x86-64-v3", "-march=x86-64", "-DISOBIT_PORTABLE"])
def test_every_instruction_set_has_these_bits(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AVX2; no fused multiply-add at all; no intrinsics. The control adds other lanes first."""
    if not recipe.on_x86():
        pytest.skip("flags of x86-64")
    native, other, wrong = (NativeOps() for _ in range(3))
    order = "(lane[0][n] + lane[{}][n]) + (lane[{}][n] + lane[3][n])"
    changed_copy(tmp_path, ["delta/delta.h"], order.format(2, 1), order.format(1, 2))
    other.lib = library_of(DELTA, tmp_path, f"-O1 {flags}", monkeypatch)
    wrong.lib = library_of(DELTA, tmp_path, f"-O1 {flags}", monkeypatch, tmp_path)
    for sizes in SIZES:
        for dtype in DTYPES:
            case = Case([38, 1, 4], sizes, dtype, 3)
            assert alike(case.at_once(other), case.at_once(native))
            assert not alike(case.at_once(wrong), case.at_once(native))
