"""A conversation in the words that one chat template reads: the writer of every prompt, whether of
rollouts, `serve`, supervised rows or environments.

Messages are in OpenAI's form (`data/messages.py`). Templates differ in what they read: arguments of
calls as objects or as JSON text, thoughts under one of three keys, roles by several names. The form
is found by rendering: a call with one argument shows how arguments are written, and a conversation
of the same shape, with dummies in place of what it says, shows which messages the template leaves
out. What it leaves out is given the other name of its role, or is refused.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any

from isobit.data.dataset import TEMPLATE_KWARGS
from isobit.data.messages import TOOLS, arguments_of
from isobit.errors import IsobitError
from isobit.model.text.chat import TookTooMuch

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool, Mapping[str, Any]], str]
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_OTHER_ROLES = {
    "developer": ("system",),
    "system": ("developer",),
    "tool": ("observation", "ipython", "function"),
}
"""Roles that models write under other names."""
_ASKED: Sequence[Message] = ({"role": "user", "content": "qzaskedx"},)
_KEY, _VALUE = "qzkeyx", "qzvaluex"
_MOST_SHAPES = 1024


class LeftOut(IsobitError):
    """A template leaves out a message, or a call in one: `what`."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the model's chat template leaves out {what}; name one that does not with "
            "model.chat_template"
        )


class Conversations:
    """Conversations for one chat template, which `render` writes. `template` is its text."""

    def __init__(self, render: Render, template: str) -> None:
        self._render = render
        self._thoughts = [key for key in _THOUGHTS if re.search(rf"[.\"']{key}\b", template)]
        self._others = {
            role: [name for name in names if name in template]
            for role, names in _OTHER_ROLES.items()
        }
        self._roles = dict[int, tuple[dict[str, str], str | None]]()

    def written(
        self, messages: Sequence[Message], answering: bool, variables: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Return messages with roles, thoughts and arguments as the template reads them, and what it
        leaves out of them, in words; None: nothing."""
        made = [self._in_form(message) for message in messages]
        if all(m.get("role") in ("user", "assistant") and not m.get("tool_calls") for m in made):
            return made, None
        arguments = {**made[0].get(TEMPLATE_KWARGS, {}), **variables}
        kinds = [
            (m.get("role"), bool(_text(m)), len(m.get("tool_calls") or ()), "name" in m)
            for m in made
        ]
        kwargs = {name: value for name, value in arguments.items() if name != TOOLS}
        key = hash(json.dumps([kinds, answering, bool(arguments.get(TOOLS)), kwargs], default=str))
        if key not in self._roles:
            while len(self._roles) >= _MOST_SHAPES:
                del self._roles[next(iter(self._roles))]
            shape = [self._dummy(m, index) for index, m in enumerate(made)]
            self._roles[key] = self._roles_of(shape, answering, variables)
        roles, left_out = self._roles[key]
        return _with_roles(made, roles), left_out

    def _dummy(self, message: Message, index: int) -> dict[str, Any]:
        """Return a message of which every text is a word that is nowhere else."""
        made = {key: value for key, value in message.items() if key not in _THOUGHTS}
        made["content"] = f"qz{index}x" if _text(message) else ""
        if message.get("tool_calls"):
            made["tool_calls"] = [
                self._call(
                    {**call, "function": {"name": f"qz{index}call{number}x", "arguments": {}}}
                )
                for number, call in enumerate(message["tool_calls"])
            ]
        return made

    def _in_form(self, message: Message) -> dict[str, Any]:
        made = dict(message)
        calls = made.get("tool_calls")
        if calls:
            made["tool_calls"] = [self._call(call) for call in calls]
        thoughts_key = next((key for key in _THOUGHTS if made.get(key)), None)
        if thoughts_key is not None and self._thoughts and thoughts_key not in self._thoughts:
            made[self._thoughts[0]] = made.pop(thoughts_key)
        text = made.get("content")
        # gpt-oss: next to a call the template writes a text or thoughts, either as an analysis
        if thoughts_key is not None and calls and text and self._thoughts == ["thinking"]:
            made["thinking"], made["content"] = f"{made['thinking']}\n{text}", ""
        return made

    def _call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return call
        arguments = arguments_of(function.get("arguments"))
        if self._as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    @cached_property
    def _as_text(self) -> bool:
        """Whether the template joins arguments as text, and not as objects, to what it writes."""
        as_object = self._shown({_KEY: _VALUE})
        if as_object is not None and _VALUE in as_object and f"'{_KEY}': '" not in as_object:
            return False
        as_text = self._shown(json.dumps({_KEY: _VALUE}))
        return as_text is not None and f'"{_KEY}": "{_VALUE}"' in as_text

    def _shown(self, arguments: Any) -> str | None:
        """Return a call as the template writes it, also where another message must follow; None
        where it refuses."""
        function = {"name": "qzcallx", "arguments": arguments}
        call = {"id": "call00000", "type": "function", "function": function}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "name": "qzcallx", "tool_call_id": "call00000", "content": "1"}
        for chat in ([*_ASKED, answer], [*_ASKED, answer, result]):
            try:
                return self._render(chat, False, {})
            except TookTooMuch:
                raise
            except IsobitError:
                continue
        return None

    def _roles_of(
        self, shape: Sequence[Message], answering: bool, variables: Mapping[str, Any]
    ) -> tuple[dict[str, str], str | None]:
        """Return the names of roles under which the template writes all that a conversation of this
        shape says, or what it leaves out. A conversation that it refuses leaves out nothing."""
        left_out, roles = None, sorted({str(m.get("role")) for m in shape} & self._others.keys())
        for names in product(*((role, *self._others[role]) for role in roles)):
            renamed = dict(zip(roles, names))
            try:
                text = self._render(_with_roles(shape, renamed), answering, variables)
            except TookTooMuch:
                raise
            except IsobitError:
                continue
            missing = next((meaning for word, meaning in _said(shape) if word not in text), None)
            if missing is None:
                return renamed, None
            left_out = left_out or missing
        return {}, left_out

    def check_calls(self, messages: Sequence[Message]) -> None:
        """Raise LeftOut for a call that the template does not write."""
        made, _ = self.written(messages, False, {})
        shape = [self._dummy(m, index) for index, m in enumerate(made)]
        text = self._render(shape, False, {})
        for word, meaning in _called(shape):
            if word not in text:
                raise LeftOut(meaning)


def _text(message: Message) -> str:
    return str(message.get("content") or "").strip()


def _said(shape: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Yield the dummies of a conversation that must be written, and what each stands for."""
    for index, message in enumerate(shape):
        role = message.get("role")
        if role not in ("user", "assistant") and message["content"]:
            yield message["content"], f"what a message of role {role} says (messages[{index}])"


def _called(shape: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Yield the dummies of calls, and what each stands for."""
    for index, message in enumerate(shape):
        for number, call in enumerate(message.get("tool_calls") or ()):
            yield call["function"]["name"], f"call {number} of a message (messages[{index}])"


def _with_roles(messages: Sequence[Message], roles: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {**m, "role": roles.get(m["role"], m["role"])} if "role" in m else {**m} for m in messages
    ]
