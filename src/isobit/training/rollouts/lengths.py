"""Check prompts against the length limits before a run starts: refuse the first prompt outside
them, or drop and count such prompts.

The limits are `task.min_prompt_tokens`, `task.max_prompt_tokens`, and what the model's context
leaves. A prompt that cannot be encoded, such as a chat that the model's template refuses, is never
dropped: it is an error, with its row.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isobit.data.dataset import Dataset, Example
from isobit.engine.prompts import encode
from isobit.engine.types import Sampling
from isobit.errors import IsobitError, printable
from isobit.model import Model, Tokenizer
from isobit.model.described import Described
from isobit.tasks.builtin import Task, TaskSettings

_ESCAPED = re.compile(r"\\[ntr](?![a-z])")


@dataclass(frozen=True)
class Fitted:
    """The task without dropped examples, and the example with the longest prompt to train on, for
    which an engine must have room."""

    task: Task
    longest: Example


def fit_prompts(
    task: Task,
    model: Model | Described,
    limits: TaskSettings,
    max_new_tokens: int,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    quiet: bool,
) -> Fitted:
    """Encode every prompt of the task, with the `tools` that its template is given, and keep those
    within the limits and the model's context less `max_new_tokens`. Raises IsobitError for the
    first prompt outside, unless such prompts are dropped; for a prompt that cannot be encoded; and
    where no example is left."""
    context = model.config.max_positions
    room = context - max_new_tokens
    if room < 1:
        raise IsobitError(
            f"sampling.max_new_tokens {max_new_tokens} leaves no room for a prompt in the "
            f"model's context of {context}"
        )
    lengths: dict[int, int] = {}
    seen: set[int] = set()

    def problem(example: Example) -> str | None:
        ids = encode_prompt(example, model, tools)
        seen.add(hash(tuple(ids)))
        tokens = len(ids)
        if tokens > room:
            left = (
                f"the model's context of {context} leaves {room} beside "
                f"sampling.max_new_tokens {max_new_tokens}"
            )
            return f"the prompt has {tokens} tokens: {left}"
        lengths[example.index] = tokens
        return outside(tokens, limits)

    held_out = keep(task.held_out, problem, limits, "held-out", quiet)
    lengths.clear()
    seen.clear()
    train = keep(task.train, problem, limits, "training", quiet)
    if not quiet:
        _say_alike(train, len(seen))
        say_ends(model)
        say_special_tokens([*train.examples, *held_out.examples], model)
    longest = max(train.examples, key=lambda example: lengths[example.index])
    return Fitted(replace(task, train=train, held_out=held_out), longest)


def _say_alike(train: Dataset, distinct: int) -> None:
    """Warn on stderr where all training prompts are the same tokens although their texts differ, as
    under a template that leaves the messages out."""
    first, *rest = train.examples
    if distinct == 1 and any(example.prompt != first.prompt for example in rest):
        print(
            f"warning: all {len(train):,} training prompts are the same tokens: the chat template "
            "writes nothing of what they say",
            file=sys.stderr,
        )


def say_special_tokens(examples: Sequence[Example], model: Model | Described) -> None:
    """Print on stderr how many special tokens the text of the prompts spells, and whether they are
    encoded as text or taken for the tokens; nothing where there are none."""
    tokenizer = model.tokenizer
    spelled = [word for example in examples for word in tokenizer.special_tokens_in(example.prompt)]
    say_spelled("prompts", spelled, tokenizer)


def say_spelled(whose: str, spelled: Sequence[str], tokenizer: Tokenizer) -> None:
    """Print on stderr how many special tokens are spelled in prompts or answers, and what becomes
    of them; nothing where there are none."""
    if spelled:
        rule = tokenizer.special_tokens_in_content
        done = "encoded as text" if rule == "escape" else "taken for the tokens"
        print(
            f"the {whose}' own text spells {len(spelled):,} special tokens, such as "
            f"{printable(spelled[0])}: {done} (task.special_tokens_in_content: {rule})",
            file=sys.stderr,
        )


def say_ends(model: Model | Described) -> None:
    """Print on stderr which tokens end a completion, where the model's files do not agree."""
    if model.tokenizer.ends is not None:
        print(printable(model.tokenizer.ends), file=sys.stderr)


