"""Families with multi-head latent attention (MLA): DeepSeek-V3 and R1, Moonlight and Kimi's, which
have its architecture, and GLM-4.7-Flash.

Experts are scored by a sigmoid each; a bias that no gradient reaches has a say in which are chosen,
and none in their gates, which are multiplied by a number. Left out: the layers that predict further
tokens (MTP), whose tensors are not read, and the sparse attention of DeepSeek-V3.2.
"""

from dataclasses import replace

from isobit.model.families.family import (
    AFTER_THE_LAST,
    LLAMA_MODULES,
    Family,
    Mixtures,
    Modules,
)

SCORED_EXPERTS: Modules = {
    "router": ("mlp.gate",),
    "balance": ("mlp.gate.e_score_correction_bias",),
    "experts.gate_up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "experts.down": ("mlp.experts.{}.down_proj",),
    "shared.gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "shared.down": ("mlp.shared_experts.down_proj",),
}

_MODULES = {
    name: LLAMA_MODULES[name] for name in ("input_norm", "post_norm", "gate_up", "down")
} | {
    "qkv_a": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    "whole.qkv_a": ("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"),
    "q_a_norm": ("self_attn.q_a_layernorm",),
    "q_b": ("self_attn.q_b_proj",),
    "kv_a_norm": ("self_attn.kv_a_layernorm",),
    "kv_b": ("self_attn.kv_b_proj",),
    "o": ("self_attn.o_proj",),
    **SCORED_EXPERTS,
}

_DEEPSEEK = Family(
    "DeepseekV3ForCausalLM",
    _MODULES,
    latent={
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "q_lora_rank": 1536,
    },
    interleaved=True,
    off=("attention_bias",),
    fixed={"rope_interleave": True, "scoring_func": "sigmoid", "moe_layer_freq": 1},
    rope_kinds=("default", "yarn"),
    max_positions=4096,
    kv_heads=128,
    predicts_more=AFTER_THE_LAST,
    mixtures=Mixtures(
        256,
        8,
        own_keys=True,
        size=2048,
        normalize=True,
        shared=1,
        dense=3,
        dense_key="first_k_dense_replace",
        scoring=(8, 4, 2.5),
        adapters="rows",
        renamed=True,
    ),
)

FAMILIES = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe_lite": replace(
        _DEEPSEEK,
        architecture="Glm4MoeLiteForCausalLM",
        latent={
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "q_lora_rank": 768,
        },
        max_positions=202752,
        rms_eps=1e-5,
        kv_heads=20,
        nullable=(),
        mixtures=Mixtures(
            64,
            4,
            own_keys=True,
            size=1536,
            normalize=True,
            shared=1,
            dense_key="mlp_layer_types",
            scoring=(1, 1, 1.8),
            adapters="rows",
            renamed=True,
        ),
    ),
}
