"""`train` and `resume`, which are public, and `replay`, for `--from-rollouts`: they open a run and
train it.

Left out: the algorithm (`loop.py`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isobit.config import Config, is_supervised, load_any_run_config, load_config
from isobit.distributed import Ranks
from isobit.distributed.launch import joined, restarted
from isobit.run.directory import CONFIG, require_run
from isobit.training.objects import Given, Measure, OnStep, Rewards, Rows
from isobit.training.running.result import TrainResult, trained
from isobit.training.session.opening import open_replay, open_resumed, open_session
from isobit.training.sft.supervised import resume_supervised


def train(
    config: Config | str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    rewards: Rewards = (),
    data: Rows | None = None,
    held_out: Rows | None = None,
    callbacks: Sequence[OnStep] = (),
    measures: Sequence[Measure] = (),
    quiet: bool = False,
) -> TrainResult:
    """Train in a new run directory, as a config says: one that was loaded, a YAML file, or a
    mapping of settings.

    `rewards`, `data` and `held_out` may be objects instead of files: functions, alone or in pairs
    with a weight, and rows, each a mapping of columns or a prompt. Functions that are objects are
    called in this process, without a deadline. Each of the `callbacks` is called as `on_step(step,
    metrics)` after every step. Each of the `measures` is called as `measure(samples, advantages)`
    before a step learns from them, and returns numbers by name, which are logged as `custom/NAME`.
    Progress is shown on stderr unless `quiet`.

    Where a launcher such as torchrun has started several processes, each calls this, and together
    they train one model: the same bits on any number of them (tests/distributed/test_runs.py).

    Raises IsobitError for a user's mistake, before anything is written, and RunFailed for a run
    that had to stop.
    """
    loaded, objects = Given(rewards, data, held_out, callbacks, measures).into(
        load_config(config, overrides)
    )
    with joined(loaded.run.rank_timeout_s) as ranks:
        if _began(Path(loaded.run.dir), ranks):
            given = Given(rewards, data, held_out, callbacks, measures)
            with open_resumed(Path(loaded.run.dir), (), given, quiet=quiet, ranks=ranks) as session:
                return trained(session)
        with open_session(loaded, objects, quiet=quiet, ranks=ranks) as session:
            return trained(session)


def resume(
    run_dir: str | Path,
    overrides: Sequence[str] = (),
    *,
    rewards: Rewards = (),
    data: Rows | None = None,
    held_out: Rows | None = None,
    callbacks: Sequence[OnStep] = (),
    measures: Sequence[Measure] = (),
    quiet: bool = False,
) -> TrainResult:
    """Go on with an interrupted run from its newest whole checkpoint: the result is that of a run
    never stopped, bit for bit (tests/test_resume.py).

    The objects that the run began with must be given again. `overrides` may change steps, ranks,
    on_mismatch, rewards.on_error, rewards.environment, environment.workers, environment.variables,
    run.*, tracking.*, fleet.* and serve.* (except run.dir).
    """
    given = Given(rewards, data, held_out, callbacks, measures)
    require_run(Path(run_dir))
    if is_supervised(Path(run_dir)):
        return resume_supervised(Path(run_dir), overrides, quiet=quiet)
    with (
        joined(_timeout_of(Path(run_dir), overrides)) as ranks,
        open_resumed(Path(run_dir), overrides, given, quiet=quiet, ranks=ranks) as session,
    ):
        return trained(session)


def replay(
    recorded: Path, out: Path, overrides: Sequence[str] = (), *, quiet: bool = False
) -> TrainResult:
    """Repeat the learning of a recorded run from its rollouts, in a new run: the same weights, bit
    for bit."""
    with joined(_timeout_of(recorded, overrides)) as ranks:
        if _began(out, ranks):
            with open_resumed(out, (), Given(), quiet=quiet, ranks=ranks) as session:
                return trained(session)
        with open_replay(recorded, out, overrides, quiet=quiet, ranks=ranks) as session:
            return trained(session)


def _began(directory: Path, ranks: Ranks) -> bool:
    """Whether the ranks were started again after one died, and the run goes on."""
    return any(ranks.all_gather_json(restarted() and (directory / CONFIG).is_file()))


def _timeout_of(run_dir: Path, overrides: Sequence[str]) -> float:
    return load_any_run_config(run_dir, overrides).run.rank_timeout_s
