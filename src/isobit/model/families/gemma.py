"""Gemma 3 and Gemma 4, their models of text. Norms stand before and after attention and MLP, gates
have GELU, and embeddings are multiplied by the root of their width. Five of six layers have a
window, and their own rotary embedding. Of those that read images or hear the text is taken
(`hub/wrapped.py`).

Gemma 3's norms multiply by 1 + weight in float32, and the scale of scores has its own key.

Of Gemma 4 these are the dense ones (12B, 31B), 26B-A4B with experts next to the MLP of each layer,
and E2B and E4B, whose layers have their own embeddings, and of which the last ones read the keys
and values of others. Norms multiply by the weight; values are normed too, and scores are not
scaled. The layers without a window have wider heads and fewer of keys, which may be their values;
of each head a quarter is rotated. A layer's sum is multiplied by a number, and logits are capped.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isobit.errors import IsobitError
from isobit.model.families.family import LLAMA_MODULES, Family, Mixtures, sizes
from isobit.model.families.reading import whole
from isobit.model.families.rope import PROPORTIONAL, Rope
from isobit.model.families.ropes import by_layer_type, by_sections
from isobit.model.families.windows import Windows

_MODULES = LLAMA_MODULES | {
    "attention_out_norm": ("post_attention_layernorm",),
    "post_norm": ("pre_feedforward_layernorm",),
    "mlp_out_norm": ("post_feedforward_layernorm",),
}
_NORMS = ("input_norm", "attention_out_norm", "post_norm", "mlp_out_norm")


def _but_every_sixth(values: Mapping[str, Any], where: str, layers: int) -> list[bool]:
    pattern = whole(values, "sliding_window_pattern", where, 6)
    return [(layer + 1) % pattern != 0 for layer in range(layers)]


def _but_every_sixth_and_the_last(values: Mapping[str, Any], where: str, layers: int) -> list[bool]:
    return [(layer + 1) % 6 != 0 and layer + 1 < layers for layer in range(layers)]


def _one_way(values: Mapping[str, Any], where: str) -> None:
    """Raises IsobitError for a Gemma 4 that sees later tokens, or whose last layer slides."""
    if (direction := values.get("use_bidirectional_attention")) not in (None, "vision"):
        raise IsobitError(
            f"{where}: use_bidirectional_attention {direction!r:.80} is not supported: a model "
            "that sees later tokens has no log-probabilities to train"
        )
    kinds = values.get("layer_types")
    if isinstance(kinds, list) and kinds and kinds[-1] != "full_attention":
        raise IsobitError(
            f"{where}: layer_types must end with full_attention in this architecture, got "
            f"{kinds[-1]!r:.80}"
        )


_GEMMA4 = Family(
    "Gemma4ForCausalLM",
    _MODULES
    | {
        "joint.qkv": ("self_attn.q_proj", "self_attn.k_proj"),
        "queries.qkv": ("self_attn.q_proj",),
        "embedded_gate": ("per_layer_input_gate",),
        "embedded_out": ("per_layer_projection",),
        "embedded_out_norm": ("post_per_layer_input_norm",),
        "layer_scalar": ("layer_scalar",),
        "shared.gate_up": _MODULES["gate_up"],
        "shared.down": _MODULES["down"],
        "shared_out_norm": ("post_feedforward_layernorm_1",),
        "router": ("router.proj",),
        "router_norm": ("router.scale",),
        "expert_scale": ("router.per_expert_scale",),
        "experts_norm": ("pre_feedforward_layernorm_2",),
        "experts.gate_up": ("experts.{}.gate_proj", "experts.{}.up_proj"),
        "experts.down": ("experts.{}.down_proj",),
        "experts_out_norm": ("post_feedforward_layernorm_2",),
    },
    norms=_NORMS,
    qk_norm=True,
    norms_values=True,
    attention_bias=True,
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    score_scale=1.0,
    scaled_embedding=True,
    layer_scalars=True,
    capped_logits=True,
    global_head_dim=512,
    layer_embeddings=256,
    checks=(_one_way,),
    windows=Windows(512, slides=_but_every_sixth_and_the_last, nullable=False),
    ropes=by_sections(Rope(1e6, PROPORTIONAL, (("partial_rotary_factor", 0.25),)), Rope(10000.0)),
    max_positions=131072,
    kv_heads=4,
    head_dim=256,
    nullable=(),
    tied=True,
    wrappers=("gemma4",),
    mixtures=Mixtures(
        128,
        8,
        own_keys=True,
        shared=2112,
        together="rows",
        adapters="rows",
        switch="enable_moe_block",
    ),
    sizes=sizes(262144, 2304, 9216, 30, 8),
)

FAMILIES = {
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _MODULES,
        norms=_NORMS,
        norm_offset=1.0,
        qk_norm=True,
        attention_bias=True,
        activation="gelu_pytorch_tanh",
        activation_key="hidden_activation",
        query_scalar=256,
        scaled_embedding=True,
        off=("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"),
        windows=Windows(4096, slides=_but_every_sixth, nullable=False),
        ropes=by_layer_type(1e6, 10000.0, "rope_local_base_freq"),
        whole_heads=True,
        max_positions=131072,
        kv_heads=4,
        head_dim=256,
        nullable=(),
        tied=True,
        wrappers=("gemma3",),
        sizes=sizes(262208, 2304, 9216, 26, 8),
    ),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": replace(
        _GEMMA4,
        architecture="Gemma4UnifiedForCausalLM",
        layer_embeddings=0,
        mixtures=None,
        off=("enable_moe_block", "hidden_size_per_layer_input"),
        windows=Windows(1024, slides=_but_every_sixth_and_the_last, nullable=False),
        max_positions=262144,
        wrappers=("gemma4_unified",),
    ),
}
