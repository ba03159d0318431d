"""Qwen2, Qwen3 and Qwen3-MoE."""

from collections.abc import Mapping
from typing import Any

from isobit.model.families.family import LLAMA_MODULES, Family, Mixtures, sizes
from isobit.model.families.reading import whole
from isobit.model.families.windows import Windows

_WINDOW = 4096


def _from_a_layer_on(values: Mapping[str, Any], where: str, layers: int) -> list[bool]:
    first = whole(values, "max_window_layers", where, 28, least=0)
    return [layer >= first for layer in range(layers)]


FAMILIES = {
    "qwen2": Family(
        "Qwen2ForCausalLM",
        qkv_bias=True,
        wrappers=("internvl", "llava_onevision", "llava", "llava_next"),
        sizes=sizes(151936, 4096, 22016, 32, 32),
        windows=Windows(_WINDOW, flag=True, slides=_from_a_layer_on),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        wrappers=("internvl",),
        sizes=sizes(151936, 4096, 22016, 32, 32),
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
        attention_bias=True,
        qk_norm=True,
        windows=Windows(_WINDOW, flag=True),
        kv_heads=4,
        nullable=(),
        mixtures=Mixtures(128, 8, own_keys=True, renamed=True),
    ),
}
