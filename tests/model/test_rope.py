"""Rotary tables against `transformers`."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from isobit.errors import IsobitError
from isobit.model import Model, Rope, Tokenizer
from tests.models import ALPHABET

from .helpers import logits, oracle, oracle_logits, tokens

_HEAD_DIM, CONTEXT = 64, 16384


def _rope(values: dict) -> Rope:
    return Rope.from_hf(values, "config.json", theta=10000.0, max_positions=64)


_FACTORS = {
    "short_factor": [1.0 + i / 40 for i in range(_HEAD_DIM // 2)],
    "long_factor": [1.0 + i for i in range(_HEAD_DIM // 2)],
}
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
    "longrope": {"original_max_position_embeddings": 4096, **_FACTORS},
    "longrope-attention": {
        "original_max_position_embeddings": 4096,
        "factor": 2.0,
        "attention_factor": 1.5,
        **_FACTORS,
    },
}


def _oracle(kind: str, parameters: dict) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [head_dim / 2] and attention factor of `transformers`."""
    config = transformers.LlamaConfig(
        hidden_size=4 * _HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": kind, "rope_theta": 50000.0, **parameters},
    )
    if kind == "default":
        module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        return module.inv_freq, module.attention_scaling
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=CONTEXT)


@pytest.mark.parametrize("name", ["default", *SCALINGS])
def test_tables_are_those_of_transformers(name: str) -> None:
    kind, parameters = name.split("-")[0], SCALINGS.get(name, {})
    values = {"rope_theta": 50000.0, "max_position_embeddings": CONTEXT}
    if kind != "default":
        values["rope_scaling"] = {"rope_type": kind, **parameters}
    cos, sin = _rope(values).tables(300, _HEAD_DIM, CONTEXT if kind == "longrope" else 0)
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


@pytest.mark.parametrize(("context", "length"), [(64, 20), (64, 40), (32, 20)])
def test_longrope_is_chosen_by_the_context(context: int, length: int) -> None:
    """A model whose context is above the original length turns short sequences by the long factors
    too, where transformers takes the short ones; its own where they are of one side. Controls: the
    other list is far off."""
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 32, **_FACTORS}
    given = transformers.LlamaConfig(
        hidden_size=4 * _HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=context,
        rope_parameters={"rope_theta": 50000.0, **scaling},
    )
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(given)
    theirs = module(torch.zeros(1), torch.arange(length).unsqueeze(0))[0][0, :, : _HEAD_DIM // 2]
    rope = _rope({"rope_theta": 50000.0, "rope_scaling": scaling})
    ours, other = (rope.tables(length, _HEAD_DIM, each)[0] for each in (context, 96 - context))
    assert rope.is_long(context) == (context == 64)
    one_side = (context > 32) == (length > 32)
    assert bool(float((ours - theirs).abs().max()) < 1e-4) == one_side
    assert float((ours - other).abs().max()) > 0.1


def test_the_context_of_longrope_is_the_models(tmp_path: Path) -> None:
    """A Phi-3 whose config.json has a context of the original length, and the factor of the longer
    one, is the model with short factors, and the longer one's attention factor."""
    model, sequence = oracle("phi3-longrope", original_max_position_embeddings=32), tokens(30)
    wanted = oracle_logits(model, sequence)
    model.save_pretrained(tmp_path)
    Tokenizer.characters(ALPHABET).save(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    long = Model.load(tmp_path, "float32", "reference", "exact")
    assert float((logits(long, sequence) - wanted).abs().max()) > 0.01
    said["rope_parameters"]["factor"] = (
        said["max_position_embeddings"] / said["original_max_position_embeddings"]
    )
    said["max_position_embeddings"] = said["original_max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(said))
    short = Model.load(tmp_path, "float32", "reference", "exact")
    assert float((logits(short, sequence) - wanted).abs().max()) < 1e-4


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
            "unsupported rope scaling 'dynamic'.*default, linear, llama3, yarn, longrope",
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
