"""What an answer is, wherever a row of data has one: text, or the messages of an assistant.

It is read here alone, so that null, a list of texts or a tool call is nowhere taken for the text
that Python writes of it. Left out: numbers, which are not completions; `gold_text` takes them for a
right answer, which is compared.
"""

import math
from collections.abc import Mapping
from typing import Any

from isobit.data.messages import standard_message
from isobit.data.text_rows import kind
from isobit.errors import IsobitError, brief

ANSWERS = "completion_answers"
"""The argument of reward functions with what each completion says without its thoughts."""
ANSWER = "text or the messages of an assistant"
GOLD = "text, a number or the messages of an assistant"


class NoAnswer(ValueError):
    """A value that is not an answer; `found` is what it is instead."""

    def __init__(self, found: str, wanted: str = ANSWER) -> None:
        super().__init__(f"expected {wanted}, got {found}")
        self.found = found


def content_text(content: Any) -> str | None:
    """Return the text of a message's content: text, or parts that are text, such as [{"type":
    "text", "text": ...}]; None where it is something else."""
    if isinstance(content, str):
        return content
    texts = []
    for item in content if isinstance(content, list | tuple) else ():
        text = (
            item.get("text") if isinstance(item, Mapping) and item.get("type") == "text" else None
        )
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "".join(texts) if texts else None


def answer_messages(value: Any, *, learned: bool = False) -> list[dict[str, Any]]:
    """Return an answer as messages of the assistant, whose contents are text. Keys that are null,
    with which Parquet fills up, are left out. `learned`: it may call tools and say nothing, and
    between its first message and its last others may answer. Raises NoAnswer."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if not isinstance(value, list | tuple):
        raise NoAnswer(kind(value))
    if not value:
        raise NoAnswer("an empty list")
    last = len(value) - 1
    return [
        _answer_message(message, calls=learned, any_role=learned and 0 < index < last)
        for index, message in enumerate(value)
    ]


def _answer_message(message: Any, calls: bool, any_role: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise NoAnswer(f"a list with {kind(message)} in it")
    try:
        made = standard_message(message)
    except ValueError as error:
        raise NoAnswer(f"a message with {error}") from None
    role, content = made.get("role"), made.get("content")
    if role != "assistant" and not (any_role and isinstance(role, str)):
        raise NoAnswer(f"a message of role {message.get('role')!r:.40}")
    text = content_text(content)
    if made.get("tool_calls") and not calls and not (text or "").strip():
        raise NoAnswer("a message that calls tools and says nothing")
    if text is None:
        raise NoAnswer(f"a message whose content is {kind(content)}")
    return made | {"content": text}


def answer_text(value: Any) -> str:
    """Return the text of an answer, as reward functions and evaluations take it. Raises
    NoAnswer."""
    return (
        value
        if isinstance(value, str)
        else "".join(message["content"] for message in answer_messages(value))
    )


def after_thoughts(text: str) -> str:
    """Return a text of a person or a model without the thoughts that `</think>` ends."""
    return text.rpartition("</think>")[2].lstrip("\n")


def completion_text(value: Any) -> str:
    """Return the text of a model's answer: of a conversation in which tools or users have answered
    it, its last message, and "" where that only calls tools. Raises NoAnswer."""
    if not _is_conversation(value):
        return answer_text(value)
    last = max(index for index, message in enumerate(value) if message["role"] == "assistant")
    return content_text(value[last].get("content")) or ""


def _is_conversation(value: Any) -> bool:
    """Return whether a value begins with the assistant's turn, and others answer it."""
    if not isinstance(value, list | tuple) or not all(
        isinstance(message, Mapping) for message in value
    ):
        return False
    roles = [message.get("role") for message in value]
    return roles[:1] == ["assistant"] and bool({"tool", "user"} & set(roles))


def gold_text(value: Any) -> str:
    """Return the text of a right answer, which may be a number. Raises NoAnswer."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise NoAnswer(f"{value}, which is no number", GOLD)
        return str(value)
    try:
        return answer_text(value)
    except NoAnswer as error:
        raise NoAnswer(error.found, GOLD) from None


def answer_in(columns: Mapping[str, Any], column: str, place: str, *, gold: bool = False) -> str:
    """Return the text of the answer in a row's column. Raises IsobitError with the row's place."""
    try:
        return (gold_text if gold else answer_text)(columns[column])
    except NoAnswer as error:
        raise IsobitError(f"{place}: column {brief(column)!r}: {error}") from None
