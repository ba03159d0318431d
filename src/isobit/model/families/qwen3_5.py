"""Qwen3.5, dense and with experts, and Qwen3-Next: three of four layers have linear attention by the gated delta
rule; the others have a gate on what attention gives, and rotate a quarter of a head. To the experts
of a layer an MLP is added that serves every token, times a gate.

Published checkpoints read images too. Their text is taken: config.json's text_config, and the
tensors of the language model; the vision tower and the layers that predict further tokens (MTP) are
written back as they were. Qwen3-Next has no pictures; the projections of its linear attention are
two tensors, whose rows go from one head of keys to the next.
"""

from dataclasses import replace

from isobit.model.families.family import LLAMA_MODULES, Family, Mixtures

_DENSE = Family(
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
    wrappers=("qwen3_5",),
    opened_alone=True,
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

_MOE = replace(
    _DENSE,
    architecture="Qwen3_5MoeForCausalLM",
    modules=_DENSE.modules
    | {
        "router": ("mlp.gate",),
        "experts.gate_up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
        "experts.down": ("mlp.experts.{}.down_proj",),
        "shared.gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        "shared.down": ("mlp.shared_expert.down_proj",),
        "shared_gate": ("mlp.shared_expert_gate",),
    },
    wrappers=("qwen3_5_moe",),
    kv_heads=2,
    mixtures=Mixtures(
        256,
        8,
        own_keys=True,
        size=512,
        dense=0,
        shared=512,
        shared_gate=True,
        adapters="rows",
    ),
)

FAMILIES = {
    "qwen3_5_text": _DENSE,
    "qwen3_5_moe_text": _MOE,
    "qwen3_next": replace(
        _MOE,
        architecture="Qwen3NextForCausalLM",
        modules=_MOE.modules
        | {"linear.qkv": ("linear_attn.in_proj_qkvz",), "gates": ("linear_attn.in_proj_ba",)},
        wrappers=(),
        opened_alone=False,
        fixed={},
        linear_attention="by head",
        predicts_more="mtp.",
        mixtures=Mixtures(
            512,
            10,
            own_keys=True,
            size=512,
            normalize=True,
            shared=512,
            shared_gate=True,
            adapters="rows",
            renamed=True,
        ),
    ),
}
