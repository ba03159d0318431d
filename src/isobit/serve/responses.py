"""OpenAI's Responses: a conversation as items in, items out, over the route of messages.

A response that is kept is the last turn of a conversation (`sessions.py`), which `previous_response_id`
goes on from; there its answer stays the tokens that were sampled where the template allows it. Left
out: responses that are read again or run in the background, tools that are not functions, and
everything but text; each is refused by its key.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from isobit.engine.types import Completion
from isobit.errors import IsobitError
from isobit.options.declare import options_of
from isobit.serve import sessions
from isobit.serve.answering import Results, completed, in_json, streamed
from isobit.serve.answers import Asked, event
from isobit.serve.neutral import NEUTRAL
from isobit.serve.openai import OpenAI
from isobit.serve.protocol import ChatRequest, SamplingKeys, Tokens, Top
from isobit.serve.requests import (
    BadRequest,
    Declared,
    Neutral,
    kind,
    named_as_sent,
    read,
)
from isobit.serve.thinking import REASONING
from isobit.serve.wire import error_value, read_as

_OFF = (False,)
_SHOWN = ("message.output_text.logprobs", "reasoning.encrypted_content")
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
_SAME = (
    *("model", "stream", "parallel_tool_calls", "top_logprobs", "cache_salt"),
    "chat_template_kwargs",
)


class TextKeys(Declared):
    """A form of answers."""

    neutral = {"verbosity": Neutral("", None)}
    format: Any = None


class ReasoningKeys(Declared):
    """The effort of thoughts, which are told whole."""

    neutral = {key: Neutral("", None) for key in ("summary", "generate_summary", "context", "mode")}
    effort: str | None = None


class ResponsesRequest(SamplingKeys):
    """A request for the next items of a conversation."""

    neutral = {
        **NEUTRAL,
        "background": Neutral("responses that are read later", _OFF),
        "conversation": Neutral("conversations that the server keeps", ()),
        "prompt": Neutral("templates of prompts", ()),
        "max_tool_calls": Neutral("calls of the server's own tools", ()),
        "truncation": Neutral("prompts that are cut", ("disabled",)),
        "context_management": Neutral("prompts that are cut", ([],)),
        "stream_options": Neutral("", None),
    }
    model: str | None = None
    input: Annotated[Any, "a text or a list of items"] = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Tokens | None = None
    stream: bool = False
    store: bool = True
    include: Annotated[Any, "a list of what is told besides"] = None
    text: TextKeys = TextKeys()
    reasoning: ReasoningKeys = ReasoningKeys()
    tools: Annotated[Any, "a list of functions"] = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    top_logprobs: Top = 0
    metadata: Any = None
    cache_salt: str | None = None
    chat_template_kwargs: Any = None

    @property
    def names(self) -> dict[str, str]:
        """The keys of messages that stand for others here, with the names of these."""
        names = {"messages": "input", "prompt": "input", "reasoning_effort": "reasoning.effort"}
        if self.text.format is not None:
            names |= dict.fromkeys(
                ("response_format.json_schema", "response_format"), "text.format"
            )
        if self.max_output_tokens is not None:
            keys = ("max_tokens' or 'max_completion_tokens", "max_completion_tokens", "max_tokens")
            names |= dict.fromkeys(keys, "max_output_tokens")
        return names


class Responses:
    """The route of responses, over the routes of OpenAI."""

    def __init__(self, openai: OpenAI) -> None:
        self._openai, self._gateway = openai, openai.gateway

    def routes(self) -> list[Route]:
        """Return the route."""
        return [Route("/v1/responses", self.create, methods=["POST"])]

    async def create(self, request: Request) -> Response:
        """Answer with the next items of a conversation."""
        gateway, tenant = self._gateway, request.state.tenant
        keys, body = await read_as(
            request,
            gateway.limits,
            lambda body: (read(ResponsesRequest, body, gateway.limits), body),
        )
        before = self._before(tenant, keys.previous_response_id)
        values, items = _as_chat(keys, before, body)
        with named_as_sent(keys.names, items.__getitem__):
            chat_keys = read(ChatRequest, values, gateway.limits)
            try:
                asked, turn = await self._openai.conversation(request, chat_keys, before)
            except IsobitError:
                if before is None:
                    raise  # else the template may have no place where the turn ends: encode it again
                asked, turn = await self._openai.conversation(request, chat_keys, None)
        frame, instructed = _Frame(keys, asked), keys.instructions is not None

        def keep(completion: Completion) -> None:
            if keys.store:
                size = len(request.state.body) + (0 if before is None else before.num_bytes)
                made = replace(turn(completion), num_bytes=size, instructed=instructed)
                gateway.sessions.keep(tenant, frame.id, made)

        if keys.stream:
            return await streamed(gateway, request, asked, keep, _Events(frame))
        results = await completed(gateway, request, asked)
        if results is None:
            return Response(status_code=499)
        keep(results.answers[0][1])
        return await in_json(gateway, request, lambda: frame.whole(results))

    def _before(self, tenant: str, name: str | None) -> sessions.Turn | None:
        """Return the turn of an earlier response. Raises BadRequest for one that is not kept."""
        turn = None if name is None else self._gateway.sessions.find(tenant, name)
        if name is not None and turn is None:
            raise BadRequest(
                f"previous_response_id: {name!r:.80} is not kept: it was not stored, or newer ones "
                "took its place; send its items as input",
                *("previous_response_id", 404),
            )
        return turn


def _as_chat(
    keys: ResponsesRequest, before: sessions.Turn | None, body: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of the request for a message that a request for a response stands for, and
    where each of its messages comes from. Raises BadRequest."""
    include = [] if keys.include is None else keys.include
    if not isinstance(include, list) or any(name not in _SHOWN for name in include):
        raise BadRequest(f"include: expected a list of {', '.join(_SHOWN)}", "include")
    if keys.n != 1:
        raise BadRequest("n: a response is one answer", "n")
    messages = list[dict[str, Any]]()
    if keys.instructions is not None:
        messages.append({"role": "system", "content": keys.instructions})
    if before is not None:  # earlier instructions are not those of this request
        earlier = list(map(dict, (*before.messages, before.message)))
        messages += earlier[1:] if before.instructed else earlier
    items = ["input"] * len(messages)
    messages += _messages(keys.input, items)
    if keys.response_format is not None and keys.text.format is not None:
        raise BadRequest("response_format: text.format is given too", "response_format")
    shown = _SHOWN[0] in include or keys.top_logprobs > 0
    for key in ("max_tokens", "max_completion_tokens"):
        if keys.max_output_tokens is not None and getattr(keys, key) is not None:
            raise BadRequest(f"{key}: max_output_tokens is given too; give one of them", key)
    chosen = {
        "max_completion_tokens": keys.max_output_tokens,
        "tools": None if keys.tools is None else _tools(keys.tools),
        "tool_choice": _choice(keys.tool_choice),
        "response_format": _format(keys.text.format),
        "reasoning_effort": keys.reasoning.effort,
        "logprobs": shown,
        "stream_options": {"include_usage": True},
        "messages": messages,
    }
    values = {key: body[key] for key in (*_SAME, *options_of(SamplingKeys)) if key in body}
    return values | {key: value for key, value in chosen.items() if value is not None}, items


