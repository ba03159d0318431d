"""Rewards that compare text: `exact_match`, `fuzzy_match` and `format`."""

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from isobit.data.answers import NoAnswer, gold_text
from isobit.errors import IsobitError
from isobit.options.declare import at_least, at_most
from isobit.options.reading import OptionError
from isobit.tasks.rewards.by_name import Unscored
from isobit.tasks.rewards.named.base import NamedReward

_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Match(NamedReward):
    """The common options of `exact_match` and `fuzzy_match`: the part of the completion that is
    compared, and how it is normalized."""

    answer: Annotated[str, "column of the right answer, or of a list of right answers"] = "answer"
    extract: Annotated[
        str | None,
        "regular expression; its last match in the completion is compared: group 1, or all of it",
    ] = None
    ignore_case: Annotated[bool, "compare in lower case"] = False
    ignore_space: Annotated[bool, "one space for any white space, and none at the ends"] = True
    ignore_punctuation: Annotated[bool, "leave out ASCII punctuation"] = False

    def __post_init__(self) -> None:
        if self.extract is not None:
            compiled("extract", self.extract)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.answer,)

    @property
    def wants_answers(self) -> bool:
        return True

    def check(self, row: Mapping[str, Any]) -> None:
        right_answers(row, self.answer)

    def compared(self, text: str) -> str | None:
        """Return the part of a completion that is compared, normalized; None if `extract` finds
        nothing."""
        if self.extract is not None:
            matches = list(re.finditer(self.extract, text))
            if not matches:
                return None
            text = matches[-1].group(1 if matches[-1].re.groups else 0) or ""
        return self.normalized(text)

    def normalized(self, text: str) -> str:
        if self.ignore_case:
            text = text.lower()
        if self.ignore_punctuation:
            text = text.translate(_WITHOUT_PUNCTUATION)
        return " ".join(text.split()) if self.ignore_space else text

    def answers(self, row: Mapping[str, Any]) -> list[str]:
        """Return the right answers of a row, normalized."""
        return [self.normalized(answer) for answer in right_answers(row, self.answer)]


@dataclass(frozen=True)
class ExactMatch(Match):
    """1 if the completion, or what `extract` finds in it, equals the answer, else 0."""

    def score(
        self, text: str, row: Mapping[str, Any], token_ids: Sequence[int] | None
    ) -> float | Unscored:
        answers = self.answers(row)
        return float(self.compared(text) in answers)


@dataclass(frozen=True)
class FuzzyMatch(Match):
    """1 minus the Levenshtein distance to the answer over the longer length: from 0 to 1."""

    threshold: Annotated[float, at_least(0), at_most(1), "a lower similarity counts as 0"] = 0.0

    def prepare(self) -> None:
        try:
            import rapidfuzz  # noqa: F401
        except ImportError:
            raise IsobitError("reward fuzzy_match needs rapidfuzz: pip install rapidfuzz") from None

    def score(
        self, text: str, row: Mapping[str, Any], token_ids: Sequence[int] | None
    ) -> float | Unscored:
        from rapidfuzz.distance import Levenshtein

        answers = self.answers(row)
        compared = self.compared(text)
        if compared is None:
            return 0.0
        best = max(Levenshtein.normalized_similarity(compared, answer) for answer in answers)
        return best if best >= self.threshold else 0.0


@dataclass(frozen=True)
class FormatReward(NamedReward):
    """1 if the completion matches a regular expression, else 0."""

    pattern: Annotated[str, "regular expression of Python's `re`; required"] = ""
    match: Annotated[
        Literal["full", "search"], "the whole completion must match, or some part of it"
    ] = "full"
    flags: Annotated[str, "letters of inline flags: a, i, m, s, x"] = "s"

    def __post_init__(self) -> None:
        if not self.pattern:
            raise OptionError(("pattern",), "required, such as '<think>.*</think>.*'")
        if wrong := sorted(set(self.flags) - set("aimsx")):
            raise OptionError(("flags",), f"expected letters of a, i, m, s, x, got {wrong[0]!r}")
        compiled("pattern", self.pattern, self.flags)

    def score(
        self, text: str, row: Mapping[str, Any], token_ids: Sequence[int] | None
    ) -> float | Unscored:
        pattern = compiled("pattern", self.pattern, self.flags)
        return float(
            (pattern.fullmatch(text) if self.match == "full" else pattern.search(text)) is not None
        )


def compiled(key: str, pattern: str, flags: str = "") -> re.Pattern[str]:
    """Return the compiled pattern, from `re`'s cache. Raises OptionError for the option `key` if it
    is not a regular expression."""
    try:
        return re.compile(pattern, _flags(flags))
    except re.error as error:
        raise OptionError((key,), f"not a regular expression: {error}") from None


def right_answers(row: Mapping[str, Any], column: str) -> list[str]:
    """Return the answers of a row as text: one, or all of a list. Raises ValueError for a row
    without an answer."""
    value = row[column]
    several = isinstance(value, list) and not any(isinstance(item, Mapping) for item in value)
    try:
        if value == []:
            raise NoAnswer("an empty list")
        return [gold_text(answer) for answer in (value if several else [value])]
    except NoAnswer as error:
        raise ValueError(
            f"column {column!r}: expected text or a number, or a list of them, got {error.found}"
        ) from None


def _flags(letters: str) -> int:
    flags = 0
    for letter in letters:
        flags |= re.RegexFlag[letter.upper()]
    return flags
