"""The typer application, and what several commands share: options, and the syntax of lists."""

import re
from typing import Annotated

import typer

from isobit import __version__
from isobit.cli import completion
from isobit.errors import IsobitError
from isobit.options.precisions import PRECISIONS

app = typer.Typer(
    name="isobit",
    help="Reinforcement-learning post-training in FP8: rollouts and learner compute the same bits.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key.sub=value]...", help="config keys to change", autocompletion=completion.overrides),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="no progress display")]
Precision = Annotated[
    str,
    typer.Option(
        help=f"preset: {', '.join(PRECISIONS)}; or one changed: fp8[wgrad=bf16]",
        autocompletion=completion.presets,
    ),
]
Consistency = Annotated[str, typer.Option(help="bitwise, exact or fast", autocompletion=completion.consistencies)]
Backend = Annotated[str, typer.Option(help="auto, triton, native or reference", autocompletion=completion.backends)]
Column = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        metavar="NAME=COLUMN",
        help="role or new name of a column, such as prompt=question; may be given several times",
    ),
]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="a stop string; may be given several times")]


def _version(value: bool) -> None:
    if value:
        print(f"isobit {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")] = False,
) -> None:
    pass


def names(presets: str) -> list[str]:
    """Names between commas; those inside brackets are part of a name."""
    return [name.strip() for name in re.split(r",(?![^\[]*\])", presets) if name.strip()]


def columns(given: list[str] | None) -> dict[str, str]:
    """The mapping of `--column NAME=COLUMN`. Raises IsobitError for another form."""
    pairs = [text.partition("=") for text in given or []]
    for name, sign, column in pairs:
        if not (name and sign and column):
            raise IsobitError(f"--column {name + sign + column!r}: expected NAME=COLUMN, such as prompt=question")
    return {name: column for name, _, column in pairs}
