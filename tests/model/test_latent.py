"""Multi-head latent attention: what is read of published files, what a cache holds of it, and what
is refused. Logits, gradients and bits are compared where those of all families are
(`test_model.py`, `tests/engine/test_architectures.py`)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isobit.config import load_sft_config
from isobit.engine.engine import Engine
from isobit.errors import IsobitError
from isobit.model import Model
from tests.models import tiny_model

from .helpers import directory, tokens


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    """Those after the last. One that the model has not is refused where it is none of them."""
    _, path = directory(tmp_path, "deepseek-v3")
    ids = tokens(20)
    before = Model.load(path, "float32").logprobs([ids])[0]
    tensors = load_file(path / "model.safetensors")
    more = {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}
    save_file(tensors | more, path / "model.safetensors")
    assert torch.equal(Model.load(path, "float32").logprobs([ids])[0], before)
    more = {"model.layers.2.eh_proj.weight": torch.ones(2, 2)}
    save_file(tensors | more, path / "model.safetensors")
    with pytest.raises(IsobitError, match=r"layers\.2\.eh_proj\.weight is not part of"):
        Model.load(path, "float32")


def test_a_cache_holds_expanded_heads() -> None:
    """Keys and values of all heads, as wide as keys: its bytes, which docs/decisions/model.md
    names."""
    model = tiny_model("bf16", "deepseek_v3")
    latent, layers, heads = model.config.latent, model.config.num_layers, model.config.num_heads
    assert latent is not None
    engine = Engine(model, kv_pages=4, page_size=16)
    assert engine.kv_bytes_per_token == layers * heads * 2 * latent.head_dim * 2


def test_a_model_of_it_is_not_made_from_scratch(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "model: {init: {family: deepseek_v3, num_experts: 4}}\ntask: {name: arithmetic}\n"
        "out: runs/base\n"
    )
    with pytest.raises(IsobitError, match="deepseek_v3 has latent attention, whose sizes"):
        load_sft_config(tmp_path / "base.yaml")
