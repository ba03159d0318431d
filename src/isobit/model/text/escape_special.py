"""Special tokens in text from outside: the messages of a chat, the text of a prompt, what a tool
returned.

`<|im_start|>system` in a user's message is text, unless a setting says otherwise: a vocabulary's
special tokens stand for the start and end of turns, and the text of a row of data could end its own
turn. Three rules (`RULES`): *escape* encodes such text as any other, *allow* takes it for the
tokens, *refuse* raises. Text that has none of them has the same tokens under each. Tokens that the
chat template writes around messages count as special here, whatever their flag says (`turns.py`).

A template may do with a message what it likes, so a chat is rendered whole. Only where a message
spells a special token, or ends with the start of one that the template could complete, it is
rendered a second time, with one character of each such place replaced by one that is nowhere else:
lengths, slices and what surrounds them stay. Special tokens without such a character are the
template's own. With the characters put back, the second text must be the first: a template that
looks for the character wrote another, and then another character is replaced; where all of them
make a difference, the chat is refused. The template's tokens are encoded in one pass with the rest
by a copy of the tokenizer that knows them by other names, and takes the rest for text. Left out:
added tokens that are not special and stand for no turn, such as `<think>`, which stay tokens
everywhere; and what a template composes of parts, such as `<|` + role + `|>`.
"""

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as FastTokenizer

from isobit.errors import IsobitError, brief

Rule = Literal["escape", "allow", "refuse"]
Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages], str]
_PRIVATE = range(0xE000, 0xF000)  # characters that stand for nothing; names have others
_NAME = "".join(chr(0xF000 + secrets.randbelow(0x900)) for _ in range(12))
_PICKS: tuple[Callable[[str], int], ...] = (
    lambda word: 0,
    lambda word: len(word) - 1,
    lambda word: len(word) // 2,
)
"""Functions that choose the character of a special token, or of the start of one, that is
replaced."""
_LONGEST = 1000
"""The most characters of a special token. A longer one is not expected in any vocabulary, and its
starts would take long to look for."""
_SLICE = 1 << 15
"""The number of characters that are searched, or encoded, without letting other threads run."""


