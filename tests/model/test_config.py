"""config.json: what is read, what is written, what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers

from isobit.errors import IsobitError
from isobit.model import ModelConfig
from isobit.model.families import FAMILIES as FAMILY_TABLES
from isobit.model.hub.shapes import parameter_shapes
from isobit.options.families import UNREAD

from .helpers import FAMILIES, oracle

_LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


_QWEN2 = _LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2}


def test_defaults_of_a_short_config() -> None:
    config = ModelConfig.from_hf(_LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.max_positions) == (4, 6, 2048)
    assert not config.tie_embeddings
    assert (config.eos_ids, config.bos_id) == ((), None)


_QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "head_dim": 256,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "use_sliding_window": False,
}
_GLM_AIR = {
    "model_type": "glm4_moe",
    "vocab_size": 151552,
    "hidden_size": 4096,
    "head_dim": 128,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": False,
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "moe_intermediate_size": 1408,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "eos_token_id": [151329, 151336, 151338],
    "pad_token_id": 151329,
}
_MINIMAX_M2 = {
    "model_type": "minimax_m2",
    "vocab_size": 200064,
    "hidden_size": 3072,
    "head_dim": 128,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 196608,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "sliding_window": None,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "attn_type_list": [1] * 62,
    "mlp_intermediate_size": 8192,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
    "num_mtp_modules": 3,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


@pytest.mark.parametrize(
    ("values", "billions"), [(_QWEN3_NEXT, 79.7), (_GLM_AIR, 106.9), (_MINIMAX_M2, 228.7)]
)
def test_published_models_have_their_number_of_parameters(
    values: dict[str, Any], billions: float
) -> None:
    """Without the layers that predict further tokens. The control: a layer less."""
    config = ModelConfig.from_hf(values)
    assert ModelConfig.from_hf(config.to_hf()) == config

    def count(config: ModelConfig) -> float:
        return sum(map(math.prod, parameter_shapes(config).values())) / 1e9

    assert count(config) == pytest.approx(billions, abs=0.06)
    short = {"num_hidden_layers": values["num_hidden_layers"] - 1}
    assert count(ModelConfig.from_hf(values | short)) != pytest.approx(billions, abs=0.06)


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_through_transformers(family: str, tmp_path: Path) -> None:
    """transformers 5's own config.json, and ours read by transformers, are one architecture."""
    theirs = oracle(family).config
    theirs.save_pretrained(tmp_path)
    config = ModelConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert ModelConfig.from_hf(config.to_hf()) == config
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    if theirs.is_heterogeneous:
        mine, wanted = (list(each.per_layer_config) for each in (again, theirs))
        heads = [
            [(one.num_key_value_heads, one.head_dim) for one in each] for each in (mine, wanted)
        ]
        assert heads[0] == heads[1]
        assert again.final_logit_softcapping == theirs.final_logit_softcapping
        assert again.attention_k_eq_v == theirs.attention_k_eq_v
    for key in (
        *(() if theirs.is_heterogeneous else ("num_key_value_heads",)),
        "tie_word_embeddings",
        "rms_norm_eps",
        "attention_bias",
        "mlp_bias",
    ):
        assert getattr(again, key, None) == getattr(theirs, key, None), key
    if not FAMILY_TABLES[config.family].rotary:
        return
    mine, wanted = dict(again.rope_parameters), dict(theirs.rope_parameters)
    assert {key: mine[key] for key in wanted} == wanted


def test_qwen_biases_and_norms() -> None:
    qwen2 = ModelConfig.from_hf(_QWEN2)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias, qwen2.qk_norm) == (
        True,
        False,
        False,
        False,
    )
    qwen3 = ModelConfig.from_hf(_QWEN2 | {"model_type": "qwen3"})
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)


