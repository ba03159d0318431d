"""Learn from the rollouts of another run: what it must have recorded, and what a config may not say
of rollouts that are not sampled."""

from collections.abc import Sequence
from pathlib import Path

from isobit.config import Config, load_run_config
from isobit.config.reading import override
from isobit.errors import IsobitError
from isobit.options.declare import plain
from isobit.run import directory as runs
from isobit.run import ends as files
from isobit.run.rows import warn
from isobit.training.recording.rows import recorded_groups


def replay_config(recorded: Path, out: Path, overrides: Sequence[str]) -> Config:
    """Return the config of a new run in `out` that learns from the rollouts of another run. Raises
    IsobitError where these are not all there, or are not what the overrides say."""
    runs.require_run(recorded)
    steps = _recorded_steps(recorded)
    if steps == 0:
        raise IsobitError(f"{recorded}: no step was recorded")
    for line in (files.cut_short(recorded), files.other_completions(recorded)):
        if line is not None:
            warn(line)
    began = load_run_config(recorded)
    recorded_groups(recorded, began)  # refuses one that has not all of them
    config = load_run_config(recorded, [f"steps={steps}", *overrides, override("run.dir", out)])
    _refuse_other_rollouts(config, began, recorded)
    _refuse_more_steps(config, recorded)
    return config


def require_recorded(run_dir: Path, recorded: Path, config: Config) -> None:
    """Raise IsobitError where the other run is not there any more, or has too few steps."""
    if not (recorded / runs.CONFIG).is_file():
        raise IsobitError(
            f"{run_dir} learns from the rollouts of {recorded}, which is no run directory any "
            f"more; if it was moved, write its new path into {run_dir / runs.ROLLOUTS_FROM}"
        )
    _refuse_more_steps(config, recorded)


def _refuse_other_rollouts(config: Config, began: Config, recorded: Path) -> None:
    """Raise IsobitError where a config says of the rollouts what they are not: none are sampled."""
    now, recorded_values = (
        {
            "prompts_per_step": source.prompts_per_step,
            **{f"sampling.{key}": value for key, value in plain(source.sampling).items()},
        }
        for source in (config, began)
    )
    for key, value in now.items():
        if value != recorded_values[key]:
            raise IsobitError(
                f"{key}={value}: {recorded} sampled its rollouts with {recorded_values[key]}, and they are "
                f"learned from as they are; leave {key} out, or sample anew: isobit train "
                f"{recorded / runs.CONFIG} {key}={value} --out DIR"
            )


def _recorded_steps(run_dir: Path) -> int:
    return sum(1 for row in runs.read_jsonl(run_dir / runs.METRICS) if row["step"] > 0)


def _refuse_more_steps(config: Config, recorded: Path) -> None:
    if config.steps > (steps := _recorded_steps(recorded)):
        raise IsobitError(
            f"steps={config.steps}: {recorded} recorded {steps}, and no more can be learned from "
            f"its rollouts; give at most steps={steps}"
        )
