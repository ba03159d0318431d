"""Tiny random models that read images, by `transformers`, and what these make of pictures."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from isobit.model import Model, Tokenizer
from isobit.model.images.bank import Axes, Bank, Image
from tests.models import ALPHABET

from .helpers import randomize

VOCABULARY, IMAGE = 64, 61
_IDS = {"vision_start_token_id": 62, "vision_end_token_id": 63, "video_token_id": 60}
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 8,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
}
_POSITIONS = {"num_position_embeddings": 64}
_DEEP = {**_POSITIONS, "deepstack_visual_indexes": [0, 1]}
_MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_ROPE = {"rope_type": "default", "rope_theta": 300.0}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}


def _axes(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {**_ROPE, "mrope_section": list(sections), **more}}


_WINDOWS = {"window_size": 32, "fullatt_block_indexes": [1]}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], Axes | None]] = {
    "qwen3_vl": ("Qwen3VL", {"head_dim": 32, **_axes(6, 5, 5)}, _DEEP, Axes((6, 5, 5), True)),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {"head_dim": 32, **_MOE, **_axes(6, 5, 5), "tie_word_embeddings": False},
        _DEEP,
        Axes((6, 5, 5), True),
    ),
    "qwen3_5": (
        "Qwen3_5",
        {"head_dim": 64, **_LINEAR, **_axes(3, 3, 2, partial_rotary_factor=0.25)},
        _POSITIONS,
        Axes((3, 3, 2), True),
    ),
    "qwen2_5_vl": ("Qwen2_5_VL", _axes(2, 3, 3), _WINDOWS, Axes((2, 3, 3), False)),
    "llava": ("Llava", {"model_type": "qwen2"}, {}, None),
}
"""Name to class prefix in transformers, and what its language model, its tower and its positions
have of their own."""


def seeing(path: Path, name: str) -> Any:
    """A model with random weights, whose images matter, in a directory."""
    prefix, text, vision, _ = KINDS[name]
    tower: dict[str, Any] = {**_VISION, **vision}
    more: dict[str, Any] = {**_IDS, "image_token_id": IMAGE}
    if name == "llava":
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32}
        tower = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 8, **sizes}
        tower["model_type"] = "siglip_vision_model"
        more = {"vision_feature_select_strategy": "full", "image_token_index": IMAGE}
    config = getattr(transformers, f"{prefix}Config")(
        text_config={**_TEXT, **text}, vision_config=tower, tie_word_embeddings=False, **more
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).float().eval()
    randomize(model, 11, config.text_config.model_type)
    model.save_pretrained(path)
    Tokenizer.characters(ALPHABET).save(path)
    return model


def pixels(name: str, seed: int, height: int, width: int) -> dict[str, Tensor]:
    """A picture of `height` x `width` patches, as a processor gives it."""
    generator = torch.Generator().manual_seed(seed)
    if name == "llava":
        return {"pixel_values": torch.randn(1, 3, 32, 32, generator=generator)}
    patches = torch.randn(height * width, 3 * 2 * 8 * 8, generator=generator)
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, height, width]])}


def bank_of(name: str) -> Bank:
    """An empty one."""
    return Bank(VOCABULARY, IMAGE, KINDS[name][3])


@torch.no_grad()
def put(bank: Bank, theirs: Any, picture: dict[str, Tensor]) -> Image:
    """The image of a picture, in a bank."""
    features = theirs.model.get_image_features(**picture, return_dict=True)
    rows = [features.pooler_output, *(getattr(features, "deepstack_features", None) or ())]
    grid = picture.get("image_grid_thw")
    own = None if grid is None else (int(grid[0, 1]) // 2, int(grid[0, 2]) // 2)
    return bank.add([_flat(row) for row in rows], own)


def _flat(rows: Any) -> Tensor:
    only = rows[0] if isinstance(rows, (list, tuple)) else rows
    return only.reshape(-1, only.shape[-1])


@cache
def words(seed: int, count: int) -> list[int]:
    """Tokens of text."""
    return np.random.default_rng(seed).integers(3, 59, count).tolist()


def flat(*parts: Any) -> list[int]:
    """The ids of texts and images in turn."""
    return [token for part in parts for token in (part.ids if isinstance(part, Image) else part)]


def with_images(
    path: Path, precision: str, backend: str, theirs: Any, name: str
) -> tuple[Model, Image, Image]:
    """A model of a directory with two images in its bank."""
    model, bank = Model.load(path, precision, backend), bank_of(name)
    model.transformer.images = bank
    first, second = (put(bank, theirs, pixels(name, *size)) for size in ((1, 6, 8), (2, 10, 4)))
    return model, first, second
