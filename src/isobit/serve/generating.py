"""`/generate` as SGLang has it, and as vLLM's plain server has it (a `prompt`, and its settings beside
it): texts or token ids in, token ids and log-probabilities out. Left out: streams, and scores of
prompts in SGLang's form."""

from dataclasses import replace
from typing import Annotated, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from isobit.engine.types import Completion
from isobit.serve.answering import Results, at_desk, completed, in_json
from isobit.serve.answers import Asked
from isobit.serve.desk import written
from isobit.serve.neutral import NEUTRAL
from isobit.serve.openai import OpenAI
from isobit.serve.protocol import (
    LEGACY_TOKENS,
    SamplingKeys,
    Seed,
    TextRequest,
    Tokens,
    Top,
    TopOrFalse,
    check_length,
    sampling_of,
    token_list,
)
from isobit.serve.requests import (
    BadRequest,
    Declared,
    Neutral,
    kind,
    named_as_sent,
    read,
)
from isobit.serve.wire import read_as

_SGLANG_TOKENS = 128
_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
_OFF, _NOTHING, _NO_SAMPLING = (False,), TextRequest(), SamplingKeys()
_PLAIN = {**NEUTRAL, "stream": Neutral("a stream; /v1/completions has one", _OFF)}


class SGLangSampling(SamplingKeys):
    """SGLang's `sampling_params`."""

    max_new_tokens: Tokens | None = None
    min_new_tokens: Tokens | None = None
    sampling_seed: Seed | None = None

    @property
    def names(self) -> dict[str, str]:
        """The keys that were sent, by their names on the other routes."""
        return {name: key for name, key in _NAMES.items() if getattr(self, key) is not None}

    @property
    def own(self) -> "SGLangSampling":
        """The same under the names of the other routes. Raises BadRequest where a key is given by
        both."""
        for name, key in self.names.items():
            twice = ("max_tokens", "max_completion_tokens") if name == "max_tokens" else (name,)
            for other in twice:
                if getattr(self, other) != getattr(_NO_SAMPLING, other):
                    raise BadRequest(f"{key}: {other} is given too; give one of them", key)
        return replace(self, **{name: getattr(self, key) for name, key in self.names.items()})


class SGLangRequest(Declared):
    """A request for what follows a text, or token ids, or several of either."""

    neutral = {
        **_PLAIN,
        "logprob_start_len": Neutral("scores of prompts in this form", (-1,)),
        "return_text_in_logprobs": Neutral("texts beside log-probabilities", _OFF),
    }
    model: str | None = None
    text: Annotated[Any, "a text or a list of texts"] = None
    input_ids: Annotated[Any, "token ids, or a list of them"] = None
    sampling_params: SGLangSampling = SGLangSampling()
    return_logprob: bool = False
    top_logprobs_num: Top = 0


class VLLMRequest(SamplingKeys):
    """A request of vLLM's plain server, with token ids in `prompt_token_ids` of its prompt."""

    neutral = _PLAIN
    model: str | None = None
    prompt: Annotated[Any, "a text, or an object with prompt_token_ids"] = None
    logprobs: Top | None = None
    prompt_logprobs: TopOrFalse = None


class VLLMPrompt(Declared):
    """A prompt of vLLM's that is an object: one of these."""

    prompt: str | None = None
    prompt_token_ids: Annotated[Any, "a list of token ids"] = None


