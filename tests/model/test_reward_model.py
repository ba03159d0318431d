"""Reward models against `transformers`' sequence classification, and what is kept of a frozen
model."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from isobit.errors import IsobitError
from isobit.model import Model, RewardModel, Tokenizer
from isobit.model.hub.checkpoint import read_weights
from tests.models import ALPHABET

from .helpers import directory, randomize, tokens

_SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEQUENCES = [tokens(1, 1), tokens(23, 2), tokens(9, 3), tokens(40, 4)]


def classifier(path: Path, prefix: str, labels: int = 1, **changes: Any) -> Any:
    values = {
        **_SIZES,
        "num_labels": labels,
        **({"head_dim": 12} if prefix in ("Qwen3", "Gemma3Text") else {}),
        **changes,
    }
    config = getattr(transformers, f"{prefix}Config")(**values)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{prefix}ForSequenceClassification")(config).float().eval()
    randomize(model, 3)
    model.save_pretrained(path)
    Tokenizer.characters(ALPHABET).save(path)
    return model


@pytest.mark.parametrize("prefix", ["Llama", "Qwen2", "Qwen3", "Gemma3Text"])
def test_scores_of_transformers(tmp_path: Path, prefix: str) -> None:
    theirs = classifier(tmp_path, prefix)
    with torch.no_grad():
        wanted = [float(theirs(torch.tensor([ids])).logits[0, 0]) for ids in SEQUENCES]
    assert max(wanted) - min(wanted) > 1
    found = RewardModel.load(tmp_path, "float32").score(SEQUENCES)
    assert found == pytest.approx(wanted, abs=1e-4)
    low = RewardModel.load(tmp_path, "fp8").score(SEQUENCES)
    assert low == pytest.approx(wanted, abs=0.15 * (max(wanted) - min(wanted)))
    assert low != found


def test_a_score_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    classifier(tmp_path, "Llama")
    model = RewardModel.load(tmp_path, "fp8")
    together = model.score(SEQUENCES)
    assert together == [model.score([ids])[0] for ids in SEQUENCES]
    assert model.score([]) == []


def test_only_working_weights_are_kept(tmp_path: Path) -> None:
    classifier(tmp_path, "Llama", hidden_size=128, intermediate_size=256)
    linear = sum(
        tensor.numel() for name, tensor in read_weights(tmp_path).items() if "proj" in name
    )
    fp8, bf16 = RewardModel.load(tmp_path, "fp8"), RewardModel.load(tmp_path, "bf16")
    assert fp8.transformer.parameters == {}
    assert bf16.nbytes() - fp8.nbytes() == pytest.approx(
        linear, rel=0.01
    )  # a byte an element, but for the scales


def test_a_frozen_model_answers_as_before_and_cannot_be_synced(tmp_path: Path) -> None:
    _, path = directory(tmp_path, "qwen3")
    model, frozen = Model.load(path, "fp8"), Model.load(path, "fp8")
    frozen.transformer.freeze()
    assert torch.equal(model.logprobs([tokens(20)])[0], frozen.logprobs([tokens(20)])[0])
    assert frozen.memory()["masters"] == 0
    assert frozen.memory()["rollout"] == model.memory()["rollout"]
    with pytest.raises(AssertionError, match="frozen"):
        frozen.sync()


def test_what_is_no_reward_model_is_said(tmp_path: Path) -> None:
    classifier(tmp_path / "two", "Llama", labels=2)
    with pytest.raises(IsobitError, match=r"score\.weight has shape \(2, 48\), expected \(1, 48\)"):
        RewardModel.load(tmp_path / "two")
    directory(tmp_path / "causal", "llama")
    with pytest.raises(
        IsobitError, match=r"no tensor score.weight: LlamaForCausalLM is no sequence classification"
    ):
        RewardModel.load(tmp_path / "causal")
    with pytest.raises(IsobitError, match="no such directory"):
        RewardModel.load(tmp_path / "nothing")
    classifier(tmp_path / "one", "Llama")
    with pytest.raises(IsobitError, match="calibrated KV cache; use e4m3"):
        RewardModel.load(tmp_path / "one", "fp8[kv_cache=e4m3-calibrated]")
    with pytest.raises(IsobitError, match="sequence 1 has 65 tokens, expected 1 to 64"):
        RewardModel.load(tmp_path / "one").score([[3], [3] * 65])
    Tokenizer.characters(ALPHABET + "".join(map(chr, range(0x400, 0x440)))).save(tmp_path / "one")
    with pytest.raises(IsobitError, match=r"reward model .*one: the tokenizer has ids up to "):
        RewardModel.load(tmp_path / "one")
