"""Answers in OpenAI's words: choices, log-probabilities, usage, and the pieces of a stream."""

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, repeat
from typing import Any

from isobit.engine.types import Completion, Sampling, Top
from isobit.model.text.tokenizer import Tokenizer
from isobit.model.text.tool_formats.base import Reply, ToolFormat, Tools
from isobit.serve.channels import ChannelStream
from isobit.serve.chat import as_openai
from isobit.serve.prompts import KEY, Front, echoed, likely
from isobit.serve.protocol import TextRequest
from isobit.serve.scoring import Scores, Scoring
from isobit.serve.streams import TextStream
from isobit.serve.thinking import CONTENT, REASONING, Certain, ThoughtStream
from isobit.serve.words import text_sizes, token_bytes, token_words

_Shown = tuple[int, str, float]  # a token, its text or name, its log-probability


@dataclass(frozen=True, eq=False)
class Asked:
    """A request that is being answered, by an `adapter`. `chat`: messages, and not a text; `form`:
    how the model writes messages and calls; `tools`: the tools of the request, whose calls are read,
    or `one_call` alone; `own_top`: each sampled token stands alone in the place of the likeliest;
    `keys`: what the answer tells, and how; `texts`: of the prompts, None for one that was given as
    tokens; `sampled`: False where the answer tells of the prompts alone."""

    model: str
    tokenizer: Tokenizer
    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    chat: bool = False
    logprobs: bool = False
    own_top: bool = False
    keys: TextRequest = field(default_factory=TextRequest)
    form: ToolFormat | None = None
    tools: Tools = ()
    one_call: bool = False
    texts: Sequence[str | None] = ()
    sampled: bool = True
    adapter: str | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str, version: int) -> dict[str, Any]:
        """Return the fields with which every response begins. The same `seed` and weights give the
        same answer."""
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "weights_version": version,
            "seed": self.sampling.seed,
        }

    @property
    def _tops(self) -> int | None:
        """The number of likeliest tokens that answers tell; None: no log-probabilities at all."""
        return self.sampling.top_logprobs if self.logprobs else None

    def scorings(self) -> list[Scoring | None]:
        """Return the scores to compute of each prompt itself; None: none."""
        counts = [self.keys.prompt_logprobs, self._tops if self.keys.echo else None]
        top = max((count for count in counts if count is not None), default=None)
        if top is None:
            return [None if self.sampled else Scoring(0, 0)] * len(self.prompts)
        return [Scoring(len(prompt), top) for prompt in self.prompts]

    def front(self, prompt: int, scores: Scores | None) -> Front:
        """Return what the answer tells of a prompt by its `scores`, None: none were asked for. Slow
        where it tells of many tokens."""
        tokens, keys = self.prompts[prompt], self.keys
        text, logprobs, beside = "", None, dict[str, Any]()
        if keys.echo:
            text_given = self.texts[prompt]
            text = self.tokenizer.decode(tokens) if text_given is None else text_given
            if self._tops is not None:
                assert scores is not None
                by_id = keys.return_tokens_as_token_ids
                logprobs = echoed(self.tokenizer, tokens, scores, self._tops, by_id, self.own_top)
        if self.keys.return_token_ids:
            beside["prompt_token_ids"] = list(tokens)
        if keys.prompt_logprobs is not None:
            assert scores is not None
            beside[KEY] = likely(self.tokenizer, tokens, scores, keys.prompt_logprobs)
        return Front(text, logprobs, beside)

    def nothing(self, prompt: int, version: int) -> list[Completion]:
        """Return the answers to a prompt where none are sampled: `n` without tokens."""
        ids = list(self.prompts[prompt])
        samples = range(self.sampling.n)
        return [Completion(prompt, i, ids, [], "", [], "length", version) for i in samples]

    def size(self, before: int, token: int) -> int:
        """Return the number of characters that begin in a token that follows another one."""
        words = token_words(self.tokenizer, before, [token], False)
        return text_sizes(self.tokenizer, [token], words)[0]

    def index(self, prompt: int, sample: int) -> int:
        """Return the index of a choice, by its prompt and sample."""
        return prompt * self.sampling.n + sample

    def usage(self, sampled: int, cached: int | None) -> dict[str, Any]:
        """Return the usage: tokens of all prompts, tokens of these that were found in the cache,
        None: not known yet, and tokens of all answers."""
        prompt = sum(map(len, self.prompts))
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }
        details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
        return {**usage, **details}

    def choice(self, prompt: int, completion: Completion, front: Front) -> dict[str, Any]:
        """Return the choice of a complete answer."""
        entry: dict[str, Any] = {"index": self.index(prompt, completion.sample_index)}
        reason, message = self.message(completion)
        entry |= {"message": message} if self.chat else {"text": front.text + completion.text}
        entry["logprobs"] = None
        if self.logprobs:
            last_token = self.prompts[prompt][-1]
            drawn = completion.token_ids, completion.logprobs, completion.top_logprobs or ()
            entry["logprobs"] = front.before(self.shown(last_token, *drawn, len(front.text)))
        entry["finish_reason"] = reason
        if self.keys.return_token_ids:
            entry["token_ids"] = completion.token_ids
        return entry if self.chat else entry | front.beside

    def message(self, completion: Completion) -> tuple[str, dict[str, Any]]:
        """Return (finish reason, the answer as a message), with its thoughts, and the calls of
        tools that it makes."""
        reply = self._reply(completion)
        message = {"role": "assistant", "content": reply.content}
        if reply.reasoning:
            message[REASONING] = reply.reasoning
        if not reply.calls:
            return completion.finish_reason, message
        calls_made = reply.calls[:1] if self.one_call else reply.calls
        calls = {"content": reply.content or None, "tool_calls": as_openai(calls_made)}
        return "tool_calls", message | calls

    def _reply(self, completion: Completion) -> Reply:
        form = self.form
        if form is None:
            return Reply(completion.text)
        reply = form.of(completion, self.tokenizer, self.tools)
        if not form.channels:
            is_tool_reply = self.tools and not reply.problems
            return reply if is_tool_reply else Reply(reply.said, reasoning=reply.reasoning)
        if not self.tools and reply.calls:  # of no tool that the client has
            texts = [reply.content, *(call.arguments for call in reply.calls)]
            return replace(reply, content="".join(texts), calls=())
        return reply

    def shown(
        self,
        before: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[Top],
        start: int,
    ) -> Any:
        """Return the log-probabilities of tokens that follow the token `before`, at character
        `start` of an answer, with the likeliest tokens in their places if these were asked for."""
        by_id, tokenizer = self.keys.return_tokens_as_token_ids, self.tokenizer
        words = token_words(tokenizer, before, tokens, by_id)
        tops = tops if self.sampling.top_logprobs else ()
        likeliest = [
            [
                (token, token_words(tokenizer, last, [token], by_id)[0], value)
                for token, value in top
            ]
            for last, top in zip((before, *tokens), tops)
        ]
        if self.own_top:
            likeliest = [[entry] for entry in zip(tokens, words, logprobs)]
        if self.chat:
            return self._chat_logprobs(zip(tokens, words, logprobs), likeliest)
        texts = token_words(tokenizer, before, tokens, False) if by_id else words
        sizes = text_sizes(tokenizer, tokens, texts)
        by_word = [{word: value for _, word, value in reversed(top)} for top in likeliest]
        return {
            "tokens": words,
            "token_logprobs": list(logprobs),
            "top_logprobs": by_word or None,  # of several tokens with one text the first
            "text_offset": list(accumulate(sizes, initial=start))[:-1],
        }

    def _chat_logprobs(
        self, drawn: Iterable[_Shown], likeliest: list[list[_Shown]]
    ) -> dict[str, Any]:
        """Return the log-probabilities of sampled tokens in the form of chat answers, with the
        `likeliest` tokens in their places. A token that is named by its id has no bytes."""

        def one(token: int, word: str, logprob: float) -> dict[str, Any]:
            known = (
                None
                if self.keys.return_tokens_as_token_ids
                else token_bytes(self.tokenizer, token, word)
            )
            return {
                "token": word,
                "logprob": logprob,
                "bytes": None if known is None else list(known),
            }

        tops = chain(likeliest, repeat([]))
        return {
            "content": [
                {**one(*sampled), "top_logprobs": [one(*entry) for entry in top]}
                for sampled, top in zip(drawn, tops)
            ]
        }


