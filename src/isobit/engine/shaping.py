"""The amounts that a request adds to the logits of single tokens, and the tokens that it forbids.

All of it is a function of the request and of the tokens of its answer so far, so a row's bits depend
neither on its batch nor on the order of the work (tests/engine/test_shaping.py). A row's repetition
penalty comes first, then the amounts, which are added in one sum for each token, then the mask; a
token that is forbidden has logit -inf: probability 0. Left out: grammars
(`serve/structured.py`), and the tensors of a step (`changes.py`).
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from isobit.errors import IsobitError

if TYPE_CHECKING:
    from isobit.engine.token_bits import Bits


class Matcher(Protocol):
    """The state of a grammar behind the tokens of one answer."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Go on by tokens that were sampled. Raises IsobitError."""

    def allow(self, bits: "Bits") -> None:
        """Set the bits of the tokens that may come next, and clear all others. Raises
        IsobitError."""


class Grammar(Protocol):
    """A set of texts that an answer may be."""

    def begin(self) -> Matcher:
        """Return the state in front of an answer."""


class Forbidden(IsobitError):
    """The error of a `request` whose answer cannot go on: no token is allowed, or its grammar has
    failed."""

    def __init__(self, message: str, request: Hashable) -> None:
        super().__init__(message)
        self.request = request


@dataclass(frozen=True)
class Shaping:
    """The amounts and bounds of the tokens of an answer.

    `presence_penalty` is taken off the logit of each token that the answer has already, and
    `frequency_penalty` once for each time; `bias` adds to the logits of tokens. Only the `allowed`
    tokens may come, None: all. `banned`: sequences of tokens that may not stand in it. None of the
    tokens `ends` comes before it has `min_tokens`. `grammar`: the texts that it may be."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    banned: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    ends: tuple[int, ...] = ()
    grammar: Grammar | None = None

    def amounts(self, answer: Sequence[int]) -> dict[int, float]:
        """Return what is added to the logits of tokens behind an `answer` so far."""
        amounts = dict(self.bias)
        if self.presence_penalty or self.frequency_penalty:
            for token, count in Counter(answer).items():
                less = self.presence_penalty + self.frequency_penalty * count
                amounts[token] = amounts.get(token, 0.0) - less
        return amounts

    def mask(self, bits: "Bits", answer: Sequence[int], matcher: Matcher | None) -> None:
        """Write the tokens that may follow an `answer` so far into `bits`, which has all of the
        vocabulary's set. Raises IsobitError where its `matcher` does."""
        from isobit.engine.token_bits import bits_of

        if matcher is not None:
            matcher.allow(bits)
        if self.allowed is not None:
            only = self._only
            bits[: len(only)] &= only[: len(bits)]
            bits[len(only) :] = 0
        forbidden = [
            words[-1]
            for words in self.banned
            if len(words) == 1 or tuple(answer[1 - len(words) :]) == words[:-1]
        ]
        if len(answer) < self.min_tokens:
            forbidden += self.ends
        out = bits_of(forbidden)
        bits[: len(out)] &= ~out[: len(bits)]

    @cached_property
    def _only(self) -> "Bits":
        from isobit.engine.token_bits import bits_of

        return bits_of(self.allowed or ())


@dataclass(eq=False)
class Shaped:
    """The place of a sequence in its grammar: a `matcher`, and the number of tokens that it has
    `accepted`."""

    matcher: Matcher
    accepted: int = 0

    def go_on(self, answer: Sequence[int]) -> Matcher:
        """Return the matcher behind an `answer` so far. Raises IsobitError."""
        self.matcher.accept(answer[self.accepted :])
        self.accepted = len(answer)
        return self.matcher