def endings(model: Model | Described, sampling: Sampling) -> list[str]:
    """Return warnings for completions that cannot end before their limit, and for stop strings that
    cannot come."""
    warnings = [line for stop in sampling.stop if (line := _impossible(stop, model)) is not None]
    line = _endless(model, sampling)
    return [*warnings, *([] if line is None else [line])]


def _impossible(stop: str, model: Model | Described) -> str | None:
    """Return a warning about a stop string that no completion has, or None. One case is a backslash
    with a letter, which a shell, and YAML without double quotes, leave as they are."""
    if (written := _ESCAPED.search(stop)) is not None:
        means = {"n": "a line end", "t": "a tab", "r": "a carriage return"}[written[0][1]]
        return (
            f"warning: stop {stop!r} has a backslash and the letter {written[0][1]} in it; for "
            f"{means} write it in double quotes in YAML, or as $'{written[0]}' in a shell"
        )
    try:
        model.tokenizer.encode(stop, add_special=False)
    except IsobitError:
        return f"warning: stop {stop!r} never comes: the model's vocabulary cannot write it"
    return None


def _endless(model: Model | Described, sampling: Sampling) -> str | None:
    if model.tokenizer.eos_ids or sampling.stop or sampling.ignore_eos:
        return None
    return (
        "warning: the model names no end-of-sequence token (eos_token_id in "
        "generation_config.json or config.json, eos_token in tokenizer_config.json), so every "
        f"completion runs to {sampling.max_new_tokens} tokens; name one, or give sampling.stop"
    )


def encode_prompt(
    example: Example, model: Model | Described, tools: Sequence[Mapping[str, Any]] = ()
) -> list[int]:
    """Return the token ids of an example's prompt. Raises IsobitError, with the example's place,
    for a prompt that cannot be encoded."""
    try:
        if tools and not isinstance(example.prompt, str):
            return model.tokenizer.encode_chat(example.prompt, variables={"tools": list(tools)})
        return encode([example.prompt], model.tokenizer, model.config.vocab_size)[0]
    except IsobitError as error:
        raise IsobitError(f"{example.place}: {error}") from None


def first_prompt(
    example: Example, model: Model | Described, tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return a text with the prompt that a run starts with, as the model reads it: rendered, with
    its special tokens and these tools."""
    ids = encode_prompt(example, model, tools)
    text = (
        f"first prompt ({example.place}, {len(ids)} tokens):\n"
        f"{model.tokenizer.decode(ids, special=True)}"
    )
    if isinstance(example.prompt, str) and model.tokenizer.chat_template is not None:
        text += (
            "\n\nThe model has a chat template that this prompt does not use; task.chat: "
            "true would."
        )
    return text


def outside(tokens: int, limits: TaskSettings) -> str | None:
    """Return, in words, the limit of the config that a prompt of `tokens` tokens breaks, or
    None."""
    if limits.max_prompt_tokens is not None and tokens > limits.max_prompt_tokens:
        return (
            f"the prompt has {tokens} tokens: task.max_prompt_tokens is {limits.max_prompt_tokens}"
        )
    if tokens < limits.min_prompt_tokens:
        return (
            f"the prompt has {tokens} tokens: task.min_prompt_tokens is {limits.min_prompt_tokens}"
        )
    return None


def keep(
    data: Dataset,
    problem: Callable[[Example], str | None],
    limits: TaskSettings,
    name: str,
    quiet: bool,
) -> Dataset:
    """Return the examples without a problem. Raises IsobitError for the first example that has one,
    unless such examples are dropped, which is reported on stderr unless `quiet`; and where none is
    left."""
    first: str | None = None
    dropped: set[int] = set()
    for example in data.examples:
        wrong = problem(example)
        if wrong is None:
            continue
        first = first or f"{example.place}: {wrong}"
        if limits.too_long == "stop":
            raise IsobitError(
                f"{first}; change it or the limit, or leave such rows out with task.too_long: drop"
            )
        dropped.add(example.index)
    if first is None:
        return data
    if len(dropped) == len(data):
        raise IsobitError(f"no {name} example is within the limits of length; the first: {first}")
    if not quiet:
        count = f"{len(dropped):,} of {len(data):,}"
        text = f"{count} {name} examples dropped for their length; the first: {first}"
        print(printable(text), file=sys.stderr)
    return replace(
        data, examples=[example for example in data.examples if example.index not in dropped]
    )
