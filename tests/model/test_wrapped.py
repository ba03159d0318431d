"""Models around a language model, to read images, as they are published: their text is taken, with
the log-probabilities that transformers gives the whole; others are refused by name."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file

from isobit.errors import IsobitError
from isobit.model import Model, ModelConfig, Tokenizer
from isobit.model.families import FAMILIES
from isobit.model.hub.checkpoint import read_json, write_json
from tests.models import ALPHABET

from .helpers import logits, oracle, oracle_logits, randomize, tokens

_SEEING = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "head_dim": 8,
}
_AXES = {"rope_type": "default", "rope_theta": 300.0, "mrope_section": [2, 2, 2]}
PUBLISHED = {
    "gemma3": ("Gemma3", "gemma3"),
    "gemma4": ("Gemma4", "gemma4"),
    "gemma4-experts": ("Gemma4", "gemma4-experts"),
    "gemma4-small": ("Gemma4", "gemma4-small"),
    "gemma4_unified": ("Gemma4Unified", "gemma4-unified"),
    "mistral3": ("Mistral3", "mistral"),
    "mistral3-grown": ("Mistral3", "ministral3"),
    "llava": ("Llava", "llama"),
    "llava_next": ("LlavaNext", "mistral"),
    "llava_onevision": ("LlavaOnevision", "qwen2-tied"),
    "internvl": ("InternVL", "qwen3"),
    "qwen3_5": ("Qwen3_5", "qwen3.5"),
    "qwen3_5_moe": ("Qwen3_5Moe", "qwen3.5-moe"),
    "qwen2_vl": ("Qwen2VL", "qwen2"),
    "qwen2_5_vl": ("Qwen2_5_VL", "qwen2"),
    "qwen3_vl": ("Qwen3VL", "qwen3"),
    "qwen3_vl_moe": ("Qwen3VLMoe", "qwen3-moe"),
}
"""Name to class prefix in transformers, and the language model inside."""


def published(path: Path, name: str, **changes: Any) -> Any:
    """A model of text and images with random weights, in a directory."""
    prefix, inner = PUBLISHED[name]
    text = oracle(inner, **changes).config
    tied, values = text.tie_word_embeddings, text.to_dict()
    if "_vl" in name:
        values |= {"model_type": f"{name}_text", "rope_parameters": _AXES}
    config = getattr(transformers, f"{prefix}Config")(
        text_config=values,
        vision_config=_vision(prefix, text.hidden_size),
        tie_word_embeddings=tied,
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).float().eval()
    randomize(model, 11, text.model_type)
    model.save_pretrained(path)
    Tokenizer.characters(ALPHABET).save(path)
    return model


def _vision(prefix: str, hidden: int) -> dict[str, Any]:
    if prefix == "Gemma4Unified":  # it has no tower: patches become rows by one product
        sizes = {"patch_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 16}
        return {"model_type": "gemma4_unified_vision", **sizes}
    if prefix.startswith("Qwen"):
        sizes = {"depth": 1, "num_heads": 2, "out_hidden_size": hidden}
        if prefix.startswith("Qwen2VL"):
            sizes |= {"embed_dim": 16, "mlp_ratio": 1}
            return {**sizes, "hidden_size": hidden}
        return {"hidden_size": 16, "intermediate_size": 16, **sizes}
    kind = {"Gemma3": "siglip", "LlavaOnevision": "siglip", "Mistral3": "pixtral"}
    kind |= {"Llava": "clip", "LlavaNext": "clip", "Gemma4": "gemma4"}
    names = {"siglip": "siglip_vision_model", "clip": "clip_vision_model"}
    name = {**names, "gemma4": "gemma4_vision"}.get(
        kind.get(prefix, ""), kind.get(prefix, "internvl_vision")
    )
    sizes = _SEEING if name != "internvl_vision" else {**_SEEING, "image_size": [28, 28]}
    return {"model_type": name, **sizes}


@pytest.mark.parametrize("naming", ["transformers 4", "transformers 5"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_text_of_a_model_that_sees_is_taken(name: str, naming: str, tmp_path: Path) -> None:
    theirs, folder = published(tmp_path / "published", name), tmp_path / "published"
    rename(folder, naming)
    values = read_json(folder / "config.json")
    assert values["model_type"] == name.partition("-")[0]
    mine, sequence = Model.load(folder, "float32"), tokens(50, 3)
    wanted = oracle_logits(theirs, sequence)
    close = 2e-4 if name.startswith("qwen3_5") else 1e-4  # states are summed in another order
    assert float((logits(mine, sequence) - wanted).abs().max()) <= close
    assert mine.config.wrapped


def rename(folder: Path, naming: str) -> None:
    """Name the tensors as one of two versions of transformers does."""
    pairs = [
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
    ]
    old, new = (0, 1) if naming == "transformers 5" else (1, 0)
    found, tensors = {}, load_file(folder / "model.safetensors")
    if any(key.startswith("visual.") for key in tensors):  # as published, or as modules are named
        if naming == "transformers 4":
            return
        pairs = [("model.", "model.language_model."), ("visual.", "model.visual.")]
    for key, tensor in tensors.items():
        for pair in pairs:
            if key.startswith(pair[old]):
                key = pair[new] + key.removeprefix(pair[old])
                break
        found[key] = tensor
    inside = pairs[0][new]
    assert any(key.startswith(inside) for key in found)
    assert any("vis" in key for key in found)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", [name for name, table in FAMILIES.items() if table.sizes])
def test_sizes_that_are_left_out_are_those_of_transformers(family: str) -> None:
    """As Gemma 3's and Llava's config.json leave out what is their language model's default."""
    values = {
        "model_type": FAMILIES[family].wrappers[0],
        "text_config": {"model_type": family, "hidden_size": 64},
        "vision_config": {},
        "eos_token_id": [5, 6],
    }
    found = ModelConfig.from_hf(values)
    theirs = transformers.AutoConfig.for_model(family, hidden_size=64)
    assert found.hidden_size == 64
    assert found.eos_ids == (5, 6)
    assert (found.vocab_size, found.intermediate_size, found.num_layers, found.num_heads) == (
        theirs.vocab_size,
        theirs.intermediate_size,
        theirs.num_hidden_layers,
        theirs.num_attention_heads,
    )


def test_another_model_inside_is_refused(tmp_path: Path) -> None:
    """Of a model whose text is of no supported family nothing is taken."""
    published(tmp_path, "gemma3")
    values = read_json(tmp_path / "config.json")
    values["text_config"]["model_type"] = "gemma3n_text"
    write_json(tmp_path / "config.json", values)
    with pytest.raises(IsobitError, match="unsupported architecture 'gemma3': a model for images"):
        Model.load(tmp_path)
