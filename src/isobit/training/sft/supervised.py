"""`isobit sft`: supervised training on right answers, as a run like any other.

Cross-entropy on the answers' tokens, by the learner, precision and optimizer of RL, and by the same
loop (`loop.py`). Left out: which tokens are learned (`taught.py`).
"""

from collections.abc import Sequence
from pathlib import Path

from isobit.config import SftConfig, load_any_run_config
from isobit.distributed.launch import joined, restarted
from isobit.run.directory import CONFIG
from isobit.training.running.result import TrainResult, trained
from isobit.training.sft.opening import open_supervised, open_supervised_again


def supervised_run(config: SftConfig, *, quiet: bool = False) -> TrainResult:
    """Train in a new run directory, `run.dir`. Several processes that a launcher has started train
    one model together. Raises IsobitError for bad data or models, before anything is written, and
    RunFailed for a run that had to stop."""
    directory = Path(config.run.dir)
    with joined(config.run.rank_timeout_s) as ranks:
        if any(ranks.all_gather_json(restarted() and (directory / CONFIG).is_file())):
            with open_supervised_again(directory, (), quiet=quiet, ranks=ranks) as run:
                return trained(run)
        with open_supervised(config, quiet=quiet, ranks=ranks) as run:
            return trained(run)


def resume_supervised(
    run_dir: Path, overrides: Sequence[str] = (), *, quiet: bool = False
) -> TrainResult:
    """Go on with an interrupted run from its newest whole checkpoint, or extend a finished one: the
    result is that of a run never stopped, bit for bit (tests/training/test_sft_run.py)."""
    timeout = load_any_run_config(run_dir, overrides).run.rank_timeout_s
    with (
        joined(timeout) as ranks,
        open_supervised_again(run_dir, overrides, quiet=quiet, ranks=ranks) as run,
    ):
        return trained(run)
