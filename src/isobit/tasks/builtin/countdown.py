"""Countdown: reach a target from given numbers with + - * / and parentheses.

Problems are made by combining the numbers at random, so that each has a solution, which is kept as
the gold completion; every intermediate result of it is a positive integer. A completion is one
expression. It is parsed by a recursive descent over at most 256 characters, evaluated in exact
fractions, never by `eval`:

    sum = product (("+" | "-") product)*      product = atom (("*" | "/") atom)*      atom = integer | "(" sum ")"
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

from isobit.data.answers import completion_text
from isobit.data.dataset import Dataset, Example, check_template
from isobit.errors import IsobitError
from isobit.options.declare import at_least, at_most
from isobit.options.reading import OptionError
from isobit.tasks.builtin.task import SEED, Task, TaskSettings, alphabet_of, draws_of, made_here
from isobit.tasks.rewards.spec import RewardSpec

REWARD = RewardSpec("isobit.tasks.builtin.countdown:reward", name="correct")
DEFAULT_HELD_OUT_SIZE = 256
MAX_CHARACTERS = 256
MAX_DEPTH = 32  # open parentheses
MAX_DIGITS = 9  # of one number
MAX_MISSES = 100_000  # draws in a row that give no new problem

_TOKEN = re.compile(r"\s*(?:([0-9]+)|([-+*/()]))")
_SIGNS = str.maketrans(
    {"\N{MULTIPLICATION SIGN}": "*", "\N{DIVISION SIGN}": "/", "\N{MINUS SIGN}": "-"}
)


class ExpressionError(ValueError):
    """Text that is not an expression of this grammar, is over its limits, or divides by zero."""


@dataclass(frozen=True)
class CountdownOptions:
    """The problems that the task makes, and the expressions that solve them."""

    min_numbers: Annotated[int, at_least(2), "fewest numbers that are given"] = 3
    max_numbers: Annotated[int, at_least(2), at_most(8), "most numbers that are given"] = 4
    max_number: Annotated[int, at_least(2), at_most(10_000), "the largest of them"] = 50
    max_target: Annotated[int, at_least(2), at_most(1_000_000), "the largest target"] = 100
    use_all: Annotated[bool, "every number must be used exactly once; else at most once"] = True
    train_size: Annotated[int, at_least(1), at_most(1_000_000), "problems to train on"] = 5_000
    seed: SEED = 0

    def __post_init__(self) -> None:
        if self.min_numbers > self.max_numbers:
            text = f"must not be above max_numbers, got {self.min_numbers} and {self.max_numbers}"
            raise OptionError(("min_numbers",), text)


def load(settings: TaskSettings) -> Task:
    """Build the task from its options; a prompt is such as "3 5 7 -> 26: ", or a template with
    {numbers} and {target}."""
    options, held = made_here(CountdownOptions, settings, DEFAULT_HELD_OUT_SIZE, template=True)
    template = settings.prompt_template or "{prompt}"
    check_template(template, ("prompt", "numbers", "target"))
    examples = [
        _example(i if i < held else i - held, problem, options.use_all, template)
        for i, problem in enumerate(problems(options, held + options.train_size))
    ]
    return Task(
        "countdown",
        Dataset(examples[held:], settings.seed, settings.shuffle),
        Dataset(examples[:held], settings.seed),
        (REWARD,),
        gold="solution",
        alphabet=alphabet_of(
            "0123456789+-*/() >:" + re.sub(r"\{(prompt|numbers|target)\}", "", template)
        ),
    )


def problems(options: CountdownOptions, count: int) -> list[tuple[list[int], int, str]]:
    """Draw `count` problems (numbers, target, solution), no two with the same numbers and target.
    Raises IsobitError where the options give fewer."""
    draws = draws_of(options.seed)
    drawn: dict[tuple[tuple[int, ...], int], tuple[list[int], int, str]] = {}
    misses = 0
    while len(drawn) < count:
        misses += 1
        if misses > MAX_MISSES:
            raise IsobitError(
                f"task countdown: these options give only about {len(drawn)} problems, {count} are "
                "asked for (train_size + held_out_size); raise max_number or max_target"
            )
        span = options.max_numbers - options.min_numbers + 1
        numbers = [
            1 + next(draws) % options.max_number
            for _ in range(options.min_numbers + next(draws) % span)
        ]
        target, solution = _combine(numbers, draws)
        key = (tuple(sorted(numbers)), target)
        if target <= options.max_target and target not in numbers and key not in drawn:
            drawn[key] = (numbers, target, solution)
            misses = 0
    return list(drawn.values())


def reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    numbers: Sequence[Sequence[int]],
    target: Sequence[int],
    **columns: Any,
) -> list[float]:
    """Return 1.0 where the completion is an expression of the numbers that equals the target, else
    0.0.

    Each number is used exactly once, or at most once where a column `use_all` is false.
    """
    use_all = columns.get("use_all", [True] * len(completions))
    return [
        float(solves(completion_text(completion), *problem))
        for completion, *problem in zip(completions, numbers, target, use_all, strict=True)
    ]


def solves(text: str, numbers: Sequence[int], target: int, use_all: bool = True) -> bool:
    """Return whether `text` is an expression that equals the target and uses only `numbers`, each
    at most as often as it occurs; with `use_all` exactly as often."""
    try:
        value, used = evaluate(text)
    except ExpressionError:
        return False
    available, taken = Counter(numbers), Counter(used)
    return value == target and (taken == available if use_all else taken <= available)


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Return (exact value, the integers in it from left to right) of an expression. Raises
    ExpressionError."""
    text = text.strip()
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(f"longer than {MAX_CHARACTERS} characters")
    parser = _Parser(_tokens(text.translate(_SIGNS)))
    value = parser.sum(0)
    if parser.position != len(parser.tokens):
        raise ExpressionError(f"unexpected {parser.tokens[parser.position]!r}")
    return value, parser.used


