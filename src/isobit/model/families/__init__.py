"""The families of `config.json` that are supported: their tables. A new one is a file with its
table here, listed in `options/families.py`."""

from importlib import import_module

from isobit.model.families.family import Family, Mixtures
from isobit.model.families.reading import MOST_LAYERS, flag, number, optional_whole, real, whole
from isobit.model.families.windows import windows_of, windows_to_hf
from isobit.options import families

FAMILIES: dict[str, Family] = {
    name: import_module(f"isobit.model.families.{module}").FAMILIES[name]
    for name, module in families.FAMILIES.items()
}

__all__ = [
    "FAMILIES",
    "MOST_LAYERS",
    "Family",
    "Mixtures",
    "flag",
    "number",
    "optional_whole",
    "real",
    "whole",
    "windows_of",
    "windows_to_hf",
]
