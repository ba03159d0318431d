"""Quantization of weights, activations and output gradients as heat maps: layers down, tensors
across, one table for each of three figures.

The tables show the last recorded step; the script moves them over the recorded steps. A figure's
colours have one scale over all steps: the relative error's is linear from the lowest there is,
fractions' are logarithmic, and 0 has no colour.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from isobit.monitor.report.axes import power_text
from isobit.monitor.report.document import escaped

FIGURES = {
    "relative_error": (
        "Relative error",
        "norm of the quantized tensor minus the tensor, relative to the tensor",
    ),
    "flushed": ("Flushed to zero", "fraction of the elements that are not zero and became zero"),
    "saturated": ("Saturated", "fraction of the elements clamped by their scale"),
}
SHADES = 8
"""Classes `q1` to `q8` of the style sheet; `q0` has no colour."""
_MOST_RECORDS, _MOST_CELLS = 60, 12_000

Data = dict[str, Any]


def heat_maps(records: Sequence[Mapping[str, Any]]) -> Data | None:
    """Return the page's data: steps, tensors and, per figure, `low` and `high` of its scale and
    `cells` [record][tensor][layer]; None without records. Records are thinned evenly where they are
    many."""
    if not records:
        return None
    tensors = sorted({name for record in records for name in record["tensors"]}, key=_order)
    layers = max(
        len(values)
        for r in records
        for figures in r["tensors"].values()
        for values in figures.values()
    )
    most = max(2, min(_MOST_RECORDS, _MOST_CELLS // max(1, layers * len(tensors))))
    if len(records) > most:
        records = [records[round(i * (len(records) - 1) / (most - 1))] for i in range(most)]
    figures = {}
    for figure in FIGURES:
        cells = [
            [_compact(record["tensors"].get(name, {}).get(figure, [])) for name in tensors]
            for record in records
        ]
        numbers = [
            value for record in cells for row in record for value in row if value is not None
        ]
        figures[figure] = {**_scale(figure, numbers), "cells": cells}
    return {
        "steps": [r["step"] for r in records],
        "tensors": tensors,
        "layers": layers,
        "figures": figures,
    }


def heat_section(maps: Data) -> str:
    """Return the three tables at the last record, and the slider, which appears with the script."""
    last = len(maps["steps"]) - 1
    slider = (
        "<div class='controls heat-controls' hidden><span>Step <output></output></span>"
        f"<input type='range' aria-label='Step' min='0' max='{last}' value='{last}'></div>"
    )
    tables = "".join(_table(maps, figure) for figure in FIGURES)
    return f"<div class='heat'>{slider}<div class='heat-maps'>{tables}</div></div>"


def shade(value: float | None, low: float, high: float, log: bool) -> int:
    """Return a cell's colour: 0 (none) to SHADES."""
    if value is None or (log and value <= 0):
        return 0
    if log:
        value, low, high = (math.log10(x) for x in (value, low, high))
    return 1 + min(SHADES - 1, max(0, int(SHADES * (value - low) / (high - low))))


def _scale(figure: str, values: Sequence[float]) -> Data:
    """Return a figure's colour scale, `low` to `high`, and whether it is logarithmic. That of
    relative errors spans at least a factor of 1.5, by which they differ where nothing is wrong."""
    if figure == "relative_error":
        low = min(values, default=0.0)
        return {"low": low, "high": max(max(values, default=0.0), 1.5 * low, 1e-9), "log": False}
    return {"low": 1e-7, "high": max(1e-2, max(values, default=0.0)), "log": True}


def _table(maps: Data, figure: str) -> str:
    title, meaning = FIGURES[figure]
    matrix = maps["figures"][figure]
    scale, last = (matrix["low"], matrix["high"], matrix["log"]), matrix["cells"][-1]
    heads = "".join(f"<th scope='col'>{escaped(name)}</th>" for name in maps["tensors"])
    lines = []
    for layer in range(maps["layers"]):
        values = [row[layer] if layer < len(row) else None for row in last]
        cells = "".join(f"<td class='q{shade(v, *scale)}'>{_text(v)}</td>" for v in values)
        lines.append(f"<tr><th scope='row'>{layer}</th>{cells}</tr>")
    return (
        "<div class='wide'><table class='heat-map' "
        f"data-figure='{figure}'><caption>{title}<small>{meaning}</small></caption><thead><tr><th "
        f"scope='col'>layer</th>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _text(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2%}" if value >= 1e-3 else "0" if value == 0 else power_text(value)


def _compact(values: Sequence[float | None]) -> list[float | None]:
    return [None if v is None else float(f"{v:.3g}") for v in values]


_LAYERS = ("qkv", "o", "gate_up", "down", "experts gate_up", "experts down")
_KINDS = ("", " input", " input (WGrad)", " gradient", " gradient (WGrad)")


def _order(name: str) -> tuple[int, str]:
    """Return the sort key of a tensor's name: weights, activations, gradients; each as a token
    meets them."""
    known = [layer + kind for kind in _KINDS for layer in _LAYERS]
    return (known.index(name) if name in known else len(known), name)
