"""The requests of clients: JSON objects, read key by key within limits.

A key that no route reads is refused, with the nearest one that is known: a misspelt option must not
vanish. An error is one line (`BadRequest`), which names the client's keys.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from isobit.data.foreign import BadJson, parse_json
from isobit.engine.types import Sampling
from isobit.errors import IsobitError, brief, did_you_mean
from isobit.options.declare import at_least

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "return_token_offsets": (False,),
    "return_weight_versions": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "use_beam_search": (False,),
}
"""Keys of the protocol that are taken with values that ask for nothing, and these values."""
IGNORED = frozenset(
    (
        "metadata",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    )
)
"""Keys that change no answer here."""

_HOTTEST = 100.0  # an infinite temperature makes logits that are not numbers


@dataclass(frozen=True)
class Limits:
    """Limits on the requests of one client, and of all clients together."""

    body_bytes: Annotated[int, at_least(1024)] = 8 << 20
    body_seconds: Annotated[float, at_least(0.1)] = 30.0  # and for the lines in front of it
    reader_seconds: Annotated[float, at_least(0.1)] = 60.0  # that an answer waits for its reader
    connections: Annotated[int, at_least(1)] = 2048
    held_bytes: Annotated[int, at_least(1024)] = 512 << 20  # of a tenant's bodies, all together
    open_samples: Annotated[int, at_least(1)] = 1024  # of a tenant
    samples: Annotated[int, at_least(1)] = 256  # of one request: prompts times n
    stop_strings: Annotated[int, at_least(1)] = 16
    stop_characters: Annotated[int, at_least(1)] = 1024  # of all stop strings of a request
    runs: Annotated[int, at_least(1)] = 16  # of a tenant, that train at the same time
    adapter_bytes: Annotated[int, at_least(1)] = 32 << 30  # of all that trains; shared equally
    snapshot_bytes: Annotated[int, at_least(1)] = (
        32 << 30
    )  # of what is sampled from; shared equally
    run_requests: Annotated[int, at_least(1)] = 1024  # that wait for their turn in a run
    waiting_bytes: Annotated[int, at_least(1)] = (
        256 << 20
    )  # of a tenant's bodies that wait, unpacked
    all_waiting_bytes: Annotated[int, at_least(1)] = 1 << 30  # of those of all tenants together


class BadRequest(IsobitError):
    """An error of a request that cannot be done: the `status` of HTTP, as `param` the key that is
    wrong, and a `code` by which clients tell errors apart."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


