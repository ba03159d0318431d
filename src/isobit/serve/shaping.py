"""The keys of a request that move or forbid single tokens, as the engine takes them
(`engine/shaping.py`)."""

from collections.abc import Sequence
from typing import Any

from isobit.engine.shaping import Grammar, Shaping
from isobit.model.text.tokenizer import Tokenizer
from isobit.serve.protocol import SamplingKeys, token_list
from isobit.serve.requests import BadRequest, kind

_PENALTY, _BIAS = 2.0, 100.0
"""The largest magnitudes, as OpenAI has them."""
MOST_BIASES, MOST_BAD_WORDS, MOST_BAD_CHARACTERS = 1024, 256, 8192
_NOTHING = Shaping()


def shaping_of(
    keys: SamplingKeys,
    tokenizer: Tokenizer,
    vocabulary: int,
    most: int,
    grammar: Grammar | None = None,
) -> Shaping | None:
    """Return what moves and forbids the tokens of a request's answers, which have at most `most`,
    None: nothing. Raises BadRequest."""
    late = keys.min_tokens > 0
    most = most if keys.wanted is None else keys.wanted
    if late and keys.stop not in (None, [], ""):
        raise BadRequest("min_tokens: not offered beside stop strings", "min_tokens")
    if late and keys.min_tokens > most:
        limit = "max_tokens" if keys.max_completion_tokens is None else "max_completion_tokens"
        default = "by default " if keys.wanted is None else ""
        raise BadRequest(
            f"min_tokens: expected at most {limit}, {default}{most:,}, got {keys.min_tokens:,}",
            "min_tokens",
        )
    stops = [token for token in keys.stop_token_ids or () if token < vocabulary]
    eos = [] if keys.ignore_eos else [token for token in tokenizer.eos_ids if token < vocabulary]
    shaping = Shaping(
        presence_penalty=_penalty("presence_penalty", keys.presence_penalty),
        frequency_penalty=_penalty("frequency_penalty", keys.frequency_penalty),
        bias=_bias(keys.logit_bias, vocabulary),
        allowed=_allowed(keys.allowed_token_ids, vocabulary),
        banned=_banned(keys.bad_words, tokenizer),
        min_tokens=keys.min_tokens,
        ends=(*eos, *stops) if late else (),
        grammar=grammar,
    )
    return None if shaping == _NOTHING else shaping


def _penalty(key: str, value: Any) -> float:
    return 0.0 if value is None else _number(key, value, _PENALTY)


def _number(key: str, value: Any, most: float) -> float:
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= most
    if not fits:
        raise BadRequest(
            f"{key}: expected a number from {-most:g} to {most:g}, got {kind(value)}",
            key.partition("[")[0],
        )
    return float(value)


def _bias(value: Any, vocabulary: int) -> tuple[tuple[int, float], ...]:
    key = "logit_bias"
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > MOST_BIASES:
        raise BadRequest(
            f"{key}: expected an object of at most {MOST_BIASES:,} numbers, got {kind(value)}", key
        )
    numbers = {
        token: _number(f"{key}[{token[:20]}]", number, _BIAS) for token, number in value.items()
    }
    for token in numbers:
        if not token.isascii() or not token.isdigit() or len(token) > 10:
            raise BadRequest(f"{key}: expected token ids as keys, got {token!r:.40}", key)
    ids = [int(token) for token in numbers]
    _check_known(key, ids, vocabulary)
    return tuple(dict(zip(ids, numbers.values())).items())


def _allowed(value: Any, vocabulary: int) -> tuple[int, ...] | None:
    if value is None or value == []:
        return None
    ids = token_list(value, "allowed_token_ids")
    _check_known("allowed_token_ids", ids, vocabulary)
    return tuple(sorted(set(ids)))


def _banned(value: Any, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of words, at the beginning of a text and behind a space, as vLLM has
    them."""
    words = [] if value is None else value
    fits = isinstance(words, list) and all(isinstance(word, str) and word.strip() for word in words)
    if not fits or len(words) > MOST_BAD_WORDS or sum(map(len, words)) > MOST_BAD_CHARACTERS:
        raise BadRequest(
            f"bad_words: expected a list of at most {MOST_BAD_WORDS} texts of "
            f"{MOST_BAD_CHARACTERS:,} characters together, got {kind(value)}",
            "bad_words",
        )
    banned = list[tuple[int, ...]]()
    for word in words:
        plain, spaced = (
            tuple(tokenizer.encode_text(space + word.lstrip(), False)) for space in ("", " ")
        )
        two = spaced[:1] != plain[:1] and len(spaced) == len(plain)
        banned += [tokens for tokens in (plain, *([spaced] if two else [])) if tokens]
    return tuple(banned)


def _check_known(key: str, tokens: Sequence[int], vocabulary: int) -> None:
    """Raise BadRequest for a token that the model does not have."""
    unknown = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if unknown is not None:
        raise BadRequest(f"{key}: token {unknown} is not in the vocabulary of {vocabulary:,}", key)
