"""`isobit compare`: one training config under several precision flows and seeds, run one after the
other.

Every run has its own directory under `out` and is a run like any other; an interrupted one is
resumed, a finished one is not repeated. A run that had to stop (its loss diverged, its weights
broke) is a result too, and `outcome.json` keeps the reason. The conclusions are drawn in
`monitor/report/comparison.py`.
"""

import json
import re
import sys
from pathlib import Path

from isobit.config import CompareConfig, Config, load_config
from isobit.config.reading import override
from isobit.errors import IsobitError, RunFailed
from isobit.monitor.report.comparison import OUTCOME, write_comparison
from isobit.run import directory as runs
from isobit.run import durable
from isobit.training.train import resume, train


def compare(config: CompareConfig, *, quiet: bool = True) -> int:
    """Run what is missing, then print the table and write the page. Returns an exit code: 0, or
    130/143 if interrupted.

    Raises IsobitError, before anything runs, if the training config is wrong for any of the
    presets.
    """
    out = Path(config.out)
    seeds = range(config.first_seed, config.first_seed + config.seeds)
    planned = {
        (preset, seed): load_config(
            config.train,
            [
                *config.changes,
                f"precision={json.dumps(preset)}",
                f"seed={seed}",
                override("run.dir", out / folder_name(preset) / f"seed-{seed}"),
                "run.report=false",
                "run.keep_last=1",
                "evaluation.keep_best=false",
                f"tracking.name={json.dumps(f'{folder_name(preset)}, seed {seed}')}",
                f"tracking.group={json.dumps(out.name)}",
            ],
        )
        for preset in config.presets
        for seed in seeds
    }
    for run in planned.values():
        _check_same(run)
    for (preset, seed), run in planned.items():
        code = _run_one(run, f"{preset}, seed {seed}", quiet)
        if code:
            print(
                f"interrupted; go on with the same command: what is finished in {out} is not "
                "repeated"
            )
            return code
    directories = {
        preset: [Path(planned[preset, seed].run.dir) for seed in seeds] for preset in config.presets
    }
    table = write_comparison(directories, out)
    print(table)
    print(f"\n{out / 'comparison.html'}")
    return 0


def folder_name(preset: str) -> str:
    """Return a directory's name for a preset: `fp8[wgrad=bf16]` becomes `fp8-wgrad-bf16`."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", preset).strip("-")


def _check_same(config: Config) -> None:
    """Refuse a directory that holds a run of another configuration."""
    path = Path(config.run.dir) / runs.CONFIG
    if path.is_file() and load_config(path) != config:
        raise IsobitError(
            f"{path.parent} holds a run of another configuration; choose another directory "
            "(--out), or remove it"
        )


def _run_one(config: Config, title: str, quiet: bool) -> int:
    directory = Path(config.run.dir)
    if (directory / OUTCOME).is_file():
        return 0
    if not quiet:
        print(f"{title}: {directory}", file=sys.stderr, flush=True)
    try:
        if (directory / runs.CONFIG).is_file():
            result = resume(directory, quiet=quiet)
        else:
            result = train(config, quiet=quiet)
    except RunFailed as failure:
        outcome = {"finished": False, "reason": str(failure)}
    else:
        if result.exit_code:
            return result.exit_code
        outcome = {"finished": True, "reason": ""}
    durable.write_text(directory / OUTCOME, json.dumps(outcome) + "\n")
    return 0
