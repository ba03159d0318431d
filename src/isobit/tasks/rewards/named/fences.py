"""The program in a completion: the last fenced block of Python, else the last without a language,
else the text.

A fence is three or more of ` or ~. One opens a block at the end of its line, but for the language:
alone, in a list or a quotation, after words, after a tag. Fences do not show where code begins and
ends: a docstring may hold some, a thought one without a partner, and a model may close a block
behind the last line of code. So what decides between the fences that could close a block is whether
what they enclose is Python: the first does that stands on a line of its own and makes it so, else
the first anywhere. A block that is no Python either way ends at the first one. A fence with a
language closes nothing. Where thoughts end with `</think>`, what follows them counts, if a program
is in it.

Left out: code between fences on one line.
"""

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

_OPENS = re.compile(r"^(.*?)(?<![`~])(`{3,}|~{3,})([^`\n]*)$", re.MULTILINE)
_OWN = re.compile(r"^[ \t>]*(`{3,}|~{3,})[ \t]*([^\s`~]?)", re.MULTILINE)
_MARGIN = re.compile(
    r"[ \t>]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*"
)  # of a line in a list or a quotation
_LANGUAGE = re.compile(r"[{.\s]*([\w+#-]*)")
_PYTHON = ("python", "python3", "py", "py3")
_MOST_OPENINGS = 500  # of a completion that are looked at
_MOST_CLOSINGS = 8  # of each kind that are tried for one of them


def program(text: str) -> str:
    """What of the completion is run."""
    parser = _Parser()
    thoughts, _, answer = text.rpartition("</think>")
    for part in (answer, thoughts):
        blocks = list(_blocks(part, parser))
        for wanted in (True, False):
            found = [source for is_python, source in blocks if is_python is wanted]
            if found:
                return found[-1]
        inside = re.sub(r"\A(?s:.*)<answer>|</answer>(?s:.*)\Z", "", part)
        source = parser.python(inside)
        if source is not None and _does_something(source):
            return source
    return text


@dataclass
class _Parser:
    """Python's parser, which reads at most so many characters for one completion; from there on
    nothing is Python."""

    left: int = 12_000_000

    def python(self, *texts: str) -> str | None:
        """The first of the texts, or the last with its lines moved to the left, that is Python."""
        self.left -= 2 * sum(map(len, texts))
        if self.left < 0:
            return None
        for variant in dict.fromkeys((*texts, textwrap.dedent(texts[-1]).lstrip("\n"))):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    ast.parse(variant)
            except (SyntaxError, ValueError, MemoryError, RecursionError):
                continue
            return variant
        return None


def _does_something(source: str) -> bool:
    """Whether it is more than words that happen to be Python."""
    statements = ast.parse(source).body
    return any(
        not isinstance(one, ast.Expr) or isinstance(one.value, (ast.Call, ast.Await))
        for one in statements
    )


def _blocks(text: str, parser: _Parser) -> Iterator[tuple[bool, str]]:
    """Of each block of Python, or without a language that is Python, which of both it is, and its
    source."""
    place = 0
    for _ in range(_MOST_OPENINGS):
        if (opening := _OPENS.search(text, place)) is None:
            return
        place = opening.end()
        language = _LANGUAGE.match(opening[3])
        assert language is not None
        is_python = language[1].lower() in _PYTHON
        if language[1] and not is_python:
            place = _after_other(text, opening)
            continue
        closings = _closings(text, opening)
        end = closings[0][0] if closings else len(text)
        source: str | None = text[place + 1 : end] if is_python else None
        for begin, after in [*closings, (len(text), len(text))]:
            body = text[place + 1 : begin]
            if (found := parser.python(body, _outdented(body, opening[1]))) is not None:
                source, place = found, after
                break
        if source is not None and source.strip():
            yield is_python, source


def _after_other(text: str, opening: re.Match[str]) -> int:
    """Where to go on after the fence that opens a block of another language: behind the next one if
    that closes it."""
    following = _OWN.search(text, opening.end())
    closes = (
        following
        and _MARGIN.fullmatch(opening[1])
        and following[1].startswith(opening[2])
        and not following[2]
    )
    return following.end() if following and closes else opening.end()


def _closings(text: str, opening: re.Match[str]) -> list[tuple[int, int]]:
    """Where the fences begin and end that could close a block: those on a line of their own, then
    the others."""
    fence = rf"{opening[2]}{opening[2][0]}*(?!\w|\{{)"
    own = re.compile(rf"^[ \t>]*{fence}", re.MULTILINE).finditer(text, opening.end())
    others = re.compile(rf"(?<!{opening[2][0]}){fence}").finditer(text, opening.end())
    return [match.span() for found in (own, others) for match in islice(found, _MOST_CLOSINGS)]


def _outdented(body: str, before: str) -> str:
    """A block's lines without the margin of the list or the quotation that its first fence stands
    in."""
    if not _MARGIN.fullmatch(before):
        return body
    if ">" in before:
        return re.sub(r"^[ \t]*(?:>[ ]?)+", "", body, flags=re.MULTILINE)
    return re.sub(rf"^[ \t]{{1,{len(before)}}}", "", body, flags=re.MULTILINE) if before else body
