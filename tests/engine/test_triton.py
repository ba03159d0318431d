"""What the engine records is what the learner computes, bit for bit, with the Triton kernels: in the interpreter where
there is no GPU. Real sizes: tests/gpu."""

import pytest
import torch

from isobit import Engine, Model, Sampling
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


def _differing(model: Model, learner: Model) -> int:
    """Tokens whose recorded log-probability is not the learner's: prompts of several lengths, in chunks, few pages."""
    prompts = [[3, 4, 5, 6, 7, 8, 9], [5], [6, 7, 8]]
    engine = Engine(model, kv_pages=9, page_size=4, max_batch_tokens=5, max_sequences=4)
    groups = engine.generate(prompts, Sampling(2, 4, seed=1, ignore_eos=True))
    engine.integrity()
    completions = [c for group in groups for c in group]
    found = learner.logprobs([c.prompt_token_ids + c.token_ids for c in completions])
    differing = 0
    for completion, logprobs in zip(completions, found):
        own = logprobs[len(completion.prompt_token_ids) - 1 :]
        assert own.numel() == len(completion.token_ids) == 4
        differing += sum(not same(a, b) for a, b in zip(own, torch.tensor(completion.logprobs)))
    return differing


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp8", "fp8-unified", "bf16"])
def test_zero_bits_differ(precision: str) -> None:
    model = _model(precision)
    assert get_ops("triton").backend == model.ops.backend == "triton"
    assert _differing(model, model) == 0


@pytest.mark.slow
def test_other_weights_and_a_bf16_learner_differ() -> None:
    """The controls."""
    model = _model("fp8")
    assert _differing(model, _model("fp8", seed=1)) > 0
    assert _differing(model, model.under("bf16")) > 0
