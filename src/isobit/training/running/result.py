"""What training leaves for whoever called it, and the one way to train an open run to its end."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isobit.run.directory import METRICS, read_jsonl
from isobit.training.loop import training_loop
from isobit.training.running.open_run import OpenRun


@dataclass(frozen=True)
class TrainResult:
    """Where the run is, its metrics, one mapping per step, whose `step` is a whole number, and the
    exit code: 0, or 130/143 if it was interrupted."""

    run_dir: Path
    metrics: Sequence[dict[str, float]]
    exit_code: int

    def __repr__(self) -> str:
        """One line, however many steps there were."""
        last = self.metrics[-1] if self.metrics else {}
        found = next((name for name in ("reward/mean", "loss/cross_entropy") if name in last), None)
        said = "" if found is None else f", {found} {last[found]:.4g}"
        return (
            f"TrainResult({str(self.run_dir)!r}, step {last.get('step', 0)}{said}, "
            f"exit_code={self.exit_code})"
        )


def trained(run: OpenRun) -> TrainResult:
    """All steps that are left, and what is due after them."""
    training_loop(run)
    run.finish()
    metrics = list(read_jsonl(run.run.directory / METRICS))
    return TrainResult(run.run.directory, metrics, run.interruption.exit_code)
