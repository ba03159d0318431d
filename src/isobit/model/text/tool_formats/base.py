"""What a format of tool calls is, and the one reader of a model's answer: `ToolFormat.of`, which
rollouts, environments and the server call.

An answer is cut into pieces at marks: those of thoughts (`thoughts.py`) and the format's own. Where
a mark is a special token of the model, only that token is the mark: ordinary tokens that spell it
are text. What looks like a call and does not parse is a problem, a line that says why. Left out:
the formats.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from isobit.data.foreign import BadJson, parse_json
from isobit.data.text_rows import kind
from isobit.data.turns import Call
from isobit.model.text.tokenizer import Tokenizer
from isobit.model.text.tool_formats import thoughts

_Written = TypeVar("_Written")
_PLAINLY = {
    "Expecting value": "expected a value",
    "Expecting property name": "expected a key in double quotes",
    "Extra data": "expected its end",
    "Unterminated string": "a text without its closing quote, which begins",
    "Invalid control character": "a line break or other control character that is not escaped",
    "Invalid \\": "a backslash that escapes nothing",
}
"""What the library says of a text that is no JSON, and what a model is told."""
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
    """Why what looks like a call is none, in one line, which goes on from "is invalid"; `what` is
    invalid in it."""

    def __init__(self, reason: str, what: str = "") -> None:
        super().__init__(f"{what}: {reason}")


@dataclass(frozen=True)
class Reply:
    """What an answer says: to the user, of its thoughts, and to tools; and why what looks like a
    call of a tool is none, a line each. `said`: all but the thoughts, as it was written."""

    content: str
    calls: tuple[Call, ...] = ()
    reasoning: str = ""
    problems: tuple[str, ...] = ()
    said: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls. Text is held back from the first of the `opens` on. `read` takes an
    answer cut at `marks`, and the tools that there are, whose schemas say which arguments are text;
    None: nothing in it looks like a call. `closes`: the marks behind which a call is over. With
    `channels` every answer is written in them, thoughts too, whether there are tools or not."""

    opens: tuple[str, ...]
    read: Callable[[Pieces, Tools], Reply | None]
    marks: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    channels: bool = False

    def read_text(self, text: str, tools: Tools = ()) -> Reply | None:
        """Return what `read` does for a text in which marks are spelled."""
        return self.read(_cut([("", text)], self.marks), tools)

    def of(self, answer: Answer, tokenizer: Tokenizer, tools: Tools = ()) -> Reply:
        """Return what a sampled answer says."""
        marks = self.marks if self.channels else (*self.marks, *thoughts.MARKS)
        special = special_tokens(marks, tokenizer)
        pieces = _pieces(answer, tokenizer, special)
        pieces = _cut(pieces, [mark for mark in marks if mark not in special.values()])
        if self.channels:
            return replace(self.read(pieces, tools) or Reply(answer.text), said=answer.text)
        begun = thoughts.begun_by(answer.prompt_token_ids, tokenizer)
        calls = self.opens, self.closes
        found = thoughts.apart(pieces, begun, special.values(), self.marks, calls)
        hidden = special.values()
        said = "".join(("" if mark in hidden else mark) + text for mark, text in found.pieces)
        reply = self.read(found.pieces, tools) or Reply(said)
        problems = reply.problems
        if found.open and any(len(mark) > 1 and mark in found.reasoning for mark in self.opens):
            end = thoughts.CLOSES[found.open]
            problems += (f"a tool call is invalid: expected {end} before it, where thoughts end",)
        return replace(reply, reasoning=found.reasoning, problems=problems, said=said)


def _pieces(answer: Answer, tokenizer: Tokenizer, special: Mapping[int, str]) -> Pieces:
    """Return an answer cut at special tokens, which are marks of these names."""
    if not special:
        return [("", answer.text)]
    runs: list[tuple[str, list[int]]] = [("", [])]
    for token in answer.token_ids:
        if token in special:
            runs.append((special[token], []))
        else:
            runs[-1][1].append(token)
    first = tokenizer.decode_completion(answer.prompt_token_ids, runs[0][1])
    later = [(mark, tokenizer.decode(ids)) for mark, ids in runs[1:]]
    return _shortened([("", first), *later], len(answer.text))


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
            problems.append(numbered(number, error))
    return Reply(before, tuple(calls), problems=tuple(problems))


def behind(text: str) -> str:
    """Return the content that text behind a call is: line breaks around it are the format's."""
    return text.strip("\n") if text.strip() else ""


def numbered(number: int, error: NoCall) -> str:
    """Return the problem of a call, which the model is told."""
    return f"tool call {number} is invalid{error}"


def json_value(text: str) -> Any:
    """The value of a JSON text. Raises NoCall."""
    try:
        return parse_json(text)
    except BadJson as error:
        place = ""
        if error.column is not None:
            line = f"line {error.line}, " if error.line != 1 else ""
            place = f" at {line}column {error.column}"
        raise NoCall(f"{_plainly(error.reason)}{place}", " JSON") from None


def _plainly(reason: str) -> str:
    """Return why a text is no JSON in words that need no knowledge of a parser."""
    begins = next((each for each in _PLAINLY if reason.startswith(each)), None)
    if begins is not None:
        return _PLAINLY[begins]
    return reason.replace("Expecting", "expected").removesuffix(" delimiter")


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
