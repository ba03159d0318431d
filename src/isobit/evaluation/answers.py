"""The answer in a completion, as text that is equal where two completions agree: this is what a
majority vote counts.

`gsm8k` takes the final number (after `####`, or the last one). Other tasks take the content of the
last \\boxed{}, else what follows the last `####` in its line, else the whole text without outer
white space. A pattern replaces all of this. Left out: mathematical equality of answers that are
written differently, other than gsm8k's numbers.
"""

import re
from collections.abc import Callable

from isobit.errors import IsobitError, brief
from isobit.tasks.builtin.gsm8k import final_number
from isobit.tasks.rewards.named.marks import marked

Extract = Callable[[str], str | None]
"""A completion's answer, or None where it has none."""


def answer_extractor(task: str, pattern: str | None = None) -> Extract:
    """Return how the answer is taken from a completion of a task, or by a regular expression: its
    last match, and of that the first group where it has one. Raises IsobitError for a pattern that
    is not a regular expression."""
    if pattern is not None:
        return _by_pattern(pattern)
    return _final_number if task == "gsm8k" else marked_answer


def marked_answer(text: str) -> str | None:
    r"""Return the content of the last \boxed{}, else the line after the last ####, else the text;
    None if that is empty."""
    answer = marked(text)
    return (text if answer is None else answer).strip() or None


def _by_pattern(pattern: str) -> Extract:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise IsobitError(
            f"answer pattern {brief(pattern)!r}: not a regular expression: {error}"
        ) from None

    def extract(text: str) -> str | None:
        answer = None
        for match in compiled.finditer(text):
            answer = match[1] if compiled.groups else match[0]
        return answer.strip() or None if answer is not None else None

    return extract


def _final_number(text: str) -> str | None:
    number = final_number(text)
    return None if number is None else f"{(number + 0).normalize():f}"  # + 0: there is no -0
