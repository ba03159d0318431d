"""What is said over the pipes of a worker of environments, as JSON: turns one way, replies the
other."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from isobit.environments.base import Call, Reply, Step, ToolUse, Turn


def turn_message(turn: Turn) -> dict[str, Any]:
    """A turn."""
    return asdict(turn)


def turn_of(message: Mapping[str, Any]) -> Turn:
    """The turn of a message."""
    calls = tuple(Call(**each) for each in message["calls"])
    return Turn(**{**message, "calls": calls, "problems": tuple(message["problems"])})


def reply_message(reply: Reply, kind: str | None, lost: bool) -> dict[str, Any]:
    """A reply about an episode of a kind of environment; `lost`: a call of it has not come back."""
    return {
        "key": reply.key,
        "step": [list(reply.step.messages), reply.step.reward, reply.step.done],
        "uses": [[each.name, each.seconds, each.error] for each in reply.uses],
        "problem": reply.problem,
        "prompt": reply.prompt,
        "rewards": dict(reply.rewards),
        "kind": kind,
        "lost": lost,
    }


def reply_of(message: Mapping[str, Any], key: int, tools: Sequence[Mapping[str, Any]]) -> Reply:
    """The reply of a message, about what its asker calls `key`, whose tools these are."""
    messages, reward, done = message["step"]
    return Reply(
        key,
        Step(tuple(messages), reward, done),
        tuple(ToolUse(*each) for each in message["uses"]),
        message["problem"],
        message["prompt"],
        tuple(tools),
        message["rewards"],
    )
