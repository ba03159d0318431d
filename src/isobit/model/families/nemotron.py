"""Nemotron-H and what has its architecture: Nemotron Nano 2, and Nemotron 3 with its experts.

A layer has one part, named by a pattern: Mamba-2, attention without rotary embedding, an MLP
without a gate, whose activation is the square of ReLU, or a mixture of such experts, chosen by
scores as DeepSeek-V3's are, next to an MLP for every token. In Nemotron 3 Super experts are between
two projections, into a latent and out of it (LatentMoE: NVIDIA 2025, arXiv 2512.20856). Left out:
the layers that predict further tokens (MTP), which are not read.
"""

from isobit.model.families.family import Family, Mixtures

FAMILIES = {
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        {
            "embed": ("embeddings",),
            "final_norm": ("norm_f",),
            "input_norm": ("norm",),
            "linear.qkv": ("mixer.in_proj",),
            "linear.o": ("mixer.out_proj",),
            "conv": ("mixer.conv1d",),
            "decay": ("mixer.A_log",),
            "step_bias": ("mixer.dt_bias",),
            "skip": ("mixer.D",),
            "state_norm": ("mixer.norm",),
            "qkv": ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
            "o": ("mixer.o_proj",),
            "post_norm": ("norm",),
            "gate_up": ("mixer.up_proj",),
            "down": ("mixer.down_proj",),
            "router": ("mixer.gate",),
            "balance": ("mixer.gate.e_score_correction_bias",),
            "experts_in": ("mixer.fc1_latent_proj",),
            "experts_out": ("mixer.fc2_latent_proj",),
            "experts.gate_up": ("mixer.experts.{}.up_proj",),
            "experts.down": ("mixer.experts.{}.down_proj",),
            "shared.gate_up": ("mixer.shared_experts.up_proj",),
            "shared.down": ("mixer.shared_experts.down_proj",),
        },
        activation="relu2",
        activation_key="mlp_hidden_act",
        one_part=True,
        rotary=False,
        linear_attention=True,
        off=(
            *("use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias", "sliding_window"),
            "residual_in_fp32",
            "tie_word_embeddings",  # transformers ties nothing here, whatever it says
        ),
        fixed={"mamba_hidden_act": "silu", "use_conv_bias": True, "n_shared_experts": 1},
        rms_key="layer_norm_epsilon",
        rms_eps=1e-5,
        max_positions=4096,
        kv_heads=8,
        head_dim=128,
        nullable=(),
        predicts_more="mtp.",
        mixtures=Mixtures(
            8,
            2,
            own_keys=True,
            size=7688,
            normalize=True,
            shared=7688,
            shared_key="moe_shared_expert_intermediate_size",
            latent_key="moe_latent_size",
            dense_key="hybrid_override_pattern",
            scoring=(1, 1, 1.0),
        ),
    )
}
