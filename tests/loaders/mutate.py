"""Damage to values, texts and bytes, drawn from a seed. What JSON has no value for is put in as
text afterwards."""

import json
import random
from collections.abc import Callable
from typing import Any

_MARK = "\ue0ff{}\ue0ff"
RAW = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "-0", "9" * 5000, "-" + "9" * 400,
    "9" * 290,
    "[" * 200 + "]" * 200, "[" * 100_000, '{"a":' * 50_000, '"\\ud800"', '"\\u0000"',
        '{"a": 1, "a": 2}', "01", "tru",
    "'a'", '"\\x"', "", ",", "[]" * 3, '"' + "a" * 100_000 + '"', "1" + "0" * 300 + ".5", "1E400",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**32, 2**63, 10**9, 10**18, 10**30, 10**299, -(10**18),
    0.0, 0.5, 1.5, 2.0,
    1e-300, 1e300, -1e308, "", "a", "a" * 10_000, "a b " * 2500, "\0", "../x", "NaN", "default",
    "0", "1e9", " ", "\n",
    "é\u202e😀", "{}", True, False, None, [], {}, [None], [[]], [0], [-1], [1, 2, 3], ["a"],
    {"a": {}}, {"a": 1}, [{}],
    [{"name": [], "template": {}}], {"content": []}, {"content": "<s>"}, {"": ""},
    list(range(2000)),
)  # fmt: skip
TEMPLATES = (
    "{% for a in range(10**9) %}x{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor "
    "%}{{ n.x }}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor "
    "%}{{ n.x }}",
    "{{ '%1000000000000d' % 1 }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ 9**9**9**9 }}",
    "{{ lipsum(10**8) }}",
    "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
    "{{ " + "[" * 90_000,
    "{{ 1" + "+1" * 20_000 + " }}",
    "{{ ''.__class__.__mro__ }}",
    "{% include 'x' %}",
    "{% extends messages %}",
    "{{ messages | map(attribute='content') | join | tojson(indent=10**9) }}",
    "{{ raise_exception(messages) }}",
    "{{ strftime_now(messages) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ '\ud800' }}".encode("utf-8", "replace").decode(),
)


def value(tree: Any, rng: random.Random, extra: dict[str, tuple[Any, ...]] | None = None) -> Any:
    """One place of a JSON value changed. `extra`: keys that may be added at its top, with values
    for them."""
    if extra and isinstance(tree, dict) and rng.random() < 0.3:
        key = rng.choice(list(extra))
        return {**tree, key: rng.choice(extra[key])}
    path = _path(tree, rng)
    return _changed(tree, path, lambda old: _hostile(old, rng), rng)


def _path(tree: Any, rng: random.Random) -> list[Any]:
    path: list[Any] = []
    while isinstance(tree, (dict, list)) and tree and (not path or rng.random() < 0.75):
        key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        path.append(key)
        tree = tree[key]
    return path


def _changed(tree: Any, path: list[Any], change: Callable[[Any], Any], rng: random.Random) -> Any:
    if not path:
        return change(tree)
    key, rest = path[0], path[1:]
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    kind = rng.random() if not rest else 1.0
    if kind < 0.15:
        del copy[key]
    elif kind < 0.25 and isinstance(copy, dict):
        copy[
            rng.choice(
                (
                    "",
                    "a",
                    "\0",
                    key.upper() if isinstance(key, str) else "b",
                    "x" * 5000,
                    "x y " * 1250,
                )
            )
        ] = copy.pop(key)
    elif kind < 0.3 and isinstance(copy, dict):
        copy[key] = copy[rng.choice(list(copy))]
    else:
        copy[key] = _changed(copy[key], rest, change, rng)
    return copy


def _hostile(old: Any, rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.3:
        return _MARK.format(rng.randrange(len(RAW)))
    if kind < 0.4:
        return [old] if rng.random() < 0.5 else {"a": old}
    if kind < 0.45:
        return str(old)
    if kind < 0.5 and isinstance(old, list):
        return old * rng.choice((2, 50))
    if kind < 0.6 and isinstance(old, int) and not isinstance(old, bool):
        return old + rng.choice((-1, 1, 10**6))
    if kind < 0.65 and isinstance(old, str) and old:
        cut = rng.randrange(len(old))
        return old[:cut] + rng.choice(("", "\0", "\ud7ff", "[", "(a+)+$", "%s")) + old[cut:]
    return rng.choice(VALUES)


def dumped(tree: Any, indent: int | None = None) -> str:
    """JSON text, with what was marked put in as it stands."""
    return put(json.dumps(tree, ensure_ascii=False, indent=indent))


def put(text: str) -> str:
    """Marks in a text, with quotes around them or not, replaced by what they stand for."""
    if "\ue0ff" in text:
        for i, raw in enumerate(RAW):
            mark = _MARK.format(i)
            text = text.replace(f'"{mark}"', raw).replace(mark, raw.strip('"'))
    return text


def data(content: bytes, rng: random.Random) -> bytes:
    """Bytes cut, flipped, put in, taken out or repeated."""
    kind, length = rng.randrange(7), len(content)
    a, b = sorted((rng.randrange(length + 1), rng.randrange(length + 1)))
    if kind == 0:
        return content[:a]
    if kind == 1 and length:
        flipped = bytearray(content)
        for _ in range(rng.choice((1, 3, 30))):
            flipped[rng.randrange(length)] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if kind == 2:
        return content[:a] + rng.randbytes(rng.choice((1, 4, 100))) + content[a:]
    if kind == 3:
        return content[:a] + content[b:]
    if kind == 4:
        return content[:b] + content[a:b] * rng.choice((1, 20)) + content[b:]
    if kind == 5:
        return rng.choice(
            (
                b"",
                b"\0" * 64,
                b"\xff\xfe",
                b"\xef\xbb\xbf" + content,
                content.decode("latin-1").encode("utf-16"),
            )
        )
    return (
        content[:a]
        + rng.choice((b"\r", b"\0", b'"', b"{", b"[", b",", b":", b"\\", b"\xed\xa0\x80", b"&a *a"))
        + content[a:]
    )
