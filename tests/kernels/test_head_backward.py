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
