"""Guess: find a secret number of a range in a few turns, such as in "12-42". After each guess the
model hears whether the secret is higher (">") or lower ("<").

With 10 numbers and 4 guesses, halving what is left finds every secret, and trying the lowest number
that is left 0.4 of them. The game is an environment (`Guess`), and its reward is one of
two: `sparse` is 1 for the secret and 0 otherwise; `dense` also pays for what the guesses have shown
of another secret, log(numbers / numbers left) / log(2 numbers): as if to name it were one bit more.
Both are 1 for games that are won and for no other.

Held out are ranges that are never trained on. With `demonstrations` the examples are single turns
for supervised training: games so far, each with the middle of what is left or, twice as often, its
lowest number. Who plays so heeds every hint, and wins 0.62 of such games.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from isobit.data.dataset import SPLIT_STREAM, Dataset, Example, permutation
from isobit.data.turns import Step, Turn
from isobit.errors import IsobitError
from isobit.options.declare import at_least, at_most
from isobit.tasks.builtin.task import (
    PRINTABLE,
    SEED,
    Task,
    TaskSettings,
    draws_of,
    made_here,
    user_says,
)

DEFAULT_HELD_OUT_SIZE = 256
_HELD_OUT_RANGES = 8  # one of so many


@dataclass(frozen=True)
class GuessOptions:
    """The games that are played: their ranges of numbers, the guesses allowed, and the reward."""

    numbers: Annotated[int, at_least(2), at_most(1000), "numbers in a range"] = 31
    largest: Annotated[int, at_least(2), at_most(9999), "the largest number of all ranges"] = 99
    guesses: Annotated[int, at_least(1), at_most(100), "guesses in a game"] = 5
    reward: Annotated[
        Literal["dense", "sparse"],
        "sparse: 1 for the secret. dense: 1 for the secret, else less for what the guesses have shown",
    ] = "sparse"
    demonstrations: Annotated[
        bool,
        "examples are single turns to learn from: the middle of what is left, or its lowest number",
    ] = False
    train_size: Annotated[int, at_least(1), at_most(1_000_000), "examples to train on"] = 4_000
    seed: SEED = 0


def load(settings: TaskSettings) -> Task:
    """Build the task from its options: games, or single turns of games as demonstrations."""
    options, size = made_here(GuessOptions, settings, DEFAULT_HELD_OUT_SIZE)
    train, held_out = ranges(options)
    make = _turns if options.demonstrations else _games
    return Task(
        "guess",
        Dataset(make(options, train, options.train_size, 0), settings.seed, settings.shuffle),
        Dataset(make(options, held_out, size, 1), settings.seed),
        gold="guess" if options.demonstrations else None,
        alphabet=PRINTABLE,
    )


def ranges(options: GuessOptions) -> tuple[list[int], list[int]]:
    """Return the lowest numbers of the ranges to train on, then of the held-out ranges, each
    sorted."""
    count = options.largest - options.numbers + 1
    if count < _HELD_OUT_RANGES:
        raise IsobitError(
            f"task.options.largest: {options.largest} leaves {max(count, 0)} ranges of "
            f"{options.numbers} numbers; at least {_HELD_OUT_RANGES} are needed"
        )
    order = [1 + offset for offset in permutation(count, options.seed, SPLIT_STREAM)]
    return sorted(order[count // _HELD_OUT_RANGES :]), sorted(order[: count // _HELD_OUT_RANGES])


def _games(options: GuessOptions, lows: list[int], size: int, stream: int) -> list[Example]:
    draws = draws_of(options.seed, stream)
    return [_game(options, lows, index, draws) for index in range(size)]


def _game(options: GuessOptions, lows: list[int], index: int, draws: Iterator[int]) -> Example:
    low = lows[next(draws) % len(lows)]
    columns = {
        "low": low,
        "high": low + options.numbers - 1,
        "secret": low + next(draws) % options.numbers,
        "guesses": options.guesses,
        "dense": options.reward == "dense",
    }
    return Example(index, [user_says(f"{low}-{columns['high']}")], columns)


def _turns(options: GuessOptions, lows: list[int], size: int, stream: int) -> list[Example]:
    """Return `size` single turns of games, whose guess is the middle of the range that is left or
    its lowest number."""
    draws, examples = draws_of(options.seed, stream + 2), list[Example]()
    while len(examples) < size:
        game = _game(options, lows, 0, draws)
        low, high, secret = (game.columns[key] for key in ("low", "high", "secret"))
        chat = [user_says(f"{low}-{high}")]
        for _ in range(options.guesses):
            guess = low if next(draws) % 3 else (low + high) // 2
            examples.append(Example(len(examples), list(chat), {"guess": str(guess)}))
            if guess == secret:
                break
            low, high = left_after(low, high, guess, secret)
            reply = {"role": "assistant", "content": str(guess)}
            chat += [reply, user_says(">" if secret > guess else "<")]
    return examples[:size]


def left_after(low: int, high: int, guess: int, secret: int) -> tuple[int, int]:
    """Return the lowest and highest number that are left after a guess that is not the secret."""
    return (max(low, guess + 1), high) if secret > guess else (low, min(high, guess - 1))


class Guess:
    """The environment of one game."""

    def reset(
        self, low: int, high: int, secret: int, guesses: int, dense: bool, **columns: Any
    ) -> None:
        """Begin a game with a row's secret. Adds nothing to the prompt, which names the range."""
        self._low, self._high, self._secret, self._numbers = low, high, secret, high - low + 1
        self._guesses, self._dense = guesses, dense

    async def step(self, turn: Turn) -> Step:
        """Answer a guess with ">" or "<", the side on which the secret lies, or "?" for text that
        is not a number."""
        text = turn.content.strip()
        guess = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else None
        hint = "?" if guess is None else ">" if self._secret > guess else "<"
        if guess == self._secret:
            self._low = self._high = self._secret
        elif guess is not None:
            self._low, self._high = left_after(self._low, self._high, guess, self._secret)
        done = guess == self._secret or turn.number + 1 >= self._guesses
        return Step((user_says(hint),), self._reward(guess == self._secret), done)

    def _reward(self, solved: bool) -> float:
        if solved or not self._dense:
            return float(solved)
        left = self._high - self._low + 1
        return math.log(self._numbers / left) / math.log(2 * self._numbers)
