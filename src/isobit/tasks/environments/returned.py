"""Checks of the values that an environment's code returns: a `Step`, and what `reset` adds.

A value of a type that is never right raises `Mistake`. A value that is only too large
(MOST_MESSAGES, MOST_TEXT) raises IsobitError. Left out: results of tools, which all become text
(`tools.py`).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from isobit.data.dataset import Message, Prompt
from isobit.data.turns import Step
from isobit.errors import IsobitError, brief
from isobit.tasks.environments.mistakes import Mistake
from isobit.tasks.environments.tools import MOST_CHARACTERS, result_text
from isobit.tasks.rewards.functions import checked_values

MOST_MESSAGES = 256
"""The most messages of one step, and the most that reset adds."""
MOST_TEXT = 8 * MOST_CHARACTERS
"""The most characters of all these messages together."""
_FOLLOWING = ("tool", "user")
_BEGINNING = ("system", "developer", "user", "assistant", "tool")
_MESSAGE = '{"role": "user", "content": "..."}'


def step_of(returned: Any, where: str) -> Step:
    """Return the Step that `step` returned, with the contents of its messages as text; `where`:
    file and line of the method, for errors. Raises IsobitError for a reward that is not finite and
    for messages beyond the limits, and Mistake for a value that is not a Step or has fields of
    wrong types."""
    if not isinstance(returned, Step):
        raise Mistake(
            f"step{where} returned {type(returned).__name__}, expected a Step, such as "
            f"Step(({_MESSAGE},), reward=0.0, done=False)"
        )
    if not (returned.reward is None or hasattr(returned.reward, "__float__")):
        _, wrong = checked_values([returned.reward], 1)
        raise Mistake(f"step{where}: its reward {wrong[0]}")
    try:
        over = returned.done in (False, True)
    except Exception:  # an array of several values
        over = False
    if not over:
        kind = type(returned.done).__name__
        raise Mistake(f"step{where}: done is {kind} {returned.done!r:.40}, expected True or False")
    values, wrong = checked_values([returned.reward], 1)
    if wrong:
        raise IsobitError(f"step: its reward {wrong[0]}")
    messages = _messages(returned.messages, _FOLLOWING, f"step{where}")
    return Step(messages, values[0], bool(returned.done))


def joined(prompt: Prompt, observation: Any, where: str) -> Prompt:
    """Return a prompt with what reset returned: text is added to the content of the prompt's last
    message, as TRL does; messages are added after the prompt. Raises as `step_of`."""
    if observation is None or (isinstance(observation, list | tuple) and not observation):
        return prompt
    only_text = isinstance(observation, list) and all(
        isinstance(block, dict) and block.get("type") == "text" for block in observation
    )
    if not (isinstance(observation, str) or only_text):
        if not isinstance(observation, list | tuple) or isinstance(prompt, str):
            kind = type(observation).__name__
            raise Mistake(
                f"reset{where} returned {kind}; expected text, messages or None"
                + ("" if isinstance(prompt, list) else "; messages only behind a chat")
            )
        return [*prompt, *_messages(observation, _BEGINNING, f"reset{where}")]
    text = result_text(observation)
    if isinstance(prompt, str):
        return prompt + text
    last = prompt[-1]
    return [*prompt[:-1], {**last, "content": last["content"] + text}]


def _messages(returned: Any, roles: Sequence[str], source: str) -> tuple[Message, ...]:
    """Return the messages that a method `returned`, with their contents as text. Raises as
    `step_of`."""
    if not isinstance(returned, list | tuple):
        raise Mistake(
            f"{source}: its messages are {type(returned).__name__}, expected a tuple of messages, such "
            f"as ({_MESSAGE},)"
        )
    if len(returned) > MOST_MESSAGES:
        raise IsobitError(f"{source}: {len(returned):,} messages, the most are {MOST_MESSAGES}")
    messages, length = list[Message](), 0
    for index, message in enumerate(returned):
        messages.append(_message(message, roles, f"{source}: its messages[{index}]"))
        try:
            length += len(json.dumps(messages[-1], ensure_ascii=False))
        except (TypeError, ValueError, RecursionError) as error:
            reason = brief(str(error) or type(error).__name__)
            raise Mistake(f"{source}: its messages[{index}] is not JSON: {reason}") from None
    if length > MOST_TEXT:
        raise IsobitError(
            f"{source}: messages of {length:,} characters, the most are {MOST_TEXT:,}"
        )
    return tuple(messages)


def _message(message: Any, roles: Sequence[str], source: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise Mistake(
            f"{source} is {type(message).__name__}, expected a message, such as {_MESSAGE}"
        )
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in roles:
        known = f"{', '.join(roles[:-1])} or {roles[-1]}"
        has = "no role" if "role" not in message else f"the role {brief(repr(role), 40)}"
        raise Mistake(f"{source} has {has}, expected {known}, as in {_MESSAGE}")
    only_text = isinstance(content, list) and all(
        isinstance(block, Mapping) and block.get("type") == "text" for block in content
    )
    if not (isinstance(content, str) or only_text):
        has = f"the content {type(content).__name__}" if "content" in message else "no content"
        raise Mistake(f"{source} has {has}, expected text")
    if not all(isinstance(key, str) for key in message):
        raise Mistake(f"{source} has keys that are not text")
    if not isinstance(message.get("name", ""), str):
        raise Mistake(f"{source} has the name {type(message['name']).__name__}, expected text")
    text = str.__str__(content) if isinstance(content, str) else content  # a subclass of str too
    return {**message, "role": str.__str__(role), "content": result_text(text)}
