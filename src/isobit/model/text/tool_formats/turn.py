"""An answer as an environment sees it: its text, its calls of tools, and why what looks like one is
none.

Thoughts, all up to the last `</think>`, are no part of what is said, and calls in them are none.
"""

from typing import Protocol

from isobit.environments.base import Turn
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
    said = text if form.channels else without_thoughts(text)
    whole = said == text or form.marks
    reply = form.of(answer, tokenizer, tools) if whole else form.read_text(said, tools)
    if reply is None:
        reply = Reply(said)
    content = reply.content if form.channels else without_thoughts(reply.content)
    return Turn(
        number, text, content, reply.calls, reply.problems, answer.finish_reason == "length"
    )


def without_thoughts(text: str) -> str:
    """A text behind its last `</think>`; nothing of it where thoughts begin and do not end."""
    _, end, behind = text.rpartition(_END)
    if not end and text.lstrip().startswith(_THOUGHTS):
        return ""
    return behind.lstrip("\n") if end else text