class _Parser:
    """A recursive-descent parser over the tokens; each method consumes what its grammar rule
    describes."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0
        self.used: list[int] = []

    def next_is(self, choices: str) -> bool:
        return self.position < len(self.tokens) and self.tokens[self.position] in choices

    def take(self) -> str:
        if self.position == len(self.tokens):
            raise ExpressionError("ends too early")
        self.position += 1
        return self.tokens[self.position - 1]

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while self.next_is("+-"):
            value = (
                value + self.product(depth) if self.take() == "+" else value - self.product(depth)
            )
        return value

    def product(self, depth: int) -> Fraction:
        value = self.atom(depth)
        while self.next_is("*/"):
            if self.take() == "*":
                value *= self.atom(depth)
                continue
            divisor = self.atom(depth)
            if divisor == 0:
                raise ExpressionError("division by zero")
            value /= divisor
        return value

    def atom(self, depth: int) -> Fraction:
        token = self.take()
        if token == "(":
            if depth == MAX_DEPTH:
                raise ExpressionError(f"more than {MAX_DEPTH} open parentheses")
            value = self.sum(depth + 1)
            if self.take() != ")":
                raise ExpressionError("expected )")
            return value
        if not token.isdigit():
            raise ExpressionError(f"unexpected {token!r}")
        if len(token) > MAX_DIGITS:
            raise ExpressionError(f"a number of more than {MAX_DIGITS} digits")
        self.used.append(int(token))
        return Fraction(int(token))


def _example(
    index: int, problem: tuple[list[int], int, str], use_all: bool, template: str
) -> Example:
    numbers, target, solution = problem
    listed = " ".join(map(str, numbers))
    prompt = template.replace("{prompt}", f"{listed} -> {target}: ")
    prompt = prompt.replace("{numbers}", listed).replace("{target}", str(target))
    columns = {"numbers": numbers, "target": target, "solution": solution, "use_all": use_all}
    return Example(index, prompt, columns)


def _tokens(text: str) -> list[str]:
    tokens = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ExpressionError(f"unexpected {text[position]!r}")
        tokens.append(match[1] or match[2])
        position = match.end()
    return tokens


def _combine(numbers: list[int], draws: Iterator[int]) -> tuple[int, str]:
    """Combine all the numbers, two at a time, by random operators that keep the results positive
    integers."""
    items = [(value, str(value)) for value in numbers]
    while True:
        (a, left), (b, right) = (items.pop(next(draws) % len(items)) for _ in range(2))
        results = [(a + b, "+"), (a * b, "*")]
        if a > b:
            results.append((a - b, "-"))
        if a % b == 0:
            results.append((a // b, "/"))
        value, operator = results[next(draws) % len(results)]
        text = f"{left}{operator}{right}"
        if not items:
            return value, text
        items.append((value, f"({text})"))
