"""Answers with thoughts (`model/text/tool_formats/thoughts.py`), as their tokens are sampled: which
text of thoughts or content is certain.
"""

from collections.abc import Collection, Sequence

from isobit.model.text.tokenizer import Tokenizer
from isobit.model.text.tool_formats.base import ToolFormat, special_tokens
from isobit.model.text.tool_formats.thoughts import CLOSES, LABELS, MARKS, begun_by
from isobit.serve.streams import TextStream, overlap

CONTENT, REASONING = "content", "reasoning_content"
Certain = list[tuple[str, str]]
"""Pieces of text, each with its kind."""


class ThoughtStream:
    """The text of an answer that is certain with each token. Joined, the texts of a kind are a
    beginning of what `ToolFormat.of` reads: of its thoughts, and of its content up to what opens a
    call, if there are `tools`. Where marks are special tokens, nothing of an answer with `stop`
    strings is certain: these may reach over a mark."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str],
        form: ToolFormat,
        tools: bool,
        ends: Collection[int],
    ) -> None:
        self._tokenizer, self._prompt, self._ends = tokenizer, prompt, ends
        self._marks = special_tokens((*MARKS, *form.marks), tokenizer)
        self._text = TextStream(tokenizer, prompt, stop, ends)
        self._run = list[int]()
        self._behind_mark = False
        self._closed = bool(stop) and bool(self._marks)
        self._parts = _Parts(begun_by(prompt, tokenizer), self._marks.values(), form, tools)

    def feed(self, token: int) -> Certain:
        """Return the texts that are certain with one more token."""
        if self._closed or self._parts.closed:
            return []
        mark = self._marks.get(token)
        if mark is None:
            if token not in self._ends:
                self._run.append(token)
            return self._parts.add(self._text.feed(token))
        text = (
            self._tokenizer.decode(self._run)
            if self._behind_mark
            else self._tokenizer.decode_completion(self._prompt, self._run)
        )
        certain = self._parts.add(self._text.rest(text))
        self._behind_mark, self._run = True, []
        self._text = TextStream(self._tokenizer, [token], (), self._ends)
        return certain + self._parts.mark(mark)


class _Parts:
    """Text, as it comes, told apart into thoughts and content. `begun`: the mark of thoughts that
    the prompt has begun; `special`: marks that are tokens, and not spelled. At what opens a call it
    is `closed`, if there are `tools`."""

    def __init__(self, begun: str, special: Collection[str], form: ToolFormat, tools: bool) -> None:
        self._inside, self._form, self.closed = begun, form, False
        self._opens = form.opens if tools else ()
        self._begins = [mark for mark in CLOSES if mark not in special]
        self._special = special
        self._held = ""
        self._blank = True  # no content so far
        self._label = ""  # which may come next
        self._skips = bool(begun)  # line breaks that come next
        self._thoughts = False  # some are told
        self._again = False  # between two blocks of them
        self._calling = False

    def add(self, text: str) -> Certain:
        """Return what is certain with more text."""
        self._held += text
        certain: Certain = []
        while self._held and not self.closed:
            state = self._held, self._inside
            certain += self._think() if self._inside else self._say()
            if (self._held, self._inside) == state or not self._held:
                break
        return [(kind, text) for kind, text in certain if text]

    def mark(self, mark: str) -> Certain:
        """Return what is certain with a mark that is a token."""
        if self._inside:
            self._label = ""
            return self._end(self._held) if mark == CLOSES[self._inside] else []
        thinks = mark in CLOSES and not self._calling
        opens, closes = mark in self._form.opens, self._form.closes
        is_format_mark = mark in self._form.marks and (self._calling or opens or not closes)
        if not (thinks or is_format_mark):
            return []
        self._blank &= not self._held.strip()
        certain = [] if thinks and self._blank else [(CONTENT, self._held)]
        if thinks:
            self._begin(mark, "")
            return certain
        self._held, self._blank, self._skips = "", False, False
        self._calling = (self._calling or opens) and mark not in closes
        self.closed = self._calling and bool(self._opens)
        return certain

    def _begin(self, mark: str, rest: str) -> None:
        self._inside, self._held, self._skips = mark, rest, True
        self._label, self._again = LABELS.get(mark, ""), self._thoughts

    def _end(self, text: str, rest: str = "") -> Certain:
        """End thoughts with the last of their text."""
        certain = self._thought(text.strip("\n") if self._skips else text.rstrip("\n"))
        self._inside, self._held, self._skips = "", rest, True
        return certain

    def _thought(self, text: str) -> Certain:
        if not text:
            return []
        joined = "\n" * self._again + text
        self._skips = self._again = False
        self._thoughts = True
        return [(REASONING, joined)]

    def _think(self) -> Certain:
        close = CLOSES[self._inside]
        spelled = close not in self._special
        if self._label:
            if self._held != self._label and self._label.startswith(self._held):
                return []
            self._held, self._label = self._held.removeprefix(self._label), ""
        start = self._held.find(close) if spelled else -1
        if start >= 0:
            return self._end(self._held[:start], self._held[start + len(close) :])
        if self._skips:
            self._held = self._held.lstrip("\n")
        certain = len(self._held) - (overlap(self._held, close) if spelled else 0)
        certain = len(self._held[:certain].rstrip("\n"))
        text, self._held = self._held[:certain], self._held[certain:]
        return self._thought(text)

    def _say(self) -> Certain:
        if self._skips:
            self._held = self._held.lstrip("\n")
            self._skips = not self._held
        if self._blank:
            begins = self._held.lstrip()
            for mark in self._begins:
                if begins.startswith(mark):
                    self._begin(mark, begins[len(mark) :])
                    return []
            if any(mark.startswith(begins) for mark in self._begins):
                return []
        starts = [start for start in map(self._held.find, self._opens) if start >= 0]
        most = max((overlap(self._held, mark) for mark in self._opens), default=0)
        certain = min(starts, default=len(self._held) - most)
        self.closed = bool(starts)
        text, self._held = self._held[:certain], self._held[certain:]
        if not text.strip() and self._blank:  # no content, where a call follows
            self._held = text + self._held
            return []
        self._blank = False
        return [(CONTENT, text)]
