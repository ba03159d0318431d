"""The families of models, by `model_type` in config.json: the one list of them.

Without torch, which their tables need: a config names a family, and a tab completes it. A table is
in the module of `model/families/` that is named here.
"""

FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen",
    "qwen3": "qwen",
    "qwen3_moe": "qwen",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "mistral": "mistral",
    "ministral3": "mistral",
    "mixtral": "mistral",
    "smollm3": "smollm",
    "olmo2": "olmo",
    "olmo3": "olmo",
    "gemma3_text": "gemma",
    "glm4": "glm",
    "phi3": "phi",
    "granite": "granite",
    "deepseek_v3": "deepseek",
    "glm4_moe_lite": "deepseek",
    "gpt_oss": "gpt_oss",
}
