"""Conversations of several turns in which an answer stays the tokens that were sampled.

A client that sends `X-Session-ID` sends all messages in every turn, as always. Where they go on
from the last turn of that session, its tokens, prompt and answer, are taken as they were, and only
what the template writes behind the answer is encoded: a text that is tokenized again may become
other tokens than the model has sampled, and its log-probabilities would be of another sequence.

An answer that was cut off by its length, or by a stop string, gets the end-of-turn token that it
lacks (`model/text/appending.py`). Messages that do not go on from the last turn begin anew.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isobit.errors import IsobitError
from isobit.model.text.appending import Appending
from isobit.model.text.tokenizer import Tokenizer

MOST_SESSIONS, MOST_TOKENS, MOST_BYTES = 4096, 1 << 21, 1 << 26
"""Of a tenant, that are kept: sessions, their tokens, and the bytes of their last requests, of
which a template may write none."""
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Turn:
    """The messages of a request, the variables of its template, its tokens, the tokens of its
    answer, and this as a message. `num_bytes`: of the request's body. `instructed`: the first
    message is not of the conversation, but of this turn alone."""

    messages: tuple[Mapping[str, Any], ...]
    variables: Mapping[str, Any]
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    message: Mapping[str, Any]
    num_bytes: int = 0
    instructed: bool = False

    @property
    def num_tokens(self) -> int:
        """The number of tokens of prompt and answer."""
        return len(self.prompt) + len(self.answer)


class Sessions:
    """The last turn of each session, of those of a tenant that were used last: what one keeps
    drops nothing of another's."""

    def __init__(self) -> None:
        self._tenants = defaultdict[str, _Kept](_Kept)

    def find(self, tenant: str, name: str) -> Turn | None:
        """Return the last turn of a tenant's session."""
        return self._tenants[tenant].turns.get(name)

    def keep(self, tenant: str, name: str, turn: Turn) -> None:
        """Keep a complete turn of a session."""
        self._tenants[tenant].keep(name, turn)


class _Kept:
    """A tenant's, the oldest first."""

    def __init__(self) -> None:
        self.turns = OrderedDict[str, Turn]()
        self._tokens = self._bytes = 0  # of all turns

    def keep(self, name: str, turn: Turn) -> None:
        if name in self.turns:
            self._drop(self.turns.pop(name))
        self.turns[name] = turn
        self._tokens += turn.num_tokens
        self._bytes += turn.num_bytes
        while len(self.turns) > MOST_SESSIONS or (
            (self._tokens > MOST_TOKENS or self._bytes > MOST_BYTES) and len(self.turns) > 1
        ):
            self._drop(self.turns.popitem(last=False)[1])

    def _drop(self, turn: Turn) -> None:
        self._tokens -= turn.num_tokens
        self._bytes -= turn.num_bytes


def goes_on(turn: Turn | None, messages: Messages, variables: Mapping[str, Any]) -> bool:
    """Return whether messages are those of a turn, its answer, and more."""
    if turn is None or turn.variables != variables:
        return False
    count = len(turn.messages)
    alike = list(messages[:count]) == list(turn.messages)
    return alike and len(messages) > count + 1 and _said(messages[count]) == _said(turn.message)


def spliced(
    tokenizer: Tokenizer, turn: Turn, messages: Messages, variables: Mapping[str, Any]
) -> list[int]:
    """Return the tokens of a conversation that goes on from a turn. Raises IsobitError where the
    template has no end-of-turn tokens by which the end of the answer could be found."""
    count = len(turn.messages)
    names = {call.get("id"): call["function"].get("name") for call in _calls(messages[count])}
    messages_after = [
        {"name": names[message["tool_call_id"]], **message}
        if message.get("tool_call_id") in names
        else message
        for message in messages[count + 1 :]
    ]
    try:
        rest = Appending(tokenizer, variables, turn.messages).appended(messages_after, turn.answer)
    except IsobitError as error:
        raise IsobitError(
            f"{error}: the tokens of a session cannot be kept; leave X-Session-ID out"
        ) from None
    return [*turn.prompt, *turn.answer, *rest]


def _said(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the content of a message, without what clients add to it."""
    calls = [
        (call["function"].get("name"), call["function"].get("arguments"))
        for call in _calls(message)
    ]
    return message.get("role"), message.get("content") or "", calls


def _calls(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()
