"""Mistral and Mixtral."""

from isobit.model.families.family import LLAMA_MODULES, Family, Mixtures
from isobit.model.families.windows import Windows

FAMILIES = {
    "mistral": Family(
        "MistralForCausalLM",
        windows=Windows(4096, layer_types=False),
        max_positions=131072,
        kv_heads=8,
        nullable=("head_dim",),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        LLAMA_MODULES
        | {
            "router": ("block_sparse_moe.gate",),
            "experts.gate_up": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
            "experts.down": ("block_sparse_moe.experts.{}.w2",),
        },
        windows=Windows(),
        yarn_needs_head_dim=True,
        max_positions=131072,
        rope_theta=1e6,
        rms_eps=1e-5,
        kv_heads=8,
        nullable=("head_dim",),
        mixtures=Mixtures(8, 2, own_keys=False),
    ),
}
