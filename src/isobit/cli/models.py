"""Commands that use a model: `generate`, `inspect`, `export`."""

from pathlib import Path
from typing import Annotated

import typer

from isobit.cli import completion
from isobit.cli.app import (
    Adapters,
    Backend,
    Column,
    Consistency,
    Precision,
    Stop,
    TemplateKwargs,
    adapters,
    app,
    columns,
    lines_of_stdin,
    names,
    template_kwargs,
)
from isobit.errors import IsobitError

_Tools = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE:FUNCTION",
        help="a function that the model may call; may be given several times",
    ),
]
_Parser = Annotated[
    str | None,
    typer.Option(help="how the model writes calls of tools; default: found from its chat template"),
]


@app.command()
def generate(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL|RUN", help="a Hugging Face directory, or a run")
    ],
    prompt: Annotated[
        list[str] | None, typer.Option(help="may be given several times; default: lines of stdin")
    ] = None,
    n: Annotated[int, typer.Option("-n", help="completions per prompt")] = 1,
    max_new_tokens: Annotated[int, typer.Option()] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off")] = 0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    min_p: Annotated[float, typer.Option()] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off")] = 1.0,
    stop: Stop = None,
    seed: Annotated[int, typer.Option()] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="render each prompt with the model's chat template")
    ] = False,
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Jinja file, for a model without a chat template"),
    ] = None,
    chat_template_kwargs: TemplateKwargs = None,
    tools: _Tools = None,
    max_turns: Annotated[
        int, typer.Option(min=1, max=4000, help="turns of the model, with tools")
    ] = 8,
    parser: _Parser = None,
    adapter: Adapters = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="one JSON object per completion, with tokens and logprobs"),
    ] = False,
    precision: Precision = "fp8",
    consistency: Consistency = "bitwise",
    backend: Backend = "auto",
) -> None:
    """Sample completions with the rollout engine.

    \b
    isobit generate MODEL --prompt "Once upon a time" --max-new-tokens 64 -n 2
    echo "12+34=" | isobit generate MODEL --temperature 0
    isobit generate MODEL --adapter math=DIR --adapter code=RUN --prompt "Hello"   each answers, in one batch
    isobit generate MODEL --tools calculator.py:multiply --prompt "12 * 34"        it may call a function
    """
    from isobit.cli.commands.generate import print_completions
    from isobit.engine.types import Sampling
    from isobit.run.directory import model_directory
    from isobit.tasks.environments.settings import EnvironmentConfig

    if parser is not None and not tools:
        raise IsobitError(
            "--parser says how calls of tools are read; give --tools, or leave it out"
        )
    if not (chat or tools):
        _refuse_template(chat_template, chat_template_kwargs)
    prompts = list(prompt) if prompt else lines_of_stdin()
    numbers = n, max_new_tokens, temperature, top_k, top_p, min_p, seed
    sampling = Sampling(*numbers, tuple(stop or ()), repetition_penalty=repetition_penalty)
    print_completions(
        model_directory(model),
        prompts,
        sampling,
        (precision, backend, consistency),
        chat=chat,
        chat_template=chat_template,
        chat_template_kwargs=template_kwargs(chat_template_kwargs),
        adapters={name: model_directory(path) for name, path in adapters(adapter).items()},
        as_json=as_json,
        tools=EnvironmentConfig(tools=tuple(tools or ()), max_turns=max_turns, parser=parser),
    )


def _refuse_template(template: Path | None, variables: list[str] | None) -> None:
    """Raise IsobitError for a template of prompts that are text."""
    if template is not None or variables:
        option = "--chat-template" if template is not None else "--chat-template-kwargs"
        raise IsobitError(
            f"{option}: without --chat prompts are text, which no template renders; give --chat, or "
            "leave it out"
        )


@app.command()
def inspect(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL|RUN", help="a Hugging Face directory, or a run")
    ],
    presets: Annotated[
        str,
        typer.Option(metavar="A,B,C", help="precision flows", autocompletion=completion.presets),
    ] = "fp8,fp8-unified,bf16[engines=separate],fp8-rollout,fp8-rollout-kv,"
    "fp8-rollout-kv-verl,fp8-rollout-attention,fp8-e2e",
    prompts: Annotated[
        Path | None,
        typer.Option(help="file or directory; default: the model begins its own sequences"),
    ] = None,
    column: Column = None,
    decompose: Annotated[
        bool,
        typer.Option("--decompose", help="break down the mismatch of two-engine flows by source"),
    ] = False,
    stale: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="an older checkpoint; also shows the mismatch of weights that are synced late",
        ),
    ] = None,
    reward_model: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="a reward model; also shows how much the flows change its scores and ranks",
        ),
    ] = None,
    n: Annotated[int, typer.Option("-n", help="completions per prompt")] = 4,
    max_new_tokens: Annotated[int, typer.Option()] = 48,
    temperature: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int, typer.Option()] = 0,
    backend: Backend = "auto",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="also write inspection.html and .json")
    ] = None,
) -> None:
    """Show what number formats do to a model. Quantization noise of each tensor, and the mismatch of
    a real rollout under each flow.

    \b
    isobit inspect MODEL
    isobit inspect MODEL --presets fp8,fp8-rollout --decompose --out inspected
    isobit inspect MODEL --prompts gsm8k.jsonl --column prompt=question
    """
    from isobit.cli.commands.inspect import inspect_command
    from isobit.engine.types import Sampling
    from isobit.run.directory import model_directory

    sampling = Sampling(n, max_new_tokens, temperature, seed=seed)
    inspect_command(
        model_directory(model),
        names(presets),
        prompts,
        columns(column),
        sampling,
        decompose,
        stale,
        reward_model,
        backend,
        out,
    )


@app.command()
def export(
    source: Annotated[
        Path, typer.Argument(metavar="MODEL|RUN", help="a Hugging Face directory, or a run")
    ],
    to: Annotated[Path, typer.Option(metavar="DIR", help="must not exist yet, or be empty")],
    form: Annotated[
        str, typer.Option("--format", help="bf16, fp32, or fp8: blocks of 128x128")
    ] = "bf16",
    precision: Annotated[
        str | None,
        typer.Option(
            help="flow for the FP8 weights; default: the run's, or fp8",
            autocompletion=completion.presets,
        ),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="use a run's best model instead of its newest")
    ] = False,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge", help="add an adapter to its model's weights, and say what that loses"
        ),
    ] = False,
) -> None:
    """Write a Hugging Face checkpoint for other systems.

    \b
    isobit export runs/quickstart --to quickstart-bf16
    isobit export MODEL --format fp8 --to MODEL-FP8     FP8 blocks for vLLM, SGLang and transformers
    """
    from isobit.cli.commands.export import export as write

    print(write(source, to, form, precision, best=best, merge=merge))
