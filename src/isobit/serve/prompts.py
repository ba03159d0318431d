"""What a completion tells of its prompt: OpenAI's `echo`, its text and tokens in front of the
answer's; vLLM's `prompt_logprobs`, how likely each of its tokens was, and which were likelier.

Left out: both in streams, and of messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from isobit.engine.types import MOST_TOP_LOGPROBS, Completion
from isobit.serve.answers import Asked, token_words
from isobit.serve.requests import Fields
from isobit.serve.scoring import Scores

_KEY = "prompt_logprobs"


@dataclass(frozen=True)
class Told:
    """What is asked of prompts. `echo`: their text and tokens; `likeliest`: so many tokens beside
    each of theirs, None: no log-probabilities of their own."""

    echo: bool
    likeliest: int | None

    @staticmethod
    def of(fields: Fields) -> "Told | None":
        """Of a request; None: nothing. Raises BadRequest."""
        echo, likeliest = fields.flag("echo"), None
        if fields.take(_KEY, False) is not False:
            likeliest = fields.whole(_KEY, 0, 0, MOST_TOP_LOGPROBS)
        return Told(echo, likeliest) if echo or likeliest is not None else None

    def top(self, asked: Asked) -> int | None:
        """How many of the likeliest tokens are needed in each place; None: no scores are."""
        found = [] if self.likeliest is None else [self.likeliest]
        if self.echo and asked.logprobs:
            found.append(asked.sampling.top_logprobs)
        return max(found, default=None)

    def choice(
        self, asked: Asked, prompt: int, text: str | None, scores: Scores | None, answer: Completion
    ) -> dict[str, Any]:
        """A complete answer to a prompt, whose `text` the client gave, None: its tokens."""
        found = asked.choice(prompt, answer)
        tokens = asked.prompts[prompt]
        if self.echo:
            shown = asked.tokenizer.decode(tokens) if text is None else text
            found["text"] = shown + found["text"]
            if scores is not None and found["logprobs"] is not None:
                before = _echoed(asked, tokens, scores)
                after = found["logprobs"]
                after["text_offset"] = [len(shown) + place for place in after["text_offset"]]
                found["logprobs"] = {
                    key: None if before[key] is None else before[key] + (after[key] or [])
                    for key in before
                }
        if self.likeliest is not None:
            assert scores is not None
            found[_KEY] = _likely(asked, tokens, scores, self.likeliest)
        return found


def nothing(asked: Asked, prompt: int, sample: int, version: int) -> Completion:
    """The answer of a request for no tokens."""
    ids = list(asked.prompts[prompt])
    return Completion(prompt, sample, ids, [], "", [], "length", version)


def _words(asked: Asked, tokens: Sequence[int], by_id: bool) -> list[str]:
    """How a prompt's tokens are called."""
    first = f"token_id:{tokens[0]}" if by_id else asked.tokenizer.decode(tokens[:1], special=True)
    return [first, *token_words(asked.tokenizer, tokens[0], tokens[1:], by_id)]


def _tops(asked: Asked, scores: Scores, count: int) -> list[list[tuple[int, float]]]:
    """The `count` likeliest tokens in the place of each of a prompt's."""
    assert scores.tops is not None
    return [list(top)[:count] for top in scores.tops]


def _echoed(asked: Asked, tokens: Sequence[int], scores: Scores) -> dict[str, Any]:
    """A prompt's part of the log-probabilities of a completion. A special token has no text."""
    texts = _words(asked, tokens, False)
    sizes = [
        0 if asked.tokenizer.is_special(token) else len(text) for token, text in zip(tokens, texts)
    ]
    tops: list[Any] | None = None
    if count := asked.sampling.top_logprobs:
        tops = [
            {_words(asked, [before, token], asked.tokens_by_id)[1]: value for token, value in top}
            for before, top in zip((0, *tokens), _tops(asked, scores, count))
        ]
        tops[0] = None
    return {
        "tokens": _words(asked, tokens, asked.tokens_by_id),
        "token_logprobs": [None, *scores.logprobs[1:]],
        "top_logprobs": tops,
        "text_offset": list(accumulate(sizes[:-1], initial=0)),
    }


def _likely(asked: Asked, tokens: Sequence[int], scores: Scores, count: int) -> list[Any]:
    """vLLM's list: by token id the likeliest tokens in each place and the prompt's own, whose rank
    is only known where it is among them."""
    tops: list[list[tuple[int, float]]] = [[] for _ in tokens]
    if count:
        tops = _tops(asked, scores, count)
    found: list[Any] = [None]
    for place in range(1, len(tokens)):
        before, own = tokens[place - 1], tokens[place]
        ranked = {token: (value, rank) for rank, (token, value) in enumerate(tops[place], 1)}
        ranked.setdefault(own, (scores.logprobs[place], None))  # type: ignore[arg-type]
        found.append(
            {
                str(token): {
                    "logprob": value,
                    "rank": rank,
                    "decoded_token": _words(asked, [before, token], False)[1],
                }
                for token, (value, rank) in ranked.items()
            }
        )
    return found
