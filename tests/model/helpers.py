"""Tiny models of `transformers` with random weights, as directories: the oracle, and what isobit
loads."""

import atexit
import shutil
import tempfile
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from isobit.kernels import Layout
from isobit.kernels.sampling.capped import logits_of
from isobit.model import Experts, Model, ModelConfig, Tokenizer
from isobit.model.families import FAMILIES as FAMILY_TABLES
from isobit.model.families.rope import Rope
from isobit.model.hub.latent import Latent
from isobit.model.hub.layer_heads import LayerHeads
from isobit.model.hub.linear_attention import LinearAttention
from isobit.model.hub.multipliers import Multipliers
from tests.models import (
    ALPHABET,
    ONE_PART,
    SCORED,
    latent_values,
    level,
    one_part_values,
    require,
    scored_of,
    variant_of,
)

VOCABULARY = 61

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}

_PAD = {"pad_token_id": 0}  # whose row of the embedding gets no gradient in transformers
_OLMO = {"num_key_value_heads": 2, **_PAD}
_OLMO3_YARN = {
    "full_attention": _YARN,
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
_GEMMA = {
    "head_dim": 20,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_GEMMA |= {"query_pre_attn_scalar": 13, "rms_norm_eps": 1e-6, **_PAD}
_GEMMA4 = {
    "head_dim": 20,
    "global_head_dim": 28,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "final_logit_softcapping": 6.0,
    "hidden_size_per_layer_input": 0,
    **_PAD,
}
_GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}
_GEMMA4_SMALL = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCABULARY,
    "attention_k_eq_v": False,
}
_GEMMA4_ROPES = {
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
        "factor": 2.0,
    },
    "sliding_attention": {"rope_type": "linear", "rope_theta": 70.0, "factor": 3.0},
}
_GEMMA_LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 3.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
}
_PLAIN = {"rope_type": "default", "rope_theta": 300.0}
_GPT_OSS = {
    "head_dim": 20,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    **_PAD,
}
_GPT_OSS |= {"rope_parameters": {**_YARN, "truncate": False}}
_QWEN35 = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 20,
}
_QWEN35 |= {"linear_value_head_dim": 12, "rms_norm_eps": 1e-6}
_QWEN35_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 28,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "q_lora_rank": 28,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    **_PAD,
}
_GLM_MOE = {
    "head_dim": 20,
    "use_qk_norm": True,
    **{
        key: _LATENT[key] for key in ("n_routed_experts", "num_experts_per_tok", "n_shared_experts")
    },
    **{key: _LATENT[key] for key in ("moe_intermediate_size", "routed_scaling_factor")},
    **_PAD,
}
_MINIMAX = {"head_dim": 20, "num_local_experts": 6, "num_experts_per_tok": 3, **_PAD}
_NEMOTRON = {
    "rms_norm_eps": None,  # under another name
    "head_dim": 20,
    "n_groups": 2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "ssm_state_size": 16,
    "time_step_min": 0.6,  # which some steps are below
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 28,
    "routed_scaling_factor": 1.7,
    **_PAD,
}
_QWEN35_ROPE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
_GRANITE = {
    "embedding_multiplier": 1.7,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.8,
}
_GRANITE_4 = {
    **_GRANITE,
    "layer_types": ["attention"] * 3,
    "num_local_experts": 0,
    "mamba_n_heads": 1,
    "shared_intermediate_size": 40,
    "position_embedding_type": "rope",
}
_MINISTRAL = {
    **_YARN,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.3,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "partial_rotary_factor": 0.75,
}
_LONG_PHI = {
    **_PAD,
    "head_dim": 16,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "partial_rotary_factor": 0.75,
    "rope_parameters": _LONGROPE,
}
_GLM_ROPE = {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_WINDOWS = {"use_sliding_window": True, "sliding_window": 9}
_EXPERTS = {"head_dim": 20, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5}},
    ),
    "llama-llama3": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": _YARN, "head_dim": 32}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 20}),
    "qwen3-biases": (
        "Qwen3",
        {"head_dim": 20, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3-moe": ("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": True}),
    "qwen3-moe-mixed": ("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [1]}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], **_PAD}),
    "smollm3-windows": (
        "SmolLM3",
        {**_WINDOWS, "tie_word_embeddings": False, "no_rope_layer_interval": 2, **_PAD},
    ),
    "olmo2": ("Olmo2", _OLMO),
    "olmo2-biases": (
        "Olmo2",
        {**_OLMO, "head_dim": 20, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "olmo3": ("Olmo3", {**_OLMO, "num_hidden_layers": 4, "sliding_window": 11}),
    "olmo3-yarn": (
        "Olmo3",
        {**_OLMO, "sliding_window": 200, "rope_parameters": _OLMO3_YARN, "layer_types": _MIXED},
    ),
    "gemma3": ("Gemma3", _GEMMA),
    "gemma3-linear": (
        "Gemma3",
        {
            **_GEMMA,
            "rope_parameters": _GEMMA_LINEAR,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4": ("Gemma4", _GEMMA4),
    "gemma4-apart": (
        "Gemma4",
        {
            **_GEMMA4,
            "attention_k_eq_v": False,
            "attention_bias": True,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
            "rope_parameters": _GEMMA4_ROPES,
        },
    ),
    "gemma4-experts": ("Gemma4", _GEMMA4 | _GEMMA4_EXPERTS),
    "gemma4-small": ("Gemma4", _GEMMA4 | _GEMMA4_SMALL),
    "gemma4-unified": (
        "Gemma4Unified",
        {
            **{key: value for key, value in _GEMMA4.items() if "per_layer_input" not in key},
            "attention_bias": True,
            "rope_parameters": _GEMMA4_ROPES,
        },
    ),
    "glm4": ("Glm4", {"head_dim": 20, **_PAD}),
    "glm4-whole-heads": (
        "Glm4",
        {
            "head_dim": 12,
            "attention_bias": False,
            "rope_parameters": _GLM_ROPE,
            "tie_word_embeddings": True,
            **_PAD,
        },
    ),
    "phi3": ("Phi3", _PAD),
    "phi3-windows": (
        "Phi3",
        {**_PAD, "sliding_window": 11, "head_dim": 20, "tie_word_embeddings": True},
    ),
    "phi3-longrope": ("Phi3", {**_LONG_PHI, "original_max_position_embeddings": 16}),
    "phi3-longrope-short": ("Phi3", {**_LONG_PHI, "original_max_position_embeddings": 128}),
    "granite": ("Granite", _GRANITE),
    "granite-biases": (
        "Granite",
        {
            **_GRANITE,
            "logits_scaling": 3,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": _LLAMA3,
            "tie_word_embeddings": True,
        },
    ),
    "granite-hybrid": ("GraniteMoeHybrid", _GRANITE_4),
    "granite-hybrid-unrotated": (
        "GraniteMoeHybrid",
        {
            **_GRANITE_4,
            "position_embedding_type": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "seed-oss": ("SeedOss", {"head_dim": 20, **_PAD}),
    "seed-oss-plain": (
        "SeedOss",
        {"head_dim": 12, "attention_bias": False, "mlp_bias": True, "rope_parameters": _LLAMA3},
    ),
    "ministral3": ("Ministral3", {"head_dim": 20, "rope_parameters": _MINISTRAL, **_PAD}),
    "ministral3-windows": (
        "Ministral3",
        {
            **_PAD,
            "head_dim": 20,
            "sliding_window": 11,
            "rope_parameters": {**_MINISTRAL, "llama_4_scaling_beta": 0.7, "mscale": 0.5},
        },
    ),
    "gpt-oss": ("GptOss", _GPT_OSS),
    "gpt-oss-plain": (
        "GptOss",
        {**_GPT_OSS, "attention_bias": False, "rope_parameters": _PLAIN, "sliding_window": 200},
    ),
    "qwen3.5": ("Qwen3_5", {**_QWEN35, "num_hidden_layers": 4}),
    "qwen3.5-tied": (
        "Qwen3_5",
        {
            **_QWEN35,
            "tie_word_embeddings": True,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": _QWEN35_ROPE,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        },
    ),
    "qwen3.5-moe": ("Qwen3_5Moe", {**_QWEN35, **_QWEN35_MOE, "num_hidden_layers": 4}),
    "qwen3-next": ("Qwen3Next", {**_QWEN35, **_QWEN35_MOE, "num_hidden_layers": 4}),
    "qwen3-next-mixed": (
        "Qwen3Next",
        {
            **_QWEN35,
            **_QWEN35_MOE,
            "linear_num_key_heads": 4,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        },
    ),
    "glm4-moe": ("Glm4Moe", {**_GLM_MOE, "n_group": 2, "topk_group": 1}),
    "glm4-moe-plain": (
        "Glm4Moe",
        {
            **_GLM_MOE,
            "use_qk_norm": False,
            "attention_bias": True,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "rope_parameters": _GLM_ROPE,
        },
    ),
    "minimax-m2": ("MiniMaxM2", {**_MINIMAX, "rotary_dim": 10}),
    "minimax-m2-whole": ("MiniMaxM2", {**_MINIMAX, "tie_word_embeddings": True}),
    "deepseek-v3": ("DeepseekV3", {**_LATENT, "n_group": 2, "topk_group": 1}),
    "deepseek-v3-whole": (
        "DeepseekV3",
        {
            **_LATENT,
            "q_lora_rank": None,
            "v_head_dim": 12,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
            "tie_word_embeddings": True,
        },
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {**_LATENT, "v_head_dim": 20, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "nemotron-h": (
        "NemotronH",
        {
            **_NEMOTRON,
            "layers_block_type": [
                *("linear_attention", "mlp", "linear_attention", "full_attention", "mlp"),
            ],
        },
    ),
    "nemotron-h-experts": (
        "NemotronH",
        {
            **_NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "conv_kernel": 3,
            "n_group": 2,
            "norm_topk_prob": False,
        },
    ),
    "nemotron-h-latent": (
        "NemotronH",
        {
            **_NEMOTRON,
            "layers_block_type": ["moe", "linear_attention", "moe", "full_attention"],
            "moe_latent_size": 20,
            "n_group": 2,
        },
    ),
    "mistral": ("Mistral", {"head_dim": 20, "sliding_window": 11}),
    "qwen3-windows": ("Qwen3", {"head_dim": 20, **_WINDOWS, "max_window_layers": 1}),
}
"""Name to class prefix in transformers, and what differs from `_SIZES`."""


def oracle(family: str, **changes: Any) -> Any:
    """The `transformers` model, in float32, with weights and biases large enough to matter."""
    prefix, own = FAMILIES[family]
    wrapped = ("Gemma3", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe")
    text = "TextConfig" if prefix in wrapped else "Config"
    config = getattr(transformers, f"{prefix}{text}")(**deepcopy(_SIZES | own | changes))
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
    randomize(model, 11)
    return model


_AROUND_1 = (
    "norm.weight",
    "norm_f.weight",
    "norm_1.weight",
    "norm_2.weight",
    "router.scale",
    "expert_scale",
)


@torch.no_grad()
def randomize(model: Any, seed: int, text: str = "") -> None:
    """Give every parameter of a `transformers` model random values of a size that matters; norms
    that multiply by numbers around 1. `text`: the model_type of the language model inside."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        norm = name.endswith(_AROUND_1)
        around_0 = (text or model.config.model_type).startswith(
            ("gemma3", "qwen3_5", "qwen3_next")
        ) and "linear_attn" not in name
        middle = float(norm and not around_0)
        parameter.copy_(middle + (0.2 if norm else 0.25) * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        if name.endswith("layer_scalar"):
            buffer.copy_(0.8 + 0.3 * torch.rand(buffer.shape, generator=generator))


def directory(path: Path, family: str, **changes: Any) -> tuple[Any, Path]:
    """(the oracle, the directory that it and a tokenizer were saved in). The oracle of a family
    without changes is one model for all tests, which is not changed; its gradients are gone."""
    if not changes:
        model, saved = _saved(family)
        model.zero_grad()
        shutil.copytree(saved, path, dirs_exist_ok=True)
        return model, path
    model = oracle(family, **changes)
    model.save_pretrained(path)
    Tokenizer.characters(ALPHABET).save(path)
    return model, path


@cache
def _saved(family: str) -> tuple[Any, str]:
    folder = tempfile.mkdtemp(prefix="isobit-test-oracle-")
    atexit.register(shutil.rmtree, folder)
    model = oracle(family)
    model.save_pretrained(folder)
    Tokenizer.characters(ALPHABET).save(folder)
    return model, folder


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 40, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def logits(model: Model, sequence: list[int], use: str = "learner") -> Tensor:
    hidden = model.transformer.hidden(
        torch.tensor(sequence), Layout.packed([len(sequence)]), use=use
    )
    transformer, cap = model.transformer, model.config.logit_cap
    return logits_of(transformer.ops[use], hidden, transformer.head_weight(use), cap)


@torch.no_grad()
def oracle_logits(model: Any, sequence: list[int]) -> Tensor:
    return model(torch.tensor([sequence])).logits[0].float()


def config(family: str = "llama", **changes: Any) -> ModelConfig:
    """Sizes that are not multiples of 128, and one block that is ragged; `family` as of
    `variant_of`."""
    family, own = variant_of(family, changes.get("intermediate_size", 208))
    changes |= own
    values: dict[str, Any] = {
        "family": family,
        "vocab_size": VOCABULARY,
        "hidden_size": 144,
        "intermediate_size": 208,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 36,
        "qkv_bias": family == "qwen2",
        "qk_norm": bool(FAMILY_TABLES[family].qk_norm),
        "experts": Experts(6, 3, 40, shared=0 if family == "qwen3_moe" else 48)
        if family in ("qwen3_moe", "qwen3_5_moe_text", "qwen3_next")
        else SCORED
        if family == "glm4_moe"
        else scored_of(208)
        if family == "minimax_m2"
        else Experts(5, 2, 208)
        if family in ("mixtral", "gpt_oss")
        else None,
        "max_positions": 128,
        "eos_ids": (2,),
    }
    if FAMILY_TABLES[family].one_part:
        values |= one_part_values(ONE_PART[: changes.get("num_layers", 4)])
    elif FAMILY_TABLES[family].linear_attention:
        by_head = FAMILY_TABLES[family].linear_attention == "by head"
        linear = LinearAttention((0, 2), 2, 4, 64, 64, by_head=by_head)
        values |= {"linear": linear, "rope": Rope.of(500.0, 0.5)}
    if "default" not in FAMILY_TABLES[family].rope_kinds:
        values |= {"rope": FAMILY_TABLES[family].fresh_rope(500.0, 128)}
    if FAMILY_TABLES[family].latent is not None:
        values |= latent_values(Latent(32, 24, 12, 28, 40), 4, Rope(500.0))
    if FAMILY_TABLES[family].multipliers:
        values |= {"multipliers": Multipliers(3.0, 0.1, 0.4, 2.0)}
    if FAMILY_TABLES[family].global_head_dim is not None:
        width = 2 * changes.get("head_dim", 36)
        values |= {"global_heads": LayerHeads(1, width, True), "logit_cap": 9.0}
        layers = changes.get("num_layers", 3)
        slides = [layer % 2 == 0 and layer + 1 < layers for layer in range(layers)]
        values |= {"windows": tuple(7 if one else None for one in slides)}
        values |= {"sliding_rope": Rope(300.0)}
    return ModelConfig(**(values | changes))


def random_model(
    precision: Any = "fp8", backend: str = "reference", family: str = "llama", **changes: Any
) -> Model:
    """Random weights of some size, so that the distributions are not flat; biases and norms too."""
    require(backend)
    model = Model.init(
        config(family, **changes),
        Tokenizer.characters(ALPHABET),
        precision,
        3,
        backend,
        level(backend),
    )
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
            else:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.sync()
    return model