@pytest.mark.parametrize(
    "unused",
    [
        {"use_sliding_window": False, "sliding_window": 4096},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
        {"use_sliding_window": True, "layer_types": ["full_attention"] * 2},
    ],
)
def test_a_sliding_window_that_no_layer_uses(unused: dict) -> None:
    assert ModelConfig.from_hf(_QWEN2 | unused).num_layers == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2"},
            "unsupported architecture 'gpt2': supported are llama, qwen2, qwen3",
        ),
        (
            {"model_type": "gemma2"},
            r"'gemma2' \(its scores and logits are capped; the nearest that is read is gemma3_text\)",
        ),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["attention", "mamba"]},
            "layer_types has 'mamba': of granitemoehybrid, models whose layers all have attention",
        ),
        (
            {"model_type": "granitemoehybrid"},  # whose layers are Mamba's where nothing is said
            "layer_types has 'mamba'",
        ),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["attention"] * 2},
            "num_local_experts 8: of granitemoehybrid, models without experts",
        ),
        ({"model_type": "qwen2_moe"}, r"\(the nearest that is read is qwen\d_moe\): supported"),
        ({"model_type": None, "architectures": ["Mamba"]}, "unsupported architecture 'Mamba'"),
        ({"hidden_act": "gelu"}, "unsupported hidden_act 'gelu': supported is silu"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types has sliding_attention",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "already quantized"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
        ({"head_dim": 7}, "even head_dim, got 7"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1"),
        ({"vocab_size": "many"}, "wrong type"),
        ({"hidden_size": None}, "wrong type"),
        ({"eos_token_id": "two"}, "'two' is not a token id"),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "rope scaling longrope needs short_factor, a list",
        ),
        (
            _LLAMA
            | {"model_type": "mixtral", "sliding_window": 8, "layer_types": ["full_attention"] * 2},
            "sliding_window 8 is that of all layers; leave layer_types out",
        ),
    ],
)
def test_refused(changes: dict, message: str) -> None:
    with pytest.raises(IsobitError, match=message) as caught:
        ModelConfig.from_hf(_LLAMA | changes)
    assert "\n" not in str(caught.value)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(IsobitError, match=r"here.json: key 'vocab_size' is missing"):
        ModelConfig.from_hf({k: v for k, v in _LLAMA.items() if k != "vocab_size"}, "here.json")


@pytest.mark.parametrize(
    ("name", "inner", "kind", "right"),
    [
        ("aya_vision", "cohere2", "for images that wraps", "of llama, qwen2, "),
        ("video_llava", "llama", "for images that wraps", "whose config.json says llama"),
        ("glm4v", "glm4v_text", "for images that wraps", "of llama, qwen2, "),
        ("qwen2_audio", "qwen2", "for sound that wraps", "whose config.json says qwen2"),
    ],
)
def test_a_model_around_a_language_model_is_told_as_one(
    name: str, inner: str, kind: str, right: str
) -> None:
    values = transformers.AutoConfig.for_model(name).to_dict()
    assert values["text_config"]["model_type"] == inner
    says = (
        f"config.json: unsupported architecture '{name}': a model {kind} a language model, "
        f"'{inner}'.*; .* {right}"
    )
    with pytest.raises(IsobitError, match=says):
        ModelConfig.from_hf(values)


def test_what_is_nearest_to_a_language_model_inside_is_said() -> None:
    values = {"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text"}}
    with pytest.raises(
        IsobitError, match="embeddings of their own; the nearest that is read is gemma3"
    ):
        ModelConfig.from_hf(values | {"vision_config": {}})
    assert all(near in FAMILY_TABLES for _, near in UNREAD.values())
    assert not UNREAD.keys() & FAMILY_TABLES.keys()


def test_other_names_of_the_inner_model() -> None:
    inner = {"model_type": "qwen2"}
    for values in (
        {"model_type": "internvl_chat", "llm_config": inner, "vision_config": {}},
        {
            "architectures": ["DeepseekVLV2ForCausalLM"],
            "language_config": inner,
            "vision_config": {},
        },
    ):
        with pytest.raises(IsobitError, match="for images that wraps a language model, 'qwen2'"):
            ModelConfig.from_hf(values)
    with pytest.raises(IsobitError, match="'odd': a model around a language model of its own"):
        ModelConfig.from_hf({"model_type": "odd", "text_config": {}})
