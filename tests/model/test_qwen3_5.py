"""Qwen3.5 as it is published, with images, and what is taken of it; its states in the pages of an
engine's cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.errors import IsobitError
from isobit.kernels import StateStore, Store
from isobit.model import Model, Tokenizer
from isobit.model.hub.checkpoint import read_json, write_json
from tests.models import ALPHABET, tiny_model

from .helpers import logits, oracle, oracle_logits, randomize, tokens

_SEEING = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
}


def published(path: Path) -> Any:
    """A model of text and images with random weights, saved as Qwen publishes them: the language
    model is inside."""
    text = oracle("qwen3.5", tie_word_embeddings=True).config
    config = transformers.Qwen3_5Config(
        text_config=text.to_dict(), vision_config=_SEEING, tie_word_embeddings=True
    )
    config._attn_implementation = "eager"
    model = transformers.Qwen3_5ForConditionalGeneration(config).float().eval()
    randomize(model, 11)
    model.save_pretrained(path)
    Tokenizer.characters(ALPHABET).save(path)
    return model


def test_the_language_model_of_one_that_sees_is_taken(tmp_path: Path) -> None:
    theirs = published(tmp_path / "published")
    values = read_json(tmp_path / "published" / "config.json")
    assert values["model_type"] == "qwen3_5"
    assert "text_config" in values
    mine, sequence = Model.load(tmp_path / "published", "float32"), tokens(50, 3)
    wanted = oracle_logits(theirs, sequence)
    assert float((logits(mine, sequence) - wanted).abs().max()) <= 2e-4
    mine.save(tmp_path / "text")
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text").float().eval()
    assert type(alone).__name__ == "Qwen3_5ForCausalLM"
    assert float((oracle_logits(alone, sequence) - wanted).abs().max()) <= 1e-5


def test_experts_of_a_layer_in_one_tensor_are_read(tmp_path: Path) -> None:
    """As those that were published have them, the wrapper and its names included; the same weights,
    bit for bit."""
    text, folder = oracle("qwen3.5-moe"), tmp_path / "published"
    vision = transformers.Qwen3_5MoeVisionConfig(**_SEEING)
    config = transformers.Qwen3_5MoeConfig(
        text_config=text.config.to_dict(), vision_config=vision.to_dict()
    )
    config.save_pretrained(folder)
    text.save_pretrained(tmp_path / "text")
    Tokenizer.characters(ALPHABET).save(folder)
    Tokenizer.characters(ALPHABET).save(tmp_path / "text")
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor.detach().clone()
        for name, tensor in text.state_dict().items()
    }
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in tensors
    save_file(tensors | {"mtp.norm.weight": torch.ones(3)}, folder / "model.safetensors")
    together, apart = (Model.load(path, "float32") for path in (folder, tmp_path / "text"))
    for name, master in together.named_parameters().items():
        assert torch.equal(master, apart.named_parameters()[name]), name
    sequence = tokens(30)
    assert float((logits(together, sequence) - oracle_logits(text, sequence)).abs().max()) <= 2e-4


def test_another_tower_is_refused_by_name(tmp_path: Path) -> None:
    """Of a model whose text is of no supported family nothing is taken."""
    published(tmp_path)
    values = read_json(tmp_path / "config.json")
    values["text_config"]["model_type"] = "qwen3_vl_text"
    write_json(tmp_path / "config.json", values)
    with pytest.raises(IsobitError, match="unsupported architecture 'qwen3_5'"):
        Model.load(tmp_path)


def test_a_page_has_the_state_after_its_last_token() -> None:
    """Whoever shares full pages goes on from there; a state that is another's is noticed."""
    assert_goes_on_from_states(tiny_model("fp8", "qwen3_5_text", scale=4.0, num_layers=3))


def assert_goes_on_from_states(model: Model) -> list[Store]:
    """The stores of an engine that shares full pages, of which the control is another state."""
    prompt, sampling = [*range(3, 14), 4, 5, 6], Sampling(max_new_tokens=9, temperature=0.9, seed=2)

    def generate(engine: Engine) -> list[float]:
        return list(engine.generate([prompt], sampling)[0][0].logprobs)

    alone = generate(Engine(model, kv_pages=16, page_size=4))
    engine = Engine(model, kv_pages=16, page_size=4)
    assert generate(engine) == alone
    assert generate(engine) == alone
    assert engine.stats.cached_tokens == 12
    for store in engine.stores:
        if isinstance(store, StateStore):
            store.states.copy_(store.states.flip(0))
    assert generate(engine) != alone
    return engine.stores


def test_states_are_counted_among_the_bytes_of_pages() -> None:
    """Which are larger by default where each has states."""
    hybrid, plain = tiny_model("fp8", "qwen3_5_text"), tiny_model("fp8", "qwen3")
    engine, small = Engine(hybrid, kv_pages=4), Engine(hybrid, kv_pages=4, page_size=16)
    assert (Engine(plain, kv_pages=4).page_size, engine.page_size) == (16, 256)
    linear = hybrid.config.linear
    assert linear is not None
    states = 4 * 4 * 8 * 12 + 2 * 3 * linear.channels  # float32 states, inputs in BF16
    kept = 2 * 2 * (8 + 4) * 256  # INT8 keys and values with their scales, of one layer
    assert engine.kv_bytes == 4 * (states + kept)
    assert small.kv_bytes == 4 * (states + kept // 16)
    assert engine.kv_bytes_per_token == (states + kept) / 256
