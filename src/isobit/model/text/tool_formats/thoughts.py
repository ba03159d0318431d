"""Thoughts of an answer, which are not part of its content, and in which no call counts.

    <think>It asks for rain.</think>          Qwen3, DeepSeek, GLM, Nemotron, LFM2.5
    [THINK]It asks for rain.[/THINK]          Magistral, Ministral 3
    <seed:think>It asks for rain.</seed:think>
    <|channel>thought
    It asks for rain.<channel|>               Gemma 4

They begin where the prompt begins them, or with their mark, which an answer begins with; a mark that
is a special token of the model opens them anywhere but in a call. They end at the first mark that
closes them. What only spells such a mark elsewhere is text. Left out: harmony's channels.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from isobit.model.text.tokenizer import Tokenizer

CLOSES = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|channel>": "<channel|>",
}
"""What closes thoughts, by what opens them."""
MARKS = (*CLOSES, *CLOSES.values())
LABELS = {"<|channel>": "thought\n"}
"""What stands behind an opening mark, and is no thought."""
_LONGEST = 4096
"""The number of tokens at the end of a prompt in which it may begin thoughts."""
Pieces = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Apart:
    """An answer without its thoughts, as `pieces`; the `reasoning`; and `open`, the mark of thoughts
    that do not end."""

    pieces: list[tuple[str, str]]
    reasoning: str
    open: str


def begun_by(prompt: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the mark of the thoughts that a prompt leaves open at its end, "" for none. What a
    message of the prompt spells opens none: the last turn has begun behind it."""
    marks = {tokenizer.fast.token_to_id(mark) for mark in MARKS}
    start = len(prompt)
    while start and len(prompt) - start < _LONGEST:
        if tokenizer.is_special(prompt[start - 1]) and prompt[start - 1] not in marks:
            break
        start -= 1
    tail = tokenizer.decode(prompt[start:], special=True)
    position, opened = max((tail.rfind(mark), mark) for mark in CLOSES)
    if position < 0 or tail.find(CLOSES[opened], position) >= 0:
        return ""
    behind = tail[position + len(opened) :].removeprefix(LABELS.get(opened, ""))
    if not behind.strip():
        return opened
    added = tokenizer.fast.get_added_tokens_decoder().values()
    in_turn = start > 0 and not any(token.content in behind for token in added)
    return opened if in_turn else ""


def apart(
    pieces: Pieces,
    begun: str,
    special: Collection[str],
    own: Collection[str] = (),
    calls: tuple[Collection[str], Collection[str]] = ((), ()),
) -> Apart:
    """Return an answer, cut at MARKS and at a format's `own` marks, without its thoughts. `begun`:
    the mark of those that the prompt has begun; `special`: the marks that are special tokens;
    `calls`: the marks that open and close a call; where some close it, a mark between calls is
    text."""
    visible, blocks = [("", "")], [[""]] if begun else list[list[str]]()
    inside, calling = begun, False
    for mark, text in pieces:
        spelled = "" if mark in special else mark
        if inside and mark == CLOSES[inside]:
            inside = ""
            visible[-1] = (visible[-1][0], visible[-1][1] + text.lstrip("\n"))
        elif inside:
            blocks[-1].append(spelled + text)
        elif mark in CLOSES and not calling and (not spelled or _blank(visible)):
            inside = mark
            visible = [("", "")] if _blank(visible) else visible
            blocks.append([text.removeprefix(LABELS.get(mark, ""))])
        elif mark in own and (calling or mark in calls[0] or not calls[1]):
            calling = (calling or mark in calls[0]) and mark not in calls[1]
            visible.append((mark, text))
        else:
            visible[-1] = (visible[-1][0], visible[-1][1] + spelled + text)
    thoughts = filter(None, ("".join(block).strip("\n") for block in blocks))
    return Apart(visible, "\n".join(thoughts), inside)


def _blank(visible: Pieces) -> bool:
    return len(visible) == 1 and not visible[0][1].strip()
