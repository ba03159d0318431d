"""The command that serves a model to clients: `serve`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from isobit.cli.app import Adapters, Backend, Consistency, Precision, adapters, app

ToolFormat = Annotated[
    str,
    typer.Option(
        help="how the model writes calls of tools: auto, hermes, qwen3_coder, llama3_json, "
        "mistral, harmony, pythonic, glm45, minimax_m2, gemma4, deepseek_v3 or json"
    ),
]
Train = Annotated[
    str | None,
    typer.Option(
        "--train",
        metavar="[full]",
        help="train adapters too, by the routes of Tinker's client; full: all weights of the "
        "model, in one run",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token",
        metavar="FILE",
        help="file with the clients' tokens, one a line; if there is none, it is made, with "
        "one token",
    ),
]
StateFolder = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="DIR",
        help="where --train keeps what it trains, for this user alone (700); default: a folder of "
        "the user's, by the model's name and weights",
    ),
]
DropRuns = Annotated[
    bool,
    typer.Option(
        "--drop-runs",
        help="end what of --state cannot go on, such as runs of another model; without it the "
        "server refuses to start",
    ),
]
StateEvery = Annotated[
    int,
    typer.Option(
        "--state-every",
        metavar="N",
        min=1,
        help="optimizer steps between two saved states of a run; if the server is killed, the "
        "steps after the last one are computed again",
    ),
]


_TRAINED = ("adapters", "full")


class _Serve(TyperCommand):
    """`--train` may stand alone, which typer's options cannot."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        arguments = list[str]()
        for word, following in zip(args, [*args[1:], ""]):
            arguments += [word]
            if word == "--train" and following not in _TRAINED:
                arguments += ["adapters"]
        return super().parse_args(ctx, arguments)


@app.command(cls=_Serve)
def serve(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL|RUN", help="a Hugging Face directory, or a run")
    ],
    adapter: Adapters = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one")] = 8000,
    host: Annotated[
        str, typer.Option(help="address to listen on; others than this machine's need --token")
    ] = ("127.0.0.1"),
    token: TokenFile = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="what clients call the model; default: the name of its folder, or of the run's"
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Jinja file, for a model without a chat template"),
    ] = None,
    tool_format: ToolFormat = "auto",
    train: Train = None,
    state: StateFolder = None,
    state_every: StateEvery = 10,
    drop_runs: DropRuns = False,
    kv_pages: Annotated[
        int | None, typer.Option(min=1, help="pages of the KV cache; default: up to 2 GiB of them")
    ] = None,
    max_sequences: Annotated[
        int, typer.Option(min=1, help="answers that are sampled at the same time")
    ] = 64,
    grace: Annotated[
        float, typer.Option(help="seconds that open requests have to end after SIGTERM")
    ] = 30.0,
    precision: Precision = "fp8",
    consistency: Consistency = "bitwise",
    backend: Backend = "auto",
) -> None:
    """Serve a model and its adapters by OpenAI's routes. On this machine, and with a token.

    \b
    isobit serve MODEL
    isobit serve MODEL --adapter math=DIR --adapter code=RUN --port 8001
    isobit serve MODEL --train --state DIR
    isobit serve MODEL --train full --state DIR
    """
    from isobit.cli.commands.serve import serve_model
    from isobit.engine.types import EngineSize
    from isobit.run.directory import model_directory

    serve_model(
        model,
        {name: model_directory(path) for name, path in adapters(adapter).items()},
        (precision, backend, consistency),
        EngineSize(kv_pages=kv_pages, max_sequences=max_sequences),
        host=host,
        port=port,
        token=token,
        name=name,
        chat_template=chat_template,
        tool_format=tool_format,
        grace=grace,
        train=train,
        state=state,
        state_every=state_every,
        drop_runs=drop_runs,
    )
