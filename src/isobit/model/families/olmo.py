"""OLMo 2: norms follow attention and MLP, x + norm(attention(x)), and queries and keys are normed over all heads."""

from isobit.model.families.family import LLAMA_MODULES, Family

_MODULES = {name: modules for name, modules in LLAMA_MODULES.items() if name not in ("input_norm", "post_norm")} | {
    "attention_out_norm": ("post_attention_layernorm",),
    "mlp_out_norm": ("post_feedforward_layernorm",),
}

FAMILIES = {
    "olmo2": Family(
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
}
