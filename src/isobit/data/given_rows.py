"""Rows of supervised sets, in the columns that others use, as rows with `prompt` and an answer.

text                          a text to learn whole (TRL's language modelling)
instruction, input, output    Alpaca: the instruction, and below it the input where there is one
conversations                 ShareGPT: messages of `from` and `value`, as TRL converts them
chosen, rejected              TRL's pairs without a `prompt`: the messages that both begin with

`prompt` and `completion`, `messages`, and `prompt`, `chosen` and `rejected` stay as they are, and
so does every row whose columns the user has named. Left out: what an answer is (`answers.py`).
"""

from collections.abc import Mapping
from typing import Any

from isobit.errors import IsobitError, brief

_ROLES = {"human": "user", "gpt": "assistant"}


def given_row(
    where: str, row: dict[str, Any], columns: Mapping[str, str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the row with the columns that examples are made of, and the columns that new ones were
    made of. Raises IsobitError, with the place, for a value that cannot be."""
    if _whole_pair(row) and "prompt" not in columns:
        return _pair(where, row), ("prompt",)
    if {"prompt", "messages"} & {*row, *columns}:
        return row, ()
    if {"instruction", "output"} <= row.keys():
        return _alpaca(where, row), ("instruction", "input", "output")
    if "conversations" in row:
        return _messages(where, row), ("conversations",)
    if "text" in row:
        return {**row, "prompt": row["text"]}, ("text",)
    return row, ()


def _alpaca(where: str, row: dict[str, Any]) -> dict[str, Any]:
    instruction, more = row["instruction"], row.get("input") or ""
    for name, value in (("instruction", instruction), ("input", more)):
        if not isinstance(value, str):
            raise IsobitError(f"{where}: {name!r} must be text, got {type(value).__name__}")
    prompt = "\n\n".join((instruction, more)) if more.strip() else instruction
    rest = {key: value for key, value in row.items() if key != "output"}
    return {**rest, "prompt": prompt, "completion": row["output"]}


def _messages(where: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of ShareGPT, or of messages under another name, with `messages`."""
    value = row["conversations"]
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise IsobitError(f"{where}: 'conversations' must be a list of messages")
    messages = [
        {key: field for key, field in message.items() if key not in ("from", "value")}
        | {"role": _ROLES.get(message["from"], message["from"]), "content": message["value"]}
        if isinstance(message.get("from"), str) and "value" in message
        else message
        for message in value
    ]
    rest = {key: column for key, column in row.items() if key != "conversations"}
    return {**rest, "messages": messages}


def _whole_pair(row: Mapping[str, Any]) -> bool:
    """Return whether the prompt is in both answers: the row has no prompt, or a text next to
    conversations, as TRL's sets have it."""
    if not {"chosen", "rejected"} <= row.keys():
        return False
    beside = row.get("prompt")
    return beside is None or (isinstance(beside, str) and isinstance(row["chosen"], list))


def _pair(where: str, row: dict[str, Any]) -> dict[str, Any]:
    chosen, rejected = row["chosen"], row["rejected"]
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise IsobitError(
            f"{where}: no column 'prompt', and 'chosen' and 'rejected' are no conversations that "
            f"begin with one; they are {brief(type(chosen).__name__)} and "
            f"{brief(type(rejected).__name__)}"
        )
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    if not same or same == min(len(chosen), len(rejected)):
        raise IsobitError(
            f"{where}: no column 'prompt', and 'chosen' and 'rejected' must begin with the same "
            "messages and end with different answers"
        )
    return {
        **row,
        "prompt": chosen[:same],
        "chosen": chosen[same:],
        "rejected": rejected[same:],
    }
