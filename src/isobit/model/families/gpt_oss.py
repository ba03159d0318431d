"""gpt-oss: attention sinks, biases everywhere, clamped gates, and experts that files hold together,
in MXFP4 or BF16.

Every other layer has a window, the first among them. A router's gates are the softmax over the
logits of those that it chose, which is that over all logits, divided by the sum of the chosen.
"""

from isobit.kernels.norms.definition import CLAMPED
from isobit.model.families.family import LLAMA_MODULES, Family, Mixtures
from isobit.model.families.windows import Windows

FAMILIES = {
    "gpt_oss": Family(
        "GptOssForCausalLM",
        LLAMA_MODULES
        | {
            "sinks": ("self_attn.sinks",),
            "router": ("mlp.router",),
            "experts.gate_up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
            "experts.down": ("mlp.experts.{}.down_proj",),
        },
        attention_bias=True,
        biased=True,
        sinks=True,
        activation="swiglu_clamped",
        activation_name="silu",
        fixed={"swiglu_alpha": CLAMPED[0], "swiglu_limit": CLAMPED[1]},
        windows=Windows(
            128,
            slides=lambda values, where, layers: [i % 2 == 0 for i in range(layers)],
            nullable=False,
        ),
        max_positions=131072,
        rope_theta=150000.0,
        rope_section={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        rms_eps=1e-5,
        kv_heads=8,
        head_dim=64,
        nullable=(),
        mixtures=Mixtures(
            128, 4, own_keys=False, biases=True, together="columns", adapters="columns"
        ),
    )
}
