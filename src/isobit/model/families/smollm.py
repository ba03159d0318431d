"""SmolLM3, in which every fourth layer has no rotary embedding; with use_sliding_window these
layers have a window."""

from collections.abc import Mapping
from typing import Any

from isobit.errors import IsobitError
from isobit.model.families.family import Family
from isobit.model.families.reading import whole
from isobit.model.families.windows import Windows


def _unrotated(values: Mapping[str, Any], where: str, layers: int) -> tuple[int, ...]:
    """By `no_rope_layers`, which says of each layer whether it has the embedding, or by their
    interval."""
    listed = values.get("no_rope_layers")
    if listed is None:
        interval = whole(values, "no_rope_layer_interval", where, 4)
        return tuple(layer for layer in range(layers) if (layer + 1) % interval == 0)
    if (
        not isinstance(listed, list)
        or len(listed) < layers
        or not all(type(entry) is int and entry in (0, 1) for entry in listed)
    ):
        raise IsobitError(
            f"{where}: no_rope_layers must say 0 or 1 for each of {layers} layers, got "
            f"{listed!s:.80}"
        )
    return tuple(layer for layer in range(layers) if not listed[layer])


def _slides(values: Mapping[str, Any], where: str, layers: int) -> list[bool]:
    unrotated = _unrotated(values, where, layers)
    return [layer in unrotated for layer in range(layers)]


FAMILIES = {
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        attention_bias=True,
        mlp_bias=True,
        windows=Windows(flag=True, slides=_slides),
        unrotated=_unrotated,
        rope_theta=2e6,
        kv_heads=4,
        tied=True,
    )
}
