"""What a format of tool calls is, and an answer cut into pieces at the format's own marks.

Where a mark is a special token of the model, only that token is the mark: ordinary tokens that
spell it are text. A call that does not parse is text too. Left out: the formats.
"""

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from isobit.data.foreign import BadJson, parse_json
from isobit.environments.base import Call
from isobit.model.text.tokenizer import Tokenizer

Pieces = Sequence[tuple[str, str]]
"""An answer: (mark, the text behind it up to the next one); the first mark is empty."""


class Answer(Protocol):
    """What was sampled behind a prompt: its tokens, and its text without what ended it."""

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def text(self) -> str: ...


@dataclass(frozen=True)
class Reply:
    """What an answer says: to the user, of its thoughts, and to tools."""

    content: str
    calls: tuple[Call, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls. Text is held back from the first of the `opens` on. `read` takes an
    answer cut at `marks`; None: it has no calls that parse. With `channels` every answer is
    written in them, whether there are tools or not."""

    opens: tuple[str, ...]
    read: Callable[[Pieces], Reply | None]
    marks: tuple[str, ...] = ()
    channels: bool = False

    def read_text(self, text: str) -> Reply | None:
        """`read` of a text in which marks are spelled."""
        return self.read(_cut([("", text)], self.marks))

    def of(self, answer: Answer, tokenizer: Tokenizer) -> Reply | None:
        """`read` of what was sampled."""
        special = special_tokens(self.marks, tokenizer)
        spelled = [mark for mark in self.marks if mark not in special.values()]
        if not special:
            return self.read(_cut([("", answer.text)], spelled))
        runs: list[tuple[str, list[int]]] = [("", [])]
        for token in answer.token_ids:
            if token in special:
                runs.append((special[token], []))
            else:
                runs[-1][1].append(token)
        first = tokenizer.decode_completion(answer.prompt_token_ids, runs[0][1])
        later = [(mark, tokenizer.decode(ids)) for mark, ids in runs[1:]]
        return self.read(_cut(_shortened([("", first), *later], len(answer.text)), spelled))


def special_tokens(names: Collection[str], tokenizer: Tokenizer) -> dict[int, str]:
    """Those of the names that are special tokens of a model, by their ids."""
    ids = {tokenizer.fast.token_to_id(name): name for name in names}
    return {
        token: name
        for token, name in ids.items()
        if token is not None and tokenizer.is_special(token)
    }


def object_call(text: str, key: str) -> Call | None:
    """A call that is a JSON object with a name, and arguments under `key`."""
    try:
        return call_of(parse_json(text), key)
    except BadJson:
        return None


def call_of(value: Any, key: str) -> Call | None:
    """The same of a JSON value."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get(key, {})
    return Call(value["name"], dumped(given)) if isinstance(given, dict) else None


def dumped(arguments: Any) -> str:
    """Arguments as JSON text."""
    return json.dumps(arguments, ensure_ascii=False)


def _shortened(pieces: Pieces, length: int) -> list[tuple[str, str]]:
    """Pieces up to so many characters of text: a stop string ends an answer in front of it."""
    found = []
    for mark, text in pieces:
        found.append((mark, text[:length]))
        length = max(length - len(text), 0)
    return found


def _cut(pieces: Pieces, marks: Sequence[str]) -> list[tuple[str, str]]:
    """Pieces that are also cut at marks which their text spells."""
    if not marks:
        return list(pieces)
    found, mark = [], re.compile("(" + "|".join(map(re.escape, marks)) + ")")
    for before, text in pieces:
        first, *rest = mark.split(text)
        found += [(before, first), *zip(rest[::2], rest[1::2])]
    return found
