"""The HTML document that every page is: one file with its style and script inside, which fetches
nothing.

A model's text never becomes markup: in HTML it is escaped (`escaped`), in the script's JSON `<`,
`>` and `&` are escaped too (`embedded`), and the script inserts it as text only. A
Content-Security-Policy in the page allows its own script, by its hash, and no other, and no
request.
"""

import base64
import hashlib
import html
import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

_STYLE = "report.css"
_ESCAPES = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})


def escaped(value: str) -> str:
    """Escape text for HTML, and drop control characters other than line breaks and tabs."""
    return html.escape("".join(c for c in value if c in "\n\t" or (c.isprintable() or c == " ")))


def embedded(data: Any, name: str = "") -> str:
    """Embed data for the script as an element that a browser does not run; `name` is its id.
    Numbers that are not finite are null."""
    text = json.dumps(
        _finite(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False
    ).translate(_ESCAPES)
    clean = text.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair has no UTF-8
    return f"<script type='application/json'{f' id={name!r}' if name else ''}>{clean}</script>"


def html_page(title: str, body: str, scripts: Sequence[str] = ("charts.js",)) -> str:
    """Return a whole document around a body, with these scripts of `assets`."""
    script = "\n".join(asset(name) for name in scripts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'"
    )
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>isobit: {escaped(title)}</title><style>{asset(_STYLE)}</style></head><body>\n"
        f"{body}\n"
        f"<script>{script}</script></body></html>\n"
    )


def asset(name: str) -> str:
    """Return the text of a file of `report/assets`."""
    return (files("isobit.monitor.report") / "assets" / name).read_text(encoding="utf-8")


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return (
            (int(data) if data.is_integer() and abs(data) < 1e15 else data)
            if math.isfinite(data)
            else None
        )
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return data
