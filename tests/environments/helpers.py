"""Asking an environment pool one thing at a time, and the files that tests write."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isobit.data.dataset import Prompt
from isobit.data.turns import Call, Reply, Turn
from isobit.tasks.environments.pool import EnvironmentPool

PROMPT: Prompt = [{"role": "user", "content": "Go."}]


def written(folder: Path, name: str, text: str) -> str:
    """The path of a file with this text."""
    path = folder / name
    path.write_text(text)
    return str(path)


def replies(pool: EnvironmentPool, count: int) -> dict[int, Reply]:
    """The next replies by their keys."""
    found: dict[int, Reply] = {}
    while len(found) < count:
        came = pool.poll(60.0)
        assert came, "no reply"
        found |= {each.key: each for each in came}
    return found


def begun(pool: EnvironmentPool, key: int, prompt: Prompt = PROMPT, **columns: Any) -> Reply:
    """What `begin` is answered."""
    pool.begin(key, prompt, columns)
    return replies(pool, 1)[key]


def call(name: str, arguments: Mapping[str, Any] | str | None = None) -> Call:
    """A call of a tool."""
    return Call(name, arguments if isinstance(arguments, str) else json.dumps(arguments or {}))


def calling(number: int, *calls: Call, problems: tuple[str, ...] = ()) -> Turn:
    """A turn with these calls."""
    return Turn(number, "text", "", calls, problems)


def turned(pool: EnvironmentPool, key: int, number: int, *calls: Call) -> Reply:
    """What a turn with these calls is answered."""
    pool.turn(key, calling(number, *calls))
    return replies(pool, 1)[key]


def finished(pool: EnvironmentPool, key: int, **arguments: Any) -> Reply:
    """What `finish` is answered; the episode is ended."""
    pool.finish(key, {"prompts": PROMPT, "completions": "done", **arguments})
    reply = replies(pool, 1)[key]
    pool.end(key)
    return reply


def contents(reply: Reply) -> list[str]:
    """The texts of its messages."""
    return [each["content"] for each in reply.step.messages]