class Fields:
    """A JSON object of a client. A key with the value null counts as absent."""

    def __init__(self, values: Any, where: str = "the body") -> None:
        if not isinstance(values, dict):
            raise BadRequest(f"{where}: expected a JSON object, got {_kind(values)}")
        self._values, self._where = {k: v for k, v in values.items() if v is not None}, where
        self._nulls = values.keys() - self._values.keys()
        self._read = set[str]()

    @staticmethod
    def parse(body: bytes) -> "Fields":
        """Parse a request's body. Raises BadRequest for bytes that are not a JSON object."""
        try:
            return Fields(parse_json(body.decode("utf-8"), patient=True, finite=True))
        except UnicodeDecodeError:
            raise BadRequest("the body is not UTF-8 text") from None
        except BadJson as error:
            place = "" if error.line is None else f", line {error.line} column {error.column}"
            raise BadRequest(f"the body is not JSON{place}: {error.reason}") from None

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, of any kind, or the default; the key counts as read."""
        self._read.add(key)
        return self._values.get(key, default)

    def check_numbers(self, *keys: str) -> None:
        """Raise BadRequest for a null under one of these keys: a client has written NaN or
        infinity, for which JSON has no word, and to take the default would be another request."""
        for key in keys:
            if key in self._nulls:
                raise BadRequest(f"{key}: expected a number, got null, which NaN becomes", key)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return the value of a key, true or false. Raises BadRequest for another kind of value."""
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise BadRequest(f"{key}: expected true or false, got {_kind(value)}", key)
        return value

    def whole(self, key: str, default: int, lowest: int, highest: int) -> int:
        """Return the value of a key, a whole number within bounds, both included. Raises BadRequest
        for another value."""
        value = self.take(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
            raise BadRequest(
                f"{key}: expected a whole number from {lowest} to {highest:,}, got {_kind(value)}",
                key,
            )
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        """Return the value of a key, a string, or the default. Raises BadRequest for another kind
        of value."""
        value = self.take(key, default)
        if value is not None and not isinstance(value, str):
            raise BadRequest(f"{key}: expected a string, got {_kind(value)}", key)
        return value

    def inner(self, key: str) -> "Fields":
        """Return the object under a key; an empty one where the key is absent. Raises BadRequest
        for another kind of value."""
        return Fields(self.take(key, {}), key)

    def all(self) -> dict[str, Any]:
        """Return all values, by keys that the client chose; all keys count as read."""
        self._read |= self._values.keys()
        return self._values

    def finish(self) -> None:
        """Raise BadRequest for a key that was not read, unless its value asks for nothing."""
        for key in self._values.keys() - self._read - IGNORED:
            if key not in NEUTRAL:
                known = sorted(self._read | NEUTRAL.keys() | IGNORED)
                raise BadRequest(
                    f"{self._where}: unknown key {brief(key)!r}; {did_you_mean(key, known)}", key
                )
            if not any(_same(self._values[key], value) for value in NEUTRAL[key]):
                raise BadRequest(
                    f"{key}: only {NEUTRAL[key][0]!r} is offered, got {_kind(self._values[key])}",
                    key,
                )


def salt_of(fields: Fields) -> bytes | None:
    """Return the hash of a request's `cache_salt`, None: it has none. Requests share cached pages
    of prompts only with requests of the same salt; the hash is short. Raises BadRequest for an
    empty one."""
    salt = fields.text("cache_salt")
    if salt == "":
        raise BadRequest("cache_salt: expected a string that is not empty", "cache_salt")
    return None if salt is None else hashlib.sha256(salt.encode(errors="surrogatepass")).digest()


def check_length(fields: Fields, prompts: Sequence[Sequence[int]], positions: int) -> None:
    """Raise BadRequest, in words and with a code by which clients know it, where a prompt fills a
    context of `positions`, or a request names more tokens than there are behind one."""
    wanted = fields.take("max_completion_tokens", fields.take("max_tokens"))
    least, wanted = (0 if wanted == 0 else 1), wanted or 0
    for length in map(len, prompts):
        if length + least > positions:
            raise too_long(
                f"This model's maximum context length is {positions} tokens, of which an answer needs "
                f"one at least, but the prompt has {length} tokens.",
                "prompt",
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


def token_list(value: Any, key: str) -> list[int]:
    """Return a value that is a list of token ids. Raises BadRequest for another value; ids are
    checked against the vocabulary later."""
    if not isinstance(value, list) or not value or not all(type(item) is int for item in value):
        raise BadRequest(f"{key}: expected a list of token ids, got {_kind(value)}", key)
    return value


def sampling_of(
    fields: Fields, limits: Limits, default_tokens: int, fewest_tokens: int = 1
) -> Sampling:
    """Return how to sample, by OpenAI's and vLLM's keys. A request without a seed gets a random
    one. `fewest_tokens`: 0 where a request may ask for no tokens, for which nothing is sampled.
    Raises BadRequest."""
    n = fields.whole("n", 1, 1, limits.samples)
    longest = fields.whole("max_tokens", default_tokens, fewest_tokens, 2**31 - 1)
    longest = fields.whole("max_completion_tokens", longest, fewest_tokens, 2**31 - 1)
    seed = fields.take("seed")
    keys = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos")
    given = {key: value for key in keys if (value := fields.take(key)) is not None}
    if isinstance(given.get("temperature"), (int, float)) and given["temperature"] > _HOTTEST:
        raise BadRequest(f"temperature: expected at most {_HOTTEST:g}", "temperature")
    if given.get("top_k") == -1:  # vLLM's word for off
        given["top_k"] = 0
    stop, ids = _stop(fields, limits), fields.take("stop_token_ids", [])
    stop_tokens = tuple(token_list(ids, "stop_token_ids")) if ids != [] else ()
    if len(stop_tokens) > limits.stop_characters:
        raise BadRequest(f"stop_token_ids: at most {limits.stop_characters:,}", "stop_token_ids")
    seed = secrets.randbits(62) if seed is None else fields.whole("seed", 0, 0, 2**63 - 1)
    try:
        return Sampling(
            n=n,
            max_new_tokens=max(longest, 1),
            seed=seed,
            stop=stop,
            stop_tokens=stop_tokens,
            **given,
        )
    except BadRequest:
        raise
    except IsobitError as error:
        raise BadRequest(str(error), str(error).partition(":")[0]) from None


def _stop(fields: Fields, limits: Limits) -> tuple[str, ...]:
    value = fields.take("stop", [])
    stop = [value] if isinstance(value, str) else value
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise BadRequest(f"stop: expected a text or a list of texts, got {_kind(value)}", "stop")
    if len(stop) > limits.stop_strings or sum(map(len, stop)) > limits.stop_characters:
        raise BadRequest(
            f"stop: expected at most {limits.stop_strings} texts of {limits.stop_characters:,} "
            f"characters together, got {len(stop):,} of {sum(map(len, stop)):,}",
            "stop",
        )
    return tuple(stop)


def _same(value: Any, other: Any) -> bool:
    """Tell whether two values are the same in JSON, where 0 is not false."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _kind(value: Any) -> str:
    """Return the words by which an error names a value."""
    if isinstance(value, dict):
        return "an object"
    return f"a list of {len(value):,}" if isinstance(value, list) else brief(repr(value), 80)
