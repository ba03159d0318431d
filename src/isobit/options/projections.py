"""The matrices that adapters are of, by Hugging Face's names, without torch, which the model would
need."""

MLP_PROJECTIONS = (
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
    *("w1", "w3", "w2"),  # the same of a Mixtral's experts
)
JOINED = (("gate_proj", "up_proj"), ("w1", "w3"))
"""Of experts, matrices that PEFT adapts together, since transformers holds them in one tensor."""
PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),  # of latent attention
    *("in_proj_qkv", "in_proj_z", "in_proj", "out_proj"),  # of linear attention, and of Mamba-2
    *MLP_PROJECTIONS,
    *("fc1_latent_proj", "fc2_latent_proj"),  # of a latent that experts work in
)
ALL_LINEAR = "all-linear"
