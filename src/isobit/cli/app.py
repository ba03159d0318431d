"""The typer application, and what several commands share: options, and the syntax of lists."""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from isobit import __version__
from isobit.cli import completion
from isobit.errors import IsobitError

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
    typer.Argument(
        metavar="[key.sub=value]...",
        help="config keys to change",
        autocompletion=completion.overrides,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="no progress display, warnings alone")]
Backend = Annotated[
    str, typer.Option(help="auto, triton, native or reference", autocompletion=completion.backends)
]
Column = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        metavar="NAME=COLUMN",
        help="role or new name of a column, such as prompt=question; may be given several times",
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="[NAME=]DIR",
        help="a PEFT folder, or a run that trained one; may be given several times, over one MODEL",
    ),
]


def _version(value: bool) -> None:
    if value:
        print(f"isobit {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")
    ] = False,
) -> None:
    pass


def lines_of_stdin() -> list[str]:
    """Return the lines of standard input, which is UTF-8 whatever the locale says; none where it is
    closed. Raises IsobitError for other bytes."""
    if sys.stdin is None:
        return []
    data = sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise IsobitError(f"standard input, line {line}: not UTF-8 text") from None
    lines = text.replace("\r\n", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def names(presets: str) -> list[str]:
    """Return the names between commas; a comma inside brackets is a part of its name."""
    parts, depth = [""], 0
    for letter in presets:
        depth += (letter in "[{") - (letter in "]}")
        parts = [*parts, ""] if letter == "," and depth <= 0 else [*parts[:-1], parts[-1] + letter]
    return [name.strip() for name in parts if name.strip()]


def adapters(given: list[str] | None) -> dict[str, Path]:
    """Folder by name of `--adapter [NAME=]DIR`; without a name it is that of the folder. Raises
    IsobitError for a name that is none, and for one that two of them have."""
    folders: dict[str, Path] = {}
    for text in given or []:
        name, sign, folder = text.partition("=")
        if not sign or "/" in name or Path(text).exists():
            name, folder = Path(text).resolve().name, text
        if not re.fullmatch(r"[\w.-]+", name) or not folder:
            raise IsobitError(
                f"--adapter {text!r}: expected NAME=DIR, with a name of letters, digits, '.', "
                "'_' and '-', or DIR"
            )
        if name in folders:
            raise IsobitError(
                f"--adapter {text!r}: {folders[name]} is called {name} too; give each a name: "
                "NAME=DIR"
            )
        folders[name] = Path(folder)
    return folders
