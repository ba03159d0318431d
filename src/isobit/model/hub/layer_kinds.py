"""Layers of one part each, as Nemotron-H has them, and their keys in config.json: linear attention,
attention, an MLP or a mixture of experts, where other families' layers have attention and MLP.

Left out: the sizes of the parts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from isobit.errors import IsobitError
from isobit.model.families import MOST_LAYERS

LINEAR, FULL, MLP, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
PATTERN = "hybrid_override_pattern"
LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}
_LISTS = ("layers_block_type", "layer_types")
_EARLIER = {"mamba": LINEAR, "attention": FULL}
"""What transformers called them before 5.20."""


def kinds_from_hf(values: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return each layer's kind, from a list, or a pattern with a letter for each. Raises
    IsobitError where there is neither, for another kind, or where two of them differ."""
    lists = {key: _listed(values[key], key, where) for key in _LISTS if values.get(key) is not None}
    if not lists and values.get(PATTERN) is not None:
        lists[PATTERN] = _spelled(values[PATTERN], where)
    if not lists:
        raise IsobitError(f"{where}: key '{PATTERN}' is missing, or {_LISTS[0]} in its place")
    if len({*lists.values()}) > 1:
        raise IsobitError(f"{where}: {' and '.join(lists)} name one list, but differ; keep one")
    key, kinds = next(iter(lists.items()))
    if not 1 <= len(kinds) <= MOST_LAYERS:
        raise IsobitError(
            f"{where}: {key} must name 1 to {MOST_LAYERS} layers, and names {len(kinds)}"
        )
    count = values.get("num_hidden_layers", len(kinds))
    if count != len(kinds):
        raise IsobitError(
            f"{where}: num_hidden_layers is {count!r:.80}, but {key} names {len(kinds)} layers"
        )
    return kinds


def kinds_to_hf(kinds: Sequence[str]) -> dict[str, Any]:
    """Return the key of config.json that transformers, vLLM and the checkpoints' own code read."""
    letters = {kind: letter for letter, kind in LETTERS.items()}
    return {PATTERN: "".join(letters[kind] for kind in kinds)}


def _listed(kinds: Any, key: str, where: str) -> tuple[str, ...]:
    known = (*LETTERS.values(), *_EARLIER)
    if not isinstance(kinds, list) or not all(kind in known for kind in kinds):
        raise IsobitError(
            f"{where}: {key} must list layers, each {', '.join(LETTERS.values())}, got "
            f"{kinds!r:.80}"
        )
    return tuple(str(_EARLIER.get(kind, kind)) for kind in kinds)


def _spelled(letters: Any, where: str) -> tuple[str, ...]:
    if not isinstance(letters, str) or not {*letters} <= LETTERS.keys():
        raise IsobitError(
            f"{where}: {PATTERN} must have a letter for each layer, of {' '.join(LETTERS)}, got "
            f"{letters!r:.80}"
        )
    return tuple(LETTERS[letter] for letter in letters)
