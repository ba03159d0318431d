"""The bounds of schemas and grammars, checked before llguidance sees them: it recurses along chains
of rules and references, and no counter of its own bounds what a `multipleOf`, or a token that is
two patterns at once, costs.

They are those of the stack of a thread of 8 MiB and of a second (tests/serve/test_bounds.py).
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from math import lcm
from typing import Any

from isobit.data.foreign import BadJson, parse_json
from isobit.errors import brief
from isobit.serve.requests import BadRequest

MOST_RULES, MOST_REFS, MOST_DEPTH, MOST_MULTIPLE = 300, 300, 1500, 10_000
"""Rules of a grammar; `$ref` of schemas; brackets of a grammar, or levels of a schema in which its
`$ref` stand, together; digits of a `multipleOf`, as a number without its decimal point."""
_JSON = re.compile(r"%json\s*")
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"?|(?://|#)[^\n]*|/(?:\\.|[^/\\])*/?', re.DOTALL)
_OWN = re.compile(r"@(answer|body)\b")
_BOTH = re.compile(r"&|~(?!\s*\d)")


def check_schemas(key: str, schemas: Iterable[tuple[str, Any]]) -> None:
    """Raise BadRequest for schemas, each with its place, that are too much together."""
    refs = depths = 0
    for place, schema in schemas:
        multiple = 1  # of which two at once are a multiple
        for where, name, value, depth in _values(place, schema):
            if name == "$ref" and isinstance(value, str):
                refs, depths = refs + 1, depths + depth
            elif name == "multipleOf" and type(value) in (int, float):
                multiple = lcm(multiple, _digits(value))
                if multiple > MOST_MULTIPLE:
                    raise BadRequest(
                        f"{brief(where)}: expected at most {MOST_MULTIPLE:,} without the decimal point, "
                        "also as the least common multiple of all in the schema",
                        key,
                    )
    if refs > MOST_REFS or depths > MOST_DEPTH:
        raise BadRequest(
            f"{key}: at most {MOST_REFS} $ref, which stand in at most {MOST_DEPTH:,} levels "
            f"together, got {refs:,} in {depths:,}",
            key,
        )


def check_size(key: str, text: str) -> str:
    """Return a grammar, in Lark's notation or in GBNF's, without the schemas that stand in it.
    Raises BadRequest for one that is too large."""
    schemas, rest, end = list[tuple[str, Any]](), "", 0
    while (mark := _JSON.search(text, end)) is not None:
        rest += text[end : mark.start()]
        try:
            end = json.JSONDecoder().raw_decode(text, mark.end())[1]
            schemas.append((f"{key}: %json", parse_json(text[mark.end() : end])))
        except (BadJson, ValueError, RecursionError):
            raise BadRequest(f"{key}: expected JSON behind %json", key) from None
    rest += text[end:]
    check_schemas(key, schemas)
    rules = rest.count(":") - rest.count("::=")  # where one stands in a text, one less
    brackets = rest.count("(") + rest.count("[")
    if rules > MOST_RULES or brackets > MOST_DEPTH:
        raise BadRequest(
            f"{key}: at most {MOST_RULES} rules (colons) and {MOST_DEPTH:,} brackets, got "
            f"{rules:,} and {brackets:,}",
            key,
        )
    return rest


def check_grammar(key: str, text: str) -> None:
    """Raise BadRequest for a grammar in Lark's notation that is too large, or has what is not
    offered."""
    bare = _QUOTED.sub(" ", check_size(key, text))
    if name := _OWN.search(bare):
        raise BadRequest(f"{key}: {name[0]}: expected a rule of this grammar", key)
    if sign := _BOTH.search(bare):
        raise BadRequest(
            f"{key}: {sign[0]}: not offered between tokens, since its work has no bound", key
        )


def _values(place: str, schema: Any) -> Iterator[tuple[str, str, Any, int]]:
    """Yield all that stands in a schema: where, by which name, what, and in which level."""
    waiting: list[tuple[str, Any, int]] = [(place, schema, 1)]
    while waiting:
        place, value, depth = waiting.pop()
        if isinstance(value, Mapping):
            pairs = [(f"{place}.{brief(name, 40)}", name, inner) for name, inner in value.items()]
        else:
            items = value if isinstance(value, list) else []
            pairs = [(f"{place}[{index}]", "", inner) for index, inner in enumerate(items)]
        for where, name, inner in pairs:
            yield where, name, inner, depth
            if isinstance(inner, (Mapping, list)):
                waiting.append((where, inner, depth + 1))


def _digits(value: float) -> int:
    """Return the digits of a number, without the zeros at the end of its decimals; for a larger one
    than any that is taken the next one."""
    if not 0 < abs(value) <= MOST_MULTIPLE:
        return MOST_MULTIPLE + 1 if value else 1
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    return int("".join(map(str, digits))) * 10 ** max(int(exponent), 0)
