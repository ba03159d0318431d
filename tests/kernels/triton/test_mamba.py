"""Mamba-2's recurrence, and the bias of the convolution before it, in Triton's kernels: the
reference's values and gradients, and the same bits however tokens are divided. What they share with
the delta rule is in `test_delta.py`."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isobit.kernels import DeltaHeads, Layout
from isobit.kernels.delta import definition as reference
from isobit.kernels.delta.triton import backward as delta_backward
from isobit.kernels.delta.triton import convolution
from isobit.kernels.delta.triton import forward as delta
from isobit.kernels.stores import StateStore

from ..helpers import draw, same
from .helpers import DEVICE
from .test_delta import CHANNELS, DTYPES, LENGTHS, PAGE, SIZES, all_same, allocated, near, weight
from .test_delta import drawn as drawn_with_strengths
from .test_delta import heads as delta_heads

SKIP, LEAST = (0.6, -1.1), 0.02


def heads(device: torch.device | str = DEVICE) -> DeltaHeads:
    return replace(delta_heads(device), skip=torch.tensor(SKIP, device=device), least_step=LEAST)


def bias() -> Tensor:
    return draw(7, CHANNELS, dtype=torch.float32)


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, gates = drawn_with_strengths(dtype, sum(LENGTHS))
    return x, gates[:, SIZES[1] :].contiguous()


def computed(
    x: Tensor, gates: Tensor, store: StateStore | None, layout: Layout
) -> tuple[Tensor, Tensor]:
    layout = layout.to(DEVICE)
    there = weight().to(DEVICE), store, layout, bias().to(DEVICE)
    mixed = convolution.short_convolution(x.to(DEVICE), *there)
    return mixed, delta.delta_rule(mixed, gates.to(DEVICE), heads(), store, layout)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_the_references(dtype: torch.dtype) -> None:
    """Of the convolution, and of the recurrence on what it gave. The controls: two percent off, no
    bias, and the delta rule."""
    (x, gates), layout = drawn(dtype), Layout.packed(LENGTHS, PAGE)
    mixed, found = (each.cpu() for each in computed(x, gates, None, layout))
    assert near(mixed, reference.short_convolution(x, weight(), None, layout, bias()))
    assert not near(mixed, reference.short_convolution(x, weight(), None, layout))
    wanted = reference.delta_rule(mixed, gates, heads("cpu"), None, layout)
    assert near(found, wanted)
    assert not near(1.02 * found, wanted)
    twice = torch.cat((gates, gates), 1)
    assert not near(found, reference.delta_rule(mixed, twice, delta_heads("cpu"), None, layout))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_how_tokens_are_divided(dtype: torch.dtype) -> None:
    """A whole sequence, and chunks and single rows of it over a store; results, and the last state.
    The control: a state five percent off."""
    (x, gates), length = drawn(dtype), LENGTHS[0]
    x, gates, table = x[:length], gates[:length], torch.tensor([[2, 0, 1]], dtype=torch.int32)
    learned = torch.cat(
        [y.flatten(1) for y in computed(x, gates, None, Layout.packed([length]))], 1
    )

    def divided(counts: tuple[int, ...], spoilt: bool) -> tuple[Tensor, Tensor]:
        store, parts, done = allocated(3, dtype), [], 0
        for count in counts:
            layout = Layout.build([count], [done], table, PAGE)
            rows = slice(done, done + count)
            found = computed(x[rows], gates[rows], store, layout)
            parts.append(torch.cat([y.flatten(1) for y in found], 1))
            done += count
            if spoilt:
                store.states.mul_(1.05)
        return torch.cat(parts).cpu(), store.states[1].cpu()

    whole = divided((length,), False)
    for counts in ((3, 1, 1, 1, 5), (4, 4, 3)):
        assert all_same(divided(counts, False), whole)
    assert same(whole[0], learned.cpu())
    assert not same(divided((3, 8), True)[0], whole[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_the_references(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several segments of a sequence, whose last is not whole. The control: gradients two
    percent off."""
    monkeypatch.setattr(delta_backward, "_SEGMENT", 4)
    (x, gates), layout = drawn(dtype), Layout.packed(LENGTHS, PAGE)
    dy, dout = draw(5, len(x), CHANNELS, dtype=dtype), draw(6, len(x), *SIZES[1::2], dtype=dtype)
    there = [each.to(DEVICE) for each in (dy, x, weight(), bias(), dout, gates)]
    laid_out = layout.to(DEVICE)
    given = there[0], there[1], there[2], laid_out, there[3]
    found = convolution.short_convolution_backward(*given)
    wanted = reference.short_convolution_backward(dy, x, weight(), layout, bias())
    found += delta_backward.delta_rule_backward(there[4], there[1], there[5], heads(), laid_out)
    wanted += reference.delta_rule_backward(dout, x, gates, heads("cpu"), layout)
    for ours, theirs in zip(found, wanted, strict=True):
        assert near(ours.cpu(), theirs)
        assert not near(1.02 * ours.cpu(), theirs)
