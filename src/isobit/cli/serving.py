"""The command that serves a model to clients: `serve`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from isobit.cli.app import Adapters, Overrides, adapters, app
from isobit.cli.keys import KeyCommand, Short

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

_TRAINED = ("adapters", "full")


class _Serve(KeyCommand):
    """`--train` may stand alone, which typer's options cannot."""

    shorts = (
        Short("--port", "serve.port"),
        Short("--host", "serve.host"),
        Short("--name", "serve.name"),
        Short("--grace", "serve.grace"),
        Short("--state-every", "serve.state_every"),
        Short("--chat-template", "model.chat_template"),
        Short("--tool-format", "environment.parser"),
        Short("--kv-pages", "engine.kv_pages"),
        Short("--max-sequences", "engine.max_sequences"),
        Short("--precision", "precision"),
        Short("--consistency", "consistency"),
        Short("--backend", "backend"),
    )

    @staticmethod
    def schema() -> type:
        from isobit.config.commands import ServerConfig

        return ServerConfig

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
    overrides: Overrides = None,
    adapter: Adapters = None,
    token: TokenFile = None,
    train: Train = None,
    state: StateFolder = None,
    drop_runs: DropRuns = False,
) -> None:
    """Serve a model and its adapters by OpenAI's routes. On this machine, and with a token. Keys of
    the model and its engine are those of a training config.

    \b
    isobit serve MODEL
    isobit serve MODEL --adapter math=DIR --adapter code=RUN --port 8001
    isobit serve MODEL --port 0 engine.kv_pages=4096 precision=fp8
    isobit serve MODEL --train --state DIR
    isobit serve MODEL --train full --state DIR
    """
    from isobit.config.commands import ServerConfig, command_config
    from isobit.run.directory import model_directory
    from isobit.training.commands.serve import Files, serve_model

    config = command_config(ServerConfig, model, overrides or (), "isobit serve")
    folders = {name: model_directory(path) for name, path in adapters(adapter).items()}
    serve_model(config, folders, Files(token, train, state, drop_runs))
