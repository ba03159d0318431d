"""The program in a completion: the last fenced block of Python, else the last without a language,
else the text.

A fence is three or more of ` or ~. One opens a block at the end of its line, but for the language:
alone, in a list or a quotation, after words, after a tag. Fences do not show where code begins and
ends: a docstring may hold some, a thought one without a partner, and a model may close a block
behind the last line of code. So what decides between the fences that could close a block is whether
what they enclose is Python: the first does that stands alone on its line and makes it so, else
the first anywhere. A block that is not Python either way ends at the first one. A fence with a
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
    """Return the source of the program in a completion: the last block of Python, else the last
    block without a language, else the text itself."""
    parser = _Parser()
    thoughts, _, answer = text.rpartition("</think>")
    for section in (answer, thoughts):
        blocks = list(_blocks(section, parser))
        for wanted in (True, False):
            sources = [source for is_python, source in blocks if is_python is wanted]
            if sources:
                return sources[-1]
        inside = re.sub(r"\A(?s:.*)<answer>|</answer>(?s:.*)\Z", "", section)
        source = parser.python(inside)
        if source is not None and _does_something(source):
            return source
    return text


@dataclass
class _Parser:
    """Python's parser with a budget: after `left` characters of one completion every text counts as
    not Python."""

    left: int = 12_000_000

    def python(self, *texts: str) -> str | None:
        """Return the first of the texts that is Python, or the last text with its lines moved to
        the left if only that is; None otherwise."""
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
    """Return whether a source does more than name things: words can happen to be Python."""
    statements = ast.parse(source).body
    return any(
        not isinstance(statement, ast.Expr) or isinstance(statement.value, (ast.Call, ast.Await))
        for statement in statements
    )


def _blocks(text: str, parser: _Parser) -> Iterator[tuple[bool, str]]:
    """Yield (whether its fence names Python, source) for each block of Python, and for each block
    without a language that parses as Python."""
    position = 0
    for _ in range(_MOST_OPENINGS):
        if (opening := _OPENS.search(text, position)) is None:
            return
        position = opening.end()
        language = _LANGUAGE.match(opening[3])
        assert language is not None
        is_python = language[1].lower() in _PYTHON
        if language[1] and not is_python:
            position = _after_other(text, opening)
            continue
        closings = _closings(text, opening)
        end = closings[0][0] if closings else len(text)
        source: str | None = text[position + 1 : end] if is_python else None
        for begin, following in [*closings, (len(text), len(text))]:
            body = text[position + 1 : begin]
            if (python_source := parser.python(body, _outdented(body, opening[1]))) is not None:
                source, position = python_source, following
                break
        if source is not None and source.strip():
            yield is_python, source


def _after_other(text: str, opening: re.Match[str]) -> int:
    """Return the position behind a fence that opens a block of another language: behind the next
    fence if that closes the block."""
    following = _OWN.search(text, opening.end())
    closes = (
        following
        and _MARGIN.fullmatch(opening[1])
        and following[1].startswith(opening[2])
        and not following[2]
    )
    return following.end() if following and closes else opening.end()


def _closings(text: str, opening: re.Match[str]) -> list[tuple[int, int]]:
    """Return the (start, end) of the fences that could close a block: those alone on their line,
    then the others."""
    fence = rf"{opening[2]}{opening[2][0]}*(?!\w|\{{)"
    on_own_line = re.compile(rf"^[ \t>]*{fence}", re.MULTILINE).finditer(text, opening.end())
    anywhere = re.compile(rf"(?<!{opening[2][0]}){fence}").finditer(text, opening.end())
    return [
        match.span()
        for matches in (on_own_line, anywhere)
        for match in islice(matches, _MOST_CLOSINGS)
    ]


def _outdented(body: str, margin: str) -> str:
    """Return a block's lines without the margin of the list or quotation in which its first fence
    stands."""
    if not _MARGIN.fullmatch(margin):
        return body
    if ">" in margin:
        return re.sub(r"^[ \t]*(?:>[ ]?)+", "", body, flags=re.MULTILINE)
    return re.sub(rf"^[ \t]{{1,{len(margin)}}}", "", body, flags=re.MULTILINE) if margin else body