class Generating:
    """The route, over those of OpenAI."""

    def __init__(self, openai: OpenAI) -> None:
        self._openai, self._gateway = openai, openai.gateway

    def routes(self) -> list[Route]:
        """Return the route."""
        return [Route("/generate", self.generate, methods=["POST"])]

    async def generate(self, request: Request) -> Response:
        """Answer texts or token ids with token ids."""
        limits = self._gateway.limits

        def declared(value: Any) -> SGLangRequest | VLLMRequest:
            if isinstance(value, dict) and "prompt" in value:
                return read(VLLMRequest, value, limits)
            return read(SGLangRequest, value, limits)

        keys = await read_as(request, limits, declared)
        if isinstance(keys, VLLMRequest):
            return await self._as_vllm(request, keys)
        return await self._as_sglang(request, keys)

    async def _as_sglang(self, request: Request, keys: SGLangRequest) -> Response:
        inner, token_ids = keys.sampling_params.own, keys.input_ids
        if (keys.text is None) == (token_ids is None):
            raise BadRequest("expected either text or input_ids", "input_ids")
        key, prompts = ("text", keys.text) if token_ids is None else ("input_ids", token_ids)
        if not _fits(prompts, str if token_ids is None else int):
            wanted = (
                "a text or a list of texts" if token_ids is None else "token ids or lists of them"
            )
            raise BadRequest(f"{key}: expected {wanted}, got {kind(prompts)}", key)
        top = keys.top_logprobs_num if keys.return_logprob else 0
        with named_as_sent({"prompt": key, **keys.sampling_params.names}):
            asked = await self._asked(request, inner, keys.model, prompts, _SGLANG_TOKENS, top)
        results = await completed(self._gateway, request, asked)
        if results is None:
            return Response(status_code=499)
        alone = asked.sampling.n == 1 and not _several(prompts)

        def answers() -> bytes:
            values = [written(self._told(keys, asked, results, *pair)) for pair in results.answers]
            return values[0] if alone else b"[" + b",".join(values) + b"]"

        content = await at_desk(self._gateway, request, answers)
        return Response(content, media_type="application/json")

    async def _as_vllm(self, request: Request, keys: VLLMRequest) -> Response:
        prompt = keys.prompt
        names = dict[str, str]()
        if isinstance(prompt, dict):
            inner = read(VLLMPrompt, prompt, self._gateway.limits, "prompt")
            if (inner.prompt is None) == (inner.prompt_token_ids is None):
                raise BadRequest("prompt: expected either prompt or prompt_token_ids", "prompt")
            prompt = inner.prompt
            if prompt is None:
                prompt = token_list(inner.prompt_token_ids, "prompt_token_ids")
                names = {"prompt": "prompt_token_ids"}
        if _several(prompt):
            raise BadRequest("prompt: expected one prompt", "prompt")
        answered = TextRequest(prompt_logprobs=keys.prompt_logprobs)
        with named_as_sent(names):
            asked = await self._asked(
                *(request, keys, keys.model, prompt, LEGACY_TOKENS, keys.logprobs or 0),
                answered=answered,
            )
        results = await completed(self._gateway, request, asked)
        if results is None:
            return Response(status_code=499)

        def answers() -> dict[str, Any]:
            text = asked.tokenizer.decode(asked.prompts[0])
            completions = [completion for _, completion in results.answers]
            value = {
                "text": [text + completion.text for completion in completions],
                "prompt": text,
                "token_ids": [completion.token_ids for completion in completions],
                "finish_reasons": [completion.finish_reason for completion in completions],
                "weights_version": results.version,
                "seed": asked.sampling.seed,
                **results.fronts[0].beside,
            }
            if keys.logprobs is not None:
                value["logprobs"] = [_by_place(completion) for completion in completions]
            return value

        return await in_json(self._gateway, request, answers)

    async def _asked(
        self,
        request: Request,
        keys: SamplingKeys,
        model: str | None,
        prompts: Any,
        tokens: int,
        top: int = 0,
        answered: TextRequest = _NOTHING,
    ) -> Asked:
        """Return the request for answers to these prompts."""
        gateway, encoder = self._gateway, self._openai.encoder
        adapter = gateway.adapter_of(model)
        sampling = sampling_of(keys, gateway.limits, tokens, top)
        arguments = encoder.prompts, prompts, True, gateway.limits.samples
        encoded = await at_desk(gateway, request, *arguments)
        check_length(keys, encoded, encoder.positions)
        sampling = await self._openai.shaped(request, sampling, keys)
        head = model or gateway.name, gateway.tokenizer, encoded, sampling
        return Asked(*head, keys=answered, adapter=adapter)

    def _told(
        self, keys: SGLangRequest, asked: Asked, results: Results, prompt: int, answer: Completion
    ) -> dict[str, Any]:
        """Return one answer as SGLang tells it."""
        reason: dict[str, Any] = {"type": answer.finish_reason}
        if answer.finish_reason == "length":
            reason["length"] = len(answer.token_ids)
        about = {
            "id": f"{asked.id}-{asked.index(prompt, answer.sample_index)}",
            "finish_reason": reason,
            "prompt_tokens": len(asked.prompts[prompt]),
            "completion_tokens": len(answer.token_ids),
            "cached_tokens": results.cached[prompt],
            "weight_version": str(results.version),
            "seed": asked.sampling.seed,
        }
        if keys.return_logprob:
            pairs = zip(answer.logprobs, answer.token_ids)
            about["output_token_logprobs"] = [[value, token, None] for value, token in pairs]
            if keys.top_logprobs_num:
                about["output_top_logprobs"] = [
                    [[value, token, None] for token, value in top]
                    for top in answer.top_logprobs or ()
                ]
        return {"text": answer.text, "output_ids": answer.token_ids, "meta_info": about}


def _fits(prompts: Any, item: type) -> bool:
    """Return whether a value is texts, or token ids, alone or in a list; `item`: str or int."""
    if item is str:
        texts = prompts if isinstance(prompts, list) and prompts else [prompts]
        return all(isinstance(text, str) for text in texts)
    lists = prompts if _several(prompts) else [prompts]
    return all(
        isinstance(ids, list) and bool(ids) and all(type(token) is int for token in ids)
        for ids in lists
    )


def _several(prompts: Any) -> bool:
    return isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], list | str)


def _by_place(answer: Completion) -> list[list[dict[str, float]]]:
    """Return, for each token, its log-probability by its id, the likeliest ones behind it."""
    tops = answer.top_logprobs or [[] for _ in answer.token_ids]
    return [
        [{str(token): value} | {str(likely): p for likely, p in top if likely != token}]
        for token, value, top in zip(answer.token_ids, answer.logprobs, tops)
    ]
