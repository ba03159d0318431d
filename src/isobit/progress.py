"""What a run shows while it works: one live line in a terminal, plain lines elsewhere, nothing with `quiet`."""

import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

_PLAIN_EVERY_S = 10.0


class Display:
    """Progress over `total` steps, on stderr. Use as a context manager."""

    def __init__(self, total: int, quiet: bool = False, done: int = 0) -> None:
        self.total, self.quiet, self.done = total, quiet, done
        self._console = Console(stderr=True)
        self._first, self._began, self._shown = done, time.monotonic(), 0.0
        self._progress: Progress | None = None
        if self._console.is_terminal and not quiet:
            columns = (
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(24),
                _Left(),
                TextColumn("{task.description}"),
            )
            self._progress = Progress(*columns, console=self._console, transient=False)
            self._task = self._progress.add_task("", total=total, completed=done)

    def __enter__(self) -> "Display":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def note(self, text: str) -> None:
        """A line that stays."""
        if not self.quiet:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, metrics: Mapping[str, float]) -> None:
        """One step is done."""
        self.done += 1
        if self.quiet:
            return
        line = summary(metrics)
        if self._progress is not None:
            self._progress.update(self._task, completed=self.done, description=line)
        elif time.monotonic() - self._shown >= _PLAIN_EVERY_S or self.done == self.total:
            self._shown = time.monotonic()
            print(f"step {self.done}/{self.total}  {line}  {_clock(self.left_s)} left", file=sys.stderr, flush=True)

    @property
    def left_s(self) -> float:
        finished = self.done - self._first
        return (time.monotonic() - self._began) / finished * (self.total - self.done) if finished else 0.0


def summary(metrics: Mapping[str, float]) -> str:
    """The few numbers worth a glance."""
    parts = []
    if "reward/mean" in metrics:
        parts.append(f"reward {metrics['reward/mean']:.3f}")
    if "loss/cross_entropy" in metrics:
        parts.append(f"loss {metrics['loss/cross_entropy']:.4f}")
    if "mismatch/differing_tokens" in metrics:
        parts.append(f"differing tokens {metrics['mismatch/differing_tokens']:.0f}")
    if "throughput/rollout_tokens_per_s" in metrics:
        parts.append(f"{metrics['throughput/rollout_tokens_per_s']:,.0f} tokens/s")
    return "  ".join(parts)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class _Left(ProgressColumn):
    def render(self, task: Task) -> Text:
        if not task.speed or task.remaining is None:
            return Text("-:--")
        return Text(f"{_clock(task.remaining / task.speed)} left")
