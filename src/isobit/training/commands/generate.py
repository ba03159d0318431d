"""`isobit generate`: prompts in, completions out, on stdout. Left out: scoring them
(`evaluate.py`)."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from isobit.config.commands import GenerateConfig
from isobit.data.dataset import Example
from isobit.engine.engine import Engine
from isobit.engine.episodes import Episodes
from isobit.engine.prompts import Prompt
from isobit.engine.types import Completion
from isobit.errors import IsobitError, printable
from isobit.model import Model
from isobit.model.adapters.peft import check_served
from isobit.model.hub.checkpoint import model_folder
from isobit.run.directory import model_directory
from isobit.tasks.environments.pool import EnvironmentPool
from isobit.training.commands.serving import open_serving, rules_of
from isobit.training.parts.assembly import open_dialogue
from isobit.training.rollouts.lengths import endings, say_ends


def print_completions(
    config: GenerateConfig,
    prompts: list[str],
    *,
    chat: bool = False,
    adapters: Mapping[str, Path] | None = None,
    as_json: bool = False,
) -> None:
    """Sample completions of every prompt, of several `adapters` by each of them, and print them.
    With an environment they are conversations, in which the model may call its tools, which run in
    their own processes.

    `adapters`: PEFT folders by name. Raises IsobitError for a bad model, an empty prompt list, or a
    prompt longer than the model's context.
    """
    if not prompts:
        raise IsobitError("no prompt: give --prompt, or lines on standard input")
    path = model_directory(Path(config.model.path))
    sampling = replace(config.sampling, n=config.sampling.group_size, seed=config.seed)
    several = adapters if adapters is not None and len(adapters) > 1 else {}
    flow, rules = (config.precision, config.backend, config.consistency), rules_of(config.model)
    if several:
        model = open_serving(path, several, flow, rules)
    else:
        adapter = next(iter((adapters or {}).values()), None)
        if adapter is not None:
            check_served(model_folder(adapter, "adapter"), model_folder(path))
        model = Model.load(path, *flow, adapter=adapter, rules=rules)
    say_ends(model)
    for line in endings(model, sampling):
        print(printable(line), file=sys.stderr)
    if sampling.greedy and sampling.n > 1:
        print(
            "warning: temperature 0 is greedy: the completions of a prompt are equal",
            file=sys.stderr,
        )
    chat = chat or config.environment.used
    requests: list[Prompt] = [[{"role": "user", "content": p}] if chat else p for p in prompts]
    if words := [word for prompt in prompts for word in model.tokenizer.special_tokens_in(prompt)]:
        print(f"{len(words):,} special tokens in the prompts are encoded as text", file=sys.stderr)
    engine = Engine(model, config.engine)
    engine.calibrate(requests)
    names: list[str | None] = [*several] or [None]
    questions = [(number, name) for number in range(len(prompts)) for name in names]
    ids, named = [number for number, _ in questions], [name for _, name in questions]
    if config.environment.used:
        examples = [Example(number, requests[number], {}) for number in ids]  # type: ignore[arg-type]
        tools = config.environment
        with EnvironmentPool(tools) as pool:
            dialogue = open_dialogue(tools, tools.max_tokens, model, pool, examples[0])
            groups = Episodes(engine, dialogue).generate(examples, sampling, ids, None, named)
    else:
        asking = [requests[number] for number in ids]
        groups = engine.generate(asking, sampling, ids, adapters=named)
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
    if completion.episode is not None:
        text = "\n".join(map(_said, completion.episode.messages))
    number = f"{completion.prompt_id}.{completion.sample_index}" if n > 1 else ""
    heading = " ".join(word for word in (completion.adapter, number) if word)
    return f"[{heading}] {text}" if heading else text


def _said(message: Mapping[str, Any]) -> str:
    """Return a message of a conversation: what the model said and which tools it called, or what a
    tool answered."""
    if message["role"] != "assistant":
        name = message.get("name")
        return f"[{message['role']}{'' if name is None else f' {name}'}] {message['content']}"
    calls = [call["function"] for call in message.get("tool_calls", ())]
    called = [f"{request['name']}({json.dumps(request['arguments'])})" for request in calls]
    return "\n".join(line for line in (message["content"], *called) if line)
