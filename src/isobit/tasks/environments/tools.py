"""Tools: functions that a model may call, their arguments as the model wrote them, and the message
that answers a call.

The text of an answer is the same as TRL's: `str(result)`, or `str({"error": ...})` for a tool that
raised. An unknown name, or arguments that the tool does not take, are the model's mistake and give
such an error message; a tool that raises or is late is also a `problem`, for
`environment.on_error`. A text longer than MOST_CHARACTERS is cut, with a note. Left out: images in
results.
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
from isobit.data.turns import Call, ToolUse
from isobit.errors import IsobitError, brief
from isobit.tasks.environments.home import Home, Late, Outcome, is_async
from isobit.tasks.environments.mistakes import is_mistake
from isobit.tasks.environments.schemas import tool_schema
from isobit.tasks.workers.loading import find_function, last_line

MOST_CHARACTERS = 32_768
UNKNOWN = "unknown"
"""The name in the message that answers a text that looks like a call but is not a call, as in TRL;
calls of tools that do not exist are counted under this name too."""


@dataclass(frozen=True)
class Tool:
    """A function that a model may call by its `name`. `file`: the source file of the function, for
    messages; `remote`: the function's code runs elsewhere, so that its signature says nothing."""

    name: str
    schema: Mapping[str, Any]
    call: Callable[..., Any]
    file: str = ""
    remote: bool = False


@dataclass(frozen=True)
class Answer:
    """The answer to a call: the message, the use of the tool, and the problem if the tool failed;
    `mistake`: the error may be a mistake of the program."""

    message: Message
    use: ToolUse | None = None
    problem: str | None = None
    mistake: bool = False

    @property
    def worked(self) -> bool:
        """Whether the tool returned a result."""
        return self.use is not None and self.use.error is None


class _BadCall(Exception):
    """A mistake of the model in a call, in words for the model."""


def function_tool(reference: str) -> Tool:
    """Return the tool of a function that a user names. Raises IsobitError if the function cannot be
    a tool."""
    label = f"environment.tools {brief(reference, 300)!r}"
    function, file = find_function(reference, "environment.tools")
    schema = tool_schema(function, label)
    return Tool(schema["function"]["name"], schema, function, file)


def method_tools(instance: Any, reserved: Sequence[str], label: str) -> list[Tool]:
    """Return the tools of an environment: its public methods except the `reserved` ones, as TRL
    finds them; properties are not read. Raises IsobitError if a method cannot be a tool."""
    file = inspect.getsourcefile(type(instance)) or ""
    tools = []
    for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction):
        if name.startswith("_") or name in reserved:
            continue
        method = getattr(instance, name)
        schema = tool_schema(method, f"{label}: its method {name!r}")
        tools.append(Tool(schema["function"]["name"], schema, method, file))
    return tools


def by_name(tools: Sequence[Tool], label: str) -> dict[str, Tool]:
    """Return tools by their names. Raises IsobitError if two tools have the same name."""
    named: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in named:
            raise IsobitError(f"{label}: two tools are called {brief(tool.name)!r}; rename one")
        named[tool.name] = tool
    return named


async def answers(
    calls: Sequence[Call], tools: Mapping[str, Tool], home: Home, until: float
) -> list[Answer]:
    """Carry out the calls of a turn, as TRL does: first those whose tools are not `async`, one
    after another, then the others at once. Return the answers in the order of the calls."""
    answered: dict[int, Answer] = {}
    rest = []
    for i, call in enumerate(calls):
        tool = tools.get(call.name)
        if tool is not None and is_async(tool.call):
            rest.append(i)
        else:
            answered[i] = await _answer(call, tool, home, until)
    together = (_answer(calls[i], tools[calls[i].name], home, until) for i in rest)
    answered |= dict(zip(rest, await asyncio.gather(*together)))
    return [answered[i] for i in range(len(calls))]


def unparsed(problem: str) -> Answer:
    """Return the answer to a text that looks like a call but is not a call."""
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
    """Return the arguments of a call. Raises _BadCall if the tool does not take them."""
    try:
        arguments = parse_json(call.arguments)
    except BadJson as error:
        raise _BadCall(f"the arguments are no JSON: {error.reason}") from None
    if not isinstance(arguments, dict):
        raise _BadCall(f"the arguments are {type(arguments).__name__}, not a JSON object")
    if tool.remote:
        _check_names(tool, arguments)
        return arguments
    try:
        inspect.signature(tool.call).bind(**arguments)
    except TypeError as error:
        raise _BadCall(f"{tool.name}() {error}") from None
    return arguments


def _check_names(tool: Tool, arguments: Mapping[str, Any]) -> None:
    """Check the names of arguments against the schema of a tool whose code runs elsewhere. Raises
    _BadCall for a name that is missing or unknown."""
    schema = tool.schema["function"]["parameters"]
    for name in schema.get("required", ()):
        if name not in arguments:
            raise _BadCall(f"{tool.name}() missing a required argument: {name!r}")
    known = schema.get("properties")
    for name in arguments if known and not schema.get("additionalProperties") else ():
        if name not in known:
            raise _BadCall(f"{tool.name}() got an unexpected keyword argument {name!r}")


def _said(outcome: Outcome) -> str:
    """Return the text of the outcome's exception, or the name of its class if it has no text."""
    try:
        text = str(outcome.error)
    except Exception:
        text = ""
    return text or type(outcome.error).__name__


def _shown(result: Any) -> Outcome:
    """Return an outcome with a result as text, or with the reason why it cannot be shown."""
    try:
        return Outcome(result_text(result))
    except Exception as error:  # raised by the result's __str__
        return Outcome(error=TypeError(f"its result cannot be shown: {type(error).__name__}"))


def _message(name: str, result: Mapping[str, Any]) -> Message:
    return {"role": "tool", "name": brief(name), "content": result_text(result)}


def result_text(result: Any) -> str:
    """Return a result as text that every tokenizer takes: parts of text are joined, everything
    else is `str(result)`."""
    blocks = result if isinstance(result, list) else None
    if blocks and all(isinstance(block, dict) and block.get("type") == "text" for block in blocks):
        result = "".join(str(block.get("text", "")) for block in blocks)
    elif blocks and any(
        isinstance(block, dict) and block.get("type") == "image" for block in blocks
    ):
        result = {"error": "its result has images, which this model cannot see"}
    text = str(result)
    if len(text) > MOST_CHARACTERS:
        text = f"{text[:MOST_CHARACTERS]}\n[{len(text) - MOST_CHARACTERS:,} characters left out]"
    return text.encode("utf-8", "replace").decode()


def schema_of(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool whose parameters are a JSON schema already. Values that are not
    JSON become text, so that a template can print the schema."""
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": json.loads(json.dumps(function, default=str))}
