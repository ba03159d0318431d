"""GLM-4 0414, dense: norms stand before and after attention and MLP, the first half of each head is
rotated in pairs of neighbours, and gate and up are one matrix."""

from isobit.model.families.family import LLAMA_MODULES, Family

FAMILIES = {
    "glm4": Family(
        "Glm4ForCausalLM",
        LLAMA_MODULES
        | {
            "attention_out_norm": ("post_self_attn_layernorm",),
            "mlp_out_norm": ("post_mlp_layernorm",),
            "gate_up": ("mlp.gate_up_proj",),
        },
        norms=("input_norm", "attention_out_norm", "post_norm", "mlp_out_norm"),
        attention_bias=True,
        biased=True,
        output_bias=False,
        interleaved=True,
        partial_rotary=0.5,
        max_positions=131072,
        rms_eps=1.5625e-7,
        kv_heads=2,
        head_dim=128,
        nullable=(),
    )
}
