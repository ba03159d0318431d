"""`isobit generate`: prompts in, completions out, on stdout. Left out: scoring them (`evaluate.py`)."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from isobit.engine.engine import Engine
from isobit.engine.prompts import Prompt
from isobit.engine.types import Completion, Sampling
from isobit.errors import IsobitError, printable
from isobit.model import Model


def print_completions(
    path: Path,
    prompts: list[str],
    sampling: Sampling,
    flow: tuple[str, str, str],
    *,
    chat: bool = False,
    chat_template: Path | None = None,
    adapter: Path | None = None,
    as_json: bool = False,
) -> None:
    """Sample `sampling.n` completions of every prompt and print them.

    `flow` is (precision, backend, consistency), `adapter` a PEFT folder. Raises IsobitError for a bad model, an empty
    prompt list, or a prompt longer than the model's context.
    """
    if not prompts:
        raise IsobitError("no prompt: give --prompt, or lines on standard input")
    precision, backend, consistency = flow
    model = Model.load(path, precision, backend, consistency, adapter=adapter)
    if chat_template is not None:
        model.tokenizer.use_template(chat_template)
    requests: list[Prompt] = [[{"role": "user", "content": p}] if chat else p for p in prompts]
    if found := [word for prompt in prompts for word in model.tokenizer.special_tokens_in(prompt)]:
        print(f"{len(found):,} special tokens in the prompts are encoded as text", file=sys.stderr)
    engine = Engine(model)
    engine.calibrate(requests)
    groups = engine.generate(requests, sampling)
    for prompt, group in zip(prompts, groups):
        for completion in group:
            print(_line(prompt, completion) if as_json else printable(_text(prompt, completion, chat, sampling.n)))


def _line(prompt: str, completion: Completion) -> str:
    text = json.dumps({"prompt": prompt, **asdict(completion)}, ensure_ascii=False)
    return "".join(c if printable(c) == c else json.dumps(c)[1:-1] for c in text)


def _text(prompt: str, completion: Completion, chat: bool, n: int) -> str:
    text = completion.text if chat else prompt + completion.text
    heading = f"[{completion.prompt_id}.{completion.sample_index}] " if n > 1 else ""
    return f"{heading}{text}"
