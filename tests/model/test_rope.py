"""Rotary tables against `transformers`."""

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from isobit.errors import IsobitError
from isobit.model import Rope

_HEAD_DIM = 64


def _rope(values: dict) -> Rope:
    return Rope.from_hf(values, "config.json", theta=10000.0, max_positions=64)


SCALINGS = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
    "yarn-attention": {
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.5,
    },
    "yarn-mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
    },
    "yarn-clamped": {"factor": 4.0, "original_max_position_embeddings": 4096, "rope_theta": 100.0},
    "yarn-betas": {
        "factor": 16.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
}


def _oracle(kind: str, parameters: dict) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [head_dim / 2] and attention factor of `transformers`."""
    config = transformers.LlamaConfig(
        hidden_size=4 * _HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=16384,
        rope_parameters={"rope_type": kind, "rope_theta": 50000.0, **parameters},
    )
    if kind == "default":
        module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        return module.inv_freq, module.attention_scaling
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


@pytest.mark.parametrize("name", ["default", *SCALINGS])
def test_tables_are_those_of_transformers(name: str) -> None:
    kind, parameters = name.split("-")[0], SCALINGS.get(name, {})
    values = {"rope_theta": 50000.0, "max_position_embeddings": 16384}
    if kind != "default":
        values["rope_scaling"] = {"rope_type": kind, **parameters}
    cos, sin = _rope(values).tables(300, _HEAD_DIM)
    inverse, factor = _oracle(kind, parameters)
    angles = torch.arange(300).unsqueeze(1).double() * inverse.double()
    assert cos.shape == (300, _HEAD_DIM // 2)
    assert cos.dtype == torch.float32
    # transformers has float32 frequencies: an angle of 300 is off by up to 300 * 2**-22
    torch.testing.assert_close(cos.double(), angles.cos() * factor, rtol=0, atol=1e-4)
    torch.testing.assert_close(sin.double(), angles.sin() * factor, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["default", *SCALINGS])
def test_old_and_new_keys_mean_the_same(name: str) -> None:
    kind, parameters = name.split("-")[0], SCALINGS.get(name, {})
    old = {"rope_theta": 7.0, "rope_scaling": {"type": kind, **parameters}}
    new = {"rope_parameters": {"rope_type": kind, "rope_theta": 7.0, **parameters}}
    rope = _rope(new)
    assert _rope(old) == rope
    assert _rope(rope.to_hf()) == rope


def test_a_larger_table_begins_with_the_smaller_one() -> None:
    rope = _rope({"rope_scaling": {"rope_type": "yarn", **SCALINGS["yarn"]}})
    for small, large in zip(rope.tables(17, 20), rope.tables(64, 20)):
        assert torch.equal(small, large[:17])


def test_yarn_without_a_factor_takes_the_ratio_of_the_lengths() -> None:
    values = {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": None,
            "original_max_position_embeddings": 100,
        },
    }
    assert dict(Rope.from_hf(values, "", theta=1e4, max_positions=400).parameters)["factor"] == 4.0


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "dynamic", "factor": 2.0},
            "unsupported rope scaling 'dynamic'.*default, linear, llama3, yarn",
        ),
        ({"rope_type": "linear"}, "rope scaling linear needs factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor must be a number, got '2'"),
        (
            {"rope_type": "llama3", "factor": 2.0, "high_freq_factor": 4.0},
            "llama3 needs low_freq_factor",
        ),
        ({"rope_type": "yarn", "original_max_position_embeddings": 8}, "yarn needs factor"),
        (
            {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 0},
            "original_max_position_embeddings must be above 0, got 0",
        ),
        (
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            "partial rotary embedding is not supported",
        ),
    ],
)
def test_refused(scaling: dict, message: str) -> None:
    with pytest.raises(IsobitError, match=message):
        _rope({"rope_scaling": scaling})
