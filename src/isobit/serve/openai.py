"""OpenAI's routes, and some of vLLM's: completions, chat, models, tokenize, token ids in and out.

A route reads its request (`protocol.py`), has its prompt encoded at the desk (`texts.py`), and has it
answered (`answering.py`). Left out: embeddings, images, audio, files, and echoes
of messages; each is refused by its key.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from isobit.engine.shaping import Grammar, Shaping
from isobit.engine.types import Completion, Sampling
from isobit.serve import chat, sessions
from isobit.serve.answering import answer, at_desk, completed, in_json
from isobit.serve.answers import Asked
from isobit.serve.gateway import Gateway
from isobit.serve.protocol import (
    LEGACY_TOKENS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    SamplingKeys,
    TextRequest,
    TokenizeRequest,
    check_length,
    sampling_of,
)
from isobit.serve.requests import BadRequest
from isobit.serve.shaping import shaping_of
from isobit.serve.texts import Encoder, check_counted
from isobit.serve.wire import read_request

_LONGEST_SESSION = 256


class OpenAI:
    """OpenAI's routes of a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway, self.encoder = gateway, Encoder(gateway.model)

    def routes(self) -> list[Route]:
        """Return OpenAI's and vLLM's routes."""

        posts = {
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat_completions,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
            "/inference/v1/generate": self.generate,
        }
        return [
            *(Route(path, handler, methods=["POST"]) for path, handler in posts.items()),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
        ]

    async def completions(self, request: Request) -> Response:
        """Continue a text, or token ids, or several of either."""
        gateway = self.gateway
        keys = await read_request(request, CompletionRequest, gateway.limits)
        adapter = gateway.adapter_of(keys.model)
        top = 0 if keys.logprobs is True else int(keys.logprobs)
        fewest = 0 if keys.echo or keys.prompt_logprobs is not None else 1
        sampling = sampling_of(keys, gateway.limits, LEGACY_TOKENS, top, fewest)
        arguments = keys.prompt, keys.add_special_tokens, gateway.limits.samples
        prompts = await at_desk(gateway, request, self.encoder.prompts, *arguments)
        check_length(keys, prompts, self.encoder.positions)
        sampling = await self.shaped(request, sampling, keys)
        texts = keys.prompt if isinstance(keys.prompt, list) else [keys.prompt]
        asked = Asked(
            *(keys.model or gateway.name, gateway.tokenizer, prompts, sampling),
            logprobs=keys.logprobs is not False,
            own_top=keys.logprobs is not False and keys.logprobs == 0,
            texts=[text if isinstance(text, str) else None for text in texts[: len(prompts)]],
            sampled=keys.wanted != 0,
            adapter=adapter,
            keys=keys,
        )
        return await answer(gateway, request, asked)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation with the next message."""
        gateway = self.gateway
        keys = await read_request(request, ChatRequest, gateway.limits)
        session, tenant = request.headers.get("x-session-id"), request.state.tenant
        if session is not None and (keys.n != 1 or not 0 < len(session) <= _LONGEST_SESSION):
            raise BadRequest(
                f"X-Session-ID: expected n = 1, and 1 to {_LONGEST_SESSION} characters"
            )
        last_turn = None if session is None else gateway.sessions.find(tenant, session)
        asked, turn = await self.conversation(request, keys, last_turn)

        def keep(completion: Completion) -> None:
            assert session is not None
            gateway.sessions.keep(tenant, session, turn(completion))

        return await answer(gateway, request, asked, None if session is None else keep)

    async def conversation(
        self, request: Request, keys: ChatRequest, last_turn: sessions.Turn | None
    ) -> tuple[Asked, Callable[[Completion], sessions.Turn]]:
        """Return the request for the next message of a conversation, which may go on from its last
        turn, and what makes a turn of its answer."""
        gateway = self.gateway
        adapter, positions = gateway.adapter_of(keys.model), self.encoder.positions
        sampling = sampling_of(keys, gateway.limits, positions, keys.top_logprobs)
        if keys.top_logprobs and not keys.logprobs:
            raise BadRequest("top_logprobs: set logprobs to true beside it", "top_logprobs")
        conversation = self.encoder.conversation, keys, last_turn
        messages, variables, prompt = await at_desk(gateway, request, *conversation)
        check_length(keys, [prompt], positions)
        tools = variables.get("tools", ())
        held = partial(gateway.grammars.of_chat, keys, gateway.tools, prompt, tools)
        sampling = await self.shaped(request, sampling, keys, held)
        asked = Asked(
            *(keys.model or gateway.name, gateway.tokenizer, [prompt], sampling),
            chat=True,
            logprobs=keys.logprobs,
            form=gateway.tools,
            tools=tools,
            one_call=not keys.parallel_tool_calls,
            adapter=adapter,
            keys=keys,
        )

        def turn(completion: Completion) -> sessions.Turn:
            message = chat.messages_of([asked.message(completion)[1]])[0]
            return sessions.Turn(
                *(tuple(messages), variables, tuple(prompt), tuple(completion.token_ids)),
                *(message, len(request.state.body)),
            )

        return asked, turn

    async def generate(self, request: Request) -> Response:
        """Answer token ids with token ids, as vLLM's token route does."""
        gateway = self.gateway
        keys = await read_request(request, GenerateRequest, gateway.limits)
        if keys.stream:
            raise BadRequest(
                "stream: this route answers at once; /v1/completions streams", "stream"
            )
        inner, adapter = keys.sampling_params, gateway.adapter_of(keys.model)
        sampling = sampling_of(inner, gateway.limits, LEGACY_TOKENS, inner.logprobs)
        arguments = self.encoder.tokens, "token_ids", keys.token_ids
        prompt = await at_desk(gateway, request, *arguments)
        check_length(inner, [prompt], self.encoder.positions)
        sampling = await self.shaped(request, sampling, inner)
        asked = Asked(
            *(keys.model or gateway.name, gateway.tokenizer, [prompt], sampling),
            chat=True,
            keys=TextRequest(
                return_tokens_as_token_ids=True,
                prompt_logprobs=inner.prompt_logprobs,
                cache_salt=keys.cache_salt,
            ),
            adapter=adapter,
        )
        results = await completed(gateway, request, asked)
        if results is None:
            return Response(status_code=499)
        value = {"request_id": keys.request_id or asked.id, "choices": [], "seed": sampling.seed}
        value |= {"weights_version": results.version, **results.fronts[0].beside}
        return await in_json(
            gateway, request, lambda: value | {"choices": results.token_choices(asked)}
        )

    async def models(self, request: Request) -> Response:
        """Answer with descriptions of the base and the adapters."""
        names = [None, *self.gateway.device.snapshots.names]
        return JSONResponse({"object": "list", "data": [self._described(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """Answer with the description of the base or of an adapter."""
        return JSONResponse(self._described(self.gateway.adapter_of(request.path_params["name"])))

    async def tokenize(self, request: Request) -> Response:
        """Answer with the token ids that a request with a text or a conversation would have."""
        gateway, encoder = self.gateway, self.encoder
        keys = await read_request(request, TokenizeRequest, gateway.limits)
        gateway.adapter_of(keys.model)
        if (keys.messages is None) == (keys.prompt is None):
            raise BadRequest("expected either prompt or messages", "prompt")
        check = check_counted(encoder.positions, "messages" if keys.prompt is None else "prompt")
        if keys.prompt is None:
            conversation = encoder.conversation, keys, None, check
            tokens = (await at_desk(gateway, request, *conversation))[2]
        else:
            arguments = encoder.tokenizer.encode_text, keys.prompt, keys.add_special_tokens, check
            tokens = await at_desk(gateway, request, *arguments)
        value = {"tokens": tokens, "count": len(tokens), "max_model_len": encoder.positions}
        return await in_json(gateway, request, lambda: value)

    async def detokenize(self, request: Request) -> Response:
        """Answer with the text of token ids, special tokens included."""
        gateway, encoder = self.gateway, self.encoder
        keys = await read_request(request, DetokenizeRequest, gateway.limits)
        gateway.adapter_of(keys.model)
        tokens = await at_desk(gateway, request, encoder.tokens, "tokens", keys.tokens)
        decode = partial(encoder.tokenizer.decode, tokens, special=True)
        return await in_json(gateway, request, lambda: {"prompt": decode()})

    async def shaped(
        self,
        request: Request,
        sampling: Sampling,
        keys: SamplingKeys,
        held: Callable[[], Grammar | None] | None = None,
    ) -> Sampling:
        """Return the settings of sampling with what moves and forbids tokens; `held` returns the
        grammar of the answers, by default that of texts."""
        gateway = self.gateway
        size = gateway.model.config.vocab_size

        def shaping() -> Shaping | None:
            grammar = gateway.grammars.of_text(keys) if held is None else held()
            return shaping_of(keys, gateway.tokenizer, size, sampling.max_new_tokens, grammar)

        return replace(sampling, shaping=await at_desk(gateway, request, shaping))

    def _described(self, name: str | None) -> dict[str, Any]:
        gateway = self.gateway
        return {
            "id": gateway.name if name is None else name,
            "object": "model",
            "created": gateway.started,
            "owned_by": "isobit",
            "root": gateway.name,
            "parent": None if name is None else gateway.name,
            "max_model_len": gateway.model.config.max_positions,
        }
