"""On a GPU, at the width of real models: what the engine records is what the learner computes, bit
for bit.

Prompts of mixed lengths, in chunks, sharing prefixes, with so few pages that sequences are
preempted, and decoding from CUDA graphs. Two layers, since every layer is the same code; the whole
vocabulary, since the head is not.
"""

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.common import random_model
from benchmarks.gpu.shapes import SHAPES
from isobit import Engine, Model, Sampling
from isobit.engine.types import Completion, EngineSize

from ..kernels.helpers import computed, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_LENGTHS = (1, 2, 7, 31, 32, 33, 63, 64, 65, 127, 129, 500, 1500)


def _model(name: str, precision: str) -> Model:
    return random_model(replace(SHAPES[name], num_layers=2), precision)


def _prompts(model: Model) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    size = model.config.vocab_size
    return [torch.randint(0, size, (length,), generator=generator).tolist() for length in _LENGTHS]


def _generate(
    model: Model, new_tokens: int = 24, kv_pages: int = 320, **options: int
) -> list[Completion]:
    size = EngineSize(kv_pages, 16, max_batch_tokens=700, max_sequences=40)
    engine = Engine(model, size, **options)
    groups = engine.generate(_prompts(model), Sampling(4, new_tokens, seed=3, ignore_eos=True))
    engine.integrity()
    found = [completion for group in groups for completion in group]
    assert computed(torch.cat([torch.tensor(c.logprobs) for c in found]))
    return found


def _differing(completions: list[Completion], learner: Model) -> int:
    found = learner.logprobs([c.prompt_token_ids + c.token_ids for c in completions])
    pairs = [
        (f[len(c.prompt_token_ids) - 1 :], torch.tensor(c.logprobs))
        for f, c in zip(found, completions)
    ]
    return sum(not same(a, b) for own, recorded in pairs for a, b in zip(own, recorded))


@pytest.mark.parametrize("precision", ["fp8", "fp8-unified", "bf16"])
@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-8B", "Qwen3-30B-A3B"])
def test_zero_bits_differ(name: str, precision: str) -> None:
    model = _model(name, precision)
    assert _differing(_generate(model), model) == 0


def test_tokens_do_not_depend_on_the_batch() -> None:
    model = _model("Qwen3-0.6B", "fp8")
    wanted = [(c.token_ids, c.logprobs) for c in _generate(model)]
    for options in (
        {"max_sequences": 3},
        {"max_batch_tokens": 4096, "kv_pages": 4000},
        {"max_batch_tokens": 64},
    ):
        assert [(c.token_ids, c.logprobs) for c in _generate(model, **options)] == wanted


def test_a_bf16_learner_and_stale_weights_differ() -> None:
    """The controls."""
    model = _model("Qwen3-0.6B", "fp8")
    completions = _generate(model)
    assert _differing(completions, model.under("bf16")) > 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    model.sync()
    assert _differing(completions, model) > 0


def test_after_an_update_the_bits_agree_again() -> None:
    model = _model("Qwen3-0.6B", "fp8")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    model.sync()
    assert _differing(_generate(model), model) == 0
