"""The families of `config.json` that are supported. A new one is a file with its table, listed here."""

from isobit.model.families import gemma, gpt_oss, llama, mistral, olmo, qwen, qwen3_5, smollm
from isobit.model.families.family import Family, Mixtures
from isobit.model.families.reading import MOST_LAYERS, flag, optional_whole, real, whole
from isobit.model.families.windows import windows_of, windows_to_hf

FAMILIES: dict[str, Family] = {
    name: family
    for module in (llama, qwen, qwen3_5, mistral, smollm, olmo, gemma, gpt_oss)
    for name, family in module.FAMILIES.items()
}

__all__ = [
    "FAMILIES", "MOST_LAYERS", "Family", "Mixtures", "flag", "optional_whole", "real", "whole", "windows_of",
    "windows_to_hf",
]  # fmt: skip
