"""`math`: whether the last answer of a completion is equivalent to the right one, by math-verify.

The answer is the text marked as such (`marks.py`), else the one that math-verify finds in the text.
math-verify reads LaTeX and plain expressions and compares them with SymPy: 1/2 = 0.5 = \\frac{1}{2}
(`math_compare.py`).

SymPy can take arbitrarily long, as on 9^(9^9). One clock (SIGALRM, so in the main thread of a
process, as the workers' is) is set over the whole comparison; if the time runs out, the completion
is unscored, with the reason, and never 0. A computation that holds the interpreter is ended with
its worker, at the function's deadline.
"""

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Annotated, Any, ClassVar

from isobit.errors import IsobitError
from isobit.options.declare import at_least, at_most
from isobit.tasks.rewards.by_name import Unscored
from isobit.tasks.rewards.named.base import NamedReward
from isobit.tasks.rewards.named.math_compare import (
    cleaned,
    last_answer,
    read_answer,
    read_completion,
    same,
)
from isobit.tasks.rewards.named.text import right_answers


class _TimeOut(BaseException):
    """The end of the clock's time. It is not an Exception, since math-verify and SymPy catch
    those."""


@dataclass(frozen=True)
class MathAnswer(NamedReward):
    """1 if the last answer of the completion is mathematically equivalent to the right one
    (math-verify), else 0."""

    answer: Annotated[
        str, "column of the right answer, or of a list of right answers; LaTeX or plain"
    ] = "answer"
    timeout_s: Annotated[
        float, at_least(0.1), "seconds for one completion; then it is unscored"
    ] = 5.0
    precision: Annotated[
        int, at_least(0), at_most(15), "decimals to which floating-point numbers are compared"
    ] = 6
    strict: Annotated[
        bool, "do not equate sets with tuples or intervals, or variables of different names"
    ] = True

    chunk_size: ClassVar[int | None] = 1

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.answer,)

    @property
    def time_limit_s(self) -> float | None:
        return self.timeout_s

    def prepare(self) -> None:
        try:
            import math_verify  # noqa: F401
        except ImportError:
            raise IsobitError("reward math needs math-verify: pip install math-verify") from None
        import logging

        # it warns that its own clock is off: ours is on
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def check(self, row: Mapping[str, Any]) -> None:
        self._right(row)

    def score(
        self, text: str, row: Mapping[str, Any], token_ids: Sequence[int] | None
    ) -> float | Unscored:
        answers = self._right(row)
        try:
            with _clock(self.timeout_s):
                answer = read_completion(text)
                equal = any(
                    same(read_answer(right), answer, self.precision, self.strict)
                    for right in answers
                )
        except _TimeOut:
            return Unscored(f"math-verify took more than {self.timeout_s:g} s")
        return float(equal)

    def _right(self, row: Mapping[str, Any]) -> list[str]:
        answers = right_answers(row, self.answer)
        for answer in answers:
            if not cleaned(last_answer(answer)):
                raise ValueError(
                    f"column {self.answer!r}: no mathematical answer in {answer!r:.60}"
                )
        return [last_answer(answer) for answer in answers]


@contextmanager
def _clock(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise _TimeOut

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
