"""The JSON messages in the pipes of a worker of environments: turns one way, replies the other.

The pipe of replies is open in a process that runs a user's code, so its lines are not trusted: any
line that is not a reply raises ValueError.
"""

from collections.abc import Mapping
from typing import Any

from isobit.data.turns import Call, Reply, Step, ToolUse, Turn


def turn_of(message: Mapping[str, Any]) -> Turn:
    """Return the turn whose plain values a message holds."""
    calls = tuple(Call(**call) for call in message["calls"])
    return Turn(**{**message, "calls": calls, "problems": tuple(message["problems"])})


def reply_message(reply: Reply, lost: bool) -> dict[str, Any]:
    """Return a reply as plain values, for JSON; `lost`: a call of its episode has not come back."""
    return {
        "key": reply.key,
        "step": [list(reply.step.messages), reply.step.reward, reply.step.done],
        "uses": [[use.name, use.seconds, use.error] for use in reply.uses],
        "problem": reply.problem,
        "mistake": reply.mistake,
        "prompt": reply.prompt,
        "rewards": dict(reply.rewards),
        "lost": lost,
    }


def reply_of(message: Mapping[str, Any]) -> Reply:
    """Return the reply that a message holds, under its worker's key and without tools. Raises
    ValueError for a message that is not a reply."""
    try:
        messages, reward, done = message["step"]
        rewards = message["rewards"]
        reply = Reply(
            message["key"],
            Step(tuple(messages), reward, done),
            tuple(ToolUse(*use) for use in message["uses"]),
            message["problem"],
            message["mistake"],
            message["prompt"],
            rewards=rewards,
        )
        values = [reward, *rewards.values(), *(use.error or 0.0 for use in reply.uses)]
        typed = (
            isinstance(done, bool)
            and isinstance(reply.mistake, bool)
            and isinstance(reply.problem, str | None)
            and isinstance(reply.prompt, str | list | None)
            and all(isinstance(message, dict) for message in messages)
            and all(isinstance(number, int | float | str | None) for number in values)
            and all(isinstance(use.name, str) and use.seconds >= 0 for use in reply.uses)
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a reply: {error}") from None
    if not typed:
        raise ValueError("not a reply")
    return reply
