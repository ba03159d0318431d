"""Qwen3.5: three of four layers have linear attention by the gated delta rule; the others a gate on
what attention gives, and rotate a quarter of a head.

Published checkpoints read images too. Their text is taken: config.json's text_config, and the
tensors of the language model; the vision tower and the layers that predict further tokens (MTP) are
left out, and `save` writes a Qwen3_5ForCausalLM.
"""

from isobit.model.families.family import LLAMA_MODULES, Family

FAMILIES = {
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        LLAMA_MODULES
        | {
            "linear.qkv": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
            "linear.o": ("linear_attn.out_proj",),
            "gates": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
            "conv": ("linear_attn.conv1d",),
            "decay": ("linear_attn.A_log",),
            "step_bias": ("linear_attn.dt_bias",),
            "state_norm": ("linear_attn.norm",),
        },
        wrapper="qwen3_5",
        qk_norm=True,
        norm_offset=1.0,
        attention_bias=True,
        fixed={"attn_output_gate": True},
        linear_attention=True,
        gated_attention=True,
        partial_rotary=0.25,
        kv_heads=4,
        head_dim=256,
        nullable=(),
    )
}
