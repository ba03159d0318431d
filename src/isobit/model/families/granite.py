"""Granite, dense: embeddings, scores, what attention and MLP add, and logits are multiplied by
numbers from config.json."""

from isobit.model.families.family import Family

FAMILIES = {
    "granite": Family(
        "GraniteForCausalLM",
        attention_bias=True,
        mlp_bias=True,
        multipliers=True,
        max_positions=2048,
        kv_heads=None,
    )
}
