"""The requests of OpenAI's and vLLM's routes, key by key, and the settings of sampling in them."""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from isobit.engine.types import MOST_TOP_LOGPROBS, Sampling
from isobit.errors import IsobitError
from isobit.options.declare import Preprocess, at_least, at_most
from isobit.serve.neutral import NEUTRAL, STRUCTURED
from isobit.serve.requests import BadRequest, Declared, Limits, Most, check_whole, kind

LEGACY_TOKENS, _MOST_TOKENS = 16, 2**31 - 1
"""The tokens of a completion, unless the request says otherwise; the most of any request."""
_HOTTEST = 100.0  # an infinite temperature makes logits that are not numbers
_OWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos")
"""The keys that `Sampling` declares, with their types and bounds."""
Tokens = Annotated[int, at_least(0), at_most(_MOST_TOKENS)]
Top = Annotated[int, at_least(0), at_most(MOST_TOP_LOGPROBS)]
Seed = Annotated[int, at_least(-1), at_most(2**63 - 1), "-1: a random one"]
TopOrFalse = Annotated[Top | None, Preprocess(lambda value: None if value is False else value)]


class ResponseFormat(Declared):
    """OpenAI's form of an answer."""

    type: str
    json_schema: Mapping[str, Any] | None = None


class StructuredOutputs(Declared):
    """vLLM's form of an answer: one of these."""

    neutral = STRUCTURED
    json: Annotated[Any, "a JSON schema, or its text"] = None
    json_object: bool = False
    regex: str | None = None
    choice: Annotated[Any, "a list of texts"] = None
    grammar: str | None = None


class SamplingKeys(Declared):
    """The keys by which answers are sampled."""

    neutral = NEUTRAL
    n: Annotated[int, at_least(1), Most("samples")] = 1
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    seed: Seed | None = None
    temperature: Any = None
    top_p: Any = None
    top_k: Annotated[Any, Preprocess(lambda value: 0 if value == -1 else value)] = None
    min_p: Any = None
    repetition_penalty: Any = None
    ignore_eos: Any = None
    stop: Annotated[Any, "a text or a list of texts"] = None
    stop_token_ids: Annotated[Any, "a list of token ids"] = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Annotated[Any, "an object of numbers by token ids"] = None
    allowed_token_ids: Annotated[Any, "a list of token ids"] = None
    bad_words: Annotated[Any, "a list of texts"] = None
    min_tokens: Tokens = 0
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: Annotated[Any, "SGLang's: a JSON schema, or its text"] = None
    regex: str | None = None
    ebnf: str | None = None

    @property
    def wanted(self) -> int | None:
        """The number of tokens that an answer may have; None: the route's own."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class StreamOptions(Declared):
    """`include_usage`: the stream ends with the usage; `continuous_usage_stats`: then each piece has
    it so far."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class TextRequest(SamplingKeys):
    """The keys that completions and chat have in common. `echo` is of completions alone."""

    echo = False
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    cache_salt: str | None = None
    prompt_logprobs: TopOrFalse = None


class CompletionRequest(TextRequest):
    """A request for the continuation of texts or token ids. `logprobs`: true, or the number of the
    likeliest tokens in the place of each sampled one."""

    prompt: Annotated[Any, "a text, token ids, or a list of either"] = None
    logprobs: bool | Top = False
    echo: bool = False
    add_special_tokens: bool = True


class TemplateKeys(Declared):
    """The keys that a chat template is given."""

    neutral = NEUTRAL
    messages: Annotated[Any, "a list of messages"] = None
    tools: Annotated[Any, "a list of tools"] = None
    tool_choice: Annotated[Any, "auto, none, required or a tool"] = None
    chat_template_kwargs: Annotated[Any, "variables of the template"] = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatRequest(TemplateKeys, TextRequest):
    """A request for the next message of a conversation."""

    logprobs: bool = False
    top_logprobs: Top = 0
    parallel_tool_calls: bool = True


class TokenSampling(SamplingKeys):
    """The `sampling_params` of the token route."""

    logprobs: Top = 0
    prompt_logprobs: TopOrFalse = None


class GenerateRequest(Declared):
    """A request for token ids that follow token ids."""

    neutral = NEUTRAL
    model: str | None = None
    token_ids: Annotated[Any, "a list of token ids"] = None
    request_id: str | None = None
    stream: bool = False
    stream_options: Any = None
    sampling_params: TokenSampling = TokenSampling()
    cache_salt: str | None = None


