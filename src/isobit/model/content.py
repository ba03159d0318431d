"""Special tokens in what others wrote: the messages of a chat, the text of a prompt, what a tool returned.

`<|im_start|>system` in a user's message is text, unless somebody says otherwise: a vocabulary's special tokens stand
for the start and end of turns, and whoever writes a row of data could end their own. Three rules (`RULES`): *escape*
encodes such text as any other, *allow* takes it for the tokens, *refuse* raises. Text that has none of them has the
same tokens under each.

A template may do with a message what it likes, so a chat is rendered whole. Only where a message spells a special
token, or ends with the start of one that the template could complete, a marker that nobody can guess is put between
its characters before, and taken out of the rendered text afterwards; the special tokens without a marker are the
template's own. They are encoded in one pass by a copy of the tokenizer that knows them by other names, and takes the
rest for text. Left out: added tokens that are not special, such as `<think>`, which stay tokens everywhere; and what a
template composes of parts, such as `<|` + role + `|>`.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from isobit.errors import IsobitError, brief

Rule = Literal["escape", "allow", "refuse"]
Messages = Sequence[Mapping[str, Any]]
_MARK, _NAME = (
    "".join(chr(0xE000 + secrets.randbelow(0x1900)) for _ in range(12)) for _ in range(2)
)  # for private use
_MARKS = re.compile("|".join(re.escape(mark) for mark in (_MARK, json.dumps(_MARK)[1:-1])))  # as tojson may write it

_PRIME, _BASE = 2**61 - 1, secrets.randbelow(1 << 60) + (1 << 60)  # which nobody can aim at


class ContentEncoder:
    """Encodes what others wrote with a fast tokenizer."""

    def __init__(self, fast: FastTokenizer) -> None:
        self.fast = fast
        self._tokens = [token for token in fast.get_added_tokens_decoder().values() if token.special and token.content]
        words = sorted((token.content for token in self._tokens), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, words)) or r"(?!)")
        self._words = words
        self._first = re.compile("|".join(sorted({re.escape(word[0]) for word in words})) or r"(?!)")
        self._starts = {value for word in words for value in _hashes(word[:-1])}

    def text(self, text: str, rule: Rule, add_special: bool) -> list[int]:
        """Token ids of a text; with `add_special`, the tokenizer adds its own, such as a start token."""
        if rule == "allow" or not self._counted(text, rule):
            return self.fast.encode(text, add_special_tokens=add_special).ids
        return self._as_text.encode(text, add_special_tokens=add_special).ids

    def chat(self, messages: Messages, rule: Rule, render: Callable[[Messages], str]) -> list[int]:
        """Token ids of the rendered chat. What is special in it is what the template wrote."""
        count = 0 if rule == "allow" else self._counted(messages, rule)
        partial = rule == "escape" and any(self._ends_with_a_start(text) for text in _texts(messages))
        if not count and not partial:
            return self._whole(render(messages))
        marked = render(_mapped(messages, self._marked))
        if not count:
            plain = render(messages)
            if len(self._pattern.findall(plain)) == len(self._pattern.findall(marked)):
                return self._whole(plain)
        renamed = self._pattern.sub(lambda found: self._names[found[0]], marked)
        ids = self._renaming.encode(_MARKS.sub("", renamed), add_special_tokens=False).ids
        return [self._ids.get(token, token) for token in ids]

    def _whole(self, rendered: str) -> list[int]:
        return self.fast.encode(rendered, add_special_tokens=False).ids

    def spelled(self, value: str | Messages) -> list[str]:
        """The special tokens that a text or the messages of a chat spell."""
        return [found for text in _texts(value) for found in self._pattern.findall(text)]

    def _counted(self, value: str | Messages, rule: Rule) -> int:
        """How many special tokens are spelled. Raises IsobitError if the rule refuses them."""
        spelled = self.spelled(value)
        if spelled and rule == "refuse":
            raise IsobitError(
                f"the text has the special token {brief(spelled[0])!r} in it; take it out, or encode it as text with "
                "task.special_tokens_in_content: escape"
            )
        return len(spelled)

    def _ends_with_a_start(self, text: str) -> bool:
        """Whether it ends with a special token's first characters, but not with all. Hashes, and not the starts
        themselves, are looked up: a token may have a million characters, and of those each start is a string."""
        longest, value, power = len(self._words[0]) if self._words else 0, 0, 1
        first = self._first.search(text, max(0, len(text) - longest + 1))
        for length, character in enumerate(reversed(text[first.start() :] if first else ""), 1):
            value, power = (ord(character) * power + value) % _PRIME, power * _BASE % _PRIME
            if value in self._starts and any(
                len(word) > length and word.startswith(text[-length:]) for word in self._words
            ):
                return True
        return False

    def _marked(self, text: str) -> str:
        """The text with marks inside every special token, and after the start of one at its end."""
        end = _MARK if self._ends_with_a_start(text) else ""
        return self._pattern.sub(lambda found: _MARK.join(found[0]), text) + end

    @cached_property
    def _names(self) -> dict[str, str]:
        return {token.content: f"{_NAME}{i}{_NAME}" for i, token in enumerate(self._tokens)}

    @cached_property
    def _as_text(self) -> FastTokenizer:
        """A copy for which no special token is one."""
        copy = FastTokenizer.from_str(self.fast.to_str())
        copy.encode_special_tokens = True
        return copy

    @cached_property
    def _renaming(self) -> FastTokenizer:
        """Such a copy, with a token more for each special one, of another name."""
        copy = FastTokenizer.from_str(self.fast.to_str())
        copy.encode_special_tokens = True
        copy.add_tokens(
            [
                AddedToken(self._names[t.content], lstrip=t.lstrip, rstrip=t.rstrip, normalized=False, special=False)
                for t in self._tokens
            ]
        )
        return copy

    @cached_property
    def _ids(self) -> dict[int, int]:
        """The ids of the names to those of the special tokens."""
        pairs = [(self._renaming.token_to_id(name), self.fast.token_to_id(word)) for word, name in self._names.items()]
        return {name: token for name, token in pairs if name is not None and token is not None}


def _hashes(word: str) -> Iterator[int]:
    """A number for each start of the word, in time that grows with its length: sum of character * BASE^(place from
    the start's end), modulo a prime."""
    value = 0
    for character in word:
        value = (value * _BASE + ord(character)) % _PRIME
        yield value


def _texts(value: Any) -> list[str]:
    """Every text in a chat, keys of mappings too."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for part in pair for text in _texts(part)]
    return [text for part in value for text in _texts(part)] if isinstance(value, (list, tuple)) else []


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(part, change) for key, part in value.items()}
    return [_mapped(part, change) for part in value] if isinstance(value, (list, tuple)) else value