class ChoiceStream:
    """The pieces of one choice. Joined, they are the `choice` of the answer that is not
    streamed."""

    def __init__(self, asked: Asked, prompt: int, sample: int, front: Front) -> None:
        self._front = front
        self._asked, self._index = asked, asked.index(prompt, sample)
        self._text = _text_of(asked, prompt)
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._tops: list[Top] = []
        self._certain: dict[str, str] = {}  # text that is in no piece yet, by its kind
        self._told: dict[str, int] = {}  # characters of each kind that were certain
        self._offset = len(front.text)
        self._before = asked.prompts[prompt][-1]

    def begin(self) -> dict[str, Any] | None:
        """Return the first piece, which tells of the prompt; None: there is nothing to tell."""
        front = self._front
        if self._asked.chat:
            return self._piece({"role": "assistant", "content": ""})
        if front == Front():
            return None
        return {**self._piece(front.text), "logprobs": front.logprobs, **front.beside}

    def feed(self, token: int, logprob: float, top: Top) -> None:
        """Add a token that was sampled."""
        self._tokens.append(token)
        self._logprobs.append(logprob)
        self._tops.append(top)
        for kind, text in self._text(token):
            self._add(kind, text)

    def take(self) -> dict[str, Any] | None:
        """Return the piece of the tokens since the last piece; None: there is nothing to send
        yet."""
        shows_tokens = self._asked.logprobs or self._asked.keys.return_token_ids
        if not self._certain and not (shows_tokens and self._tokens):
            return None
        delta, self._certain = self._certain, {}
        if self._asked.chat:
            return self._piece(delta or {"content": ""})
        return self._piece(delta.get("content", ""))

    def end(self, completion: Completion) -> dict[str, Any]:
        """Return the last piece: text that was held back, and why the answer ends."""
        reason, message = self._asked.message(completion)
        for kind in (REASONING, CONTENT):
            if rest := (message.get(kind) or "")[self._told.get(kind, 0) :]:
                self._add(kind, rest)
        if not self._asked.chat:
            return self._piece(self._certain.get("content", ""), reason)
        delta: dict[str, Any] = dict(self._certain)
        if calls := message.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        return self._piece(delta, reason)

    def _add(self, kind: str, text: str) -> None:
        self._certain[kind] = self._certain.get(kind, "") + text
        self._told[kind] = self._told.get(kind, 0) + len(text)

    def _piece(self, delta: Any, reason: str | None = None) -> dict[str, Any]:
        asked = self._asked
        piece: dict[str, Any] = {"index": self._index, ("delta" if asked.chat else "text"): delta}
        piece["logprobs"] = None
        if asked.logprobs and self._tokens:
            drawn = self._tokens, self._logprobs, self._tops
            piece["logprobs"] = asked.shown(self._before, *drawn, self._offset)
            if not asked.chat:
                last = asked.size((self._before, *self._tokens)[-2], self._tokens[-1])
                self._offset = piece["logprobs"]["text_offset"][-1] + last
            self._before = self._tokens[-1]
        piece["finish_reason"] = reason
        if asked.keys.return_token_ids:
            piece["token_ids"] = self._tokens
        self._tokens, self._logprobs, self._tops = [], [], []
        return piece


def _text_of(asked: Asked, prompt: int) -> Callable[[int], Certain]:
    """Return what tells the texts of an answer to a prompt that are certain with one more token."""
    tokenizer, sampling, form = asked.tokenizer, asked.sampling, asked.form
    if form is not None and form.channels:
        return ChannelStream(tokenizer, sampling.stop).feed
    ends = (*sampling.stop_tokens, *(() if sampling.ignore_eos else tokenizer.eos_ids))
    arguments = tokenizer, asked.prompts[prompt], sampling.stop
    if form is not None:
        return ThoughtStream(*arguments, form, bool(asked.tools), ends).feed
    stream = TextStream(*arguments, ends)
    return lambda token: [(CONTENT, text)] if (text := stream.feed(token)) else []


def event(value: Mapping[str, Any] | str) -> bytes:
    """Return a value as a server-sent event."""
    text = (
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
    )
    return f"data: {text}\n\n".encode()
