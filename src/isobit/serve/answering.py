"""The way of a request to the device and back: the jobs, their events, and the response, whole or in
the pieces of a stream."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from isobit.engine.types import Completion
from isobit.serve.answers import Asked, ChoiceStream, event
from isobit.serve.desk import written
from isobit.serve.gateway import Events, Gateway, Indexed, in_thread, unless_gone
from isobit.serve.jobs import Begun, Done, Scored, Token
from isobit.serve.prompts import KEY, Front
from isobit.serve.protocol import salt_of
from isobit.serve.scoring import Scores, check_top
from isobit.serve.wire import EventStream, error_value

_T = TypeVar("_T")
Keep = Callable[[Completion], None]


class Writer(Protocol):
    """A form of streams."""

    def piece(self, value: Mapping[str, Any]) -> bytes:
        """Return what tells of a piece, as OpenAI's chunks have it."""

    def failed(self, error: Exception) -> bytes:
        """Return what ends a stream that fails."""

    def end(self) -> bytes:
        """Return what ends a stream."""


class Chunks:
    """The writer of streams of completions and messages."""

    def piece(self, value: Mapping[str, Any]) -> bytes:
        """Return the chunk itself."""
        return event(value)

    def failed(self, error: Exception) -> bytes:
        """Return the error; no `[DONE]` follows."""
        return event(error_value(error)[1])

    def end(self) -> bytes:
        """Return the event `[DONE]`."""
        return event("[DONE]")


@dataclass
class Results:
    """The results of a request: the `version` of the weights; `answers`, each with the index of its
    prompt, in the order of choices; by prompts, `fronts`, which tell of the prompt, and how many of
    its tokens were `cached`."""

    version: int = 0
    answers: list[tuple[int, Completion]] = field(default_factory=list)
    fronts: dict[int, Front] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)

    def choices(self, asked: Asked) -> list[dict[str, Any]]:
        """Return all answers as OpenAI's choices, which have an entry for each token: slow where
        answers are long."""
        return [
            asked.choice(prompt, answer, self.fronts[prompt]) for prompt, answer in self.answers
        ]

    def token_choices(self, asked: Asked) -> list[dict[str, Any]]:
        """Return all answers as choices of vLLM's token route."""
        return [
            {
                "index": answer.sample_index,
                "token_ids": answer.token_ids,
                "finish_reason": answer.finish_reason,
                "logprobs": asked.shown(
                    asked.prompts[prompt][-1],
                    *(answer.token_ids, answer.logprobs, answer.top_logprobs or ()),
                    start=0,
                ),
            }
            for prompt, answer in self.answers
        ]


async def at_desk(
    gateway: Gateway, request: Request, function: Callable[..., _T], *given: Any
) -> _T:
    """Return the result of a function of a client's text, called in the turn of its tenant."""
    return await gateway.desk.do(request.state.tenant, function, *given)


async def in_json(
    gateway: Gateway, request: Request, value: Callable[[], dict[str, Any]]
) -> Response:
    """Return the response with a value, which may be long and is written at the desk."""
    content = await at_desk(gateway, request, lambda: written(value()))
    return Response(content, media_type="application/json")


async def answer(
    gateway: Gateway, request: Request, asked: Asked, keep: Keep | None = None
) -> Response:
    """Return the response to a request, whose completions `keep` is called with."""
    if asked.keys.stream:
        return await streamed(gateway, request, asked, keep)
    results = await completed(gateway, request, asked)
    if results is None:
        return Response(status_code=499)  # no client reads it
    if keep is not None:
        keep(results.answers[0][1])
    sampled = sum(len(completion.token_ids) for _, completion in results.answers)
    value = asked.head("chat.completion" if asked.chat else "text_completion", results.version)
    value |= {"choices": [], "usage": asked.usage(sampled, sum(results.cached.values()))}
    if asked.chat:
        value |= results.fronts[0].beside
    return await in_json(gateway, request, lambda: value | {"choices": results.choices(asked)})


async def completed(gateway: Gateway, request: Request, asked: Asked) -> Results | None:
    """Return all results of a request; None: its client went away. Raises BadRequest where too many
    scores of prompts are asked for."""
    return await unless_gone(request.receive, _completed(gateway, request, asked))


async def _completed(gateway: Gateway, request: Request, asked: Asked) -> Results:
    results, scores = Results(), dict[int, Scores]()
    async with _ask(gateway, request, asked) as events:
        async for prompt, happened in events:
            if isinstance(happened, Begun):
                results.version = happened.weights_version
            elif isinstance(happened, Scored):
                scores[prompt] = happened.scores
            elif isinstance(happened, Done):
                results.answers.append((prompt, happened.completion))
                results.cached[prompt] = happened.cached
    for prompt in range(len(asked.prompts)):
        results.fronts[prompt] = await _front(asked, prompt, scores.get(prompt))
        if not asked.sampled:
            results.answers += [(prompt, empty) for empty in asked.nothing(prompt, results.version)]
    results.answers.sort(key=lambda pair: asked.index(pair[0], pair[1].sample_index))
    return results


