"""OLMo 2 and 3: norms follow attention and MLP, x + norm(attention(x)), and queries and keys are
normed over all heads.

Three of four layers of an OLMo 3 have a window, and their own rotary embedding, which is never
scaled.
"""

from dataclasses import replace

from isobit.model.families.family import LLAMA_MODULES, Family
from isobit.model.families.ropes import by_layer_type
from isobit.model.families.windows import Windows

_THETA = 500000.0

_MODULES = {
    name: modules
    for name, modules in LLAMA_MODULES.items()
    if name not in ("input_norm", "post_norm")
} | {
    "attention_out_norm": ("post_attention_layernorm",),
    "mlp_out_norm": ("post_feedforward_layernorm",),
}


_OLMO2 = Family(
    "Olmo2ForCausalLM",
    _MODULES,
    norms=("attention_out_norm", "mlp_out_norm"),
    attention_bias=True,
    qk_norm=True,
    norms_all_heads=True,
    max_positions=2048,
    rms_eps=1e-5,
    kv_heads=None,
)

FAMILIES = {
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        architecture="Olmo3ForCausalLM",
        windows=Windows(
            4096,
            slides=lambda values, where, layers: [i % 4 != 3 for i in range(layers)],
            nullable=False,
        ),
        ropes=by_layer_type(_THETA, _THETA),
    ),
}
