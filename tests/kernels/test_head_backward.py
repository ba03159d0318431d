"""The native backward of the output head has the bits of the definition over the same products."""

from typing import Any

import pytest
import torch

from isobit.kernels import get_ops
from isobit.kernels.head import definition

from .helpers import draw, same

OPS = get_ops("native", "bitwise")
ROWS, CHANNELS, VOCABULARY = 37, 64, 523


def given(temperature: float) -> Any:
    hidden, weight = draw(1, ROWS, CHANNELS), draw(2, VOCABULARY, CHANNELS)
    tokens = torch.arange(ROWS) * 13 % VOCABULARY
    tokens[:2] = torch.tensor([0, VOCABULARY - 1])
    return draw(3, ROWS, dtype=torch.float32), hidden, weight, tokens, temperature


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_is_the_definition_bit_for_bit(temperature: float) -> None:
    """The control: another temperature."""
    found = OPS.head_backward(*given(temperature))
    wanted = definition.head_backward(OPS, *given(temperature))
    assert same(found[0], wanted[0])
    assert same(found[1], wanted[1])
    assert not same(found[1], OPS.head_backward(*given(0.9))[1])


def test_the_weights_gradient_is_added_or_left_out() -> None:
    before = draw(4, VOCABULARY, CHANNELS, dtype=torch.float32)
    alone, into = OPS.head_backward(*given(1.0)), before.clone()
    added = OPS.head_backward(*given(1.0), into=into)
    assert added[1] is into
    assert same(into, before + alone[1])
    without = OPS.head_backward(*given(1.0), trained=False)
    assert without[1] is None
    assert same(without[0], alone[0])


@pytest.mark.parametrize("consistency", ["bitwise", "exact"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kept_logits_give_the_bits_of_chunks_in_turn(temperature: float, consistency: str) -> None:
    """The control: other chunks, whose sums are rounded elsewhere."""
    ops = get_ops("native", consistency)
    dlogprobs, hidden, weight, tokens, _ = given(temperature)
    before = draw(4, VOCABULARY, CHANNELS, dtype=torch.float32)

    def kept(size: int, **options: Any) -> Any:
        logits = [ops.product(x, weight, None, torch.float32) for x in hidden.split(size)]
        arguments = (dlogprobs, logits, hidden, weight, tokens, temperature)
        return ops.head_backward_kept(*arguments, **options)

    def in_turn(size: int) -> Any:
        dhidden, dweight = [], None
        parts = (dlogprobs.split(size), hidden.split(size), tokens.split(size))
        for dy, x, chosen in zip(*parts):
            one, dweight = ops.head_backward(dy, x, weight, chosen, temperature, into=dweight)
            dhidden.append(one)
        return torch.cat(dhidden), dweight

    wanted = in_turn(16)
    assert all(same(a, b) for a, b in zip(kept(16), wanted))
    assert same(kept(16, from_zero=True)[1], wanted[1] + 0.0)
    into = before.clone()
    assert kept(16, into=into)[1] is into
    assert same(into, before + wanted[1])
    assert kept(16, trained=False)[1] is None
    assert not same(kept(8)[1], wanted[1])


def test_kept_logits_with_a_gradient_of_entropies() -> None:
    dlogprobs, hidden, weight, tokens, temperature = given(0.7)
    of_entropy = draw(5, ROWS, dtype=torch.float32)
    logits = [OPS.product(hidden, weight, None, torch.float32)]
    arguments = hidden, weight, tokens, temperature, of_entropy
    found = OPS.head_backward_kept(dlogprobs, logits, *arguments)
    assert all(same(a, b) for a, b in zip(found, OPS.head_backward(dlogprobs, *arguments)))


def test_what_cpp_does_not_cover_goes_by_the_definition() -> None:
    """Entropy's gradient, and float32."""
    of_entropy = draw(5, ROWS, dtype=torch.float32)
    dlogprobs, hidden, weight, tokens, temperature = given(0.7)
    narrow = (dlogprobs, hidden, weight, tokens, temperature, of_entropy)
    wide = (dlogprobs, hidden.float(), weight.float(), tokens, temperature)
    for arguments in (narrow, wide):
        found = OPS.head_backward(*arguments)
        wanted = definition.head_backward(OPS, *arguments)
        assert all(same(a, b) for a, b in zip(found, wanted))
