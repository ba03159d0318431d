"""Commands that use a model: `generate`, `inspect`, `export`."""

from pathlib import Path
from typing import Annotated

import typer

from isobit.cli import completion
from isobit.cli.app import (
    Adapters,
    Backend,
    Column,
    Overrides,
    adapters,
    app,
    lines_of_stdin,
    names,
)
from isobit.cli.keys import KeyCommand, Short, formerly, pairs
from isobit.errors import IsobitError


class _Generate(KeyCommand):
    shorts = (
        Short("-n", "sampling.group_size"),
        Short("--max-new-tokens", "sampling.max_new_tokens"),
        Short("--temperature", "sampling.temperature"),
        Short("--top-k", "sampling.top_k"),
        Short("--top-p", "sampling.top_p"),
        Short("--stop", "sampling.stop"),
        Short("--seed", "seed"),
        Short("--chat-template", "model.chat_template"),
        Short("--tools", "environment.tools"),
        Short("--max-turns", "environment.max_turns"),
        Short("--precision", "precision"),
        Short("--backend", "backend"),
        *formerly(
            min_p="sampling.min_p",
            repetition_penalty="sampling.repetition_penalty",
            chat_template_kwargs="model.chat_template_kwargs",
            parser="environment.parser",
            consistency="consistency",
        ),
    )

    @staticmethod
    def schema() -> type:
        from isobit.config.commands import GenerateConfig

        return GenerateConfig


@app.command(cls=_Generate)
def generate(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL|RUN", help="a Hugging Face directory, or a run")
    ],
    overrides: Overrides = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="may be given several times; default: lines of stdin")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="render each prompt with the model's chat template")
    ] = False,
    adapter: Adapters = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="one JSON object per completion, with tokens and logprobs"),
    ] = False,
) -> None:
    """Sample completions with the rollout engine. Keys are those of a training config.

    \b
    isobit generate MODEL --prompt "Once upon a time" --max-new-tokens 64 -n 2
    echo "12+34=" | isobit generate MODEL --temperature 0
    isobit generate MODEL sampling.min_p=0.1 consistency=exact --prompt "Hello"
    isobit generate MODEL --adapter math=DIR --adapter code=RUN --prompt "Hello"   each answers, in one batch
    isobit generate MODEL --tools calculator.py:multiply --prompt "12 * 34"        it may call a function
    """
    from isobit.config.commands import GenerateConfig, command_config
    from isobit.run.directory import model_directory
    from isobit.training.commands.generate import print_completions

    config = command_config(GenerateConfig, model, overrides or (), "isobit generate")
    if not (chat or config.environment.used):
        for key in ("chat_template", "chat_template_kwargs"):
            if getattr(config.model, key):
                raise IsobitError(
                    f"model.{key}: without --chat prompts are text, which no template renders; "
                    "give --chat, or leave it out"
                )
    print_completions(
        config,
        list(prompt) if prompt else lines_of_stdin(),
        chat=chat,
        adapters={name: model_directory(path) for name, path in adapters(adapter).items()},
        as_json=as_json,
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
    from isobit.run.directory import model_directory
    from isobit.training.commands.inspect import inspect_command

    inspect_command(
        model_directory(model),
        names(presets),
        prompts,
        pairs("--column", column or ()),
        (n, max_new_tokens, temperature, seed),
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
    from isobit.training.commands.export import export as write

    print(write(source, to, form, precision, best=best, merge=merge))
