"""What a turn appends: the tokens between a sampled answer and the start of the next one.

Behind an answer stand the messages that an environment gives, as the model's own chat template
writes them. The tokens so far stay as they were sampled, and only what comes behind them is
encoded: the template is rendered on a short conversation that has the shape of the real one, with
its prompt and answer replaced by dummies and the new messages as they are, and cut behind the
answer. Where the cut is follows from the tokens at which generation stops, which only the template
can have written (`escape_special.py`): the first of them behind the dummy's prompt ends its answer.

A template may write an earlier answer otherwise than the last one: leave out its thoughts, move a
system message. What was sampled is then not what the template would write later. `refusal` says so,
in one line; `appended` gives the tokens all the same. Left out: messages before the answer, and
answers that a template splits in two.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from isobit.errors import IsobitError
from isobit.model.text.chat import TookTooMuch
from isobit.model.text.conversation import LeftOut
from isobit.model.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
_ID = "call{:05d}"
"""The id of a call that does not bring one: nine letters and digits, as Mistral's templates
want."""
_SHOWN = 40
"""The number of characters that are shown where two renderings differ."""
_PROMPT: Sequence[Message] = ({"role": "user", "content": ""},)
_SAYING = {"role": "assistant", "content": "qzanswerx"}
_THOUGHTS = "qzthoughtsx"
_END = "</think>"
_NO_END = (
    "the model's chat template does not end an answer with one of the model's end-of-sequence "
    "tokens ({}), so nothing can be appended to it; write {{{{ eos_token }}}} behind what an assistant "
    "says in the template (model.chat_template)"
)


@dataclass(frozen=True)
class _Cut:
    """The place where an answer ends: after `ends` ends of the prompt. `closes`: the end belongs to
    the answer, and does not open the next message."""

    ends: int
    closes: bool


class Appending:
    """The tokens that turns append under a tokenizer's chat template and these `variables` of it,
    to conversations whose prompts have the roles of `prompt`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        variables: Mapping[str, Any] | None = None,
        prompt: Sequence[Message] = _PROMPT,
    ) -> None:
        self._tokenizer, self._variables = tokenizer, dict(variables or {})
        self._prompt = _shape(prompt)
        self._ends = frozenset(tokenizer.eos_ids)

    def appended(self, messages: Sequence[Message], answer: Sequence[int]) -> list[int]:
        """Return the tokens behind an answer: its end, unless it ended with a token that ends
        answers, the messages, and the start of the next answer. Raises IsobitError for messages
        that the template refuses, and where it does not end an answer with an end of sequence."""
        dummies = _with_ids(messages)
        cut = self._cut_of(dummies[0]["role"])
        whole = self._encoded([self._said(dummies), *dummies], True)
        end_indices = [index for index, token in enumerate(whole) if token in self._ends]
        if len(end_indices) <= cut.ends:
            raise self._no_end()
        rest = whole[end_indices[cut.ends] :]
        ended = bool(answer) and answer[-1] in self._ends
        return rest[1:] if ended and (cut.closes or answer[-1] == rest[0]) else rest

    def check(self, *roles: str) -> None:
        """Raise IsobitError if there is a `refusal` for one of these roles."""
        for role in roles:
            if (reason := self.refusal(role)) is not None:
                raise IsobitError(reason)

    def check_end(self) -> None:
        """Raise IsobitError if the template does not end an answer with an end of sequence,
        whatever message follows."""
        try:
            self._cut_of("user")
        except TookTooMuch:
            raise
        except IsobitError:
            self._cut_of("tool")

    def check_shown(self, *roles: str) -> None:
        """Raise IsobitError if the template refuses or leaves out a message of one of these roles
        behind an answer."""
        for role in roles:
            dummies = _dummies(role)
            if dummies[0]["content"] not in self._text(
                self._encoded([self._said(dummies), *dummies], True)
            ):
                raise IsobitError(
                    f"the model's chat template leaves out what a message of role {role} says; "
                    "name one that does not with model.chat_template"
                )

    def refusal(self, role: str) -> str | None:
        """Return, in one line, why what is appended with a message of this role, `tool` or `user`,
        is not what the template would write for the whole conversation; None where it is."""
        why = self._tool_refusal if role == "tool" else self._user_refusal
        if why is None:
            return None
        return (
            f"the model's chat template {why}, so turns cannot be appended (environment.history: "
            "append); name a template that keeps what it wrote with model.chat_template, or set "
            "history: fork"
        )

    @cached_property
    def _tool_refusal(self) -> str | None:
        return self._difference(_dummies("tool"))

    @cached_property
    def _user_refusal(self) -> str | None:
        return self._difference(_dummies("user"))

    def _difference(self, dummies: list[dict[str, Any]]) -> str | None:
        """Return what the template changes in an answer that dummies follow, or in the dummies;
        None where it only writes them behind it."""
        role = dummies[0]["role"]
        try:
            for turn in self._answers(dummies):
                last, whole = (self._encoded([turn], False), self._encoded([turn, *dummies], True))
                shown = self._text(whole)
                if dummies[0]["content"] not in shown:
                    return f"leaves out what a message of role {role} says"
                last = last[: self._end(last)]
                if whole[: len(last)] != last:
                    prefix = shown.partition(dummies[0]["content"])[0]
                    why = _why(self._text(last), prefix, self._prompt)
                    return f"{why} once a message of role {role} follows"
            self._cut_of(role)
        except TookTooMuch:
            raise
        except LeftOut:
            return f"leaves out what a message of role {role} says"
        except IsobitError as error:
            _, colon, reason = str(error).partition("refused a conversation: ")
            if not colon:
                raise
            return f"refuses a message of role {role} behind an answer: {reason}"
        return None

    def _end(self, last: Sequence[int]) -> int:
        """Count the tokens of an answer that nothing follows, with its prompt and its end. What a
        template writes behind the last end of turn is not part of the answer."""
        end_indices = [index for index, token in enumerate(last) if token in self._ends]
        return end_indices[self._before] + 1 if len(end_indices) > self._before else len(last)

    @cached_property
    def _before(self) -> int:
        """The number of end-of-sequence tokens in the prompt."""
        return self._count(self._encoded([], True))

    def _answers(self, dummies: Sequence[Message]) -> Iterator[dict[str, Any]]:
        """Yield dummies of an answer: plain, with thoughts next to its text, and with thoughts in
        its text where the template looks for their end."""
        answer = self._said(dummies)
        yield answer
        yield answer | {"reasoning_content": _THOUGHTS, "thinking": _THOUGHTS}
        if _END in (self._tokenizer.chat_template or ""):
            yield answer | {"content": f"<think>\n{_THOUGHTS}\n{_END}\n\n{answer['content']}"}

    def _cut_of(self, role: str) -> _Cut:
        return self._tool_cut if role == "tool" else self._user_cut

    @cached_property
    def _tool_cut(self) -> _Cut:
        return self._cut(_dummies("tool"))

    @cached_property
    def _user_cut(self) -> _Cut:
        return self._cut(_dummies("user"))

    def _cut(self, dummies: list[dict[str, Any]]) -> _Cut:
        answer, ends = self._said(dummies), self._before
        closes = self._count(self._encoded([answer], False)) > ends
        whole = self._encoded([answer, *dummies], True)
        ends_at = [index for index, token in enumerate(whole) if token in self._ends]
        if len(ends_at) <= ends or dummies[0]["content"] in self._text(whole[: ends_at[ends]]):
            raise self._no_end()
        return _Cut(ends, closes)

    def _no_end(self) -> IsobitError:
        names = [self._tokenizer.fast.id_to_token(end) for end in sorted(self._ends)]
        return IsobitError(_NO_END.format(", ".join(map(str, names)) or "it has none"))

    def _said(self, dummies: Sequence[Message]) -> dict[str, Any]:
        """Return the dummy of the answer that these messages follow."""
        called = [message for message in dummies if message["role"] == "tool"]
        return _calling(called) if called else _SAYING

    def _count(self, tokens: Sequence[int]) -> int:
        return sum(token in self._ends for token in tokens)

    def _encoded(self, more: Sequence[Message], answering: bool) -> list[int]:
        chat = [*self._prompt, *more]
        return self._tokenizer.encode_chat(chat, answering, self._variables)

    def _text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, special=True)


