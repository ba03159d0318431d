"""Where an answer is marked in a text: in the last `\\boxed{...}` or `\\fbox{...}`, else after the
last `####`.

Braces are matched as TeX does it: `\\{` and `\\}` are characters, of which there may be any number.
A box without braces (`\\boxed 7`) holds the rest of its formula, or the next word. What a box
inside a box holds is part of the outer one. An empty box marks nothing that another box does not.
Where the last box is never closed, as in a completion that was cut, there is a mark but no answer:
an earlier box was not meant as the last. Left out: what an answer means.
"""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"(?=[-+\d\\(\[]|\.\d)[^\n$]+")
_COUNTED = re.compile(r"([-+]?[$€£]?[\d.,]*\d)[ \t]+[A-Za-z][A-Za-z .]*")


def marked(text: str) -> str | None:
    """Return the text marked as the answer, perhaps empty; None without a mark."""
    boxed = _boxed(text)
    if boxed is not None:
        return boxed
    _, mark, tail = text.rpartition("####")
    if not mark:
        return None
    line = tail.strip().partition("\n")[0].strip()
    counted = _COUNTED.fullmatch(
        line
    )  # GSM8K's own checkers read a number there and nothing after it
    return counted[1] if counted else line


def _boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed; "" if it is never closed, None without one."""
    closing = _closing(text)
    answer: str | None = None
    end = 0
    for box in _BOX.finditer(text):
        start = box.end()
        if start <= end:  # inside of a box
            continue
        if text[start : start + 1] != "{":
            answer = _bare(text, box.start(), start) or answer
        elif start not in closing:
            answer = ""
        else:
            end = closing[start]
            answer = _content(text, start + 1, end, closing) or answer or ""
    return answer


def _bare(text: str, box: int, start: int) -> str | None:
    """Return the text behind a box without braces, where that looks like an answer: in a formula up
    to its end, else one word."""
    match = _BARE.match(text, start)
    if match is None:
        return None
    in_formula = text.count("$", text.rfind("\n", 0, box) + 1, box) % 2 == 1
    return match[0].strip() if in_formula else match[0].split()[0].rstrip(".,;:")


def _content(text: str, start: int, end: int, closing: dict[int, int]) -> str:
    """Return the content of a box, without boxes in it; `{7}` for an inner box that is a part of
    it."""
    while (box := _BOX.match(text, start)) and closing.get(box.end()) == end - 1:
        start, end = box.end() + 1, end - 1
    return _BOX.sub("", text[start:end]).strip()


def _closing(text: str) -> dict[int, int]:
    """Map the position of each opening brace to that of its closing brace."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACES.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            closing[opened.pop()] = brace.start()
    return closing
