"""Llama's dense models."""

from isobit.model.families.family import Family, sizes

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        attention_bias=True,
        mlp_bias=True,
        whole_heads=True,
        max_positions=2048,
        kv_heads=None,
        nullable=("num_key_value_heads", "head_dim"),
        wrappers=("llava", "llava_next"),
        sizes=sizes(32000, 4096, 11008, 32, 32),
    )
}