def _ask(gateway: Gateway, request: Request, asked: Asked) -> AbstractAsyncContextManager[Events]:
    scorings = asked.scorings()
    total = sum(scoring.last for scoring in scorings if scoring is not None)
    top = max((scoring.top for scoring in scorings if scoring is not None), default=0)
    check_top(total, top, KEY, "ask for fewer, or of shorter prompts")
    arguments = request.state.tenant, asked.prompts, asked.sampling, asked.adapter
    salt = salt_of(asked.keys.cache_salt)
    return gateway.ask(*arguments, asked.keys.stream, scorings, asked.sampled, salt=salt)


async def _front(asked: Asked, prompt: int, scores: Scores | None) -> Front:
    """Return what the answer tells of a prompt, made in a thread where that is slow."""
    if scores is None:
        return asked.front(prompt, None)
    return await in_thread(asked.front, prompt, scores)


async def streamed(
    gateway: Gateway,
    request: Request,
    asked: Asked,
    keep: Keep | None,
    writer: Writer | None = None,
) -> Response:
    """Return the answer as a stream, by default of chunks. A request that is refused at once is answered with an error
    and without a stream."""
    async with AsyncExitStack() as stack:
        events = await stack.enter_async_context(_ask(gateway, request, asked))
        first = await unless_gone(request.receive, anext(events))
        if first is None:
            return Response(status_code=499)
        return EventStream(_pieces(asked, first, events, keep, writer or Chunks()), stack.pop_all())
    raise AssertionError("unreachable")


async def _pieces(
    asked: Asked, first: Indexed, events: Events, keep: Keep | None, writer: Writer
) -> AsyncIterator[bytes]:
    """Yield what the `writer` makes of the pieces of a stream. Tokens that came together make one
    piece."""
    kind = "chat.completion.chunk" if asked.chat else "text_completion"
    version, choices = 0, dict[tuple[int, int], ChoiceStream]()
    sampled, cached = Counter[tuple[int, int]](), dict[int, int]()  # tokens
    scored, usage = asked.scorings()[0] is not None, asked.keys.stream_options.include_usage
    continuous = usage and asked.keys.stream_options.continuous_usage_stats
    heard = dict[tuple[int, int], ChoiceStream]()  # choices with tokens that are in no piece yet

    def chunk(piece: dict[str, Any] | None, **more: Any) -> bytes:
        if piece is None:
            return b""
        value = asked.head(kind, version) | {"choices": [piece]} | more
        tokens_used = asked.usage(sampled.total(), None) if continuous else None
        return writer.piece(value | ({"usage": tokens_used} if usage else {}))

    async def all_events() -> AsyncIterator[Indexed]:
        yield first
        async for item in events:
            yield item

    try:
        async for prompt, happened in all_events():
            if isinstance(happened, Begun):
                version = happened.weights_version
            if isinstance(happened, Scored if scored else Begun):
                scores = happened.scores if isinstance(happened, Scored) else None
                front = await _front(asked, prompt, scores)
                for sample in range(asked.sampling.n):
                    choices[prompt, sample] = ChoiceStream(asked, prompt, sample, front)
                    more = front.beside if asked.chat else {}
                    yield chunk(choices[prompt, sample].begin(), **more)
                for nothing in () if asked.sampled else asked.nothing(prompt, version):
                    yield chunk(choices[prompt, nothing.sample_index].end(nothing))
            elif isinstance(happened, Token):
                choice = prompt, happened.sample_index
                heard[choice] = choices[choice]
                heard[choice].feed(happened.token, happened.logprob, happened.top)
                sampled[choice] += 1
            elif isinstance(happened, Done):
                completion, choice = happened.completion, (prompt, happened.completion.sample_index)
                sampled[choice], cached[prompt] = len(completion.token_ids), happened.cached
                if keep is not None:
                    keep(completion)
                heard.pop(choice, None)
                yield chunk(choices[choice].end(completion))
            if not events.waiting:
                yield b"".join(chunk(stream.take()) for stream in heard.values())
                heard.clear()
    except Exception as error:
        yield writer.failed(error)
        return
    if usage:
        tokens_used = asked.usage(sampled.total(), sum(cached.values()))
        yield writer.piece(asked.head(kind, version) | {"choices": [], "usage": tokens_used})
    yield writer.end()