class TokenizeRequest(TemplateKeys):
    """A request for the token ids of a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Declared):
    """A request for the text of token ids."""

    neutral = NEUTRAL
    model: str | None = None
    tokens: Annotated[Any, "a list of token ids"] = None


def sampling_of(
    keys: SamplingKeys, limits: Limits, default_tokens: int, top: int = 0, fewest: int = 1
) -> Sampling:
    """Return the settings of sampling that a request asks for, with `top` likeliest tokens in each
    place. A request without a seed gets a random one. `fewest`: 0 where a request may ask for no
    tokens, for which nothing is sampled. Raises BadRequest."""
    for key in ("max_tokens", "max_completion_tokens"):
        if getattr(keys, key) is not None:
            check_whole(key, getattr(keys, key), fewest, _MOST_TOKENS)
    settings = {key: value for key in _OWN if (value := getattr(keys, key)) is not None}
    if isinstance(keys.temperature, (int, float)) and keys.temperature > _HOTTEST:
        raise BadRequest(f"temperature: expected at most {_HOTTEST:g}", "temperature")
    ids = keys.stop_token_ids
    stop_tokens = () if ids in (None, []) else tuple(token_list(ids, "stop_token_ids"))
    if len(stop_tokens) > limits.stop_characters:
        raise BadRequest(f"stop_token_ids: at most {limits.stop_characters:,}", "stop_token_ids")
    try:
        return Sampling(
            n=keys.n,
            max_new_tokens=max(default_tokens if keys.wanted is None else keys.wanted, 1),
            seed=secrets.randbits(62) if keys.seed in (None, -1) else keys.seed,
            stop=_stop(keys.stop, limits),
            stop_tokens=stop_tokens,
            top_logprobs=top,
            **settings,
        )
    except BadRequest:
        raise
    except IsobitError as error:
        raise BadRequest(str(error), str(error).partition(":")[0]) from None


def _stop(value: Any, limits: Limits) -> tuple[str, ...]:
    stop = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise BadRequest(f"stop: expected a text or a list of texts, got {kind(value)}", "stop")
    if len(stop) > limits.stop_strings or sum(map(len, stop)) > limits.stop_characters:
        raise BadRequest(
            f"stop: expected at most {limits.stop_strings} texts of {limits.stop_characters:,} "
            f"characters together, got {len(stop):,} of {sum(map(len, stop)):,}",
            "stop",
        )
    return tuple(stop)


def token_list(value: Any, key: str) -> list[int]:
    """Return a value that is a list of token ids. Raises BadRequest for another value; ids are
    checked against the vocabulary later."""
    if not isinstance(value, list) or not value or not all(type(item) is int for item in value):
        raise BadRequest(f"{key}: expected a list of token ids, got {kind(value)}", key)
    return value


def salt_of(salt: str | None) -> bytes | None:
    """Return the hash of a request's `cache_salt`, None: it has none. Requests share cached pages
    of prompts only with requests of the same salt; the hash is short. Raises BadRequest for an
    empty one."""
    if salt == "":
        raise BadRequest("cache_salt: expected a string that is not empty", "cache_salt")
    return None if salt is None else hashlib.sha256(salt.encode(errors="surrogatepass")).digest()


def check_length(keys: SamplingKeys, prompts: Sequence[Sequence[int]], positions: int) -> None:
    """Raise BadRequest, in words and with a code by which clients know it, where a prompt fills a
    context of `positions`, or a request names more tokens than there are behind one, as its most or
    its fewest."""
    wanted = keys.wanted or 0
    least = 0 if keys.wanted == 0 else 1
    for length in map(len, prompts):
        if length + least > positions:
            raise too_long(
                f"This model's maximum context length is {positions} tokens, of which an answer needs "
                f"one at least, but the prompt has {length} tokens.",
                "prompt",
            )
        if positions < length + keys.min_tokens:
            raise too_long(
                f"min_tokens: expected at most {positions - length:,}, since this model's maximum "
                f"context length is {positions} tokens and the prompt has {length}, got "
                f"{keys.min_tokens:,}",
                "min_tokens",
            )
        if positions < length + wanted:
            raise too_long(
                f"'max_tokens' or 'max_completion_tokens' is too large: {wanted}. This model's "
                f"maximum context length is {positions} tokens and your request has {length} input "
                f"tokens ({wanted} > {positions} - {length}).",
                "max_tokens",
            )


def too_long(message: str, param: str) -> BadRequest:
    """Return the error of a request that exceeds the model's context."""
    return BadRequest(message, param, code="context_length_exceeded")
