"""`isobit generate`: prompts in, completions out, on stdout. Left out: scoring them
(`evaluate.py`)."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isobit.cli.commands.serving import open_serving
from isobit.engine.engine import Engine
from isobit.engine.prompts import Prompt
from isobit.engine.types import Completion, Sampling
from isobit.errors import IsobitError, printable
from isobit.model import Model, TextRules
from isobit.training.rollouts.lengths import say_ends


def print_completions(
    path: Path,
    prompts: list[str],
    sampling: Sampling,
    flow: tuple[str, str, str],
    *,
    chat: bool = False,
    chat_template: Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    adapters: Mapping[str, Path] | None = None,
    as_json: bool = False,
) -> None:
    """Sample `sampling.n` completions of every prompt, of several `adapters` by each of them, and
    print them.

    `flow` is (precision, backend, consistency), `adapters` PEFT folders by name. Raises IsobitError
    for a bad model, an empty prompt list, or a prompt longer than the model's context.
    """
    if not prompts:
        raise IsobitError("no prompt: give --prompt, or lines on standard input")
    several = adapters if adapters is not None and len(adapters) > 1 else {}
    rules = TextRules(chat_template=chat_template, chat_template_kwargs=chat_template_kwargs or {})
    if several:
        model = open_serving(path, several, flow, rules)
    else:
        model = Model.load(
            path, *flow, adapter=next(iter((adapters or {}).values()), None), rules=rules
        )
    say_ends(model)
    requests: list[Prompt] = [[{"role": "user", "content": p}] if chat else p for p in prompts]
    if found := [word for prompt in prompts for word in model.tokenizer.special_tokens_in(prompt)]:
        print(f"{len(found):,} special tokens in the prompts are encoded as text", file=sys.stderr)
    engine = Engine(model)
    engine.calibrate(requests)
    names: list[str | None] = [*several] or [None]
    asked = [(number, name) for number in range(len(prompts)) for name in names]
    ids, named = [number for number, _ in asked], [name for _, name in asked]
    groups = engine.generate([requests[number] for number in ids], sampling, ids, adapters=named)
    for number, group in zip(ids, groups):
        prompt = prompts[number]
        for completion in group:
            print(
                _line(prompt, completion)
                if as_json
                else printable(_text(prompt, completion, chat, sampling.n))
            )


def _line(prompt: str, completion: Completion) -> str:
    text = json.dumps({"prompt": prompt, **asdict(completion)}, ensure_ascii=False)
    return "".join(c if printable(c) == c else json.dumps(c)[1:-1] for c in text)


def _text(prompt: str, completion: Completion, chat: bool, n: int) -> str:
    text = completion.text if chat else prompt + completion.text
    number = f"{completion.prompt_id}.{completion.sample_index}" if n > 1 else ""
    heading = " ".join(part for part in (completion.adapter, number) if part)
    return f"[{heading}] {text}" if heading else text
