"""An answer as an environment sees it: its text, its calls of tools, and why what looks like one is
none.

Thoughts, all up to the last `</think>`, are no part of what is said, and calls in them are none.
"""

from dataclasses import replace
from typing import Protocol

from isobit.environments.base import Turn
from isobit.model.text.tokenizer import Tokenizer
from isobit.model.text.tool_formats.base import Answer, Reply, ToolFormat, Tools

_BEGIN, _END = "<think>", "</think>"


class Sampled(Answer, Protocol):
    """What was sampled, and whether it ended or was cut off ("length")."""

    @property
    def finish_reason(self) -> str: ...


def reply_of(answer: Answer, tokenizer: Tokenizer, form: ToolFormat, tools: Tools = ()) -> Reply:
    """What an answer, one turn alone, says. `form`: how the model writes calls; `tools`: their
    schemas, by which texts become arguments."""
    if form.channels:
        return form.of(answer, tokenizer, tools) or Reply(answer.text)
    thoughts, said = _split(answer.text)
    reply = form.of(answer, tokenizer, tools) if form.marks else form.read_text(said, tools)
    if reply is None:
        return Reply(said, reasoning=thoughts)
    content = _split(reply.content)[1] if form.marks else reply.content
    return replace(reply, content=content, reasoning=thoughts)


def turn_of(number: int, answer: Sampled, reply: Reply) -> Turn:
    """The turn of this number, from 0."""
    truncated = answer.finish_reason == "length"
    return Turn(number, answer.text, reply.content, reply.calls, reply.problems, truncated)


def _split(text: str) -> tuple[str, str]:
    """(thoughts, what is said behind them): all is thoughts where they begin and do not end."""
    before, end, behind = text.rpartition(_END)
    if not end:
        begun = text.lstrip().startswith(_BEGIN)
        return (text.lstrip()[len(_BEGIN) :].strip(), "") if begun else ("", text)
    return before.strip().removeprefix(_BEGIN).strip(), behind.lstrip("\n")
