"""Countdown: reach a target from given numbers with + - * /, each number used exactly once. Made here, seeded,
solvable.

A completion is an expression, or ends with one after the last `=`-free line or `answer:`; it is parsed by a small
recursive parser over exact fractions, never evaluated as code.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from isobit.errors import IsobitError
from isobit.tasks.data import Dataset, Example, TaskSettings
from isobit.tasks.task import RewardSpec, Task, read_options, refuse_file

_DEFAULTS: dict[str, Any] = {"numbers": 3, "largest": 20, "train_size": 5000}
_HELD_OUT = 256
_LONGEST = 200  # characters of an expression that are parsed
_TOKEN = re.compile(r"\s*(\d+|[-+*/()])")


def load(settings: TaskSettings) -> Task:
    """Options: numbers (2 to 6), largest (of the numbers), train_size."""
    refuse_file(settings)
    options = read_options(settings, _DEFAULTS)
    if not 2 <= options["numbers"] <= 6:
        raise IsobitError(f"task.options.numbers: expected 2 to 6, got {options['numbers']}")
    if not 3 <= options["largest"] <= 999 or options["train_size"] < 1:
        raise IsobitError("task.options: expected largest from 3 to 999, and train_size of at least 1")
    held_out = _HELD_OUT if settings.held_out_size is None else settings.held_out_size
    examples = _problems(held_out + options["train_size"], options["numbers"], options["largest"], settings.seed)
    return Task(
        name="countdown",
        train=Dataset(examples[held_out:], settings.seed),
        held_out=Dataset(examples[:held_out], settings.seed),
        rewards=(RewardSpec("isobit.tasks.countdown:reward", name="correct"),),
        gold=lambda columns: str(columns["solution"]),
        alphabet="0123456789+-*/() ->:",
    )


def reward(
    prompts: list[str], completions: list[str], numbers: list[list[int]], target: list[int], **columns: Any
) -> list[float]:
    """1 for an expression over exactly the given numbers that equals the target, else 0."""
    return [float(_solves(c, n, t)) for c, n, t in zip(completions, numbers, target)]


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """The value of an arithmetic expression and the numbers in it; None if it is not one, or divides by zero."""
    if len(expression) > _LONGEST:
        return None
    tokens, position = [], 0
    while expression[position:].strip():
        match = _TOKEN.match(expression, position)
        if match is None or len(match.group(1)) > 9:
            return None
        tokens.append(match.group(1))
        position = match.end()
    parser = _Parser(tokens)
    try:
        value = parser.sum()
    except (ValueError, ZeroDivisionError):
        return None
    return (value, parser.numbers) if parser.position == len(tokens) else None


class _Parser:
    """Recursive descent: sum = product {(+|-) product}; product = atom {(*|/) atom}; atom = number | ( sum )."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.position, self.numbers = tokens, 0, list[int]()

    def sum(self) -> Fraction:
        value = self.product()
        while self.peek() in ("+", "-"):
            value = value + self.product() if self.next() == "+" else value - self.product()
        return value

    def product(self) -> Fraction:
        value = self.atom()
        while self.peek() in ("*", "/"):
            value = value * self.atom() if self.next() == "*" else value / self.atom()
        return value

    def atom(self) -> Fraction:
        token = self.next()
        if token == "(":
            value = self.sum()
            if self.next() != ")":
                raise ValueError("unbalanced parenthesis")
            return value
        self.numbers.append(int(token))
        return Fraction(int(token))

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def next(self) -> str:
        token = self.peek()
        self.position += 1
        return token


def _solves(completion: str, numbers: list[int], target: int) -> bool:
    lines = completion.strip().splitlines()
    text = lines[-1].rpartition(":")[2].partition("=")[0] if lines else ""
    result = evaluate(text)
    return result is not None and result[0] == target and sorted(result[1]) == sorted(numbers)


def _problems(count: int, numbers: int, largest: int, seed: int) -> list[Example]:
    generator = np.random.Generator(np.random.Philox(key=seed))
    seen: dict[str, Example] = {}
    for _ in range(200 * count + 1000):
        if len(seen) == count:
            return list(seen.values())
        example = _problem([int(n) for n in generator.integers(1, largest + 1, numbers)], generator)
        if example is not None:
            seen.setdefault(str(example.prompt), example)
    raise IsobitError(f"task countdown: fewer than {count} different problems; raise numbers or largest")


def _problem(numbers: list[int], generator: np.random.Generator) -> Example | None:
    """Join the numbers by random operations, each giving a positive whole number; None if that fails."""
    value, solution = numbers[0], str(numbers[0])
    for number in numbers[1:]:
        operator = "+-*/"[int(generator.integers(4))]
        results: Mapping[str, Fraction] = {
            "+": Fraction(value + number),
            "-": Fraction(value - number),
            "*": Fraction(value * number),
            "/": Fraction(value, number),
        }
        result = results[operator]
        if result.denominator != 1 or not 0 < result <= 10_000:
            return None
        value, solution = int(result), f"({solution}{operator}{number})"
    order = generator.permutation(len(numbers))
    shown = [numbers[int(i)] for i in order]
    columns = {"numbers": shown, "target": value, "solution": solution}
    return Example(f"{' '.join(map(str, shown))} -> {value}: ", columns)
