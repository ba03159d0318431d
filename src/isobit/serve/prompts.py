"""What an answer tells of its prompt: OpenAI's `echo`, its text and tokens in front of the answer's;
vLLM's `prompt_logprobs`, how likely each of its tokens was, and which were likelier.

Left out: `echo` of messages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from isobit.model.text.tokenizer import Tokenizer
from isobit.serve.scoring import Scores
from isobit.serve.words import prompt_words, text_sizes, token_words

KEY = "prompt_logprobs"


@dataclass(frozen=True)
class Front:
    """The record of a prompt in the answer: the `text` and the `logprobs` in front of those of its
    answers, None: none; and further values of the answer, by key."""

    text: str = ""
    logprobs: Mapping[str, Any] | None = None
    beside: dict[str, Any] = field(default_factory=dict)

    def before(self, logprobs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the log-probabilities of an answer, with these in front."""
        if self.logprobs is None:
            return dict(logprobs)
        return {
            key: None if values is None else values + (logprobs[key] or [])
            for key, values in self.logprobs.items()
        }


def echoed(
    tokenizer: Tokenizer, tokens: Sequence[int], scores: Scores, count: int, by_id: bool, own: bool
) -> dict[str, Any]:
    """Return a prompt's part of the log-probabilities of a completion, with the `count` likeliest
    tokens in each place, or the prompt's `own` there."""
    words = prompt_words(tokenizer, tokens, by_id)
    texts = prompt_words(tokenizer, tokens, False) if by_id else words
    sizes = text_sizes(tokenizer, tokens, texts)
    tops: list[Any] | None = None
    if count:
        tops = [
            {token_words(tokenizer, previous, [token], by_id)[0]: value for token, value in top}
            for previous, top in zip((0, *tokens), _tops(scores, count))
        ]
        tops[0] = None
    elif own:
        tops = [None, *({word: value} for word, value in zip(words[1:], scores.logprobs[1:]))]
    return {
        "tokens": words,
        "token_logprobs": [None, *scores.logprobs[1:]],
        "top_logprobs": tops,
        "text_offset": list(accumulate(sizes[:-1], initial=0)),
    }


def likely(tokenizer: Tokenizer, tokens: Sequence[int], scores: Scores, count: int) -> list[Any]:
    """Return vLLM's list: by token id the `count` likeliest tokens in each place and the prompt's
    own, whose rank is only known where it is among them."""
    tops: list[list[tuple[int, float]]] = [[] for _ in tokens]
    if count:
        tops = _tops(scores, count)
    entries: list[Any] = [None]
    for index in range(1, len(tokens)):
        previous, token_id = tokens[index - 1], tokens[index]
        ranked = {token: (value, rank) for rank, (token, value) in enumerate(tops[index], 1)}
        ranked.setdefault(token_id, (scores.logprobs[index], None))  # type: ignore[arg-type]
        entries.append(
            {
                str(token): {
                    "logprob": value,
                    "rank": rank,
                    "decoded_token": token_words(tokenizer, previous, [token], False)[0],
                }
                for token, (value, rank) in ranked.items()
            }
        )
    return entries


def _tops(scores: Scores, count: int) -> list[list[tuple[int, float]]]:
    """Return the `count` likeliest tokens in the place of each of a prompt's."""
    assert scores.tops is not None
    return [list(top)[:count] for top in scores.tops]
