"""Tools: what a model may call, its arguments as the model wrote them, and the message that answers
a call.

An answer is what TRL makes of it: `str(result)`, and of what a tool raised `str({"error": ...})`.
An unknown name, or arguments that the tool does not take, are the model's mistake, and always such
a message; a tool that raises or is late is a `problem` besides, for `environment.on_error`. What is
longer than MOST_CHARACTERS is cut, with a note. Left out: images in results.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from isobit.data.dataset import Message
from isobit.data.foreign import BadJson, parse_json
from isobit.environments.base import Call, ToolUse
from isobit.environments.home import Home, Late, Outcome, is_async
from isobit.environments.mistakes import is_mistake
from isobit.environments.schemas import tool_schema
from isobit.errors import IsobitError, brief
from isobit.workers.loading import find_function, last_line

MOST_CHARACTERS = 32_768
UNKNOWN = "unknown"
"""The name in the message that answers what looked like a call and was none, as TRL's; and the one
under which calls of tools that there are not are counted."""


@dataclass(frozen=True)
class Tool:
    """A function that a model may call, by its name. `file` it comes from, for messages; the
    signature of a `remote` one, whose code is elsewhere, says nothing."""

    name: str
    schema: Mapping[str, Any]
    call: Callable[..., Any]
    file: str = ""
    remote: bool = False


@dataclass(frozen=True)
class Answer:
    """What follows a call: the message, how it was used, and the problem where the tool failed;
    `mistake`: what it raised may be one of the program."""

    message: Message
    use: ToolUse | None = None
    problem: str | None = None
    mistake: bool = False

    @property
    def worked(self) -> bool:
        """Whether the tool came back."""
        return self.use is not None and self.use.error is None


class _BadCall(Exception):
    """The model's mistake, in words for it."""


def function_tool(reference: str) -> Tool:
    """The tool of a function that a user names. Raises IsobitError where it cannot be one."""
    what = f"environment.tools {brief(reference, 300)!r}"
    function, file = find_function(reference, "environment.tools")
    schema = tool_schema(function, what)
    return Tool(schema["function"]["name"], schema, function, file)


def method_tools(instance: Any, kept: Sequence[str], what: str) -> list[Tool]:
    """The tools of an environment: its public methods but those `kept`, as TRL finds them, without
    looking at properties. Raises IsobitError where one cannot be a tool."""
    file = inspect.getsourcefile(type(instance)) or ""
    found = []
    for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction):
        if name.startswith("_") or name in kept:
            continue
        method = getattr(instance, name)
        schema = tool_schema(method, f"{what}: its method {name!r}")
        found.append(Tool(schema["function"]["name"], schema, method, file))
    return found


def by_name(tools: Sequence[Tool], what: str) -> dict[str, Tool]:
    """Tools by their names. Raises IsobitError where two have one name."""
    found: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in found:
            raise IsobitError(f"{what}: two tools are called {brief(tool.name)!r}; rename one")
        found[tool.name] = tool
    return found


async def answers(
    calls: Sequence[Call], tools: Mapping[str, Tool], home: Home, until: float
) -> list[Answer]:
    """Carry out the calls of a turn, those that are not `async` one after another and then the
    others at once, as TRL does; their answers in the order of the calls."""
    found: dict[int, Answer] = {}
    rest = []
    for i, call in enumerate(calls):
        tool = tools.get(call.name)
        if tool is not None and is_async(tool.call):
            rest.append(i)
        else:
            found[i] = await _answer(call, tool, home, until)
    together = (_answer(calls[i], tools[calls[i].name], home, until) for i in rest)
    found |= dict(zip(rest, await asyncio.gather(*together)))
    return [found[i] for i in range(len(calls))]


def unparsed(problem: str) -> Answer:
    """The answer to what looked like a call and was none."""
    return Answer(_message(UNKNOWN, {"error": problem}))


