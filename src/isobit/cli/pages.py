"""Commands that show runs: `watch`, `report`."""

from pathlib import Path
from typing import Annotated

import typer

from isobit.cli.app import app


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="a run directory")],
    once: Annotated[bool, typer.Option("--once", help="show it as it stands, and stop")] = False,
) -> None:
    """Show a run that works elsewhere, live: the screen of `isobit train`, from the run's files.

    \b
    isobit watch runs/quickstart
    isobit watch runs/quickstart --once
    """
    from isobit.view.watch import watch as follow

    follow(run, once)


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
