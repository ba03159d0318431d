"""Arithmetic: additions, subtractions and multiplications, made here, such as "123+456=" with the
answer "579".

A problem is a number p in [0, operators * span^2) that names an operator and two operands. Problems
come in an order that a seed decides; the first ones are held out, and neither they nor their mirror
(456+123 for 123+456) are ever trained on. Completions are compared as text: digits and nothing
else.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, overload

from isobit.data.answers import completion_text
from isobit.data.dataset import SPLIT_STREAM, Dataset, Example, check_template, random_words
from isobit.errors import IsobitError
from isobit.options.declare import Pattern, at_least, at_most
from isobit.options.reading import OptionError
from isobit.tasks.builtin.task import SEED, Task, TaskSettings, alphabet_of, made_here
from isobit.tasks.rewards.spec import RewardSpec

HINTED = "{};{}"
"""A prompt that shows the answer first."""
REWARD = RewardSpec("isobit.tasks.builtin.arithmetic:reward", name="correct")
DEFAULT_TRAIN_SIZE = 20_000
DEFAULT_HELD_OUT_SIZE = 512


def _some_operators(text: str) -> bool:
    return bool(text) and set(text) <= set("+-*") and len(set(text)) == len(text)


_SOME = "some of + - *, each once"
Operators = Annotated[str, Pattern(_SOME, _some_operators), _SOME]


@dataclass(frozen=True)
class ArithmeticOptions:
    """The problems that the task makes: operators, digits, and the order of an answer's digits."""

    digits: Annotated[int, at_least(1), at_most(8), "most digits of an operand"] = 3
    min_digits: Annotated[
        int | None, at_least(1), "fewest digits of an operand; default: `digits`"
    ] = None
    operators: Operators = "+"
    reverse: Annotated[bool, "the answer's lowest digit first, which small models learn faster"] = (
        False
    )
    hints: Annotated[
        float,
        at_least(0),
        at_most(1),
        "share of the training examples whose prompt shows the answer first, such as "
        "579;123+456=. From these a model learns to use a demonstration",
    ] = 0.0
    pairs: Annotated[
        bool,
        "for a loss of pairs: the columns chosen, the answer, and rejected, which has a wrong digit",
    ] = False
    labels: Annotated[
        bool,
        "for loss: kto: the columns completion, the answer or for about half of the examples one "
        "with a wrong digit, and label, whether it is right",
    ] = False
    train_size: Annotated[
        int | None, at_least(1), at_most(2_000_000), "default: 20,000, or all there are"
    ] = None
    seed: SEED = 0

    def __post_init__(self) -> None:
        if self.min_digits is not None and self.min_digits > self.digits:
            raise OptionError(
                ("min_digits",),
                f"must not be above digits, got {self.min_digits} and {self.digits}",
            )

    @property
    def low(self) -> int:
        """The smallest operand; one digit includes 0."""
        digits = self.digits if self.min_digits is None else self.min_digits
        return 0 if digits == 1 else 10 ** (digits - 1)

    @property
    def span(self) -> int:
        """The number of different operands."""
        return 10**self.digits - self.low


class Problems(Sequence[Example]):
    """Problem numbers as examples, made when they are asked for: a number takes 8 bytes, an example
    600."""

    def __init__(
        self,
        numbers: Sequence[int],
        options: ArithmeticOptions,
        template: str | None,
        hints: float = 0.0,
    ) -> None:
        self._numbers, self._options, self._template = numbers, options, template
        self._hints = hints

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, i: int) -> Example: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Example]: ...
    def __getitem__(self, i: int | slice) -> Example | Sequence[Example]:
        if isinstance(i, slice):
            return Problems(self._numbers[i], self._options, self._template, self._hints)
        operator, left, right = operands(self._numbers[i], self._options)
        reverse = self._options.reverse
        question, answer = f"{left}{operator}{right}=", gold_answer(operator, left, right, reverse)
        prompt = (
            question if self._template is None else self._template.replace("{prompt}", question)
        )
        columns: dict[str, Any] = {"answer": answer}
        mixed = _mixed(self._numbers[i])
        wrong, right = with_wrong_digit(answer, mixed), mixed >> 31 == 0
        if self._options.pairs:
            columns |= {"chosen": answer, "rejected": wrong}
        if self._options.labels:
            columns |= {"completion": answer if right else wrong, "label": right}
        if mixed % 1000 < 1000 * self._hints:
            prompt = HINTED.format(answer, prompt)
        return Example(i % len(self), prompt, columns)


