"""What trackers and the display take from a step: that of `grpo_step`, 512 completions of 5 tokens, hidden 128.

A tracker is a process of its own, so that a step pays it in two ways: a look at its pipe, and the processor time of
that process and of those that it starts, of which all is counted as if the step had had to wait for it. wandb is
offline, MLflow writes files: nothing leaves the machine. The display draws on a pseudo-terminal; what it takes is the
processor time of this process while nothing but the display is at work, four steps a second. The steps are short:
what they pay is the same for longer ones.
"""

import os
import pty
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.common import Claim, Result, race, row
from benchmarks.models import save_model
from benchmarks.steps import open_run
from isobit.run.directory import read_jsonl
from isobit.training.loop import training_step
from isobit.training.session.open_run import Session

KINDS = ("tensorboard", "wandb", "trackio", "mlflow")
WARMUP, ROWS, SHOWN, INTERVAL_S = 3, 50, 20, 0.25


def run(rounds: int) -> Result:
    result = Result("trackers")
    os.environ["WANDB_MODE"] = "offline"
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        stack.enter_context(_terminal())
        folder = Path(name)
        model = save_model(folder / "model", 128, 4, 64, 64)
        runs = {}
        for kind in ("no tracker", *KINDS, "all trackers"):
            (folder / kind).mkdir()
            names = {"no tracker": (), "all trackers": KINDS}.get(kind, (kind,))
            runs[kind] = open_run(folder / kind, model, "fp8", stack, trackers=names)
        steps = {kind: lambda session=session: training_step(session) for kind, session in runs.items()}
        result.rows += race("step", steps, rounds, warmup=WARMUP, amount=512, unit="completions")
        looks = {kind: session.trackers.poll for kind, session in runs.items()}
        result.rows += race("a look at the pipes", looks, 100)
        for kind in KINDS:
            result.rows.append(row("processor time of a row", kind, [_row_seconds(runs[kind])]))
        (folder / "shown").mkdir()
        result.rows.append(row("processor time of a second", "display", [_display(folder / "shown", model)]))
    step = min(r.least_s for r in result.rows if r.case == "step")  # what else runs here makes steps longer, not rows
    for kind in KINDS:
        part = (result.median(kind, "a look at the pipes") + result.median(kind, "processor time of a row")) / step
        result.claims.append(Claim(f"{kind}, part of a step", part, "<=", 0.02))
    result.claims.append(Claim("display, part of a step", result.rows[-1].median_s, "<=", 0.02))
    return result


def _row_seconds(session: Session) -> float:
    """Processor seconds that a tracker's processes spend on a row: some more rows, less what they take when idle."""
    values = list(read_jsonl(session.run.directory / "metrics.jsonl"))[-1]
    time.sleep(1.5)
    idle = _spent(session, 0, values)
    return max(0.0, _spent(session, ROWS, values) - idle) / ROWS


def _spent(session: Session, rows: int, values: dict[str, float]) -> float:
    """Processor seconds of a tracker's processes in the time of `ROWS` rows and a little more, of which `rows` come."""
    began = _processor_seconds(session)
    for _ in range(ROWS):
        if rows:
            values["step"] += 1
            session.run.write_metrics(values)
        time.sleep(0.1)
    time.sleep(1.5)  # the last row is read within half a second
    return _processor_seconds(session) - began


def _processor_seconds(session: Session) -> float:
    """Of the processes that trackers run in, and those that these started: each leads a session of the system's."""
    leaders = set(session.trackers.process_ids)
    nanoseconds = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rpartition(")")[2].split()[3]) in leaders:
                threads = [(thread / "schedstat").read_text() for thread in (path / "task").iterdir()]
                nanoseconds += sum(int(text.split()[0]) for text in threads)
        except OSError:  # it has ended
            continue
    return nanoseconds / 1e9


def _display(folder: Path, model: Path) -> float:
    """Processor seconds a second of a run's display that is shown a step every quarter of a second."""
    with ExitStack() as stack:
        session = open_run(folder, model, "fp8", stack, quiet=False)
        training_step(session)
        metrics = list(read_jsonl(session.run.directory / "metrics.jsonl"))[-1]
        time.sleep(1.0)
        began, start = time.process_time(), time.monotonic()
        for _ in range(SHOWN):
            session.display.step(metrics)
            time.sleep(INTERVAL_S)
        return (time.process_time() - began) / (time.monotonic() - start)


@contextmanager
def _terminal() -> Iterator[None]:
    """stderr is a pseudo-terminal, which a thread empties."""
    theirs, ours = pty.openpty()
    before, sys.stderr = sys.stderr, os.fdopen(ours, "w", buffering=1)
    threading.Thread(target=_drain, args=(theirs,), daemon=True).start()
    try:
        yield
    finally:
        sys.stderr = before


def _drain(descriptor: int) -> None:
    while os.read(descriptor, 1 << 16):
        pass
