"""OpenAI's routes, and some of vLLM's: completions, chat, models, tokenize, token ids in and out.

Left out: embeddings, images, audio, files, responses, echoes of messages, and constrained decoding;
each is refused by its key.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from isobit.engine.prompts import encode_prompt
from isobit.engine.types import MOST_TOP_LOGPROBS, Completion, Sampling
from isobit.model.text.tokenizer import Check
from isobit.serve import chat, sessions
from isobit.serve.answers import Asked, ChoiceStream, event
from isobit.serve.desk import written
from isobit.serve.gateway import Events, Gateway, Indexed, in_thread, unless_gone
from isobit.serve.jobs import Begun, Done, Scored, Token
from isobit.serve.prompts import KEY, Front, Told
from isobit.serve.requests import BadRequest, Fields, check_length, salt_of, sampling_of, token_list
from isobit.serve.scoring import Scores, check_top
from isobit.serve.texts import check_counted, check_prompt
from isobit.serve.wire import EventStream, error_value, read_fields

_LEGACY_TOKENS = 16  # of a completion, unless the request says otherwise
_LONGEST_SESSION = 256
_T = TypeVar("_T")


@dataclass
class Found:
    """The results of a request: the `version` of the weights; `answers`, each with the index of its
    prompt, in the order of choices; by prompts, `fronts`, which tell of the prompt, and how many of
    its tokens were `cached`."""

    version: int = 0
    answers: list[tuple[int, Completion]] = field(default_factory=list)
    fronts: dict[int, Front] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)

    @property
    def num_sampled(self) -> int:
        """The number of tokens of all answers."""
        return sum(len(completion.token_ids) for _, completion in self.answers)

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


class OpenAI:
    """OpenAI's routes of a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._vocabulary = gateway.model.config.vocab_size

    def routes(self) -> list[Route]:
        """Return OpenAI's and vLLM's routes."""

        def post(path: str, handler: Callable[[Request], Any]) -> Route:
            return Route(path, handler, methods=["POST"])

        return [
            post("/v1/completions", self.completions),
            post("/v1/chat/completions", self.chat_completions),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            post("/tokenize", self.tokenize),
            post("/detokenize", self.detokenize),
            post("/inference/v1/generate", self.generate),
        ]

    async def completions(self, request: Request) -> Response:
        """Continue a text, or token ids, or several of either."""
        gateway, fields = self._gateway, await read_fields(request, self._gateway.limits)
        model = fields.text("model")
        adapter = gateway.adapter_of(model)
        given = fields.take("prompt")
        told = Told.of(fields, may_echo=True)
        fewest = 0 if told.anything else 1
        sampling = sampling_of(fields, gateway.limits, _LEGACY_TOKENS, fewest)
        none = fields.take("max_completion_tokens", fields.take("max_tokens")) == 0
        logprobs = fields.take("logprobs", False) is not False
        if logprobs and fields.take("logprobs") is not True:
            sampling = _with_top(sampling, fields, "logprobs")
        add_special = fields.flag("add_special_tokens", True)
        shown, salt = _shown(fields), salt_of(fields)
        stream, usage = _stream_of(fields)
        fields.finish()
        prompts = await self._at_desk(request, self._prompts, given, add_special)
        check_length(fields, prompts, gateway.model.config.max_positions)
        texts = given if isinstance(given, list) else [given]
        asked = Asked(
            *(model or gateway.name, gateway.tokenizer, prompts, sampling, False, logprobs, *shown),
            told=told,
            texts=[text if isinstance(text, str) else None for text in texts[: len(prompts)]],
            sampled=not none,
            salt=salt,
        )
        return await self._answer(request, asked, adapter, stream, usage, None)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation with the next message."""
        gateway, fields = self._gateway, await read_fields(request, self._gateway.limits)
        model = fields.text("model")
        adapter = gateway.adapter_of(model)
        messages = await self._at_desk(request, chat.messages_of, fields.take("messages"))
        variables = chat.variables_of(*map(fields.take, chat.VARIABLES))
        sampling = sampling_of(fields, gateway.limits, gateway.model.config.max_positions)
        logprobs, shown = fields.flag("logprobs"), _shown(fields)
        sampling = _with_top(sampling, fields, "top_logprobs")
        if sampling.top_logprobs and not logprobs:
            raise BadRequest("top_logprobs: set logprobs to true beside it", "top_logprobs")
        stream, usage = _stream_of(fields)
        told, salt = Told.of(fields), salt_of(fields)
        one_call = chat.wants_one_call(messages, fields)
        fields.finish()
        session = request.headers.get("x-session-id")
        if session is not None and (sampling.n != 1 or not 0 < len(session) <= _LONGEST_SESSION):
            raise BadRequest(
                f"X-Session-ID: expected n = 1, and 1 to {_LONGEST_SESSION} characters"
            )
        before = None if session is None else gateway.sessions.find(request.state.tenant, session)
        check = check_prompt(gateway.tokenizer, gateway.model.config.max_positions, "messages")
        prompt = await self._at_desk(request, self._chat_prompt, messages, variables, before, check)
        check_length(fields, [prompt], gateway.model.config.max_positions)
        asked = Asked(
            model or gateway.name,
            gateway.tokenizer,
            [prompt],
            sampling,
            True,
            logprobs,
            *shown,
            form=gateway.tools,
            tools=variables.get("tools", ()),
            one_call=one_call,
            told=told,
            salt=salt,
        )

        def keep(completion: Completion) -> None:
            if session is not None:
                answer = chat.messages_of([asked.message(completion)[1]])[0]
                turn = sessions.Turn(
                    *(tuple(messages), variables, tuple(prompt), tuple(completion.token_ids)),
                    *(answer, len(request.state.body)),
                )
                gateway.sessions.keep(request.state.tenant, session, turn)

        return await self._answer(request, asked, adapter, stream, usage, keep)

    async def generate(self, request: Request) -> Response:
        """Answer token ids with token ids, as vLLM's token route does."""
        gateway, fields = self._gateway, await read_fields(request, self._gateway.limits)
        model, given = fields.text("model"), fields.take("token_ids")
        name = fields.text("request_id")
        if fields.flag("stream"):
            raise BadRequest(
                "stream: this route answers at once; /v1/completions streams", "stream"
            )
        inner = fields.inner("sampling_params")
        sampling = sampling_of(inner, gateway.limits, _LEGACY_TOKENS)
        sampling = _with_top(sampling, inner, "logprobs")
        fields.take("stream_options")
        told, salt = Told.of(inner), salt_of(fields)
        for each in (inner, fields):
            each.finish()
        prompt = await self._at_desk(request, self._tokens, "token_ids", given)
        check_length(inner, [prompt], gateway.model.config.max_positions)
        asked = Asked(
            *(model or gateway.name, gateway.tokenizer, [prompt], sampling),
            chat=True,
            tokens_by_id=True,
            told=told,
            salt=salt,
        )
        found = await unless_gone(
            request.receive, self._completed(request, asked, gateway.adapter_of(model))
        )
        if found is None:
            return Response(status_code=499)
        value = {"request_id": name or asked.id, "choices": [], "seed": sampling.seed}
        value |= {"weights_version": found.version, **found.fronts[0].beside}
        return await self._written(request, lambda: value | {"choices": found.token_choices(asked)})

    async def models(self, request: Request) -> Response:
        """Answer with descriptions of the base and the adapters."""
        names = [None, *self._gateway.device.snapshots.names]
        return JSONResponse({"object": "list", "data": [self._described(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """Answer with the description of the base or of an adapter."""
        return JSONResponse(self._described(self._gateway.adapter_of(request.path_params["name"])))

    async def tokenize(self, request: Request) -> Response:
        """Answer with the token ids that a request with a text or a conversation would have."""
        fields = await read_fields(request, self._gateway.limits)
        self._gateway.adapter_of(fields.text("model"))
        messages, text = fields.take("messages"), fields.text("prompt")
        add_special = fields.flag("add_special_tokens", True)
        given = fields.take("tools"), None, fields.take("chat_template_kwargs")
        fields.finish()
        if (messages is None) == (text is None):
            raise BadRequest("expected either prompt or messages", "prompt")
        positions = self._gateway.model.config.max_positions
        check = check_counted(positions)
        if messages is not None:
            found = await self._at_desk(request, chat.messages_of, messages)
            written = found, chat.variables_of(*given), None, check
            tokens = await self._at_desk(request, self._chat_prompt, *written)
        else:
            encode = self._gateway.tokenizer.encode_text
            tokens = await self._at_desk(request, encode, text, add_special, check)
        value = {"tokens": tokens, "count": len(tokens), "max_model_len": positions}
        return await self._written(request, lambda: value)

    async def detokenize(self, request: Request) -> Response:
        """Answer with the text of token ids, special tokens included."""
        fields = await read_fields(request, self._gateway.limits)
        self._gateway.adapter_of(fields.text("model"))
        given = fields.take("tokens")
        fields.finish()
        tokens = await self._at_desk(request, self._tokens, "tokens", given)
        decode = self._gateway.tokenizer.decode
        return await self._written(request, lambda: {"prompt": decode(tokens, special=True)})

    async def _answer(
        self,
        request: Request,
        asked: Asked,
        adapter: str | None,
        stream: bool,
        usage: bool,
        keep: Callable[[Completion], None] | None,
    ) -> Response:
        if stream:
            return await self._streamed(request, asked, adapter, usage, keep)
        found = await unless_gone(request.receive, self._completed(request, asked, adapter))
        if found is None:
            return Response(status_code=499)  # no client reads it
        if keep is not None:
            keep(found.answers[0][1])
        value = asked.head("chat.completion" if asked.chat else "text_completion", found.version)
        cached = sum(found.cached.values())
        value |= {"choices": [], "usage": asked.usage(found.num_sampled, cached)}
        if asked.chat:
            value |= found.fronts[0].beside
        return await self._written(request, lambda: value | {"choices": found.choices(asked)})

    async def _at_desk(self, request: Request, function: Callable[..., _T], *given: Any) -> _T:
        """Return the result of a function of a client's text, called in the turn of its tenant."""
        return await self._gateway.desk.do(request.state.tenant, function, *given)

    async def _written(self, request: Request, value: Callable[[], dict[str, Any]]) -> Response:
        """Return the response with a value, which may be long and is written at the desk."""
        content = await self._at_desk(request, lambda: written(value()))
        return Response(content, media_type="application/json")

    async def _completed(self, request: Request, asked: Asked, adapter: str | None) -> Found:
        """Return all results of a request. Raises BadRequest where too many scores of prompts are
        asked for."""
        found, scores = Found(), dict[int, Scores]()
        async with self._ask(request, asked, adapter, streamed=False) as events:
            async for prompt, happened in events:
                if isinstance(happened, Begun):
                    found.version = happened.weights_version
                elif isinstance(happened, Scored):
                    scores[prompt] = happened.scores
                elif isinstance(happened, Done):
                    found.answers.append((prompt, happened.completion))
                    found.cached[prompt] = happened.cached
        for prompt in range(len(asked.prompts)):
            found.fronts[prompt] = await _front(asked, prompt, scores.get(prompt))
            if not asked.sampled:
                found.answers += [(prompt, one) for one in asked.nothing(prompt, found.version)]
        found.answers.sort(key=lambda pair: asked.index(pair[0], pair[1].sample_index))
        return found

    def _ask(
        self, request: Request, asked: Asked, adapter: str | None, streamed: bool
    ) -> AbstractAsyncContextManager[Events]:
        scorings = asked.scorings()
        total = sum(one.last for one in scorings if one is not None)
        top = max((one.top for one in scorings if one is not None), default=0)
        check_top(total, top, KEY, "ask for fewer, or of shorter prompts")
        given = request.state.tenant, asked.prompts, asked.sampling, adapter
        return self._gateway.ask(*given, streamed, scorings, asked.sampled, salt=asked.salt)

    async def _streamed(
        self,
        request: Request,
        asked: Asked,
        adapter: str | None,
        usage: bool,
        keep: Callable[[Completion], None] | None,
    ) -> Response:
        """Return the answer as a stream. A request that is refused at once is answered with an
        error and without a stream."""
        async with AsyncExitStack() as stack:
            events = await stack.enter_async_context(
                self._ask(request, asked, adapter, streamed=True)
            )
            first = await unless_gone(request.receive, anext(events))
            if first is None:
                return Response(status_code=499)
            return EventStream(_pieces(asked, first, events, usage, keep), stack.pop_all())
        raise AssertionError("unreachable")

    def _prompts(self, given: Any, add_special: bool) -> list[list[int]]:
        """Return the prompts, as token ids, of a text, of token ids, or of a list of either."""
        several = isinstance(given, list) and bool(given) and isinstance(given[0], (str, list))
        prompts = given if several else [given]
        if len(prompts) > self._gateway.limits.samples:
            raise BadRequest(
                f"prompt: at most {self._gateway.limits.samples:,} at a time", "prompt"
            )
        return [self._prompt(prompt, add_special) for prompt in prompts]

    def _prompt(self, given: Any, add_special: bool) -> list[int]:
        if isinstance(given, str):
            tokenizer, positions = self._gateway.tokenizer, self._gateway.model.config.max_positions
            check = check_prompt(tokenizer, positions, "prompt")
            given = tokenizer.encode_text(given, add_special, check)
        elif not isinstance(given, list):
            raise BadRequest("prompt: expected a text, token ids, or a list of either", "prompt")
        return self._checked("prompt", given)

    def _tokens(self, key: str, given: Any) -> list[int]:
        return self._checked(key, token_list(given, key))

    def _checked(self, key: str, tokens: list[int]) -> list[int]:
        if tokens and not all(type(token) is int for token in tokens):
            raise BadRequest(f"{key}: expected a text, token ids, or a list of either", key)
        return encode_prompt(key, tokens, self._gateway.tokenizer, self._vocabulary)

    def _chat_prompt(
        self,
        messages: list[chat.Message],
        variables: dict[str, Any],
        before: sessions.Turn | None,
        check: Check,
    ) -> list[int]:
        tokenizer = self._gateway.tokenizer
        if before is not None and sessions.goes_on(before, messages, variables):
            return sessions.spliced(tokenizer, before, messages, variables)
        chat.check_tools(tokenizer, messages, variables)
        return tokenizer.encode_chat(messages, True, variables, check)

    def _described(self, name: str | None) -> dict[str, Any]:
        gateway = self._gateway
        return {
            "id": gateway.name if name is None else name,
            "object": "model",
            "created": gateway.started,
            "owned_by": "isobit",
            "root": gateway.name,
            "parent": None if name is None else gateway.name,
            "max_model_len": gateway.model.config.max_positions,
        }


def _shown(fields: Fields) -> tuple[bool, bool]:
    """Return (whether answers have token ids, whether tokens are named by their ids)."""
    return fields.flag("return_token_ids"), fields.flag("return_tokens_as_token_ids")


def _with_top(sampling: Sampling, fields: Fields, key: str) -> Sampling:
    """Return a sampling with the number of likeliest tokens that is asked for under a key."""
    return replace(sampling, top_logprobs=fields.whole(key, 0, 0, MOST_TOP_LOGPROBS))


async def _front(asked: Asked, prompt: int, scores: Scores | None) -> Front:
    """Return what the answer tells of a prompt, made in a thread where that is slow."""
    if scores is None:
        return asked.front(prompt, None)
    return await in_thread(asked.front, prompt, scores)


def _stream_of(fields: Fields) -> tuple[bool, bool]:
    """Return (whether to stream, whether the stream ends with the usage)."""
    stream, options = fields.flag("stream"), fields.inner("stream_options")
    usage = options.flag("include_usage")
    if options.flag("continuous_usage_stats"):
        raise BadRequest(
            "stream_options: usage is told at the end (include_usage), and not continuously",
            "stream_options",
        )
    options.finish()
    return stream, usage and stream


async def _pieces(
    asked: Asked,
    first: Indexed,
    events: Events,
    usage: bool,
    keep: Callable[[Completion], None] | None,
) -> AsyncIterator[bytes]:
    """Yield the events of a stream by OpenAI's protocol. Tokens that came together make one
    piece."""
    kind = "chat.completion.chunk" if asked.chat else "text_completion"
    version, sampled, choices = 0, 0, dict[tuple[int, int], ChoiceStream]()
    cached = dict[int, int]()
    scored = asked.scorings()[0] is not None
    heard = dict[tuple[int, int], ChoiceStream]()  # choices with tokens that are in no piece yet

    def chunk(piece: dict[str, Any] | None, **more: Any) -> bytes:
        if piece is None:
            return b""
        value = asked.head(kind, version) | {"choices": [piece]} | more
        return event(value | ({"usage": None} if usage else {}))

    async def all_events() -> AsyncIterator[Indexed]:
        yield first
        async for each in events:
            yield each

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
                for answer in () if asked.sampled else asked.nothing(prompt, version):
                    yield chunk(choices[prompt, answer.sample_index].end(answer))
            elif isinstance(happened, Token):
                place = prompt, happened.sample_index
                heard[place] = choices[place]
                heard[place].feed(happened.token, happened.logprob, happened.top)
            elif isinstance(happened, Done):
                sampled += len(happened.completion.token_ids)
                cached[prompt] = happened.cached
                if keep is not None:
                    keep(happened.completion)
                heard.pop((prompt, happened.completion.sample_index), None)
                yield chunk(
                    choices[prompt, happened.completion.sample_index].end(happened.completion)
                )
            if not events.waiting:
                yield b"".join(chunk(stream.take()) for stream in heard.values())
                heard.clear()
    except Exception as error:
        yield event(error_value(error)[1])
        return
    if usage:
        told = asked.usage(sampled, sum(cached.values()))
        yield event(asked.head(kind, version) | {"choices": [], "usage": told})
    yield event("[DONE]")
