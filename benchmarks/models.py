"""Random models of the benchmarks, as Hugging Face directories, so that every contestant loads the
same weights."""

import string
from pathlib import Path

from isobit import Model
from isobit.model import Experts, ModelConfig, Tokenizer

_CHARACTERS = string.digits + string.ascii_letters + "+-*= ."


def tokenizer() -> Tokenizer:
    """Of single characters."""
    return Tokenizer.characters(_CHARACTERS)


def save_model(
    directory: Path,
    hidden: int,
    layers: int,
    vocabulary: int,
    positions: int = 512,
    experts: int = 0,
    per_token: int = 2,
) -> Path:
    """A Qwen3 of random weights with heads of 64 (32 if that would leave fewer than four).

    With `experts` a Qwen3-MoE, of which `per_token` experts together are as wide as the dense
    model's MLP.
    """
    known = tokenizer()
    head = 64 if hidden >= 256 else 32
    config = ModelConfig(
        family="qwen3_moe" if experts else "qwen3",
        vocab_size=max(vocabulary, known.vocab_size),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_layers=layers,
        num_heads=hidden // head,
        num_kv_heads=hidden // head,
        head_dim=head,
        qk_norm=True,
        tie_embeddings=True,
        max_positions=positions,
        eos_ids=known.eos_ids,
        experts=Experts(experts, per_token, 3 * hidden // per_token) if experts else None,
    )
    Model.init(config, known, "float32", seed=0).save(directory)
    return directory
