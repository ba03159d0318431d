"""Log-probabilities of prompts: the model's forward over them, between two steps of the engine, by
the weights that a request's answers are sampled from.

They are those of `Model.logprobs`, at temperature 1, and so the learner's (tests/serve/
test_prompts.py). Left out: how responses tell them (`prompts.py`, `tinker/wire.py`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from isobit.engine.types import Top
from isobit.serve.gateway import Gateway
from isobit.serve.requests import BadRequest
from isobit.serve.snapshots import Snapshot

MOST_PROMPT_TOP, _AT_ONCE = 1 << 18, 1024
"""Likeliest tokens of prompts in one request, of all places together; and as many as are computed
before others have a turn: each is a pass over the vocabulary."""


@dataclass(frozen=True)
class Scores:
    """Of a prompt of n tokens: `logprobs` [n], NaN where none is asked, and of the first token, in
    front of which nothing stands; `tops` [n]: the likeliest tokens in the place of each, none where
    none are asked; None: nowhere."""

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


async def score(
    gateway: Gateway, tenant: str, prompt: Sequence[int], held: Snapshot, scored: int, top: int
) -> Scores:
    """Scores of the last `scored` tokens of a prompt, by a snapshot that is held. Raises Refused
    and BadRequest."""
    first = len(prompt) - scored
    found = await gateway.work(tenant, partial(_logprobs, gateway, prompt, held))
    logprobs = [math.nan] * first + [math.nan, *found][first:]
    if not top:
        return Scores(logprobs, None)
    known, rows = max(first, 1), max(_AT_ONCE // top, 1)
    tops: list[Top] = [[] for _ in range(known)]
    if len(prompt) > 1:
        parts = gateway.model.top_logprobs_in_parts(prompt, top, rows, known, held.served)
        while part := await gateway.work(tenant, partial(_next, gateway, held, parts)):
            tops += part
    return Scores(logprobs, tops)


def _logprobs(gateway: Gateway, prompt: Sequence[int], held: Snapshot) -> list[float]:
    """On the device thread."""
    gateway.device.snapshots.check(held)
    found: list[float] = gateway.model.logprobs([prompt], adapter=held.served)[0].tolist()
    return found


def _next(gateway: Gateway, held: Snapshot, parts: Iterator[list[Top]]) -> list[Top]:
    """On the device thread: the next part of the likeliest tokens, by the same weights; at the end
    none."""
    gateway.device.snapshots.check(held)
    return next(parts, [])
