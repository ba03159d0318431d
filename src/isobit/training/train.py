"""`train` and `resume`, which are public; `train_supervised`, for `isobit sft`, and `replay`, for
`--from-rollouts`: they open a run and train it.

Left out: the algorithm (`loop.py`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isobit.config import Config, SftConfig, load_any_run_config, load_config
from isobit.distributed import Ranks
from isobit.training.objects import Given, Measure, OnStep, Rewards, Rows
from isobit.training.running.open_run import OpenRun
from isobit.training.running.result import TrainResult, trained
from isobit.training.session.opening import open_replay, open_resumed, open_session
from isobit.training.sft.opening import open_supervised, open_supervised_again


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
    Progress is shown on stderr unless `quiet`; warnings always are.

    Where a launcher such as torchrun has started several processes, each calls this, and together
    they train one model: the same bits on any number of them (tests/distributed/test_runs.py).

    Raises IsobitError for a user's mistake, before anything is written, and RunFailed for a run
    that had to stop.
    """
    given = Given(rewards, data, held_out, callbacks, measures)
    loaded, objects = given.into(load_config(config, overrides))
    folder = Path(loaded.run.dir)
    return trained(
        folder,
        loaded.run.rank_timeout_s,
        lambda ranks: open_resumed(folder, (), given, quiet=quiet, ranks=ranks),
        new=lambda ranks: open_session(loaded, objects, quiet=quiet, ranks=ranks),
    )


def train_supervised(config: SftConfig, *, quiet: bool = False) -> TrainResult:
    """Supervised training on right answers in a new run directory, by the learner, precision and
    optimizer of RL, and by the same loop. Ranks and errors: as of `train`."""
    folder = Path(config.run.dir)
    return trained(
        folder,
        config.run.rank_timeout_s,
        lambda ranks: open_supervised_again(folder, (), quiet=quiet, ranks=ranks),
        new=lambda ranks: open_supervised(config, quiet=quiet, ranks=ranks),
    )


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
    """Go on with an interrupted run from its newest whole checkpoint, or extend a finished one: the
    result is that of a run never stopped, bit for bit (tests/test_resume.py,
    tests/training/test_sft_run.py).

    The objects that the run began with must be given again; a supervised run takes none.
    `overrides` may change steps, ranks,
    on_mismatch, rewards.on_error, rewards.environment, environment.workers, environment.variables,
    run.*, tracking.*, fleet.* and serve.* (except run.dir).
    """
    folder = Path(run_dir)
    config = load_any_run_config(folder, overrides)
    given = Given(rewards, data, held_out, callbacks, measures)
    if isinstance(config, SftConfig):
        given.refuse(folder)

    def again(ranks: Ranks) -> OpenRun:
        if isinstance(config, SftConfig):
            return open_supervised_again(folder, overrides, quiet=quiet, ranks=ranks)
        return open_resumed(folder, overrides, given, quiet=quiet, ranks=ranks)

    return trained(folder, config.run.rank_timeout_s, again)


def replay(
    recorded: Path, out: Path, overrides: Sequence[str] = (), *, quiet: bool = False
) -> TrainResult:
    """Repeat the learning of a recorded run from its rollouts, in a new run: the same weights, bit
    for bit."""
    return trained(
        out,
        load_any_run_config(recorded, overrides).run.rank_timeout_s,
        lambda ranks: open_resumed(out, (), Given(), quiet=quiet, ranks=ranks),
        new=lambda ranks: open_replay(recorded, out, overrides, quiet=quiet, ranks=ranks),
    )