async def _answer(call: Call, tool: Tool | None, home: Home, until: float) -> Answer:
    clock = asyncio.get_running_loop().time
    began = clock()
    name, problem, mistake = brief(call.name), None, False
    try:
        if tool is None:
            raise _BadCall(f"Tool {call.name} not found.")
        outcome = await home.run(partial(tool.call, **_arguments(call, tool)), until)
        if outcome.error is None:
            outcome = _shown(outcome.result)
        if outcome.error is None:
            message = {"role": "tool", "name": name, "content": outcome.result}
            return Answer(message, ToolUse(name, round(clock() - began, 6)))
        error, problem = _said(outcome), f"tool {name}: {last_line(outcome.error, tool.file)}"
        owner = getattr(tool.call, "__self__", None)
        mistake = not tool.remote and is_mistake(outcome.error, owner, tool.file)
    except _BadCall as bad:
        error = str(bad)
    except Late as late:
        error, problem = f"no result in time: {late}", f"tool {name}: no result in time: {late}"
    used = name if tool is not None else UNKNOWN
    use = ToolUse(used, round(clock() - began, 6), brief(" ".join(error.split()), 300))
    return Answer(_message(call.name, {"error": error}), use, problem, mistake)


def _arguments(call: Call, tool: Tool) -> dict[str, Any]:
    """The arguments of a call. Raises _BadCall where they are not what the tool takes."""
    try:
        given = parse_json(call.arguments)
    except BadJson as error:
        raise _BadCall(f"the arguments are no JSON: {error.reason}") from None
    if not isinstance(given, dict):
        raise _BadCall(f"the arguments are {type(given).__name__}, not a JSON object")
    if tool.remote:
        _check_names(tool, given)
        return given
    try:
        inspect.signature(tool.call).bind(**given)
    except TypeError as error:
        raise _BadCall(f"{tool.name}() {error}") from None
    return given


def _check_names(tool: Tool, given: Mapping[str, Any]) -> None:
    """The same of names alone, by the schema of a tool whose code is elsewhere."""
    schema = tool.schema["function"]["parameters"]
    for name in schema.get("required", ()):
        if name not in given:
            raise _BadCall(f"{tool.name}() missing a required argument: {name!r}")
    known = schema.get("properties")
    for name in given if known and not schema.get("additionalProperties") else ():
        if name not in known:
            raise _BadCall(f"{tool.name}() got an unexpected keyword argument {name!r}")


def _said(outcome: Outcome) -> str:
    """What an exception says, or its class where it says nothing."""
    try:
        text = str(outcome.error)
    except Exception:
        text = ""
    return text or type(outcome.error).__name__


def _shown(result: Any) -> Outcome:
    """A result as text, or why it cannot be."""
    try:
        return Outcome(result_text(result))
    except Exception as error:  # of its own __str__
        return Outcome(error=TypeError(f"its result cannot be shown: {type(error).__name__}"))


def _message(name: str, result: Mapping[str, Any]) -> Message:
    return {"role": "tool", "name": brief(name), "content": result_text(result)}


def result_text(result: Any) -> str:
    """A result as text that every tokenizer takes: parts of text are joined, everything else is
    `str(result)`."""
    parts = result if isinstance(result, list) else None
    if parts and all(isinstance(each, dict) and each.get("type") == "text" for each in parts):
        result = "".join(str(each.get("text", "")) for each in parts)
    elif parts and any(isinstance(each, dict) and each.get("type") == "image" for each in parts):
        result = {"error": "its result has images, which this model cannot see"}
    text = str(result)
    if len(text) > MOST_CHARACTERS:
        text = f"{text[:MOST_CHARACTERS]}\n[{len(text) - MOST_CHARACTERS:,} characters left out]"
    return text.encode("utf-8", "replace").decode()


def schema_of(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool whose parameters are a JSON schema already. What a template cannot
    print is dropped."""
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": json.loads(json.dumps(function, default=str))}
