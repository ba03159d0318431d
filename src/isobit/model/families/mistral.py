"""Mistral, Ministral 3 and Mixtral.

Queries of Ministral 3 grow with the position, by the logarithm of how many original contexts came
before (`Rope.growth`).
"""

from isobit.model.families.family import LLAMA_MODULES, Family, Mixtures, sizes
from isobit.model.families.windows import Windows

FAMILIES = {
    "mistral": Family(
        "MistralForCausalLM",
        windows=Windows(4096, layer_types=False),
        max_positions=131072,
        kv_heads=8,
        nullable=("head_dim",),
        wrappers=("mistral3", "llava", "llava_next"),
        sizes=sizes(32000, 4096, 14336, 32, 32),
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        windows=Windows(layer_types=False),
        max_positions=262144,
        rope_theta=1e6,
        rope_kinds=("yarn",),
        rope_more=("llama_4_scaling_beta",),
        rope_section={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        rms_eps=1e-5,
        kv_heads=8,
        head_dim=128,
        nullable=(),
        wrappers=("mistral3",),
        sizes=sizes(131072, 4096, 14336, 34, 32),
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
