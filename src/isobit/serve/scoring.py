"""Log-probabilities of prompts: the model's forward over them, between two steps of the engine, by
the weights that a request's answers are sampled from.

They are those of `Model.logprobs`, at temperature 1, and so the learner's (tests/serve/
test_prompts.py). Left out: when a part of them is computed (`device.py`), and how responses tell
them (`prompts.py`, `tinker/wire.py`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isobit.engine.types import Top
from isobit.model import Model
from isobit.serve.requests import BadRequest

MOST_PROMPT_TOP, _AT_ONCE = 1 << 18, 1024
"""Likeliest tokens of prompts in one request, of all places together; and as many as are computed
before others have a turn: each is a pass over the vocabulary."""


@dataclass(frozen=True)
class Scoring:
    """The scores to compute of a prompt: log-probabilities of its `last` tokens, 0: of none, and
    the `top` likeliest tokens in the place of each."""

    last: int
    top: int


@dataclass(frozen=True)
class Scores:
    """The scores of a prompt of n tokens: `logprobs` [n], NaN where none is asked, and for the
    first token, which has no token in front; `tops` [n]: the likeliest tokens in the place of each,
    none where none are asked; None: nowhere."""

    logprobs: list[float]
    tops: list[Top] | None


def check_top(scored: int, top: int, key: str, instead: str) -> None:
    """Raise BadRequest where the `top` likeliest tokens in `scored` places are too many."""
    if scored * top > MOST_PROMPT_TOP:
        raise BadRequest(
            f"{key}: at most {MOST_PROMPT_TOP:,} of a request, got {top} for {scored:,} tokens; "
            f"{instead}",
            key,
        )


def scores_in_parts(
    model: Model, prompt: Sequence[int], adapter: str | None, asked: Scoring
) -> Iterator[Scores | None]:
    """Yield the scores of a prompt by an `adapter` that the model serves, None: by the base. Before
    them comes None after each part of the work, so that others can have a turn. Raises IsobitError
    as `Model.logprobs`."""
    if not asked.last:
        yield Scores([math.nan] * len(prompt), None)
        return
    first = len(prompt) - asked.last
    values: list[float] = model.logprobs([prompt], adapter=adapter)[0].tolist()
    logprobs = [math.nan] * first + [math.nan, *values][first:]
    if not asked.top:
        yield Scores(logprobs, None)
        return
    yield None
    known, rows = max(first, 1), max(_AT_ONCE // asked.top, 1)
    tops: list[Top] = [[] for _ in range(known)]
    if len(prompt) > 1:
        for chunk in model.top_logprobs_in_parts(prompt, asked.top, rows, known, adapter):
            tops += chunk
            yield None
    yield Scores(logprobs, tops)
