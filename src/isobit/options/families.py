"""The families of models, by `model_type` in config.json: the one list of them.

Without torch, which their tables need: a config names a family, and a tab completes it. A table is
in the module of `model/families/` that is named here.
"""

from difflib import get_close_matches

FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen",
    "qwen3": "qwen",
    "qwen3_moe": "qwen",
    "qwen3_next": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "mistral": "mistral",
    "ministral3": "mistral",
    "mixtral": "mistral",
    "minimax_m2": "minimax",
    "smollm3": "smollm",
    "olmo2": "olmo",
    "olmo3": "olmo",
    "gemma3_text": "gemma",
    "gemma4_text": "gemma",
    "gemma4_unified_text": "gemma",
    "glm4": "glm",
    "glm4_moe": "glm",
    "phi3": "phi",
    "granite": "granite",
    "granitemoehybrid": "granite",
    "seed_oss": "seed_oss",
    "deepseek_v3": "deepseek",
    "glm4_moe_lite": "deepseek",
    "nemotron_h": "nemotron",
    "gpt_oss": "gpt_oss",
}

UNREAD = {
    "gemma2": ("its scores and logits are capped", "gemma3_text"),
    "gemma3n_text": ("its layers have embeddings of their own", "gemma3_text"),
    "phimoe": ("its norms are not of root mean squares, and its experts are masked", "mixtral"),
    "phi4_multimodal": ("its adapters for images and sound are part of it", "phi3"),
    "deepseek_v2": ("its experts are chosen by a softmax in groups", "deepseek_v3"),
    "deepseek_v32": ("its attention is sparse, by an indexer", "deepseek_v3"),
    "minimax": ("most of its layers have linear attention", "minimax_m2"),
    "qwen2_vl_text": ("it is read inside a qwen2_vl", "qwen2"),
    "qwen2_5_vl_text": ("it is read inside a qwen2_5_vl", "qwen2"),
    "qwen3_vl_text": ("it is read inside a qwen3_vl", "qwen3"),
    "qwen3_vl_moe_text": ("it is read inside a qwen3_vl_moe", "qwen3_moe"),
}
"""Families that are not read: why, and the nearest that is."""


def nearest(name: object) -> str:
    """Return a remark on a family that is not read: in brackets, or ""."""
    if isinstance(name, str) and name in UNREAD:
        why, near = UNREAD[name]
        return f" ({why}; the nearest that is read is {near})"
    close = get_close_matches(str(name), FAMILIES, 1, cutoff=0.7)
    return f" (the nearest that is read is {close[0]})" if close else ""
