"""`train` and `resume`, which are public; `train_supervised`, for `isobit sft`, and `replay`, for
`--from-rollouts`: they open a run and train it.

Left out: the algorithm (`loop.py`), and what a run is (`run.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from isobit.config import Config, SftConfig, load_any_run_config, load_config
from isobit.config.reading import override
from isobit.distributed import ALONE, Ranks
from isobit.distributed.launch import joined, restarted
from isobit.monitor.screen.history import History
from isobit.monitor.screen.lines import LINES, lines_of
from isobit.run.directory import CONFIG, METRICS, read_jsonl
from isobit.run.outlived import outlived_stderr
from isobit.training.loop import training_loop
from isobit.training.objects import (
    NO_OBJECTS,
    NOTHING_GIVEN,
    Given,
    Measure,
    Objects,
    OnStep,
    Rewards,
    Rows,
)
from isobit.training.parts.assembly import open_parts
from isobit.training.parts.given import open_given
from isobit.training.parts.sampled import SampledParts
from isobit.training.rollouts.recorded import replay_config, require_recorded
from isobit.training.run import OpenParts, Run, open_again, open_new


@dataclass(frozen=True)
class TrainResult:
    """The directory of a run, its metrics (one mapping per step, in which `step` is a whole
    number), and the exit code: 0, or 130/143 if the run was interrupted."""

    run_dir: Path
    metrics: Sequence[dict[str, float]]
    exit_code: int

    def __repr__(self) -> str:
        """Return one line, whatever the number of steps."""
        history = History("", 0)
        for row in self.metrics:
            history.add(row)
        metric = next((name for _, name in lines_of(history, LINES)), None)
        last = "" if metric is None else f", {metric} {history.last(metric):.4g}"
        return (
            f"TrainResult({str(self.run_dir)!r}, step {history.step}{last}, "
            f"exit_code={self.exit_code})"
        )


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
    user = Given(rewards, data, held_out, callbacks, measures)
    loaded, objects = user.into(load_config(config, overrides))
    return _trained(loaded, lambda ranks: open_run(loaded, objects, quiet, ranks), user, quiet)


def train_supervised(config: SftConfig, *, quiet: bool = False) -> TrainResult:
    """Train on right answers in a new run directory, by the learner, precision and optimizer of RL,
    and by the same loop. Ranks and errors: as of `train`."""
    return _trained(
        config, lambda ranks: open_run(config, NO_OBJECTS, quiet, ranks), NOTHING_GIVEN, quiet
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
    `overrides` may change steps, ranks, divided, on_mismatch, rewards.on_error,
    rewards.environment, environment.workers, environment.variables, run.*, tracking.*, fleet.* and
    serve.* (except run.dir).
    """
    folder = Path(run_dir)
    config = load_any_run_config(folder, [override("run.dir", folder), *overrides])
    objects = Given(rewards, data, held_out, callbacks, measures)
    if isinstance(config, SftConfig):
        objects.refuse(folder)
    return _trained(config, lambda ranks: open_resumed(folder, overrides, objects, quiet, ranks))


def replay(
    recorded: Path, out: Path, overrides: Sequence[str] = (), *, quiet: bool = False
) -> TrainResult:
    """Repeat the learning of a recorded run from its rollouts, in a new run: the same weights, bit
    for bit."""
    config = load_any_run_config(recorded, [*overrides, override("run.dir", out)])
    return _trained(
        config,
        lambda ranks: open_replay(recorded, out, overrides, quiet, ranks),
        NOTHING_GIVEN,
        quiet,
    )


def _trained(
    config: Config | SftConfig,
    opened: Callable[[Ranks], Run[Any]],
    objects: Given | None = None,
    quiet: bool = False,
) -> TrainResult:
    """Do all steps of the run that is `opened`, and the work that is due after them. A new run was
    given `objects`: where its ranks were started once more after one had died, it goes on."""
    folder = Path(config.run.dir)
    with outlived_stderr(), joined(config.run.rank_timeout_s) as ranks:
        began = restarted() and (folder / CONFIG).is_file()
        if objects is not None and any(ranks.all_gather_json(began)):
            run = open_resumed(folder, (), objects, quiet, ranks)
        else:
            run = opened(ranks)
        with run:
            training_loop(run)
            run.finish()
            rows = list(read_jsonl(folder / METRICS))
            return TrainResult(folder, rows, run.interruption.exit_code)


def open_run(
    config: Config | SftConfig,
    objects: Objects = NO_OBJECTS,
    quiet: bool = False,
    ranks: Ranks = ALONE,
) -> Run[Any]:
    """Open a new run, with the objects of Python that its config names."""
    return open_new(config, _opener(config, quiet, objects), quiet=quiet, ranks=ranks)


def open_resumed(
    run_dir: Path,
    overrides: Sequence[str] = (),
    given: Given = NOTHING_GIVEN,
    quiet: bool = False,
    ranks: Ranks = ALONE,
) -> Run[Any]:
    """Open a run that goes on, with the objects that it was `given`, or begins again where it had
    no checkpoint."""

    def opener(config: Config | SftConfig, source: Path | None) -> OpenParts[Any]:
        if isinstance(config, SftConfig):
            return open_given
        objects = given.again(config)
        if source is not None:
            require_recorded(run_dir, source, config)
        return _opener(config, quiet, objects, source)

    return open_again(run_dir, overrides, opener, quiet=quiet, ranks=ranks)


def open_replay(
    recorded: Path,
    out: Path,
    overrides: Sequence[str] = (),
    quiet: bool = False,
    ranks: Ranks = ALONE,
) -> Run[SampledParts]:
    """Open a new run that learns from the rollouts recorded in another."""
    config = replay_config(recorded, out, overrides)
    opener = _opener(config, quiet, recorded=recorded)
    return open_new(config, opener, quiet=quiet, ranks=ranks, recorded=recorded)


def _opener(
    config: Config | SftConfig,
    quiet: bool,
    objects: Objects = NO_OBJECTS,
    recorded: Path | None = None,
) -> OpenParts[Any]:
    """Return what opens the parts of a config: those of given answers, or those that sample."""
    if isinstance(config, SftConfig):
        return open_given
    return partial(open_parts, quiet=quiet, objects=objects, recorded=recorded)
