"""Log-probabilities of prompts: the model's forward over them, between two steps of the engine, by
the weights that a request's answers are sampled from.

They are those of `Model.logprobs`, at temperature 1, and so the learner's (tests/serve/
test_prompts.py). Left out: how responses tell them (`prompts.py`, `tinker/wire.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from isobit.engine.types import Top
from isobit.serve.gateway import Gateway
from isobit.serve.requests import BadRequest
from isobit.serve.snapshots import Snapshot

MOST_PROMPT_TOP = 4096
"""Likeliest tokens of prompts in one request, of all places together: each is a pass over the
vocabulary, while others wait."""


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
    return await gateway.work(tenant, partial(_score, gateway, prompt, held, scored, top))


def _score(
    gateway: Gateway, prompt: Sequence[int], held: Snapshot, scored: int, top: int
) -> Scores:
    """On the device thread."""
    gateway.device.snapshots.check(held)
    model, first = gateway.model, len(prompt) - scored
    found = [math.nan, *model.logprobs([prompt], adapter=held.served)[0].tolist()]
    logprobs = [math.nan] * first + found[first:]
    if not top:
        return Scores(logprobs, None)
    known = max(first, 1)
    tops = model.top_logprobs(prompt, top, known, held.served) if len(prompt) > 1 else []
    return Scores(logprobs, [*[[] for _ in range(known)], *tops])
