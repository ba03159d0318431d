"""Qwen2, Qwen3 and Qwen3-MoE, which are also the language models inside Qwen2-VL, Qwen2.5-VL,
Qwen3-VL and Qwen3-VL-MoE: the three axes of their positions are one where there is only text."""

from collections.abc import Mapping
from typing import Any

from isobit.model.families.family import LLAMA_MODULES, Family, Inner, Mixtures, sizes
from isobit.model.families.reading import whole
from isobit.model.families.windows import Windows

_WINDOW = 4096


def _from_a_layer_on(values: Mapping[str, Any], where: str, layers: int) -> list[bool]:
    first = whole(values, "max_window_layers", where, 28, least=0)
    return [layer >= first for layer in range(layers)]


_IN_QWEN2_VL = Inner(
    {
        **sizes(152064, 8192, 29568, 80, 64),
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "max_window_layers": 80,
    }
)
_FULL = {"use_sliding_window": False, "layer_types": None}
_IN_QWEN3_VL = Inner(
    {
        **sizes(151936, 4096, 22016, 32, 32),
        "num_key_value_heads": 32,
        "rope_theta": 500000.0,
        "max_position_embeddings": 128000,
    },
    _FULL,
)
_IN_QWEN3_VL_MOE = Inner(
    {
        **sizes(151936, 2048, 5632, 24, 16),
        "num_key_value_heads": 16,
        "rope_theta": 500000.0,
        "max_position_embeddings": 128000,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
    },
    {**_FULL, "norm_topk_prob": True},
)

FAMILIES = {
    "qwen2": Family(
        "Qwen2ForCausalLM",
        qkv_bias=True,
        wrappers=("internvl", "llava_onevision", "llava", "llava_next", "qwen2_vl", "qwen2_5_vl"),
        sizes=sizes(151936, 4096, 22016, 32, 32),
        inside={"qwen2_vl_text": _IN_QWEN2_VL, "qwen2_5_vl_text": _IN_QWEN2_VL},
        windows=Windows(_WINDOW, flag=True, slides=_from_a_layer_on),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        wrappers=("internvl", "qwen3_vl"),
        sizes=sizes(151936, 4096, 22016, 32, 32),
        inside={"qwen3_vl_text": _IN_QWEN3_VL},
        attention_bias=True,
        qk_norm=True,
        windows=Windows(_WINDOW, flag=True, slides=_from_a_layer_on),
        head_dim=128,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        LLAMA_MODULES
        | {
            "router": ("mlp.gate",),
            "experts.gate_up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
            "experts.down": ("mlp.experts.{}.down_proj",),
        },
        wrappers=("qwen3_vl_moe",),
        inside={"qwen3_vl_moe_text": _IN_QWEN3_VL_MOE},
        attention_bias=True,
        qk_norm=True,
        windows=Windows(_WINDOW, flag=True),
        kv_heads=4,
        nullable=(),
        mixtures=Mixtures(128, 8, own_keys=True, renamed=True),
    ),
}
