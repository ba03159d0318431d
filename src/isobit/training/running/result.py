"""The result that training returns to its caller, and the one way to train an open run to its
end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from isobit.distributed import Ranks
from isobit.distributed.launch import joined, restarted
from isobit.monitor.screen.history import History
from isobit.monitor.screen.lines import LINES, lines_of
from isobit.run.directory import CONFIG, METRICS, read_jsonl
from isobit.run.outlived import outlived_stderr
from isobit.training.loop import training_loop
from isobit.training.running.open_run import OpenRun


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
        found = next((name for _, name in lines_of(history, LINES)), None)
        said = "" if found is None else f", {found} {history.last(found):.4g}"
        return (
            f"TrainResult({str(self.run_dir)!r}, step {history.step}{said}, "
            f"exit_code={self.exit_code})"
        )


Opened = Callable[[Ranks], OpenRun]
"""Opens a run on the given ranks."""


def trained(
    run_dir: Path, timeout_s: float, again: Opened, new: Opened | None = None
) -> TrainResult:
    """Do all steps that are left, and the work that is due after them, and return the result.
    `again` opens a run that goes on; `new`, if given, opens a new run, and is called instead of
    `again` unless the run has begun already and its ranks were started once more after one had
    died. The ranks meet within `timeout_s` seconds."""
    with outlived_stderr(), joined(timeout_s) as ranks:
        if new is not None and not _began(run_dir, ranks):
            again = new
        with again(ranks) as run:
            training_loop(run)
            run.finish()
            rows = list(read_jsonl(run_dir / METRICS))
            return TrainResult(run_dir, rows, run.interruption.exit_code)


def _began(run_dir: Path, ranks: Ranks) -> bool:
    return any(ranks.all_gather_json(restarted() and (run_dir / CONFIG).is_file()))
