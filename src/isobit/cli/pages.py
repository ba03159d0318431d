"""Commands that show runs: `report`."""

from pathlib import Path
from typing import Annotated

import typer

from isobit.cli.app import app


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    out: Annotated[Path | None, typer.Option(help="default: report.html in the first run")] = None,
) -> None:
    """Write one self-contained HTML page about a run, or several side by side.

    \b
    isobit report runs/quickstart
    isobit report runs/a runs/b --out compare.html
    """
    from isobit.report import write_report

    print(write_report(runs, out if out is not None else runs[0] / "report.html"))
