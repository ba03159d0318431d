"""Which layers of a model have a sliding window, read from config.json.

A row at position p of such a layer sees the positions above p - window.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isobit.errors import IsobitError
from isobit.model.families.reading import flag, whole

Slides = Callable[[Mapping[str, Any], str, int], list[bool]]
"""(values, where, layers): of each layer, whether it slides where `layer_types` is left out."""


@dataclass(frozen=True)
class Windows:
    """When a family's layers have a sliding window: where sliding_window is a number, and with
    `flag` only if use_sliding_window is true. `default` is that number where config.json leaves it
    out.

    `slides` says which layers, if `layer_types` does not; without it all have the window.
    `nullable`: sliding_window may be null, so that no layer has one. `layer_types`: whether
    config.json may have that key.
    """

    default: int | None = None
    flag: bool = False
    slides: Slides | None = None
    nullable: bool = True
    layer_types: bool = True


def windows_of(
    values: Mapping[str, Any], where: str, rule: Windows | None, layers: int, max_positions: int
) -> tuple[int | None, ...]:
    """Return the window of each layer in tokens, None where it sees all positions; () if no layer
    has one. Raises IsobitError for layer types of other kinds, and for those that the family's
    models do not follow."""
    kinds = _layer_kinds(values, where, layers)
    if kinds and rule is not None and not rule.layer_types:
        raise IsobitError(
            f"{where}: layer_types is not supported in this architecture; leave it out"
        )
    window = None if rule is None else _window(values, where, rule)
    if rule is None or window is None:
        if "sliding_attention" in kinds:
            raise IsobitError(
                f"{where}: layer_types has sliding_attention, but no window is in use; take "
                "full_attention"
            )
        return ()
    if rule.slides is None:
        slides = [True] * layers
        if "full_attention" in kinds and window < max_positions:
            raise IsobitError(
                f"{where}: layer_types has full_attention, but in this architecture sliding_window "
                f"{window} is that of all layers; leave layer_types out"
            )
    else:
        slides = [kind == "sliding_attention" for kind in kinds] or rule.slides(
            values, where, layers
        )
    windows = tuple(window if slide else None for slide in slides)
    return windows if any(windows) else ()


def windows_to_hf(windows: Sequence[int | None], rule: Windows, layers: int) -> dict[str, Any]:
    """Return the keys that say so."""
    used = sorted({window for window in windows if window is not None})
    assert len(used) <= 1, "config.json has one window for all layers"
    values: dict[str, Any] = {"use_sliding_window": bool(used)} if rule.flag else {}
    if used or (rule.nullable and not rule.flag):
        values["sliding_window"] = used[0] if used else None
    if rule.slides is not None and (used or not rule.nullable):
        kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
        values["layer_types"] = kinds or ["full_attention"] * layers
    return values


def _window(values: Mapping[str, Any], where: str, rule: Windows) -> int | None:
    if rule.flag and not flag(values, "use_sliding_window", where):
        return None
    if rule.nullable and values.get("sliding_window", rule.default) is None:
        return None
    return whole(values, "sliding_window", where, rule.default)


def _layer_kinds(values: Mapping[str, Any], where: str, layers: int) -> list[str]:
    """Return `layer_types`, or nothing where it is left out."""
    kinds = values.get("layer_types")
    if kinds is None:
        return []
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise IsobitError(
            f"{where}: layer_types must name the attention of each of {layers} layers"
        )
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention", "attention"):  # Granite's word
            raise IsobitError(
                f"{where}: layer_types: {kind!r:.80} is not supported: supported are "
                "full_attention and sliding_attention"
            )
    return kinds
