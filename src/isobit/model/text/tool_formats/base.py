"""What a format of tool calls is, and an answer cut into pieces at the format's own marks.

Where a mark is a special token of the model, only that token is the mark: ordinary tokens that
spell it are text. What looks like a call and does not parse is a problem, a line that says why.
Left out: the formats.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from isobit.data.foreign import BadJson, parse_json
from isobit.data.text_rows import kind
from isobit.data.turns import Call
from isobit.model.text.tokenizer import Tokenizer

_Written = TypeVar("_Written")
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


Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of tools, as chat templates take them."""


class NoCall(ValueError):
    """Why what looks like a call is none, in one line."""


@dataclass(frozen=True)
class Reply:
    """What an answer says: to the user, of its thoughts, and to tools; and why what looks like a
    call of a tool is none, a line each."""

    content: str
    calls: tuple[Call, ...] = ()
    reasoning: str = ""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls. Text is held back from the first of the `opens` on. `read` takes an
    answer cut at `marks`, and the tools that there are, whose schemas say which arguments are text;
    None: nothing in it looks like a call. With `channels` every answer is written in them, whether
    there are tools or not."""

    opens: tuple[str, ...]
    read: Callable[[Pieces, Tools], Reply | None]
    marks: tuple[str, ...] = ()
    channels: bool = False

    def read_text(self, text: str, tools: Tools = ()) -> Reply | None:
        """`read` of a text in which marks are spelled."""
        return self.read(_cut([("", text)], self.marks), tools)

    def of(self, answer: Answer, tokenizer: Tokenizer, tools: Tools = ()) -> Reply | None:
        """`read` of what was sampled."""
        special = special_tokens(self.marks, tokenizer)
        spelled = [mark for mark in self.marks if mark not in special.values()]
        if not special:
            return self.read(_cut([("", answer.text)], spelled), tools)
        runs: list[tuple[str, list[int]]] = [("", [])]
        for token in answer.token_ids:
            if token in special:
                runs.append((special[token], []))
            else:
                runs[-1][1].append(token)
        first = tokenizer.decode_completion(answer.prompt_token_ids, runs[0][1])
        later = [(mark, tokenizer.decode(ids)) for mark, ids in runs[1:]]
        pieces = _shortened([("", first), *later], len(answer.text))
        return self.read(_cut(pieces, spelled), tools)


def special_tokens(names: Collection[str], tokenizer: Tokenizer) -> dict[int, str]:
    """Those of the names that are special tokens of a model, by their ids."""
    ids = {tokenizer.fast.token_to_id(name): name for name in names}
    return {
        token: name
        for token, name in ids.items()
        if token is not None and tokenizer.is_special(token)
    }


def calls_in(
    before: str, written: Sequence[_Written], one: Callable[[_Written], Sequence[Call]]
) -> Reply:
    """The reply of text `before` calls, each of which `one` reads; what raises NoCall there is a
    problem of the reply."""
    calls, problems = list[Call](), list[str]()
    for number, each in enumerate(written, 1):
        try:
            calls += one(each)
        except NoCall as error:
            problems.append(f"call {number} is none: {error}")
    return Reply(before, tuple(calls), problems=tuple(problems))


def json_value(text: str) -> Any:
    """The value of a JSON text. Raises NoCall."""
    try:
        return parse_json(text)
    except BadJson as error:
        place = "" if error.column is None else f" (line {error.line} column {error.column})"
        raise NoCall(f"not JSON: {error.reason}{place}") from None


def call_of(value: Any, *keys: str) -> Call:
    """A call that is a JSON object with a name, and arguments under one of the `keys`. Raises
    NoCall."""
    if not isinstance(value, dict):
        raise NoCall(f"expected a JSON object with name and {keys[0]}, got {kind(value)}")
    if not isinstance(value.get("name"), str):
        raise NoCall('expected a "name", which is text')
    key = next((key for key in keys if key in value), keys[0])
    return named_call(value["name"], value.get(key, {}), f'"{key}"')


def named_call(name: str, arguments: Any, what: str = "the arguments") -> Call:
    """A call of this name. Raises NoCall where the arguments are no object."""
    if not isinstance(arguments, dict):
        raise NoCall(f"expected {what} that are a JSON object, got {kind(arguments)}")
    return Call(name, dumped(arguments))


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
