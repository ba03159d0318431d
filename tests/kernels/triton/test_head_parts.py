"""How many rows of logits the learner's head holds at a time on a GPU: one place decides, in
multiples of what a library multiplies. The model itself is asked, on PyTorch's meta device."""

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.shapes import SHAPES
from isobit.kernels.backends.triton import TritonOps
from isobit.kernels.matrices import LIBRARY_ROWS
from isobit.kernels.triton.launch import record_launches
from isobit.model.hub.shapes import parameter_shapes
from isobit.model.transformer import Transformer
from isobit.precision import precision_from

META = torch.device("meta")
ROWS = 16384


def backward_parts(vocabulary: int, chunk: int | None = None) -> list[int]:
    """Return the rows of each part of the head's backward, of a learner's `ROWS` tokens; `chunk`
    in place of the model's own choice."""
    config = replace(SHAPES["Qwen3-0.6B"], num_layers=1, hidden_size=128, intermediate_size=128)
    config = replace(config, vocab_size=vocabulary, windows=config.windows[:1])
    shapes = parameter_shapes(config)
    masters = {name: torch.empty(shape, device=META) for name, shape in shapes.items()}
    ops = TritonOps("bitwise", "recorded", META)
    hidden = torch.empty(ROWS, 128, dtype=torch.bfloat16, device=META, requires_grad=True)
    targets = torch.empty(ROWS, dtype=torch.int64, device=META)
    with record_launches() as launches:
        transformer = Transformer(config, precision_from("fp8"), ops, masters)
        transformer.head_logprobs(hidden, targets, chunk=chunk)[0].sum().backward()
    return [x.grid[0] for x in launches if x.kernel.__name__ == "_logits_gradient"]


@pytest.mark.parametrize("vocabulary", [151_936, 128_256, 152_064, 262_144, 32_000])
def test_parts_are_as_large_as_a_library_multiplies(vocabulary: int) -> None:
    """All but the last: what a library leaves of a part would go to another kernel, and each part
    adds to a gradient as large as the head. A part's logits have 1 GiB at most."""
    *parts, last = backward_parts(vocabulary)
    assert sum(parts) + last == ROWS
    assert len(set(parts)) == 1
    assert {rows % LIBRARY_ROWS for rows in (parts[0], last)} == {0}
    assert 2**29 < 4 * parts[0] * vocabulary <= 2**30


def test_the_models_choice_is_what_is_counted() -> None:
    """The control: parts of 1,766 rows, a gibibyte of logits to the byte, are seen as they are, as
    is what was in turn 1,536 and 230 rows when two places decided."""
    assert backward_parts(151_936, chunk=1766) == [1766] * 9 + [490]
    assert backward_parts(151_936) == [1536] * 10 + [1024]
