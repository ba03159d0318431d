"""GLM-4 0414, dense, and GLM-4.5 to 4.7, with experts.

Of the dense ones norms stand before and after attention and MLP, the first half of each head is
rotated in pairs of neighbours, and gate and up are one matrix. The mixtures rotate the first half
of a head as Llama does, some norm queries and keys, and experts are DeepSeek-V3's. Left out: the
layers that predict further tokens (MTP), whose tensors are not read.
"""

from isobit.model.families.deepseek import SCORED_EXPERTS
from isobit.model.families.family import AFTER_THE_LAST, LLAMA_MODULES, Family, Mixtures

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
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        LLAMA_MODULES | SCORED_EXPERTS,
        attention_bias=True,
        output_bias=False,
        qk_norm="use_qk_norm",
        partial_rotary=0.5,
        max_positions=131072,
        rms_eps=1e-5,
        kv_heads=8,
        nullable=(),
        predicts_more=AFTER_THE_LAST,
        mixtures=Mixtures(
            128,
            8,
            own_keys=True,
            size=1408,
            normalize=True,
            shared=1,
            dense_key="first_k_dense_replace",
            scoring=(1, 1, 1.0),
            adapters="rows",
            renamed=True,
        ),
    ),
}
