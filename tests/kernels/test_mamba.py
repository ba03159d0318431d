"""Mamba-2's recurrence, and the bias of the convolution before it: the reference against
transformers and float64, C++ against the reference bit for bit, and the promise of both, that bits
do not depend on how a batch's tokens are divided. What it shares with the delta rule is in
`test_delta.py`.

Negative controls beside them: the delta rule on the same numbers, states of another page, a
gradient that is left out.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from isobit.kernels import DeltaHeads, Layout, Ops, StateStore, get_ops

from .helpers import same, threads
from .test_delta import (
    BACKENDS,
    DTYPES,
    PAGE_SIZES,
    SIZES,
    SMALL,
    Case,
    Step,
    alike,
    assert_near_to_float64,
    needs_native,
)  # fmt: skip

LEAST = 0.02


class MambaCase(Case):
    """With x, B and C in a row, a step for each head, and a bias of the convolution."""

    def __init__(
        self, lengths: Sequence[int], sizes: tuple[int, int, int, int, int] = SMALL,
        dtype: torch.dtype = torch.float32,
        page_size: int = 16, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(lengths, sizes, dtype, page_size, seed)
        random = torch.Generator().manual_seed(seed + 100)
        skip = torch.randn(self.heads.value_heads, generator=random)
        self.heads = replace(self.heads, skip=skip, least_step=LEAST)
        self.gates = self.gates[:, self.heads.value_heads :].contiguous()
        self.gates[::7] = self.gates[::7].clamp(max=30.0)
        self.gates[3::7] = -9.0  # a step below the least
        self.bias = torch.randn(self.x.shape[1], generator=random)

    def computed(
        self, ops: Ops, store: StateStore | None, rows: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        mixed = ops.short_convolution(self.x[rows], self.weight, store, layout, self.bias)
        return mixed, ops.delta_rule(mixed, self.gates[rows], self.heads, store, layout)


def plain(
    mixed: Tensor, gates: Tensor, decay: Tensor, step_bias: Tensor, skip: Tensor,
    heads: DeltaHeads, lengths: Sequence[int],
) -> Tensor:  # fmt: skip
    """The equations of the paper, token by token."""
    keys = heads.key_heads * heads.key_dim
    x, b, c = mixed.split((heads.value_heads * heads.value_dim, keys, keys), -1)
    each, out = heads.value_heads // heads.key_heads, []
    x = x.unflatten(-1, (heads.value_heads, -1))
    b, c = (one.unflatten(-1, (heads.key_heads, -1)).repeat_interleave(each, 1) for one in (b, c))
    dt = functional.softplus(gates + step_bias).clamp(min=heads.least_step)
    kept = torch.exp(-decay.exp() * dt)
    for rows in torch.arange(len(mixed)).split(list(lengths)):
        state = mixed.new_zeros(heads.value_heads, heads.key_dim, heads.value_dim)
        for t in rows.tolist():
            written = (dt[t, :, None] * x[t]).unsqueeze(1)
            state = kept[t, :, None, None] * state + b[t].unsqueeze(-1) * written
            out.append(torch.einsum("hk,hkv->hv", c[t], state) + skip[:, None] * x[t])
    return torch.stack(out)


def all_gradients(case: MambaCase, ops: Ops, dout: Tensor) -> list[Tensor]:
    """Of x, the weight and the bias of the convolution, gates, decay, step_bias and skip."""
    layout = Layout.packed(case.lengths)
    mixed = case.computed(ops, None, torch.arange(len(case.x)), layout)[0]
    dmixed, *rest = ops.delta_rule_backward(dout, mixed, case.gates, case.heads, layout)
    given = dmixed, case.x, case.weight, layout, case.bias
    return [*ops.short_convolution_backward(*given), *rest]


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_and_gradients_are_autograds_in_float64(backend: str) -> None:
    """The control: the delta rule of the same numbers is nothing like it, and neither are values
    without the skip."""
    ops, case = get_ops(backend), MambaCase([70, 5, 1], (2, 4, 16, 32, 4))
    heads = case.heads
    assert heads.skip is not None
    given = case.x, case.weight, case.bias, case.gates, heads.decay, heads.step_bias, heads.skip
    leaves = [x.double().requires_grad_() for x in given]
    x, weight, bias, *rest = leaves
    seen = [functional.pad(rows.t()[None], (3, 0)) for rows in x.split(case.lengths)]
    mixed = torch.cat(
        [functional.conv1d(s, weight[:, None], bias, groups=x.shape[1])[0].t() for s in seen]
    )
    mixed = functional.silu(mixed)
    gates, decay, step_bias, skip = rest
    wanted = plain(mixed, gates, decay, step_bias, skip, heads, case.lengths)
    found = case.computed(ops, None, torch.arange(len(case.x)), Layout.packed(case.lengths))[1]
    dout = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(wanted, leaves, dout.double())
    ours = [found, *all_gradients(case, ops, dout)]
    for one, exact in zip(ours, (wanted, *gradients), strict=True):
        exact = exact.detach()
        torch.testing.assert_close(
            one.double(), exact, rtol=1e-4, atol=2e-5 * float(exact.abs().max())
        )
    rule = replace(heads, skip=None)
    twice = torch.cat((case.gates, case.gates), 1)
    other = ops.delta_rule(mixed.detach().float(), twice, rule, None, Layout.packed(case.lengths))
    bare = replace(heads, skip=torch.zeros_like(heads.skip))
    without = ops.delta_rule(
        mixed.detach().float(), case.gates, bare, None, Layout.packed(case.lengths)
    )
    for wrong in (other, without):
        assert not torch.allclose(wrong, found, rtol=1e-3, atol=1e-3 * float(found.abs().max()))


def test_values_are_those_of_transformers_in_chunks() -> None:
    """Its form in chunks, in float32: another order of the same sums. The control: another least
    step."""
    theirs = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    case = MambaCase([70], (2, 4, 16, 32, 4))
    heads, ops = case.heads, get_ops("reference")
    mixed, found = case.computed(ops, None, torch.arange(70), Layout.packed([70]))
    x, b, c = mixed.split((128, 32, 32), -1)

    def chunked(least: float) -> Tensor:
        out: Tensor = theirs.mamba2_chunk_scan(
            x.view(1, 70, 4, 32), case.gates[None], -heads.decay.exp(), b.view(1, 70, 2, 16),
            c.view(1, 70, 2, 16), chunk_size=16, D=heads.skip, dt_bias=heads.step_bias,
            dt_softplus=True, dt_limit=(least, float("inf")),
        )  # fmt: skip
        return out[0]

    largest = float(found.abs().max())
    torch.testing.assert_close(found, chunked(LEAST), rtol=1e-4, atol=1e-5 * largest)
    assert not torch.allclose(found, chunked(0.0), rtol=1e-4, atol=1e-5 * largest)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_cpp_is_the_reference_bit_for_bit(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    """Whole sequences, chunks with rows of others between them, single rows; and no store. The
    control has another bias."""
    native, reference = get_ops("native"), get_ops("reference")
    for page_size in (1, 16):
        case = MambaCase([38, 1, 4], sizes, dtype, page_size)
        steps: list[Step] = [{0: 35, 2: 2}, {0: 1, 1: 1, 2: 1}, {2: 1, 0: 1}, {0: 1}]
        wanted = case.divided(reference, steps)
        assert alike(case.divided(native, steps), wanted)
        with threads(5):  # more than heads: each has some columns
            assert alike(case.divided(native, steps), wanted)
    rows, layout = torch.arange(len(case.x)), Layout.packed(case.lengths)
    assert alike(case.computed(native, None, rows, layout), wanted[:2])
    case.bias = case.bias + 0.02
    assert not alike(case.computed(native, None, rows, layout), wanted[:2])


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_how_tokens_are_divided(backend: str, dtype: torch.dtype) -> None:
    """Random mixtures and chunks, and token by token: results, and all that the store has in the
    end. The control: a state of another page."""
    ops, random = get_ops(backend), torch.Generator().manual_seed(3)
    for page_size in PAGE_SIZES:
        case = MambaCase([19, 7, 33], dtype=dtype, page_size=page_size, seed=page_size)
        wanted = case.at_once(ops)
        for most in (3, 12, 40):
            assert alike(case.divided(ops, case.random_steps(random, most)), wanted)
        alone: list[Step] = [{s: 1} for s in (2, 0, 1) for _ in range(case.lengths[s])]
        assert alike(case.divided(ops, alone), wanted)
    case = MambaCase([19, 7], page_size=3)
    moved = case.divided(ops, [{0: 5, 1: 7}, {0: 14}], table=case.table.roll(1, 1))
    assert same(moved[1][:5], case.at_once(ops)[1][:5])
    assert not same(moved[1][5], case.at_once(ops)[1][5])


@needs_native
@pytest.mark.parametrize("sizes", SIZES)
def test_gradients_in_cpp_are_as_near_to_float64_as_the_reference(
    sizes: tuple[int, int, int, int, int],
) -> None:
    """As those of the delta rule (`test_delta.py`). The control: without one row's gradient."""
    assert_near_to_float64(MambaCase([50, 1, 16, 17], sizes), without=40)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_in_cpp_repeat(dtype: torch.dtype) -> None:
    """On one thread and on more. The control: another last bit."""
    native, case = get_ops("native"), MambaCase([50, 1, 17], (2, 4, 32, 80, 4), dtype)
    dout = torch.randn(len(case.x), 4, 80, generator=torch.Generator().manual_seed(2)).to(dtype)
    with threads(1):
        wanted = all_gradients(case, native, dout)
    for count in (2, 3):
        with threads(count):
            assert alike(all_gradients(case, native, dout), wanted)
    case.x[40, 3] = torch.nextafter(case.x[40, 3], torch.tensor(9.0, dtype=dtype))
    assert not any(same(a, b) for a, b in zip(all_gradients(case, native, dout)[:2], wanted))