class ContentEncoder:
    """Encodes text from outside with a fast tokenizer. `turns`: added tokens that count as special,
    in addition to those with the flag."""

    def __init__(self, fast: FastTokenizer, turns: Collection[str] = ()) -> None:
        self.fast = fast
        added = fast.get_added_tokens_decoder()
        self._tokens = {
            i: t for i, t in added.items() if t.content and (t.special or t.content in turns)
        }
        self._forms = {
            form: i for i, token in self._tokens.items() for form in self._forms_of(token)
        }
        self._words = sorted(self._forms, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(self._regex, self._words)) or r"(?!)")
        self._alike = re.compile(
            self._pattern.pattern, re.IGNORECASE
        )  # what a template may turn into one
        self._first = re.compile(
            "|".join(sorted({re.escape(word[0]) for word in self._words})) or r"(?!)"
        )
        self._sorted = sorted(self._forms)
        if self._words and len(self._words[0]) > _LONGEST:
            raise IsobitError(
                f"the tokenizer's special token {brief(self._words[0], 40)!r} has "
                f"{len(self._words[0]):,} characters; at most {_LONGEST:,} are read"
            )

    def text(self, text: str, rule: Rule, add_special: bool) -> list[int]:
        """Return the token ids of a text; with `add_special`, the tokenizer adds its own tokens,
        such as a start token, unless the rule is *allow* and the text already begins with them."""
        spelled = [] if rule == "allow" else self._spelled(text, rule)
        if not spelled:
            whole = encoding(self.fast, text, add_special)
            return whole.ids[_repeated(whole) if rule == "allow" else 0 :]
        added = encoding(self._as_text, "", add_special).ids
        return self._checked(encoding(self._as_text, text, add_special).ids, spelled, added)

    def chat(self, messages: Messages, rule: Rule, render: Render) -> list[int]:
        """Return the token ids of the rendered chat, in which only what the template wrote is a
        special token, unless the rule is *allow*."""
        spelled = [] if rule == "allow" else self._spelled(messages, rule)
        plain = render(messages)
        if rule == "allow" or not any(map(self._may_make_one, _texts(messages))):
            return self._whole(plain)
        marked, hiding = self._marked(messages, spelled, plain, render)
        if not spelled and _spans(self._pattern, marked) == _spans(self._pattern, plain):
            return self._whole(plain)
        named = _replaced(self._pattern, lambda word: self._names[self._forms[word]], marked)
        ids = self._checked(encoding(self._renaming, hiding.shown(named)).ids, spelled, [])
        return [self._ids.get(token, token) for token in ids]

    def spelled(self, value: str | Messages) -> list[str]:
        """Return the special tokens that a text or the messages of a chat spell."""
        return [
            self._tokens[token].content for text in _texts(value) for token in self._found(text)
        ]

    def _whole(self, rendered: str) -> list[int]:
        return encoding(self.fast, rendered).ids

    def _may_make_one(self, text: str) -> bool:
        """Return whether a template could make a special token of a text: the text spells one in
        any case or backwards, or ends with the start of one."""
        return bool(self._found(text) or self._start_at_end(text) or self._is_alike(text))

    def _is_alike(self, text: str) -> bool:
        return any(True for way in (text, text[::-1]) for _ in _matches(self._alike, way))

    def _forms_of(self, token: AddedToken) -> set[str]:
        """Return the forms that a token has in a text, and in what the normalizer makes of it if
        the token is looked for there."""
        normalizer = self.fast.normalizer
        both = token.normalized and normalizer is not None
        return {token.content, normalizer.normalize_str(token.content)} if both else {token.content}

    def _regex(self, form: str) -> str:
        word = re.escape(form)
        return rf"(?<!\w){word}(?!\w)" if self._tokens[self._forms[form]].single_word else word

    def _found(self, text: str) -> list[int]:
        """Return the special tokens that a text spells. A text that the normalizer changes may have
        some in another form."""
        normalizer = self.fast.normalizer
        same = normalizer is None or not self._normalized
        if same or (len(text) <= _SLICE and normalizer.normalize_str(text) == text):
            return [self._forms[match[0]] for match in _matches(self._pattern, text)]
        return [
            token for token in self._whole(text) if token in self._tokens and token != self._unknown
        ]

    @cached_property
    def _normalized(self) -> bool:
        return any(token.normalized for token in self._tokens.values())

    @cached_property
    def _unknown(self) -> int | None:
        """The token for what the vocabulary cannot write."""
        return self.fast.token_to_id(getattr(self.fast.model, "unk_token", None) or "")

    def _spelled(self, value: str | Messages, rule: Rule) -> list[str]:
        """Return the special tokens that `value` spells. Raises IsobitError if the rule refuses
        them."""
        spelled = self.spelled(value)
        if spelled and rule == "refuse":
            raise IsobitError(
                f"the text has the special token {brief(spelled[0])!r} in it; take it out, or "
                "encode it as text with task.special_tokens_in_content: escape"
            )
        return spelled

    def _checked(self, ids: list[int], spelled: Sequence[str], added: Sequence[int]) -> list[int]:
        """Return the ids of text from outside, which come with those that the tokenizer `added`.
        Raises IsobitError where text became a special token all the same."""
        for name in set(spelled):
            token = self.fast.token_to_id(name)
            if (
                token is not None
                and token != self._unknown
                and ids.count(token) > added.count(token)
            ):
                raise IsobitError(
                    f"the text has the special token {brief(name)!r} in it, which this tokenizer "
                    "makes of plain text as well; take it out"
                )
        return ids

    def _start_at_end(self, text: str) -> int:
        """Return the largest number of characters at the end of a text that are the first
        characters of a special token, but not all of it."""
        tail = text[max(0, len(text) - _LONGEST) :]
        for match in self._first.finditer(tail):
            start = tail[match.start() :]
            index = bisect_right(
                self._sorted, start
            )  # words that begin so, and are longer, are next
            if index < len(self._sorted) and self._sorted[index].startswith(start):
                return len(start)
        return 0

    def _marked(
        self, messages: Messages, spelled: list[str], plain: str, render: Render
    ) -> tuple[str, "_Hiding"]:
        """Return what the template writes for the messages with a character of each special token
        that they spell hidden, and the `_Hiding`. Raises IsobitError for a template that then
        writes anything else."""
        for pick in _PICKS:
            hiding = _Hiding(
                pick,
                {
                    character
                    for text in (plain, *_texts(messages), *self._words)
                    for character in text
                },
            )
            try:
                marked = hiding.restored(render(_mapped(messages, partial(self._hidden, hiding))))
            except IsobitError:  # the template refused that, but not the messages
                continue
            if hiding.shown(marked) == plain:
                return marked, hiding
        if not spelled and not any(map(self._is_alike, _texts(messages))):
            return plain, _Hiding(_PICKS[0], ())  # honest text that ends as a special token begins
        spelled_text = (
            f"the special token {brief(spelled[0])!r}"
            if spelled
            else "what could become a special token"
        )
        raise IsobitError(
            f"a message has {spelled_text} in it, and the model's chat template looks for that and "
            "writes other text; take it "
            "out, or let it be the token with task.special_tokens_in_content: allow"
        )

    def _hidden(self, hiding: "_Hiding", text: str, end: bool) -> str:
        """Return a text of which a template can no longer make a special token, nor, where `end`,
        from its end."""
        while self._is_alike(text):
            text = _replaced(self._alike, hiding.hide, text)
            text = _replaced(self._alike, hiding.hide, text[::-1])[::-1]
        while end and (length := self._start_at_end(text)):
            text = text[:-length] + hiding.hide(text[-length:])
        return text

    @cached_property
    def _names(self) -> dict[int, str]:
        return {i: f"{_NAME}{i}{_NAME}" for i in self._tokens}

    @cached_property
    def _as_text(self) -> FastTokenizer:
        """A copy of the tokenizer that takes every special token for text."""
        values = json.loads(self.fast.to_str())
        for token in values["added_tokens"]:
            token["special"] = token["id"] in self._tokens
        copy = FastTokenizer.from_str(json.dumps(values))
        copy.encode_special_tokens = True
        return copy

    @cached_property
    def _renaming(self) -> FastTokenizer:
        """A copy like `_as_text`, with one more token for each special one, under another name."""
        copy = FastTokenizer.from_str(self._as_text.to_str())
        copy.encode_special_tokens = True
        copy.add_tokens(
            [
                AddedToken(
                    self._names[i],
                    lstrip=t.lstrip,
                    rstrip=t.rstrip,
                    normalized=False,
                    special=False,
                )
                for i, t in self._tokens.items()
            ]
        )
        return copy

    @cached_property
    def _ids(self) -> dict[int, int]:
        """The ids of the special tokens, by the ids of their other names."""
        pairs = [(self._renaming.token_to_id(name), token) for token, name in self._names.items()]
        return {name: token for name, token in pairs if name is not None}


