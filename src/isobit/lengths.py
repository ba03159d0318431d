"""Prompts against the limits of their length, before a run starts: named, or dropped and counted.

The limits are `task.min_prompt_tokens`, `task.max_prompt_tokens`, and what the model's context leaves. A prompt that
cannot be encoded, such as a chat that the model's template refuses, is never dropped: it is an error, with its row.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from isobit.config import TaskConfig
from isobit.engine.prompts import encode
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.tasks import Dataset, Example, Task

_Encoded = TypeVar("_Encoded")


@dataclass(frozen=True)
class Fitted:
    """The task without what was dropped; token ids of its training and held-out prompts."""

    task: Task
    train: list[list[int]]
    held_out: list[list[int]]


def fit_prompts(task: Task, model: Model, limits: TaskConfig, max_new_tokens: int, *, quiet: bool) -> Fitted:
    """Encode every prompt of the task, and keep those within the limits and the model's context less
    `max_new_tokens`. Raises IsobitError for the first that is outside, unless such are dropped; for what cannot be
    encoded; and where nothing is left to train on."""
    context = model.config.max_positions
    if max_new_tokens >= context:
        raise IsobitError(
            f"sampling.max_new_tokens {max_new_tokens} leaves no room for a prompt in the model's context of {context}"
        )

    def problem(ids: list[int]) -> str | None:
        room = context - max_new_tokens
        if len(ids) > room:
            left = f"the model's context of {context} leaves {room} beside sampling.max_new_tokens {max_new_tokens}"
            return f"the prompt has {len(ids)} tokens: {left}"
        return outside(len(ids), limits)

    def encoded(example: Example) -> list[int]:
        return encode_prompt(example, model)

    train, train_ids = keep(task.train, encoded, problem, limits, "training", quiet)
    held_out, held_out_ids = keep(task.held_out, encoded, problem, limits, "held-out", quiet)
    return Fitted(replace(task, train=train, held_out=held_out), train_ids, held_out_ids)


def encode_prompt(example: Example, model: Model) -> list[int]:
    """Token ids of an example's prompt. Raises IsobitError with its place."""
    try:
        return encode([example.prompt], model.tokenizer, model.config.vocab_size)[0]
    except IsobitError as error:
        raise IsobitError(f"{example.place}: {error}") from None


def outside(tokens: int, limits: TaskConfig) -> str | None:
    """Which limit of the config a prompt of so many tokens breaks, or None."""
    if limits.max_prompt_tokens is not None and tokens > limits.max_prompt_tokens:
        return f"the prompt has {tokens} tokens: task.max_prompt_tokens is {limits.max_prompt_tokens}"
    if tokens < limits.min_prompt_tokens:
        return f"the prompt has {tokens} tokens: task.min_prompt_tokens is {limits.min_prompt_tokens}"
    return None


def keep(
    data: Dataset,
    encoded: Callable[[Example], _Encoded],
    problem: Callable[[_Encoded], str | None],
    limits: TaskConfig,
    name: str,
    quiet: bool,
) -> tuple[Dataset, list[_Encoded]]:
    """The examples without a problem, and their encodings. Raises IsobitError for the first that has one, unless such
    are dropped, which is said on stderr."""
    kept: list[Example] = []
    encodings: list[_Encoded] = []
    first: str | None = None
    for example in data.examples:
        found = encoded(example)
        wrong = problem(found)
        if wrong is None:
            kept.append(example)
            encodings.append(found)
            continue
        first = first or f"{example.place}: {wrong}"
        if limits.too_long == "stop":
            raise IsobitError(f"{first}; change it or the limit, or leave such rows out with task.too_long: drop")
    if first is None:
        return data, encodings
    if not kept:
        raise IsobitError(f"no {name} example is within the limits of length; the first: {first}")
    if not quiet:
        dropped = len(data) - len(kept)
        print(
            f"{dropped:,} of {len(data):,} {name} examples dropped for their length; the first: {first}",
            file=sys.stderr,
        )
    return replace(data, examples=kept), encodings
