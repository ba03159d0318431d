"""Commands that make models: `train`, `sft`, `compare`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isobit.cli import completion
from isobit.cli.app import Overrides, Quiet, app, names
from isobit.errors import IsobitError, printable

if TYPE_CHECKING:
    from isobit.config import Config, SftConfig

DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="check everything, show the memory plan and the first prompt, and stop"
    ),
]
Redo = Annotated[
    bool,
    typer.Option(
        "--redo", help="remove a finished run of this config from the run directory first"
    ),
]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="run directory; default: run.dir")]


@app.command()
def quickstart(overrides: Overrides = None, out: Out = None, quiet: Quiet = False) -> None:
    """Train a small model to add, on the CPU, to see a run. Its config comes with isobit.

    \b
    isobit quickstart                     a few minutes; runs/quickstart/report.html at the end
    isobit quickstart steps=50 --out DIR  with changed keys

    A finished run of the same config in the run directory is done again.
    """
    from isobit.training.commands.quickstart import config_file

    config = str(config_file())
    raise typer.Exit(_train(config, list(overrides or []), None, None, out, False, quiet, True))


@app.command()
def train(
    config: Annotated[
        str | None,
        typer.Argument(
            help="YAML file; leave out with --resume and --from-rollouts",
            autocompletion=completion.config_files,
        ),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="resume an interrupted run, or extend a finished one; overrides may change "
            "steps, ranks, divided, on_mismatch, "
            "rewards.on_error, rewards.environment, environment.workers, environment.variables, "
            "run.*, tracking.*, fleet.* and serve.* (except run.dir)",
        ),
    ] = None,
    from_rollouts: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="train a new run on the recorded rollouts of another"),
    ] = None,
    out: Out = None,
    dry_run: DryRun = False,
    redo: Redo = False,
    quiet: Quiet = False,
) -> None:
    """Train a model with reinforcement learning.

    \b
    isobit train configs/quickstart.yaml                          train
    isobit train configs/quickstart.yaml steps=50 precision=bf16  with changed keys
    isobit train configs/quickstart.yaml --dry-run                check everything first
    isobit train --resume runs/quickstart                         resume after an interruption, bit for bit
    isobit train --resume runs/quickstart steps=400               extend a finished run
    isobit train --from-rollouts runs/quickstart --out runs/again train again without sampling

    All config keys: docs/config.md, or python -m isobit.config
    """
    if resume is None and from_rollouts is None:
        if config is None:
            raise IsobitError("give a config, such as configs/quickstart.yaml, or --resume RUN")
        changes = list(overrides or [])
    else:
        config, changes = None, _without_config(config, overrides)
    raise typer.Exit(_train(config, changes, resume, from_rollouts, out, dry_run, quiet, redo))


def _without_config(config: str | None, overrides: list[str] | None) -> list[str]:
    """Return the overrides of a run that has its config already: the first argument is one too."""
    if config is not None and "=" not in config:
        raise IsobitError(f"the run has its own config: leave {config!r} out")
    return [*([] if config is None else [config]), *(overrides or [])]


def _train(
    config: str | None,
    overrides: list[str],
    resume: Path | None,
    from_rollouts: Path | None,
    out: Path | None,
    dry_run: bool,
    quiet: bool,
    redo: bool,
) -> int:
    from isobit.config import load_config
    from isobit.config.reading import override
    from isobit.run.directory import CONFIG, require_run

    new = config is not None and not dry_run
    _check_redo(redo, new, "--resume, --from-rollouts and --dry-run")
    if resume is not None and (from_rollouts is not None or out is not None or dry_run):
        raise IsobitError(
            "--resume continues a run in its own directory; leave out --from-rollouts, --out "
            "and --dry-run"
        )
    if from_rollouts is not None and (out is None or dry_run):
        raise IsobitError(
            "--from-rollouts makes a new run: say where with --out DIR, without --dry-run"
        )
    if resume is not None:
        return _resume(resume, overrides, quiet)
    path: str | Path | None = config
    if from_rollouts is not None:
        require_run(from_rollouts)
        path = from_rollouts / CONFIG
    assert path is not None
    loaded = load_config(
        path, [*overrides, *([override("run.dir", out)] if out is not None else [])]
    )
    if redo:
        _clear(loaded)
    if dry_run:
        from isobit.training.commands.dry_run import dry_run as check

        check(loaded, lambda block: print(printable(block), flush=True))
        return 0
    from isobit.training.commands.ranks import launched

    if (code := launched(loaded.ranks, Path(loaded.run.dir))) is not None:
        return code
    from isobit.training import (
        train as trainer,
    )  # only here: a launcher and a mistake in a config need none of it

    if from_rollouts is not None:
        assert out is not None
        return trainer.replay(from_rollouts, out, overrides, quiet=quiet).exit_code
    return trainer.train(loaded, quiet=quiet).exit_code


def _check_redo(redo: bool, new: bool, without: str) -> None:
    if redo and not new:
        raise IsobitError(f"--redo is for a new run: give a config, without {without}")


def _clear(config: "Config | SftConfig") -> None:
    """Remove a finished run of a config, once for all ranks."""
    from isobit.training.recording.overwrite import clear_finished

    if os.environ.get("RANK", "0") == "0":
        clear_finished(config)


@app.command()
def sft(
    config: Annotated[
        str | None,
        typer.Argument(
            help="YAML file, see configs/quickstart-sft.yaml; leave out with --resume",
            autocompletion=completion.config_files,
        ),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="resume an interrupted run, or extend a finished one; overrides may change "
            "steps, ranks, divided, run.* and tracking.* (except run.dir)",
        ),
    ] = None,
    out: Out = None,
    dry_run: DryRun = False,
    redo: Redo = False,
    quiet: Quiet = False,
) -> None:
    """Supervised training: on right answers, or on preferences. A run as those of `isobit train`.

    \b
    isobit sft configs/quickstart-sft.yaml
    isobit sft configs/quickstart-sft.yaml --dry-run   check everything first
    isobit sft configs/quickstart-sft.yaml steps=100 --out runs/base
    isobit sft --resume runs/base                resume after an interruption, bit for bit
    isobit sft --resume runs/base steps=200      extend a finished run
    """
    from isobit.config import is_supervised, load_sft_config
    from isobit.config.reading import override
    from isobit.run.directory import require_run

    _check_redo(redo, resume is None and not dry_run, "--resume and --dry-run")
    if resume is not None:
        if out is not None or dry_run:
            raise IsobitError(
                "--resume continues a run in its own directory; leave out --out and --dry-run"
            )
        changes = _without_config(config, overrides)
        require_run(resume)
        if not is_supervised(resume):
            raise IsobitError(
                f"{resume} is a run of `isobit train`; go on with: isobit train --resume {resume}"
            )
        raise typer.Exit(_resume(resume, changes, quiet))
    if config is None:
        raise IsobitError("give a config, such as configs/quickstart-sft.yaml, or --resume RUN")
    where = [] if out is None else [override("out", out)]
    loaded = load_sft_config(config, [*(overrides or []), *where])
    if dry_run:
        from isobit.training.commands.dry_run import supervised_dry_run

        supervised_dry_run(loaded, lambda block: print(printable(block), flush=True))
        return
    if redo:
        _clear(loaded)
    from isobit.training.commands.ranks import launched

    if (code := launched(loaded.ranks, Path(loaded.run.dir))) is not None:
        raise typer.Exit(code)
    # only here: a mistake in a config needs none of it
    from isobit.training.train import train_supervised

    raise typer.Exit(train_supervised(loaded, quiet=quiet).exit_code)


def _resume(run: Path, overrides: list[str], quiet: bool) -> int:
    """Go on with a run of either kind."""
    from isobit.config import check_resumed, load_any_run_config

    ranks = load_any_run_config(run, overrides).ranks
    check_resumed(overrides, run)
    from isobit.training.commands.ranks import launched

    if (code := launched(ranks, run)) is not None:
        return code
    from isobit.training.train import resume

    return resume(run, overrides, quiet=quiet).exit_code


@app.command()
def compare(
    config: Annotated[
        str,
        typer.Argument(
            help="YAML file: a comparison, or a training config",
            autocompletion=completion.config_files,
        ),
    ],
    overrides: Overrides = None,
    presets: Annotated[
        str,
        typer.Option(
            metavar="A,B,C",
            help="precision flows; default: the config's",
            autocompletion=completion.presets,
        ),
    ] = "",
    seeds: Annotated[
        int | None, typer.Option(help="runs per preset; default: the config's, or 1")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="default: the config's out, or runs/compare")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Compare precision flows: train under each, and write a page. All have the same data and seeds.

    \b
    isobit compare configs/compare-recipes.yaml
    isobit compare configs/quickstart.yaml steps=50 --presets bf16,fp8-rollout,fp8 --seeds 3

    After an interruption the same command continues; finished runs are not repeated.
    """
    from isobit.config import load_compare_config
    from isobit.training.commands.compare import compare as run_comparison

    settings = load_compare_config(
        config, names(presets), seeds, None if out is None else str(out), overrides or ()
    )
    raise typer.Exit(run_comparison(settings, quiet=quiet))