def _calling(results: Sequence[Message]) -> dict[str, Any]:
    """Return the dummy of an answer that calls the tools whose messages are given."""
    calls = [
        {
            "id": message["tool_call_id"],
            "type": "function",
            "function": {"name": message["name"], "arguments": {}},
        }
        for message in results
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _shape(prompt: Sequence[Message]) -> list[dict[str, Any]]:
    """Return a prompt with dummies in place of what its messages say. An assistant's message at its
    end, which the model continues, is part of the answer and left out."""
    messages = prompt[:-1] if prompt and prompt[-1].get("role") == "assistant" else prompt
    return [{**message, "content": f"qz{index}x"} for index, message in enumerate(messages)]


def _dummies(role: str) -> list[dict[str, Any]]:
    message = {"role": role, "content": "qzgivenx"}
    return _with_ids([message | {"name": "dummy"} if role == "tool" else message])


def _with_ids(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in which those of tools have a name and the id of a call. Raises IsobitError
    for an empty list."""
    if not messages:
        raise IsobitError("nothing follows an answer; expected a message at least")
    defaults = {"name": "tool"}
    return [
        {**defaults, "tool_call_id": _ID.format(index), **message}
        if message["role"] == "tool"
        else dict(message)
        for index, message in enumerate(messages)
    ]


def numbered(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return a conversation whose calls have ids; tools' messages have the ids of the calls that
    they answer, in order."""
    chat, ids, calls = list[dict[str, Any]](), list[str](), 0
    for message in messages:
        if message["role"] == "tool":
            chat.append({"name": "tool", **message, "tool_call_id": (ids or [_ID.format(0)])[0]})
            ids = ids[1:]
            continue
        ids = [_ID.format(calls + index) for index, _ in enumerate(message.get("tool_calls", ()))]
        calls += len(ids)
        made = [{**call, "id": name} for name, call in zip(ids, message.get("tool_calls", ()))]
        chat.append({**message, "tool_calls": made} if made else dict(message))
    return chat


def _why(last: str, whole: str, prompt: Sequence[Message]) -> str:
    """Return what a template changes in `last` where the rendering goes on as `whole`."""
    if any(last.count(mark) > whole.count(mark) for mark in (_THOUGHTS, _END)):
        return "leaves out the thoughts of an answer"
    for message in prompt:
        text = message["content"]
        if last.find(text) != whole.find(text):
            return f"moves the message of role {message['role']}"
    index = next(
        (i for i, (a, b) in enumerate(zip(last, whole)) if a != b), min(len(last), len(whole))
    )
    old_text, new_text = last[index : index + _SHOWN], whole[index : index + _SHOWN]
    return f"writes {new_text!r} where it wrote {old_text!r}"
