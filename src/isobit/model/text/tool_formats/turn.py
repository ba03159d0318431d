"""An answer as an environment sees it: its text, its thoughts, its calls of tools, and why what
looks like one is none.
"""

from typing import Protocol

from isobit.data.turns import Turn
from isobit.model.text.tokenizer import Tokenizer
from isobit.model.text.tool_formats.base import Answer, ToolFormat, Tools


class Sampled(Answer, Protocol):
    """A sampled answer, and whether it ended or was cut off ("length")."""

    @property
    def finish_reason(self) -> str: ...


def turn_of(
    number: int, answer: Sampled, tokenizer: Tokenizer, form: ToolFormat, tools: Tools = ()
) -> Turn:
    """Return the turn of this number, from 0. `form`: how the model writes calls; `tools`: their
    schemas, by which texts become arguments."""
    reply = form.of(answer, tokenizer, tools)
    truncated = answer.finish_reason == "length"
    reply_fields = reply.content, reply.calls, reply.problems
    return Turn(number, answer.text, *reply_fields, truncated, reply.reasoning)
