"""What the engine records is what the learner computes, bit for bit, with the Triton kernels: in the interpreter where
there is no GPU. Real sizes: tests/gpu."""

from functools import lru_cache

import pytest
import torch

from isobit import Completion, Engine, Model, Sampling
from isobit.kernels import get_ops
from isobit.model import ModelConfig, Tokenizer

from ..kernels.helpers import same

_ALPHABET = "0123456789+-*="


def _model(precision: str, seed: int = 0, **sizes: int) -> Model:
    tokenizer = Tokenizer.characters(_ALPHABET)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2}
    config = ModelConfig(
        family="qwen3",
        vocab_size=tokenizer.vocab_size,
        **{**shape, "head_dim": 16, "max_positions": 64, **sizes},
        qk_norm=True,
        tie_embeddings=True,
        eos_ids=tokenizer.eos_ids,
    )
    return Model.init(config, tokenizer, precision, seed, "triton")


@lru_cache
def _sampled(precision: str) -> tuple[Model, list[Completion]]:
    """A model and its completions: prompts of several lengths, in chunks, few pages."""
    model = _model(precision)
    assert get_ops("triton").backend == model.ops.backend == "triton"
    engine = Engine(model, kv_pages=7, page_size=4, max_batch_tokens=5, max_sequences=3)
    groups = engine.generate([[3, 4, 5, 6, 7, 8, 9], [5]], Sampling(2, 4, seed=1, ignore_eos=True))
    engine.integrity()
    return model, [c for group in groups for c in group]


def _differing(learner: Model, completions: list[Completion]) -> int:
    """Tokens whose recorded log-probability is not the learner's."""
    differing = 0
    for completion, logprobs in zip(
        completions, learner.logprobs([c.prompt_token_ids + c.token_ids for c in completions])
    ):
        own = logprobs[len(completion.prompt_token_ids) - 1 :]
        assert own.numel() == len(completion.token_ids) == 4
        differing += sum(not same(a, b) for a, b in zip(own, torch.tensor(completion.logprobs)))
    return differing


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp8", "fp8-unified", "bf16"])
def test_zero_bits_differ(precision: str) -> None:
    assert _differing(*_sampled(precision)) == 0


@pytest.mark.slow
def test_other_weights_and_a_bf16_learner_differ() -> None:
    """The controls."""
    model, completions = _sampled("fp8")
    assert _differing(_model("fp8", seed=1), completions) > 0
    assert _differing(model.under("bf16"), completions) > 0
