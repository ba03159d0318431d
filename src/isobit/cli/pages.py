"""Commands that look at runs: `watch`, `report`, `track`, `verify`."""

from pathlib import Path
from typing import Annotated

import typer

from isobit.cli.app import Overrides, app
from isobit.errors import IsobitError


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="a run directory")],
    once: Annotated[bool, typer.Option("--once", help="show the current state and exit")] = False,
) -> None:
    """Follow a run live. Shows the screen of `isobit train`, from the run's files.

    \b
    isobit watch runs/quickstart
    isobit watch runs/quickstart --once
    """
    from isobit.monitor.screen.watch import watch as follow

    follow(run, once)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    out: Annotated[Path | None, typer.Option(help="default: report.html in the first run")] = None,
) -> None:
    """Report on one run, or on several side by side. Writes one self-contained HTML page.

    \b
    isobit report runs/quickstart
    isobit report runs/a runs/b --out compare.html
    """
    from isobit.monitor.report import write_report
    from isobit.run import durable

    if out is not None:
        durable.check_new_file(out, "--out")
    print(write_report(runs, out if out is not None else runs[0] / "report.html"))


@app.command()
def track(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    overrides: Overrides = None,
) -> None:
    """Send a run's metrics to its trackers. Missing steps, or everything to a new tracker.

    \b
    isobit track runs/quickstart
    isobit track runs/quickstart tracking.trackers=[wandb] tracking.wandb.entity=mine
    """
    from isobit.config import load_any_run_config
    from isobit.monitor.trackers.process import send_run
    from isobit.options.declare import plain
    from isobit.run.directory import require_run

    require_run(run)
    changes = ["tracking.close_s=600", *(overrides or [])]
    if wrong := [change for change in changes if not change.startswith("tracking.")]:
        raise IsobitError(
            f"override {wrong[0]!r}: only tracking.* may change, because the run is already there"
        )
    config = load_any_run_config(run, changes)
    if not config.tracking.trackers:
        raise IsobitError(
            "no tracker to send it to: give tracking.trackers, such as "
            "tracking.trackers=[tensorboard]"
        )
    raise typer.Exit(send_run(run, plain(config.tracking), plain(config)))


@app.command()
def verify(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="at least this many completions of each checkpoint, in whole groups; default: all",
        ),
    ] = None,
    certificate: Annotated[
        str | None,
        typer.Option(
            metavar="HASH",
            help="a certificate that a run printed; says whether it belongs to this run",
        ),
    ] = None,
) -> None:
    """Check that a run's records are what it computed. Draws its completions again from its
    checkpoints and compares every token and log-probability, bit for bit; checks everything else
    that it recorded by its chain of hashes.

    \b
    isobit verify runs/quickstart
    isobit verify runs/quickstart --samples 64
    """
    from isobit.training.commands.verify import verify_command

    verify_command(run, samples, certificate)
