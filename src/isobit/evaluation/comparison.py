"""Two results on the same prompts: the difference in every measure with its paired interval, a test
of each, and one sentence with the conclusion.

Greedy accuracy is tested by McNemar's exact test, every other measure by sign flips of the
differences per prompt (`paired.py`). Differences are of the first result minus the second.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from isobit.data.dataset import Prompt
from isobit.errors import IsobitError, brief, listed
from isobit.evaluation.paired import mcnemar, sign_flip
from isobit.evaluation.result import Result
from isobit.evaluation.summary import (
    LENGTHS,
    beside_each_other,
    number,
    results_table,
    unscored,
    values_per_prompt,
)
from isobit.monitor.report.intervals import Estimate, bootstrap_mean
from isobit.monitor.report.tables import text_table

ALONE = "(none)"
"""The line of a model without an adapter."""
LEVEL = 0.05
FEWEST = math.ceil(math.log2(2 / LEVEL))
"""Prompts from which on a test can fall below LEVEL: both tests give 2 · 2^-n where one side is
better on all n."""


@dataclass(frozen=True)
class PairedDifference:
    """A measure of both, their paired difference, and its p value; `only_first` and `only_second`,
    of accuracy: prompts that one of the two alone gets right."""

    first: float
    second: float
    difference: Estimate
    p: float
    only_first: int | None = None
    only_second: int | None = None


def compare(first: Result, second: Result) -> dict[str, PairedDifference]:
    """Return the paired difference in every measure that both have. Raises IsobitError unless both
    answer the same prompts by the same rewards."""
    _check_same(first, second)
    columns = [values_per_prompt(result.questions, result.ks) for result in (first, second)]
    differences = {}
    for name in [name for name in columns[0] if name in columns[1]]:
        pairs = [
            (a, b)
            for a, b in zip(columns[0][name], columns[1][name])
            if a is not None and b is not None
        ]
        if pairs:
            differences[name] = _difference(name, pairs)
    return differences


def comparison_json(differences: Mapping[str, PairedDifference]) -> dict[str, Any]:
    """Return plain values of a comparison."""
    return {name: asdict(difference) for name, difference in differences.items()}


def comparison_table(first: Result, second: Result) -> str:
    """Return the comparison as plain text, the sentence included."""
    differences = compare(first, second)
    rows = [["", "A", "B", "A - B", "95 % interval", "p"]]
    for name, result in differences.items():
        low, high = (_signed(x, name) for x in (result.difference.low, result.difference.high))
        values = [
            number(result.first, name),
            number(result.second, name),
            _signed(result.difference.value, name),
        ]
        rows.append([name, *values, f"{low} to {high}", f"{result.p:.2g}"])
    accuracy = differences["accuracy"]
    count = len(first.questions)
    both = sum(
        a.greedy.correct and b.greedy.correct for a, b in zip(first.questions, second.questions)
    )
    lines = [
        f"A: {first.model}\nB: {second.model}",
        text_table(rows, rule=True),
        f"of {count} prompts A alone answers {accuracy.only_first} correctly, B alone "
        f"{accuracy.only_second}, both {both}\np: exact McNemar test for accuracy, sign-flip test "
        f"of the paired differences for the rest; not corrected for being {len(differences)} tests",
        conclusion(differences),
    ]
    return "\n\n".join(lines)


def adapters_table(base: Result, adapters: Mapping[str, Result]) -> str:
    """Return a table of a model alone and with each of several adapters: a line for each, then each
    paired with the model alone, and a sentence for each."""
    differences = {name: compare(result, base) for name, result in adapters.items()}
    rows = [["adapter - none", "measure", "difference", "95 % interval", "p"]]
    for name, paired in differences.items():
        for measure in (measure for measure in beside_each_other(base.ks) if measure in paired):
            pair = paired[measure]
            value, low, high = (
                _signed(x, measure)
                for x in (pair.difference.value, pair.difference.low, pair.difference.high)
            )
            rows.append([name, measure, value, f"{low} to {high}", f"{pair.p:.2g}"])
    sentences = [conclusion(paired, name, ALONE) for name, paired in differences.items()]
    lines = [
        f"{base.model}, with {len(adapters)} adapters and alone",
        results_table("adapter", {ALONE: base, **adapters}),
        text_table(rows, rule=True),
        "p: exact McNemar test for accuracy, sign-flip test of the paired differences for the "
        f"rest; not corrected for being {len(rows) - 1} tests",
        "\n".join(f"{name}: {sentence}" for name, sentence in zip(differences, sentences)),
    ]
    notes = [
        f"{name}: {note}"
        for name, result in ({ALONE: base} | dict(adapters)).items()
        for note in unscored(result)
    ]
    return "\n\n".join([*lines, *notes])


def conclusion(
    differences: Mapping[str, PairedDifference], first: str = "A", second: str = "B"
) -> str:
    """Return the conclusion in a sentence: on accuracy; on the measure after it where both score
    the same on every prompt; and so on. `first` and `second` are what the sentence calls the
    two."""
    scores = {name: pair for name, pair in differences.items() if name not in LENGTHS}
    count = max(pair.difference.prompts for pair in scores.values())
    if (smallest := 2 * 0.5**count) > LEVEL:
        return (
            f"Too few prompts to tell: of {count}, p is {smallest:.2g} even if {first} is "
            "better on every one; below "
            f"{FEWEST} no difference can be shown, and small ones take hundreds."
        )
    telling = [
        name
        for name, pair in scores.items()
        if (pair.difference.low, pair.difference.high) != (0, 0)
    ]
    if not telling:
        return "No difference is shown: the two score the same on every prompt."
    name, pair = telling[0], differences[telling[0]]
    low, high = (_signed(x, name) for x in (pair.difference.low, pair.difference.high))
    size = (
        f"{_signed(pair.difference.value, name)} (95 % interval {low} to {high}), p = {pair.p:.2g}"
    )
    if pair.p > LEVEL:
        return (
            f"No difference is shown in {name}: {first} - {second} is {size}; a difference inside "
            "the interval is not ruled out."
        )
    better, worse = (first, second) if pair.difference.value > 0 else (second, first)
    return f"{better} is better than {worse} in {name}: {first} - {second} is {size}."


def _difference(name: str, pairs: list[tuple[float, float]]) -> PairedDifference:
    deltas = [a - b for a, b in pairs]
    first, second = (sum(values) / len(pairs) for values in zip(*pairs))
    difference = bootstrap_mean(deltas)
    if name != "accuracy":
        return PairedDifference(first, second, difference, sign_flip(deltas))
    only_first, only_second = sum(d > 0 for d in deltas), sum(d < 0 for d in deltas)
    return PairedDifference(
        first, second, difference, mcnemar(only_first, only_second), only_first, only_second
    )


def check_same_prompts(
    first_name: str, first: list[Prompt], second_name: str, second: list[Prompt]
) -> None:
    """Raise IsobitError, with the first difference, unless the prompts are the same, in the same
    order."""
    names = f"{first_name} and {second_name} cannot be paired"
    if len(first) != len(second):
        counts = f"{len(first)} and {len(second)}"
        raise IsobitError(f"{names}: they have {counts} prompts; evaluate both on the same ones")
    for i, (a, b) in enumerate(zip(first, second)):
        if a != b:
            raise IsobitError(
                f"{names}: prompt {i} is {_excerpt(a)} in one and {_excerpt(b)} in the other; "
                "evaluate both on the same prompts"
            )


def _check_same(first: Result, second: Result) -> None:
    check_same_prompts(first.model, first.prompts, second.model, second.prompts)
    if first.rewards != second.rewards:
        names = " and ".join(listed(result.rewards) or "none" for result in (first, second))
        raise IsobitError(
            f"{first.model} and {second.model} cannot be compared: their rewards differ: {names}"
        )


def _excerpt(prompt: object) -> str:
    return brief(repr(prompt))


def _signed(value: float, name: str) -> str:
    return f"{value:+.1f}" if name == "tokens" else f"{value:+.4f}"