def _messages(value: Any, items: list[str]) -> list[dict[str, Any]]:
    """Return items as messages, and append to `items` where each comes from. Calls and thoughts
    belong to the message of the assistant that they stand beside. Raises BadRequest."""
    if isinstance(value, str):
        items.append("input")
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise BadRequest(f"input: expected a text or a list of items, got {kind(value)}", "input")
    messages = list[dict[str, Any]]()
    for index, item in enumerate(value):
        where, count = f"input[{index}]", len(messages)
        if not isinstance(item, dict):
            raise BadRequest(f"{where}: expected an object, got {kind(item)}", "input")
        item_type = "message" if item.get("type") is None else item["type"]
        if item_type == "message":
            content = _text(f"{where}.content", item.get("content"))
            if item.get("role") == "assistant":
                _own(messages)["content"] += content
            else:
                messages.append({"role": item.get("role"), "content": content})
        elif item_type == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _own(messages).setdefault("tool_calls", []).append(call)
        elif item_type == "function_call_output":
            output = _text(f"{where}.output", item.get("output"))
            result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
            messages.append(result)
        elif item_type == "reasoning":
            blocks = item.get("content") or item.get("summary") or []
            thought = _text(f"{where}.content", blocks)
            messages.append({"role": "assistant", "content": "", REASONING: thought})
        else:
            raise BadRequest(
                f"{where}.type: expected message, function_call, function_call_output or reasoning, "
                f"got {item_type!r:.80}",
                "input",
            )
        if len(messages) > count:
            items.append(where)
    return messages


