"""An answer as an environment sees it: its text, its calls of tools, and why what looks like one is
none.

Thoughts, all up to the last `</think>`, are no part of what is said, and calls in them are none.
"""

from typing import Protocol

from isobit.data.turns import Turn
from isobit.model.text.tokenizer import Tokenizer
from isobit.model.text.tool_formats.base import Answer, Reply, ToolFormat, Tools

_THOUGHTS, _END = "<think>", "</think>"


class Sampled(Answer, Protocol):
    """What was sampled, and whether it ended or was cut off ("length")."""

    @property
    def finish_reason(self) -> str: ...


def turn_of(
    number: int, answer: Sampled, tokenizer: Tokenizer, form: ToolFormat, tools: Tools = ()
) -> Turn:
    """The turn of this number, from 0. `form`: how the model writes calls; `tools`: their schemas,
    by which texts become arguments."""
    text = answer.text
    thoughts, said = ("", text) if form.channels else split_thoughts(text)
    whole = said == text or form.marks
    reply = form.of(answer, tokenizer, tools) if whole else form.read_text(said, tools)
    if reply is None:
        reply = Reply(said)
    content = reply.content if form.channels else split_thoughts(reply.content)[1]
    truncated = answer.finish_reason == "length"
    reasoning = reply.reasoning or thoughts
    return Turn(number, text, content, reply.calls, reply.problems, truncated, reasoning)


def split_thoughts(text: str) -> tuple[str, str]:
    """(thoughts, what is said): a text up to its last `</think>`, whose `<think>` may stand in the
    prompt, and behind it; all of it are thoughts where these begin and do not end."""
    before, end, behind = text.rpartition(_END)
    if not end and text.lstrip().startswith(_THOUGHTS):
        before, behind = text, ""
    elif not end:
        return "", text
    return before.strip().removeprefix(_THOUGHTS).strip("\n"), behind.lstrip("\n")
