"""Answers in OpenAI's words: choices, log-probabilities, usage, and the pieces of a stream."""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isobit.engine.types import Completion, Sampling
from isobit.model.text.tokenizer import Tokenizer
from isobit.serve.chat import ToolFormat, as_openai
from isobit.serve.streams import TextStream


@dataclass(frozen=True, eq=False)
class Asked:
    """A request that is being answered. `chat`: messages, and not a text; `tools`: how calls of
    tools are read, where tools were given."""

    model: str
    tokenizer: Tokenizer
    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    chat: bool = False
    logprobs: bool = False
    token_ids: bool = False
    tokens_by_id: bool = False
    tools: ToolFormat | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str, version: int) -> dict[str, Any]:
        """What every response begins with. The same `seed` and weights give the same answer."""
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "weights_version": version,
            "seed": self.sampling.seed,
        }

    def index(self, prompt: int, sample: int) -> int:
        """Of a choice."""
        return prompt * self.sampling.n + sample

    def usage(self, sampled: int) -> dict[str, int]:
        """Tokens of all prompts, and of all answers."""
        prompt = sum(map(len, self.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }

    def choice(self, prompt: int, completion: Completion) -> dict[str, Any]:
        """A complete answer."""
        found: dict[str, Any] = {"index": self.index(prompt, completion.sample_index)}
        reason, message = self.message(completion)
        found |= {"message": message} if self.chat else {"text": completion.text}
        found["logprobs"] = None
        if self.logprobs:
            before = self.prompts[prompt][-1]
            found["logprobs"] = self.shown(before, completion.token_ids, completion.logprobs, 0)
        found["finish_reason"] = reason
        if self.token_ids:
            found["token_ids"] = completion.token_ids
            if not self.chat:
                found["prompt_token_ids"] = list(self.prompts[prompt])
        return found

    def message(self, completion: Completion) -> tuple[str, dict[str, Any]]:
        """(finish reason, the answer as a message), with the calls of tools that it makes."""
        read = None
        if self.tools is not None and any(mark in completion.text for mark in self.tools.marks):
            read = self.tools.read(completion.text)
        if read is None:
            return completion.finish_reason, {"role": "assistant", "content": completion.text}
        text, calls = read
        return "tool_calls", {
            "role": "assistant",
            "content": text or None,
            "tool_calls": as_openai(calls),
        }

    def shown(
        self, before: int, tokens: Sequence[int], logprobs: Sequence[float], start: int
    ) -> Any:
        """Log-probabilities of tokens that follow the token `before`, at character `start` of an
        answer."""
        words = token_words(self.tokenizer, before, tokens, self.tokens_by_id)
        if self.chat:
            return chat_logprobs(words, logprobs)
        offsets = [start + sum(map(len, words[:place])) for place in range(len(words))]
        return {
            "tokens": words,
            "token_logprobs": list(logprobs),
            "top_logprobs": None,
            "text_offset": offsets,
        }


def chat_logprobs(words: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    """Log-probabilities of the sampled tokens as chat answers have them."""
    return {
        "content": [
            {"token": word, "logprob": logprob, "bytes": list(word.encode()), "top_logprobs": []}
            for word, logprob in zip(words, logprobs)
        ]
    }


def token_words(tokenizer: Tokenizer, before: int, tokens: Sequence[int], by_id: bool) -> list[str]:
    """How tokens are called: by the text that each adds to the one in front of it, or
    `token_id:5`."""
    if by_id:
        return [f"token_id:{token}" for token in tokens]
    pairs = zip((before, *tokens), tokens)
    return [tokenizer.decode_completion([last], [token], special=True) for last, token in pairs]


class ChoiceStream:
    """The pieces of one choice. Joined, they are the `choice` of the answer that is not
    streamed."""

    def __init__(self, asked: Asked, prompt: int, sample: int) -> None:
        self._asked, self._index = asked, asked.index(prompt, sample)
        marks = () if asked.tools is None else asked.tools.marks
        sampling = asked.sampling
        ends = (*sampling.stop_tokens, *(() if sampling.ignore_eos else asked.tokenizer.eos_ids))
        self._text = TextStream(asked.tokenizer, asked.prompts[prompt], sampling.stop, marks, ends)
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._certain = ""  # text that is in no piece yet
        self._offset = 0
        self._before = asked.prompts[prompt][-1]

    def begin(self, prompt: Sequence[int]) -> dict[str, Any] | None:
        """The first piece."""
        if self._asked.chat:
            return self._piece({"role": "assistant", "content": ""})
        return (
            {**self._piece(""), "prompt_token_ids": list(prompt)} if self._asked.token_ids else None
        )

    def feed(self, token: int, logprob: float) -> None:
        """One more token was sampled."""
        self._tokens.append(token)
        self._logprobs.append(logprob)
        self._certain += self._text.feed(token)

    def take(self) -> dict[str, Any] | None:
        """What the tokens since the last piece bring; None: nothing yet."""
        shows_tokens = self._asked.logprobs or self._asked.token_ids
        if not self._certain and not (shows_tokens and self._tokens):
            return None
        text, self._certain = self._certain, ""
        return self._piece({"content": text} if self._asked.chat else text)

    def end(self, completion: Completion) -> dict[str, Any]:
        """The last piece: what was held back, and why the answer ends."""
        reason, message = self._asked.message(completion)
        calls = message.get("tool_calls")
        whole = (message["content"] or "") if calls else completion.text
        rest = self._certain + self._text.rest(whole)
        if not self._asked.chat:
            return self._piece(rest, reason)
        delta: dict[str, Any] = {"content": rest} if rest else {}
        if calls:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
        return self._piece(delta, reason)

    def _piece(self, delta: Any, reason: str | None = None) -> dict[str, Any]:
        asked = self._asked
        found: dict[str, Any] = {"index": self._index, ("delta" if asked.chat else "text"): delta}
        found["logprobs"] = None
        if asked.logprobs and self._tokens:
            found["logprobs"] = asked.shown(
                self._before, self._tokens, self._logprobs, self._offset
            )
            self._before = self._tokens[-1]
            if not asked.chat:
                self._offset += sum(map(len, found["logprobs"]["tokens"]))
        found["finish_reason"] = reason
        if asked.token_ids:
            found["token_ids"] = self._tokens
        self._tokens, self._logprobs = [], []
        return found


def event(value: Mapping[str, Any] | str) -> bytes:
    """A server-sent event."""
    text = (
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
    )
    return f"data: {text}\n\n".encode()
