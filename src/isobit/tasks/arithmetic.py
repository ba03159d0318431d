"""Arithmetic: additions, subtractions and multiplications of numbers with d digits, made here, seeded.

A prompt is `123+456=`, the gold completion `579`. Training and held-out problems are disjoint. Left out: division.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from isobit.errors import IsobitError
from isobit.tasks.data import Dataset, Example, TaskSettings
from isobit.tasks.task import RewardSpec, Task, read_options, refuse_file

_DEFAULTS: dict[str, Any] = {"digits": 3, "operators": "+", "train_size": 20000}
_HELD_OUT = 512


def load(settings: TaskSettings) -> Task:
    """Options: digits (1 to 9), operators (some of +-*), train_size. Raises IsobitError for others."""
    refuse_file(settings)
    options = read_options(settings, _DEFAULTS)
    digits, operators = options["digits"], options["operators"]
    if not 1 <= digits <= 9:
        raise IsobitError(f"task.options.digits: expected 1 to 9, got {digits}")
    if not operators or set(operators) - set("+-*"):
        raise IsobitError(f"task.options.operators: expected some of +-*, got {operators!r}")
    held_out = _HELD_OUT if settings.held_out_size is None else settings.held_out_size
    count = held_out + options["train_size"]
    possible = (10**digits - 10 ** (digits - 1)) ** 2 * len(operators)
    if options["train_size"] < 1 or count > possible:
        raise IsobitError(f"task.options.train_size: expected 1 to {possible - held_out}, got {options['train_size']}")
    examples = _problems(count, digits, operators, settings.seed)
    return Task(
        name="arithmetic",
        train=Dataset(examples[held_out:], settings.seed),
        held_out=Dataset(examples[:held_out], settings.seed),
        rewards=(RewardSpec("isobit.tasks.arithmetic:reward", name="correct"),),
        gold=lambda columns: str(columns["answer"]),
        alphabet="0123456789=-" + operators,
    )


def reward(prompts: list[str], completions: list[str], answer: list[int], **columns: Any) -> list[float]:
    """1 where the completion is the answer and nothing else, else 0."""
    return [float(completion == str(right)) for completion, right in zip(completions, answer)]


def _problems(count: int, digits: int, operators: str, seed: int) -> list[Example]:
    """`count` distinct problems."""
    generator = np.random.Generator(np.random.Philox(key=seed))
    low, high = 10 ** (digits - 1), 10**digits
    seen: dict[tuple[int, int, int], None] = {}
    while len(seen) < count:
        drawn = zip(
            generator.integers(low, high, count).tolist(),
            generator.integers(low, high, count).tolist(),
            generator.integers(0, len(operators), count).tolist(),
        )
        seen |= dict.fromkeys(drawn)
    return [_example(left, right, operators[symbol]) for left, right, symbol in list(seen)[:count]]


def _example(left: int, right: int, operator: str) -> Example:
    results: Mapping[str, int] = {"+": left + right, "-": left - right, "*": left * right}
    return Example(f"{left}{operator}{right}=", {"answer": results[operator]})
