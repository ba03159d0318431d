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
    """A sampled completion: its tokens, and its text without the token or string that ended it."""

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
    """The content of an answer: text for the user, reasoning, and calls of tools; `problems`, a
    line each, say why text that looks like a call is invalid. `said`: all but the reasoning, as the
    model wrote it."""

    content: str
    calls: tuple[Call, ...] = ()
    reasoning: str = ""
    problems: tuple[str, ...] = ()
    said: str = ""


@dataclass(frozen=True)
class Frame:
    """The writing of a call, for grammars: its `head`, in which NAME stands for the tool's name, its
    arguments, and its `tail`; all calls between `opens` and `closes`, with `between` two of them,
    where `several` may be written. The arguments are a JSON object, or each stands between the two
    of `parameter`, in which KEY stands for its name. In channels `thought` stands around thoughts,
    and `content` in front of what is for the user."""

    head: str
    tail: str
    opens: str = ""
    closes: str = ""
    between: str = ""
    several: bool = True
    parameter: tuple[str, str] | None = None
    thought: tuple[str, str] = ("", "")
    content: str = ""

    @property
    def text(self) -> str:
        """The text of a call without its arguments."""
        return self.opens + self.head + self.tail + self.closes


@dataclass(frozen=True)
class ToolFormat:
    """The way in which a model writes calls. Text is held back from the first of the `opens` on.
    `read` takes an answer cut at `marks`, and the tools, whose schemas say which arguments are
    text; None: nothing in it looks like a call. `closes`: the marks behind which a call is over.
    With `channels` every answer is written in them, thoughts too, whether there are tools or
    not. `frames`: how calls are written, for grammars; the first whose marks the model has."""

    opens: tuple[str, ...]
    read: Callable[[Pieces, Tools], Reply | None]
    marks: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    channels: bool = False
    frames: tuple[Frame, ...] = ()

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
        split = thoughts.apart(pieces, begun, special.values(), self.marks, calls)
        hidden = special.values()
        visible = "".join(("" if mark in hidden else mark) + text for mark, text in split.pieces)
        reply = self.read(split.pieces, tools) or Reply(visible)
        problems = reply.problems
        if split.open and any(len(mark) > 1 and mark in split.reasoning for mark in self.opens):
            end = thoughts.CLOSES[split.open]
            problems += (f"a tool call is invalid: expected {end} before it, where thoughts end",)
        return replace(reply, reasoning=split.reasoning, problems=problems, said=visible)


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
    """Return those of the names that are special tokens of a model, by their ids."""
    ids = {tokenizer.fast.token_to_id(name): name for name in names}
    return {
        token: name
        for token, name in ids.items()
        if token is not None and tokenizer.is_special(token)
    }


def calls_in(
    before: str, written: Sequence[_Written], one: Callable[[_Written], Sequence[Call]]
) -> Reply:
    """Return the reply of text `before` calls, each of which `one` reads; what raises NoCall there
    is a problem of the reply."""
    calls, problems = list[Call](), list[str]()
    for number, block in enumerate(written, 1):
        try:
            calls += one(block)
        except NoCall as error:
            problems.append(numbered(number, error))
    return Reply(before, tuple(calls), problems=tuple(problems))


def behind(text: str) -> str:
    """Return the content that text behind a call is: line breaks around it are the format's."""
    return text.strip("\n") if text.strip() else ""


def numbered(number: int, error: NoCall) -> str:
    """Return the problem of a call in words for the model."""
    return f"tool call {number} is invalid{error}"


def json_value(text: str) -> Any:
    """Return the value of a JSON text. Raises NoCall."""
    try:
        return parse_json(text)
    except BadJson as error:
        position = ""
        if error.column is not None:
            line = f"line {error.line}, " if error.line != 1 else ""
            position = f" at {line}column {error.column}"
        raise NoCall(f"{_plainly(error.reason)}{position}", " JSON") from None


def _plainly(reason: str) -> str:
    """Return why a text is invalid JSON in words that need no knowledge of a parser."""
    begins = next((prefix for prefix in _PLAINLY if reason.startswith(prefix)), None)
    if begins is not None:
        return _PLAINLY[begins]
    return reason.replace("Expecting", "expected").removesuffix(" delimiter")


def call_of(value: Any, *keys: str) -> Call:
    """Return the call that a JSON object with a name, and arguments under one of the `keys`, stands
    for. Raises NoCall."""
    if not isinstance(value, dict):
        raise NoCall(f"expected a JSON object with name and {keys[0]}, got {kind(value)}")
    if not isinstance(value.get("name"), str):
        raise NoCall('expected a "name", which is text')
    key = next((key for key in keys if key in value), keys[0])
    return named_call(value["name"], value.get(key, {}), f'"{key}"')


def named_call(name: str, arguments: Any, what: str = "the arguments") -> Call:
    """Return a call of this name. Raises NoCall where the arguments are not an object."""
    if not isinstance(arguments, dict):
        raise NoCall(f"expected {what} that are a JSON object, got {kind(arguments)}")
    return Call(name, dumped(arguments))


def dumped(arguments: Any) -> str:
    """Return arguments as JSON text."""
    return json.dumps(arguments, ensure_ascii=False)


def _shortened(pieces: Pieces, length: int) -> list[tuple[str, str]]:
    """Return pieces up to `length` characters of text: a stop string ends an answer in front of
    it."""
    shortened = []
    for mark, text in pieces:
        shortened.append((mark, text[:length]))
        length = max(length - len(text), 0)
    return shortened


def _cut(pieces: Pieces, marks: Sequence[str]) -> list[tuple[str, str]]:
    """Return pieces that are also cut at marks which their text spells."""
    if not marks:
        return list(pieces)
    cut_pieces, mark = [], re.compile("(" + "|".join(map(re.escape, marks)) + ")")
    for opening, text in pieces:
        first, *rest = mark.split(text)
        cut_pieces += [(opening, first), *zip(rest[::2], rest[1::2])]
    return cut_pieces