def _own(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message at the end, a new one where another message is there."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(where: str, value: Any) -> str:
    """Return the text of an item's parts. Raises BadRequest."""
    if isinstance(value, str):
        return value
    texts = list[str]()
    for entry in value if isinstance(value, list) else [None]:
        block = entry if isinstance(entry, dict) else {}
        text = block.get("text", block.get("refusal"))
        if not isinstance(text, str) or block.get("type") not in _TEXTS:
            raise BadRequest(f"{where}: expected text, or a list of parts that are text", "input")
        texts.append(text)
    return "\n".join(texts)


def _tools(value: Any) -> list[dict[str, Any]]:
    """Return the tools of a response as those of messages. Raises BadRequest."""
    tools, keys = list[dict[str, Any]](), ("name", "description", "parameters", "strict")
    for index, tool in enumerate(value if isinstance(value, list) else [None]):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise BadRequest(f"tools[{index}]: expected an object of type function", "tools")
        function = {key: tool[key] for key in keys if tool.get(key) is not None}
        tools.append({"type": "function", "function": function})
    return tools


def _choice(value: Any) -> Any:
    if isinstance(value, dict) and "function" not in value:
        return {"type": value.get("type"), "function": {"name": value.get("name")}}
    return value


def _format(value: Any) -> Any:
    """Return the format of a text as `response_format` has it."""
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        return value
    return {"type": "json_schema", "json_schema": {k: v for k, v in value.items() if k != "type"}}


class _Frame:
    """A response around its items: what the request was, and what came of it."""

    def __init__(self, keys: ResponsesRequest, asked: Asked) -> None:
        self.keys, self.asked = keys, asked
        self.id = f"resp_{asked.id}"

    def value(self, status: str, output: Sequence[Any], head: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response with some items; `head`: the fields of a chunk or an answer."""
        keys, usage = self.keys, head.get("usage")
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.asked.created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": keys.instructions,
            "max_output_tokens": keys.max_output_tokens,
            "metadata": keys.metadata or {},
            "model": self.asked.model,
            "output": list(output),
            "parallel_tool_calls": keys.parallel_tool_calls,
            "previous_response_id": keys.previous_response_id,
            "reasoning": {"effort": keys.reasoning.effort, "summary": None},
            "store": keys.store,
            "temperature": self.asked.sampling.temperature,
            "text": {"format": keys.text.format or {"type": "text"}},
            "tool_choice": keys.tool_choice or "auto",
            "tools": keys.tools or [],
            "top_p": self.asked.sampling.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "weights_version": head.get("weights_version", 0),
            "seed": self.asked.sampling.seed,
        }

    def whole(self, results: Results) -> dict[str, Any]:
        """Return the complete response."""
        (choice,) = results.choices(self.asked)
        sampled = sum(len(completion.token_ids) for _, completion in results.answers)
        usage = self.asked.usage(sampled, sum(results.cached.values()))
        head = {"usage": usage, "weights_version": results.version}
        status = _status(choice["finish_reason"])
        message = choice["message"]
        items = []
        if message.get(REASONING):
            items.append(_reasoning(message[REASONING], status))
        calls = message.get("tool_calls") or []
        if message["content"] or not calls:
            shown = (choice["logprobs"] or {}).get("content") or []
            items.append(_message(message["content"] or "", status, shown))
        items += [_call(call, status) for call in calls]
        return self.value(status, items, head)


class _Events:
    """The writer of a response's stream. An item is open until another kind of text comes."""

    def __init__(self, frame: _Frame) -> None:
        self._frame, self._number = frame, 0
        self._items, self._open = list[dict[str, Any]](), ""
        self._head: Mapping[str, Any] | None = None
        self._logprobs = list[Any]()
        self._reason = "stop"

    def piece(self, value: Mapping[str, Any]) -> bytes:
        """Return the events of a chunk."""
        written = b"" if self._head else self._begin(value)
        self._head = {**(self._head or {}), **value}
        for choice in value["choices"]:
            delta, self._reason = choice["delta"], choice["finish_reason"] or self._reason
            shown = (choice["logprobs"] or {}).get("content") or []
            for key in (REASONING, "content"):
                if delta.get(key):
                    written += self._add(key, delta[key], shown)
            for call in delta.get("tool_calls") or ():
                written += self._close() + self._whole(_call(call, "completed"))
        return written

    def failed(self, error: Exception) -> bytes:
        """Return the events of a response that has failed."""
        inner = error_value(error)[1]["error"]
        fault = {"code": inner.get("code") or "server_error", "message": inner["message"]}
        value = self._frame.value("failed", self._items, self._head or {}) | {"error": fault}
        begun = b"" if self._head else self._begin({})
        return begun + self._event("response.failed", response=value)

    def end(self) -> bytes:
        """Return the events at the end of a stream."""
        status = _status(self._reason)
        written = b""
        if not self._items and not self._open:
            written += self._add("content", "", [])
        written += self._close(status)
        response = self._frame.value(status, self._items, self._head or {})
        return written + self._event(f"response.{status}", response=response)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        value = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {name}\n".encode() + event(value)

    def _begin(self, head: Mapping[str, Any]) -> bytes:
        response = self._frame.value("in_progress", [], head)
        names = ("response.created", "response.in_progress")
        return b"".join(self._event(name, response=response) for name in names)

    def _add(self, key: str, text: str, shown: list[Any]) -> bytes:
        """Return the events of more text of a kind."""
        written = b""
        if self._open != key:
            written = self._close()
            self._open, self._logprobs = key, []
            item = (
                _message("", "in_progress") if key == "content" else _reasoning("", "in_progress")
            )
            item["content"], block = [], item["content"][0]
            self._items.append(item)
            written += self._of_item("output_item.added", item=item)
            written += self._of_item("content_part.added", content_index=0, part=block)
            item["content"] = [block]
        block = self._items[-1]["content"][0]
        block["text"] += text
        if not text:
            return written
        self._logprobs += shown
        more = {"logprobs": shown} if key == "content" else {}
        name = "output_text" if key == "content" else "reasoning_text"
        return written + self._of_item(f"{name}.delta", content_index=0, delta=text, **more)

    def _close(self, status: str = "completed") -> bytes:
        """Return the events that end the item that is open."""
        if not self._open:
            return b""
        item, key, self._open = self._items[-1], self._open, ""
        block, item["status"] = item["content"][0], status
        name = "output_text" if key == "content" else "reasoning_text"
        more = {"logprobs": self._logprobs} if key == "content" else {}
        if key == "content":
            block["logprobs"] = self._logprobs
        return (
            self._of_item(f"{name}.done", content_index=0, text=block["text"], **more)
            + self._of_item("content_part.done", content_index=0, part=block)
            + self._of_item("output_item.done", item=item)
        )

    def _whole(self, item: dict[str, Any]) -> bytes:
        """Return the events of a call, which comes at once."""
        self._items.append(item)
        begun = {**item, "arguments": "", "status": "in_progress"}
        arguments = item["arguments"]
        name = "function_call_arguments"
        return (
            self._of_item("output_item.added", item=begun)
            + self._of_item(f"{name}.delta", delta=arguments)
            + self._of_item(f"{name}.done", arguments=arguments, name=item["name"])
            + self._of_item("output_item.done", item=item)
        )

    def _of_item(self, name: str, /, **fields: Any) -> bytes:
        """Return an event of the newest item."""
        place = {"output_index": len(self._items) - 1}
        if "item" not in fields:
            place["item_id"] = self._items[-1]["id"]
        return self._event(f"response.{name}", **place, **fields)


def _status(reason: str) -> str:
    return "incomplete" if reason == "length" else "completed"


def _message(text: str, status: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    block = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    return {**_item("message", "msg", status), "role": "assistant", "content": [block]}


def _reasoning(text: str, status: str) -> dict[str, Any]:
    block = {"type": "reasoning_text", "text": text}
    return {**_item("reasoning", "rs", status), "summary": [], "content": [block]}


def _call(call: Mapping[str, Any], status: str) -> dict[str, Any]:
    return {**_item("function_call", "fc", status), "call_id": call["id"], **call["function"]}


def _item(what: str, prefix: str, status: str) -> dict[str, Any]:
    return {"type": what, "id": f"{prefix}_{secrets.token_hex(12)}", "status": status}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
