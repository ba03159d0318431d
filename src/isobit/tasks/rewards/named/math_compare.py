"""Mathematical answers: read by math-verify, and compared, more strictly than it does where that is
asked.

What other checkers of GSM8K and MATH leave out is left out before: signs of currencies, separators
of thousands, the dollars around a formula, a full stop. Where one of two answers is a percentage
and the other is not, the number counts with and without the percent sign.

math-verify equates what is written `\\{1, 2\\}` with `(1, 2)`, and both with `1 < x < 2`. Strictly
a set in braces is neither a tuple nor an interval, at any depth; a list without braces and parentheses
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
    not say whether there were braces. `percent`: the value is in hundredths."""

    value: Any
    text: str
    percent: bool = False


@dataclass(frozen=True)
class Answer:
    """The readings of an answer, as expressions, perhaps none; its text counts too."""

    readings: tuple[Written, ...]
    text: str


def last_answer(text: str) -> str:
    """Return the text marked as the answer (`marks.marked`), else the whole text."""
    answer = marked(text)
    return text if answer is None else answer


def cleaned(answer: str) -> str:
    """Return an answer without what other checkers ignore too: dollars, currencies, separators of
    thousands, a final full stop."""
    answer = answer.strip()
    while (whole := _FORMULA.fullmatch(answer)) is not None:
        answer = next(formula for formula in whole.groups() if formula is not None).strip()
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
    """Read a text that is an answer and nothing else."""
    from math_verify import LatexExtractionConfig, parse

    text = cleaned(answer)
    if any(mark in text for mark in ("$", r"\(", r"\[")):  # formulas among words
        return _read(parse(text, parsing_timeout=None))
    number = _PERCENT.sub("", text)
    return _read(
        parse(f"$${number}$$", [LatexExtractionConfig()], parsing_timeout=None), number != text
    )


def read_completion(text: str) -> Answer:
    """Read the marked answer of a completion, else the last expression that math-verify finds in
    it."""
    from math_verify import parse

    answer = last_answer(text)
    if answer is not text:
        return read_answer(answer)
    return _read(parse(re.sub(r"\\\$(?=\s*\d)", "", text), parsing_timeout=None))


def same(right: Answer, answer: Answer, precision: int, strict: bool) -> bool:
    """Return whether an answer equals the right one: in text, or any reading of one in any of the
    other."""
    if right.text and right.text == answer.text:
        return True
    return any(
        _equal(expected, reading, precision, strict)
        for expected in right.readings
        for reading in answer.readings
    )


def _read(parsed: list[Any], percent: bool = False) -> Answer:
    texts = [item for item in parsed if isinstance(item, str)]
    text = "".join(texts[0].split()) if texts else ""
    return Answer(
        tuple(_written(item, text, percent) for item in parsed if not isinstance(item, str)), text
    )


def _written(value: Any, text: str, percent: bool) -> Written:
    """Return an expression with its text and whether it is a percentage. To math-verify, `x %` in
    the middle of a text is x times an unevaluated hundredth: then x is returned, as a
    percentage."""
    from sympy import Mul, Rational
    from sympy.core.expr import UnevaluatedExpr

    if (
        isinstance(value, Mul)
        and len(value.args) == 2
        and value.args[1] == UnevaluatedExpr(Rational(1, 100))
    ):
        return Written(value.args[0], text, True)
    return Written(value, text, percent)


def _equal(right: Written, answer: Written, precision: int, strict: bool) -> bool:
    """Return whether two expressions are equal; where one of them is a percentage and the other is
    not, with or without the percent sign."""
    from math_verify import verify

    expected, value = right.value, answer.value
    if strict:
        forms = _form(expected, right.text), _form(value, answer.text)
        if not _fits(*forms):
            return False
        if "list" in (forms[0].kind, forms[1].kind) and {forms[0].kind, forms[1].kind} & {
            "tuple",
            "pair",
        }:
            expected, value = _in_order(expected), _in_order(value)
    pairs = [(expected, value)]
    if right.percent != answer.percent:
        with suppress(TypeError):  # not a number
            pairs.append((expected / 100, value) if right.percent else (expected, value / 100))
    return any(
        verify(*pair, float_rounding=precision, strict=strict, timeout_seconds=None)
        for pair in pairs
    )


@dataclass(frozen=True)
class _Form:
    """The notation of an expression, with those of the elements in it. `kind`: set, list, tuple,
    pair (or an open interval, which is written so), interval (or a relation that describes one),
    else value."""

    kind: str
    elements: "tuple[_Form, ...]" = ()


_FITS = {
    frozenset(kinds)
    for kinds in (
        *(("set",), ("list",), ("tuple",), ("pair",), ("interval",), ("set", "list")),
        *(("list", "tuple"), ("list", "pair"), ("tuple", "pair"), ("pair", "interval")),
    )
}


def _fits(right: _Form, answer: _Form) -> bool:
    """Return whether two notations can stand for equal values; where they can, the elements
    decide."""
    kinds = frozenset((right.kind, answer.kind))
    if "value" in kinds:
        return True
    right_elements, answer_elements = list(right.elements), list(answer.elements)
    if kinds <= {"set", "list"}:
        right_elements, answer_elements = (
            sorted(right_elements, key=str),
            sorted(answer_elements, key=str),
        )
    return kinds in _FITS and all(_fits(*pair) for pair in zip(right_elements, answer_elements))


def _form(value: Any, text: str = "") -> _Form:
    """Return the notation of an expression; `text`: how the whole is written, empty for an element
    of it."""
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
            tuple(_form(element) for element in value.args),
        )
    if isinstance(value, Tuple):
        return _Form("tuple", tuple(_form(element) for element in value.args))
    if isinstance(value, Interval):
        return _Form("pair" if value.left_open and value.right_open else "interval")
    if isinstance(value, And) and all(isinstance(equation, Eq) for equation in value.args):
        return _Form("value")
    return _Form("interval" if isinstance(value, (Set, Relational, And)) else "value")


def _braced(text: str) -> bool:
    """Return whether one pair of braces encloses the whole text."""
    text = text.replace(r"\{", "{").replace(r"\}", "}")
    depth, inside = 0, True
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        inside = inside and (depth > 0 or i == len(text) - 1)
    return inside and text.startswith("{") and text.endswith("}")


def _in_order(value: Any) -> Any:
    """Return a list, or an open interval, as a tuple, in the order in which it is written."""
    from sympy import Eq, FiniteSet, Interval, Tuple

    if isinstance(value, Eq):
        return _in_order(value.rhs)
    if isinstance(value, FiniteSet):
        return Tuple(*getattr(value, "_unsorted_args", value.args))
    return Tuple(value.start, value.end) if isinstance(value, Interval) else value
