"""Whether a chat template writes the tools and the calls of a conversation."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from isobit.errors import IsobitError
from isobit.model.text.tokenizer import Tokenizer

Message = Mapping[str, Any]


def writes_tools(
    tokenizer: Tokenizer, messages: Sequence[Message], variables: Mapping[str, Any]
) -> bool:
    """Return whether the template writes the `tools` of these variables."""
    hidden = None
    with suppress(IsobitError):  # a template that takes no such conversation without tools
        hidden = tokenizer.render_chat(messages, True, {**variables, "tools": None}, False)
    return hidden != tokenizer.render_chat(messages, True, variables, False)


def check_calls(tokenizer: Tokenizer, messages: Sequence[Message]) -> None:
    """Raise IsobitError for a call in these messages that the template leaves out."""
    if (conversations := tokenizer.conversations) is not None:
        conversations.check_calls(messages)
