"""Mathematical answers: read by math-verify, and compared, more strictly than it does where that is
asked.

What other checkers of GSM8K and MATH leave out is left out before: signs of currencies, separators
of thousands, the dollars around a formula, a full stop. Where one of two answers is a percentage
and the other is not, the number counts with and without the percent sign.

math-verify equates what is written `\\{1, 2\\}` with `(1, 2)`, and both with `1 < x < 2`. Strictly
a set in braces is no tuple and no interval, at any depth; a list without braces and parentheses
(`1, 2`) equals a set in any order and a tuple in its own. An open interval is written as a pair is,
and equals it. Left out: the clock (`math_answer.py`).
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from isobit.tasks.rewards.named.marks import marked

_FORMULA = re.compile(
    r"\$\$([^$]*)\$\$|\$([^$]*)\$|\\\(((?:(?!\\\)).)*)\\\)|\\\[((?:(?!\\\]).)*)\\\]", re.DOTALL
)
_POWER = re.compile(r"([-+]?\d+(?:\.\d*)?)[eE]([-+]?\d+)")
_CURRENCY = re.compile(
    r"\\text\s*\{\s*\\\$\s*\}|\\\$|\\(?:text|math)dollar(?![A-Za-z])|\\pounds(?![A-Za-z])|[€£¥₹]"
)
_MONEY = re.compile(r"(?:US\$|USD|EUR|GBP)\s*(?=[-\d])|(?<=\d)\s*(?:dollars?|euros?|USD|EUR|GBP)$")
_SEPARATOR = r"(?:,?\\[,;:! ]|~|\{,\}|\\text\{,\}|,|\s)"
_THOUSANDS = re.compile(rf"(?<![\d.,])\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?![\d,])")
_WRITTEN = {
    "−": "-",
    "×": r"\times ",
    "÷": r"\div ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "°": r"^\circ ",
    "∪": r"\cup ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "∈": r"\in ",
    "**": "^",
    "\n": " ",
    r"\langle": "(",
    r"\rangle": ")",
    r"\lbrace": r"\{",
    r"\rbrace": r"\}",
}
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*(?:\\?%|percent)\s*\}|(?<![a-z])percent)$")
_ASSIGNED = re.compile(r"=|\\in(?![A-Za-z])")


@dataclass(frozen=True)
class Written:
    """An expression of SymPy's, and the text that it is written as, without white space: a set does
    not say whether there were braces. `percent`: so many hundredths."""

    value: Any
    text: str
    percent: bool = False


@dataclass(frozen=True)
class Answer:
    """What an answer can be read as, perhaps nothing; its text counts too."""

    readings: tuple[Written, ...]
    text: str


def last_answer(text: str) -> str:
    """What is marked as the answer (`marks.marked`), else the text itself."""
    answer = marked(text)
    return text if answer is None else answer


def cleaned(answer: str) -> str:
    """An answer that stands alone, without what other checkers leave out too."""
    answer = answer.strip()
    while (whole := _FORMULA.fullmatch(answer)) is not None:
        answer = next(part for part in whole.groups() if part is not None).strip()
    if (power := _POWER.fullmatch(answer)) is not None:  # as Python writes a small number
        answer = rf"{power[1]}\times 10^{{{int(power[2])}}}"
    for written, meant in _WRITTEN.items():
        answer = answer.replace(written, meant)
    answer = _MONEY.sub("", _CURRENCY.sub("", answer))
    if answer.count("$") == 1:
        answer = answer.replace("$", "")
    answer = _THOUSANDS.sub(lambda number: re.sub(_SEPARATOR, "", number[0]), answer)
    return answer.strip().rstrip("\\").removesuffix(".").strip()


def read_answer(answer: str) -> Answer:
    """An answer that stands alone: all of it counts."""
    from math_verify import LatexExtractionConfig, parse

    text = cleaned(answer)
    if any(mark in text for mark in ("$", r"\(", r"\[")):  # formulas among words
        return _read(parse(text, parsing_timeout=None))
    number = _PERCENT.sub("", text)
    return _read(
        parse(f"$${number}$$", [LatexExtractionConfig()], parsing_timeout=None), number != text
    )


def read_completion(text: str) -> Answer:
    """The marked answer, else the last expression that math-verify finds in the text."""
    from math_verify import parse

    answer = last_answer(text)
    if answer is not text:
        return read_answer(answer)
    return _read(parse(re.sub(r"\\\$(?=\s*\d)", "", text), parsing_timeout=None))


def same(right: Answer, given: Answer, precision: int, strict: bool) -> bool:
    """Whether an answer is the right one."""
    if right.text and right.text == given.text:
        return True
    return any(
        _equal(one, other, precision, strict) for one in right.readings for other in given.readings
    )


def _read(found: list[Any], percent: bool = False) -> Answer:
    texts = [each for each in found if isinstance(each, str)]
    text = "".join(texts[0].split()) if texts else ""
    return Answer(
        tuple(_written(each, text, percent) for each in found if not isinstance(each, str)), text
    )


def _written(value: Any, text: str, percent: bool) -> Written:
    """`x %` in the middle of a text is x times an unevaluated hundredth to math-verify."""
    from sympy import Mul, Rational
    from sympy.core.expr import UnevaluatedExpr

    if (
        isinstance(value, Mul)
        and len(value.args) == 2
        and value.args[1] == UnevaluatedExpr(Rational(1, 100))
    ):
        return Written(value.args[0], text, True)
    return Written(value, text, percent)


def _equal(right: Written, given: Written, precision: int, strict: bool) -> bool:
    """Whether they are equal; where one is a percentage and the other is not, with or without the
    percent sign."""
    from math_verify import verify

    one, other = right.value, given.value
    if strict:
        forms = _form(one, right.text), _form(other, given.text)
        if not _fits(*forms):
            return False
        if "list" in (forms[0].kind, forms[1].kind) and {forms[0].kind, forms[1].kind} & {
            "tuple",
            "pair",
        }:
            one, other = _in_order(one), _in_order(other)
    pairs = [(one, other)]
    if right.percent != given.percent:
        with suppress(TypeError):  # not a number
            pairs.append((one / 100, other) if right.percent else (one, other / 100))
    return any(
        verify(*pair, float_rounding=precision, strict=strict, timeout_seconds=None)
        for pair in pairs
    )


@dataclass(frozen=True)
class _Form:
    """What an expression is written as, and its parts' forms. `kind`: set, list, tuple, pair (or an
    open interval, which is written so), interval (or what describes one), else value."""

    kind: str
    parts: "tuple[_Form, ...]" = ()


_FITS = {
    frozenset(kinds)
    for kinds in (
        *(("set",), ("list",), ("tuple",), ("pair",), ("interval",), ("set", "list")),
        *(("list", "tuple"), ("list", "pair"), ("tuple", "pair"), ("pair", "interval")),
    )
}


def _fits(one: _Form, other: _Form) -> bool:
    """Whether what is written so can be equal; where it can, what it holds decides."""
    kinds = frozenset((one.kind, other.kind))
    if "value" in kinds:
        return True
    parts, others = list(one.parts), list(other.parts)
    if kinds <= {"set", "list"}:
        parts, others = sorted(parts, key=str), sorted(others, key=str)
    return kinds in _FITS and all(_fits(*each) for each in zip(parts, others))


def _form(value: Any, text: str = "") -> _Form:
    """The form of an expression; `text`: how the whole is written, empty for a part of it."""
    from sympy import And, Eq, FiniteSet, Interval, Set, Tuple
    from sympy.core.relational import Relational

    if isinstance(value, Eq):
        sign = _ASSIGNED.search(text)
        form = _form(value.rhs, text[sign.end() :] if sign else text)
        if form.kind == "pair":
            return _Form(
                "interval"
                if sign and sign[0] != "="
                else "tuple"
                if isinstance(value.lhs, (Tuple, Interval))
                else "pair"
            )
        return form
    if isinstance(value, FiniteSet):
        return _Form(
            "set" if not text or _braced(text) else "list",
            tuple(_form(part) for part in value.args),
        )
    if isinstance(value, Tuple):
        return _Form("tuple", tuple(_form(part) for part in value.args))
    if isinstance(value, Interval):
        return _Form("pair" if value.left_open and value.right_open else "interval")
    if isinstance(value, And) and all(isinstance(part, Eq) for part in value.args):
        return _Form("value")
    return _Form("interval" if isinstance(value, (Set, Relational, And)) else "value")


def _braced(text: str) -> bool:
    """Whether one pair of braces holds all of it."""
    text = text.replace(r"\{", "{").replace(r"\}", "}")
    depth, inside = 0, True
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        inside = inside and (depth > 0 or i == len(text) - 1)
    return inside and text.startswith("{") and text.endswith("}")


def _in_order(value: Any) -> Any:
    """A list, or an open interval, as a tuple: what is written second is second."""
    from sympy import Eq, FiniteSet, Interval, Tuple

    if isinstance(value, Eq):
        return _in_order(value.rhs)
    if isinstance(value, FiniteSet):
        return Tuple(*getattr(value, "_unsorted_args", value.args))
    return Tuple(value.start, value.end) if isinstance(value, Interval) else value
