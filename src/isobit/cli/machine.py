"""The command line of `isobit doctor`."""

from typing import Annotated

import typer

from isobit.cli.app import app


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="print it as JSON")] = False,
) -> None:
    """Say what this machine computes with, and what is slow. Paste it into a bug report.

    \b
    isobit doctor
    isobit doctor --json
    """
    from isobit.training.commands.doctor import doctor as print_diagnosis

    print_diagnosis(as_json)