def load(settings: TaskSettings) -> Task:
    """Build the task from its options. The answer is the gold completion."""
    options, size = made_here(ArithmeticOptions, settings, DEFAULT_HELD_OUT_SIZE, template=True)
    template = settings.prompt_template
    check_template(template)
    held_out, train = problem_numbers(options, size)
    text = (template or "").replace("{prompt}", "")
    return Task(
        "arithmetic",
        Dataset(Problems(train, options, template, options.hints), settings.seed, settings.shuffle),
        Dataset(Problems(held_out, options, template), settings.seed),
        (REWARD,),
        gold="answer",
        alphabet=alphabet_of("0123456789=-" + options.operators + text + ";" * (options.hints > 0)),
    )


def problem_numbers(options: ArithmeticOptions, held_out_size: int) -> tuple[list[int], list[int]]:
    """Return (held out, train): distinct problems, and no mirror of a held-out one in train."""
    size = len(options.operators) * options.span**2
    wanted = DEFAULT_TRAIN_SIZE if options.train_size is None else options.train_size
    order = _distinct(size, options.seed)
    held_out = list(islice(order, held_out_size))
    barred = set(held_out) | {mirror(number, options) for number in held_out}
    train = list(islice((number for number in order if number not in barred), wanted))
    if (
        len(held_out) < held_out_size
        or not train
        or (options.train_size is not None and len(train) < wanted)
    ):
        raise IsobitError(
            f"task {options.digits} digits, operators {options.operators!r}: there are {size} "
            "problems, too few for "
            f"{held_out_size} held out and {options.train_size or 'some'} to train on"
        )
    return held_out, train


def operands(number: int, options: ArithmeticOptions) -> tuple[str, int, int]:
    """Return (operator, left, right) of a problem number."""
    rest, right = divmod(number, options.span)
    operator, left = divmod(rest, options.span)
    return options.operators[operator], left + options.low, right + options.low


def mirror(number: int, options: ArithmeticOptions) -> int:
    """Return the number of the problem with the two operands exchanged."""
    rest, right = divmod(number, options.span)
    operator, left = divmod(rest, options.span)
    return (operator * options.span + right) * options.span + left


def gold_answer(operator: str, left: int, right: int, reverse: bool = False) -> str:
    """Return the right completion: a decimal number. `reverse`: digits from the lowest on, after
    the sign."""
    value = left + right if operator == "+" else left - right if operator == "-" else left * right
    digits = str(abs(value))
    return ("-" if value < 0 else "") + (digits[::-1] if reverse else digits)


def with_wrong_digit(answer: str, number: int) -> str:
    """Return the answer with one digit replaced by another; `number` chooses the position and the
    digit."""
    digits_at = [i for i, character in enumerate(answer) if character.isdigit()]
    number, choice = divmod(number, len(digits_at))
    at = digits_at[choice]
    digit = (int(answer[at]) + 1 + number % 9) % 10
    return f"{answer[:at]}{digit}{answer[at + 1 :]}"


def _mixed(number: int) -> int:
    """Return a pseudo-random number below 2 ** 32 for a number (the finalizer of MurmurHash3):
    those of neighbours have nothing in common."""
    number &= 0xFFFFFFFF
    number = ((number ^ (number >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    number = ((number ^ (number >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return number ^ (number >> 16)


def reward(
    prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[str], **columns: Any
) -> list[float]:
    """Return 1.0 where the completion, outer white space aside, is the answer and nothing else,
    else 0.0."""
    return [
        float(completion_text(c).strip() == a) for c, a in zip(completions, answer, strict=True)
    ]


def _distinct(size: int, seed: int) -> Iterator[int]:
    """Yield the numbers below `size`, each once, in the order in which Philox words (modulo size)
    first name them.

    Ends early when a million words in a row name nothing new, which only happens when nearly all
    numbers have been yielded.
    """
    seen: set[int] = set()
    count = 1 << 12
    start = 0
    while len(seen) < size and start < 64 * size + (1 << 20):
        for word in random_words(seed, SPLIT_STREAM, start + count)[start:].tolist():
            number = word % size
            if number not in seen:
                seen.add(number)
                yield number
        start, count = start + count, start + count
