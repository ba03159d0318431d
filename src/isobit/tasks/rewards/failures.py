"""A call of a reward function that gave no rewards: why, in words. Left out: what is done about it
(`pool.py`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isobit.data.dataset import Prompt
from isobit.tasks.workers.dispatch import Death
from isobit.tasks.workers.variables import hint

EXCERPT_CHARACTERS = 60
Result = Mapping[str, Any]
"""What `functions.answer` returns."""
Reply = Result | Death


@dataclass(frozen=True)
class Failure:
    """Why a call gave no rewards; `deadly` if it cost its process."""

    text: str
    deadly: bool = False


def result_of(message: Mapping[str, Any]) -> Result:
    """Return the result that a message of a worker holds. Raises ValueError for a message without
    one."""
    failed = any(isinstance(message.get(key), str) for key in ("raised", "malformed"))
    types = {"values": list, "wrong": dict, "unscored": dict}
    if not failed and not all(isinstance(message.get(key), types[key]) for key in types):
        raise ValueError("not a result")
    return message


def complete(reply: Reply, count: int) -> bool:
    """Return whether a reply has a value, or None, for each of `count` samples, and lines about some
    of them."""
    if not isinstance(reply, dict):
        return False
    values, known = reply["values"], {*map(str, range(count))}
    lines = {**reply["wrong"], **reply["unscored"]}
    return (
        len(values) == count
        and all(value is None or type(value) in (int, float) for value in values)
        and all(str(name) in known and isinstance(text, str) for name, text in lines.items())
    )


def failure_of(reply: Reply, variables: Sequence[str] | None) -> Failure | None:
    """Return the failure that a reply reports, or None for a reply with values. `variables`: those
    of the environment that a worker has in addition to the usual ones; None for a function of this
    process, which has all."""
    if isinstance(reply, Death):
        return Failure(reply.text, deadly=True)
    text = reply.get("malformed") or reply.get("raised")
    return Failure(text + ("" if variables is None else hint(text, variables))) if text else None


def excerpt_of(prompt: Prompt) -> str:
    """Return the beginning of a prompt, or of a chat's last message, quoted."""
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return repr(text if len(text) <= EXCERPT_CHARACTERS else text[:EXCERPT_CHARACTERS] + "...")
