"""Heads of attention that differ by layer, as Gemma 4 has them, and their keys in config.json.

Layers that see all positions have heads of another width, and other heads of keys, than those with
a window; in some models one projection gives their keys and their values. Left out: the arithmetic
(`forward/layers.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from isobit.errors import IsobitError
from isobit.model.families import flag, optional_whole, whole

_OVERRIDES = ("num_key_value_heads", "head_dim")


class LayerHeads(NamedTuple):
    """The heads of a layer: those of keys and values, the width of every head, and whether one
    projection gives both keys and values."""

    kv_heads: int
    dim: int
    joint: bool = False

    @property
    def width(self) -> int:
        """The number of elements of a token's keys, in all heads."""
        return self.kv_heads * self.dim

    @staticmethod
    def from_hf(
        values: Mapping[str, Any],
        where: str,
        sliding: "LayerHeads",
        slides: Sequence[bool],
        dim: int,
    ) -> "LayerHeads":
        """Read the heads of the layers that do not slide: from the keys of published models, where
        `dim` is the default of global_head_dim, or from the per_layer_config that transformers
        writes. `sliding`: the heads of the layers that slide. Raises IsobitError for layers of one
        kind that differ."""
        joint = flag(values, "attention_k_eq_v", where)
        if _BY_LAYER in values:  # null and {}: no layer differs
            by_layer = values[_BY_LAYER]
            kinds = _by_layer({} if by_layer is None else by_layer, where, sliding, slides)
        else:
            global_heads = optional_whole(values, _GLOBAL_HEADS, where, (_GLOBAL_HEADS,), None)
            heads = global_heads if global_heads is not None and joint else sliding.kv_heads
            kinds = LayerHeads(heads, whole(values, "global_head_dim", where, dim))
        if kinds.kv_heads != sliding.kv_heads and not joint:
            raise IsobitError(
                f"{where}: {kinds.kv_heads} key/value heads in layers with full attention and "
                f"{sliding.kv_heads} in the others: supported with attention_k_eq_v true alone"
            )
        return kinds._replace(joint=joint)

    def to_hf(self) -> dict[str, Any]:
        """Return the keys of config.json, as published models have them."""
        return {
            "global_head_dim": self.dim,
            _GLOBAL_HEADS: self.kv_heads,
            "attention_k_eq_v": self.joint,
        }


_GLOBAL_HEADS = "num_global_key_value_heads"
_BY_LAYER = "per_layer_config"


def _by_layer(by_layer: Any, where: str, sliding: LayerHeads, slides: Sequence[bool]) -> LayerHeads:
    """Read the heads from per_layer_config, which has a mapping for each layer that differs."""
    layers = [str(layer) for layer in range(len(slides))]
    usual = dict(zip(_OVERRIDES, sliding[:2]))
    if not isinstance(by_layer, dict) or not all(
        key in layers and isinstance(changes, dict) and changes.keys() <= usual.keys()
        for key, changes in by_layer.items()
    ):
        raise IsobitError(
            f"{where}: per_layer_config is not supported but for {' and '.join(_OVERRIDES)} of "
            f"layers 0 to {len(slides) - 1}"
        )
    settings = [usual | by_layer.get(layer, {}) for layer in layers]
    heads, dims = ([whole(changes, key, where) for changes in settings] for key in _OVERRIDES)
    heads_by_layer = [LayerHeads(*sizes) for sizes in zip(heads, dims)]
    full = {heads for heads, slide in zip(heads_by_layer, slides) if not slide}
    if len(full) > 1 or any(
        slide and heads != sliding for heads, slide in zip(heads_by_layer, slides)
    ):
        raise IsobitError(
            f"{where}: per_layer_config is not supported where layers of one type have different "
            "heads"
        )
    return full.pop() if full else sliding
