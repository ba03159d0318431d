"""Seed-OSS: Llama's layers with biases of queries, keys and values. Left out: one of the output
projection."""

from isobit.model.families.family import Family

FAMILIES = {
    "seed_oss": Family(
        "SeedOssForCausalLM",
        attention_bias=True,
        biased=True,
        output_bias=False,
        off=("attention_out_bias",),
        mlp_bias=True,
        max_positions=524288,
        kv_heads=8,
        head_dim=128,
        nullable=("num_key_value_heads", "head_dim"),
    )
}
