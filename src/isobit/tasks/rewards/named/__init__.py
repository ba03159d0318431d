"""Rewards by a bare name: `function: math`, with `options`. One table says which there are.

`python -m isobit.tasks.rewards.named` prints that table as docs/how-to/rewards.md has it. Left out: a
user's functions (`functions.py`).
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from isobit.errors import brief
from isobit.options.declare import options_of, type_text
from isobit.options.reading import OptionError, read
from isobit.tasks.rewards.named.base import NamedReward
from isobit.tasks.rewards.named.code import Code
from isobit.tasks.rewards.named.length import LengthPenalty
from isobit.tasks.rewards.named.math_answer import MathAnswer
from isobit.tasks.rewards.named.text import ExactMatch, FormatReward, FuzzyMatch

NAMES: dict[str, type[NamedReward]] = {
    "math": MathAnswer,
    "exact_match": ExactMatch,
    "fuzzy_match": FuzzyMatch,
    "format": FormatReward,
    "length_penalty": LengthPenalty,
    "code": Code,
}

__all__ = [
    "NAMES",
    "NamedReward",
    "build",
    "markdown",
]


def build(name: str, options: Mapping[str, Any], deadline_s: float | None = None) -> NamedReward:
    """Build the reward of this name. Raises OptionError for an unknown name or option, and where
    the time limit of one sample is not below the deadline."""
    if name not in NAMES:
        close = get_close_matches(name, NAMES, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        text = (
            f"unknown reward {brief(name)!r}; {hint}by name there are {', '.join(NAMES)}; "
            "your own is file.py:function"
        )
        raise OptionError(("function",), text)
    reward = read(NAMES[name], options, ("options",))
    if (
        deadline_s is not None
        and reward.time_limit_s is not None
        and reward.time_limit_s >= deadline_s
    ):
        raise OptionError(
            ("options", "timeout_s"),
            f"must be below deadline_s, got {reward.time_limit_s:g} and {deadline_s:g}",
        )
    return reward


def markdown() -> str:
    """Return the documentation of the rewards by name: the table of names, then each one's
    options."""
    lines = ["| name | reward |", "|---|---|"]
    lines += [f"| `{name}` | {_summary(schema)} |" for name, schema in NAMES.items()]
    for name, schema in NAMES.items():
        lines += [
            "",
            f"Options of `{name}`:",
            "",
            "| option | type | default | |",
            "|---|---|---|---|",
        ]
        for option in options_of(schema).values():  # type: ignore[arg-type]
            kind = type_text(option.kind).replace(" | ", " or ")
            default = "" if option.default in (None, "") else f"`{option.default}`"
            lines.append(f"| `{option.name}` | {kind} | {default.lower()} | {option.text} |")
    return "\n".join(lines) + "\n"


def _summary(schema: type[NamedReward]) -> str:
    return " ".join((schema.__doc__ or "").partition("\n\n")[0].split())