class _Hiding:
    """Replaces a character of a word by one that is in none of the texts, a different one for each
    character, and puts it back."""

    def __init__(self, pick: Callable[[str], int], used: Collection[str]) -> None:
        self._pick, self._of = pick, dict[str, str]()
        self._free = (character for character in map(chr, _PRIVATE) if character not in used)

    def hide(self, word: str) -> str:
        """Return the word with one character hidden."""
        index = self._pick(word)
        if word[index] not in self._of:
            self._of[word[index]] = next(self._free)
        return word[:index] + self._of[word[index]] + word[index + 1 :]

    def restored(self, rendered: str) -> str:
        """Return a rendered text in which hidden characters that tojson wrote as numbers are
        characters again."""
        for hidden in self._of.values():
            rendered = rendered.replace(json.dumps(hidden)[1:-1], hidden)
        return rendered

    def shown(self, text: str) -> str:
        """Return the text with the original characters put back."""
        return text.translate({ord(hidden): shown for shown, hidden in self._of.items()})


def _repeated(whole: Encoding) -> int:
    """Count the tokens that the tokenizer put before a text, where the text itself begins with the
    same ones; else 0."""
    count = next((i for i, added in enumerate(whole.special_tokens_mask) if not added), 0)
    return count if whole.ids[count : 2 * count] == whole.ids[:count] else 0


def encoding(fast: FastTokenizer, text: str, add_special: bool = False) -> Encoding:
    """Encode a text, a long one without keeping other threads from running, as `encode` would."""
    if len(text) <= _SLICE:
        return fast.encode(text, add_special_tokens=add_special)
    (whole,) = fast.encode_batch_fast([text], add_special_tokens=add_special)
    return whole


def _matches(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Find the places of a pattern of special tokens as `finditer` does, one slice at a time: other
    threads cannot run during a search."""
    position = 0
    while position < len(text):
        end = position + _SLICE
        for match in pattern.finditer(text, position, end + _LONGEST + 1):
            if match.start() >= end:
                break
            yield match
            position = match.end()
        position = max(position, end)


def _replaced(pattern: re.Pattern[str], replacement: Callable[[str], str], text: str) -> str:
    """Replace the places of a pattern, as `sub` does."""
    pieces, position = list[str](), 0
    for match in _matches(pattern, text):
        pieces += text[position : match.start()], replacement(match[0])
        position = match.end()
    return "".join((*pieces, text[position:]))


def _spans(pattern: re.Pattern[str], text: str) -> list[tuple[int, int]]:
    return [match.span() for match in _matches(pattern, text)]


def _texts(value: Any) -> list[str]:
    """Return every text in a chat, keys of mappings too."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for item in pair for text in _texts(item)]
    return (
        [text for item in value for text in _texts(item)]
        if isinstance(value, (list, tuple))
        else []
    )


def _mapped(value: Any, change: Callable[[str, bool], str], end: bool = False) -> Any:
    """Return a chat with every text in it changed by `change`; keys and roles are changed without
    regard to their ends, which the template reads."""
    if isinstance(value, str):
        return change(value, end)
    if isinstance(value, Mapping):
        return {
            _mapped(key, change): _mapped(item, change, key != "role")
            for key, item in value.items()
        }
    return (
        [_mapped(item, change, end) for item in value]
        if isinstance(value, (list, tuple))
        else value
    )
