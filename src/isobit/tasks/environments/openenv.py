"""Clients of OpenEnv as environments: what a factory returns may be one, such as
`EchoEnv(base_url=...)`.

A client of an environment with tools (`MCPToolClient`) has its server's tools. Every other has one
tool, `step`, whose parameters are the fields of its action; its answer is the observation as JSON.
Columns other than the prompt are passed to `reset`, of which a server takes those that it knows.
The episode's reward is the sum of its steps' rewards, and it ends where a step's result is `done`,
or `terminated` or `truncated`, as Gymnasium says it. This follows the published code of openenv
0.10 (`EnvClient`, `SyncEnvClient` and `MCPToolClient` of `openenv.core`); nothing of it is imported
here. Left out: containers, which the factory starts.
"""

import inspect
import json
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

from isobit.errors import IsobitError
from isobit.tasks.environments.tools import Tool, schema_of

_NOT_SEEN = ("reward", "done", "metadata")
"""Fields of an observation that are not for the model."""


def is_client(value: Any) -> bool:
    """Return whether an object is a client of OpenEnv, or its synchronous form."""
    return callable(getattr(value, "_step_payload", None)) and callable(
        getattr(value, "reset", None)
    )


class Client:
    """A client with the methods of TRL's environments. It is used in its synchronous form, in the
    thread of its environment."""

    def __init__(self, client: Any) -> None:
        self._client = client.sync() if hasattr(client, "sync") else client
        self._kind = type(getattr(client, "async_client", client))
        self._reward: float | None = None
        self.over = False
        if self._lists_tools and hasattr(self._kind, "step"):
            self._watch(getattr(client, "async_client", client))

    @property
    def label(self) -> str:
        """The name of the client's reward: the name of its class."""
        return self._kind.__name__

    def reset(self, prompt: Any = None, **columns: Any) -> str | None:
        """Begin an episode. Return the first observation as text, or None if it is empty."""
        self._reward, self.over = None, False
        return self._seen(self._client.reset(**columns)) or None

    def get_reward(self) -> float | None:
        """Return the sum of the episode's rewards so far; None if the server gave none."""
        return self._reward

    def tools(self) -> list[Tool]:
        """Return the tools that the model may call. Raises IsobitError if the server has none, or
        lists something else."""
        if self._lists_tools:
            listed = self._client.list_tools()
            if not listed:
                raise IsobitError(f"environment.factory: the server of {self.label} has no tools")
            try:
                return [
                    self._tool(t.name, t.description, t.input_schema, self._called(t.name))
                    for t in listed
                ]
            except (AttributeError, TypeError):
                raise IsobitError(
                    f"environment.factory: list_tools of {self.label} returned what are not tools, "
                    "with name, description and input_schema"
                ) from None
        action = _action(self._kind)
        if action is None:
            parameters: dict[str, Any] = {"type": "object", "properties": {}}
            return [self._tool("step", f"One step of {self.label}.", parameters, self._step)]
        schema = action.model_json_schema()
        schema["properties"] = {
            name: field
            for name, field in schema.get("properties", {}).items()
            if name != "metadata"
        }
        text = (action.__doc__ or f"One step of {self.label}.").strip()
        used = {key: schema[key] for key in ("$defs", "properties", "required") if key in schema}
        call = partial(self._step, _action=action)
        return [self._tool("step", text, {"type": "object", **used}, call)]

    def _tool(
        self, name: str, text: str, parameters: dict[str, Any], call: Callable[..., Any]
    ) -> Tool:
        return Tool(name, schema_of(name, text, parameters), call, remote=True)

    def _called(self, name: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            return self._client.call_tool(name, **arguments)

        return call

    @property
    def _lists_tools(self) -> bool:
        return callable(getattr(self._kind, "list_tools", None))

    def _watch(self, client: Any) -> None:
        """Replace the client's `step` by one that also keeps the reward and the end of each step,
        since `call_tool` returns only the tool's answer."""
        step = client.step

        async def watched(*arguments: Any, **named: Any) -> Any:
            result = await step(*arguments, **named)
            self._keep(result)
            return result

        def watched_here(*arguments: Any, **named: Any) -> Any:
            result = step(*arguments, **named)
            self._keep(result)
            return result

        client.step = watched if inspect.iscoroutinefunction(step) else watched_here

    def _step(self, _action: Any = dict, **fields: Any) -> str:
        if self.over:
            return str({"error": "The episode is over."})
        return self._seen(self._client.step(_action(**fields)))

    def _seen(self, result: Any) -> str:
        """Return a result's observation as text, and keep the result's reward and end."""
        self._keep(result)
        seen = result.observation
        if hasattr(seen, "model_dump"):
            seen = seen.model_dump()
        if isinstance(seen, dict):
            seen = {name: value for name, value in seen.items() if name not in _NOT_SEEN}
            return json.dumps(seen, ensure_ascii=False, default=str) if seen else ""
        return "" if seen is None else str(seen)

    def _keep(self, result: Any) -> None:
        """Add a result's reward to the episode's, and keep whether the episode is over. Raises
        TypeError for an object that is not a result."""
        if not (hasattr(result, "reward") and hasattr(result, "observation")):
            raise TypeError(
                f"the client of {self.label} returned {type(result).__name__}, expected a result "
                "with observation, reward and done"
            )
        if result.reward is not None:
            self._reward = (self._reward or 0.0) + float(result.reward)
        ends = ("done", "terminated", "truncated")
        self.over = any(bool(getattr(result, name, False)) for name in ends)


def _action(kind: type) -> Any:
    """Return the class of actions that a client's type names, as in `EnvClient[EchoAction, ...]`;
    None if it names none."""
    for base in kind.__mro__:
        for generic in getattr(base, "__orig_bases__", ()):
            for argument in get_args(generic)[:1]:
                if hasattr(argument, "model_json_schema"):
                    return argument
    return None
