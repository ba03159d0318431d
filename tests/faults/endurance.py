"""`python -m tests.faults.endurance`: a long run and its twin that is killed again and again, and
what they hold.

    python -m tests.faults.endurance [--steps N] [--kills N] [--seed N] [--out DIR]    default: 20,000 steps, 60 kills

Both train the same tiny model, side by side. Every second the memory, descriptors, threads and
processes of each are read, and its files. Prints a table, and writes `endurance.json` and
`endurance.png` to DIR. Exit code 1 if the runs end differently, or if the one that nobody kills
holds more in its last tenth than in its second: over 5 % more memory, or any more of the rest. Its
logs are to grow, by the same bytes a step.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from tests.models import tiny_model
from tests.runs import fingerprint, write_config

EVERY = 100
"""Steps between checkpoints."""
PANELS = {
    "memory_mib": "memory (MiB)",
    "descriptors": "descriptors",
    "processes": "processes",
    "checkpoint_files": "files of checkpoints",
    "log_mib": "logs (MiB)",
}


@dataclass(frozen=True)
class Reading:
    """Of a run's processes and files at a step; pages that processes share count once (PSS)."""

    step: int
    memory_mib: float
    descriptors: int
    threads: int
    processes: int
    checkpoint_files: int
    log_mib: float


@dataclass(frozen=True)
class Watched:
    """What became of a run. `failure` is what it said when it ended by itself before its end, or
    ""."""

    run: Path
    readings: list[Reading]
    killed_at: list[int]
    failure: str


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.endurance", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("endurance"))
    given = parser.parse_args(arguments)
    moments = sorted(Random(given.seed).sample(range(1, given.steps), given.kills))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        tiny_model().save(Path(folder) / "model")
        watching = [
            pool.submit(watch, Path(folder) / name, Path(folder) / "model", given.steps, kills)
            for name, kills in (("whole", []), ("killed", moments))
        ]
        whole, killed = (found.result() for found in watching)
        same = not whole.failure + killed.failure and fingerprint(whole.run) == fingerprint(
            killed.run
        )
    print(
        f"{given.steps:,} steps, {len(killed.killed_at)} kills; the runs end "
        f"{'the same' if same else 'differently'}"
    )
    print(whole.failure + killed.failure, end="")
    held = growth(whole.readings)
    for name, (before, after) in held.items():
        print(f"{name:20} {before:10.1f} {after:10.1f}")
    given.out.mkdir(parents=True, exist_ok=True)
    values = {"steps": given.steps, "same_end": same, "killed_at": killed.killed_at, "growth": held}
    readings = {
        "whole": list(map(asdict, whole.readings)),
        "killed": list(map(asdict, killed.readings)),
    }
    (given.out / "endurance.json").write_text(json.dumps(values | readings) + "\n")
    draw(whole, killed, given.out / "endurance.png")
    return int(not same or bool(grown(held)))


def watch(folder: Path, model: Path, steps: int, moments: Sequence[int]) -> Watched:
    """Train, kill (SIGKILL) at the moments, which are steps, and go on, until the run is
    finished."""
    folder.mkdir()
    config = write_config(
        folder,
        model,
        steps=steps,
        prompts_per_step=2,
        sampling={"group_size": 2},
        optimizer={"learning_rate": 1e-4},
        run={"checkpoint_every": EVERY, "keep_last": 3},
        evaluation={"every": 5 * EVERY, "samples": 4},
    )
    run, left = folder / "run", list(moments)
    readings: list[Reading] = []
    killed_at: list[int] = []
    while True:
        words = ["--resume", str(run)] if (run / "config.yaml").is_file() else [str(config)]
        command = [sys.executable, "-m", "isobit", "train", *words, "--quiet"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True
        ) as process:
            due = time.monotonic()
            while process.poll() is None:
                time.sleep(0.05)
                step = newest_step(run)
                if left and step >= left[0]:
                    process.kill()
                    killed_at.append(left.pop(0))
                    process.wait()
                elif time.monotonic() >= due:
                    readings.extend(read(process.pid, run, step))
                    due += 1
            said = process.stderr.read() if process.stderr else ""
        if process.returncode != -signal.SIGKILL:
            return Watched(run, readings, killed_at, said if process.returncode else "")


def newest_step(run: Path) -> int:
    """The last whole line of a run's metrics, 0 before there is one."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 16)))
        lines = file.read().split(b"\n")[1:-1]
    return int(json.loads(lines[-1])["step"]) if lines else 0


def read(process: int, run: Path, step: int) -> Iterator[Reading]:
    """What the process and its children hold now; nothing where it has just ended."""
    try:
        family = list(_family(process))
        status = [Path(f"/proc/{one}/smaps_rollup").read_text() for one in family]
        memory = sum(
            int(line.split()[1])
            for text in status
            for line in text.splitlines()
            if line.startswith("Pss:")
        )
        descriptors, threads = (
            sum(len(os.listdir(f"/proc/{one}/{kind}")) for one in family) for kind in ("fd", "task")
        )
        kept = sum(path.is_file() for path in (run / "checkpoints").rglob("*"))
        logs = sum(path.stat().st_size for path in run.iterdir() if path.is_file())
    except OSError:
        return
    yield Reading(step, memory / 1024, descriptors, threads, len(family), kept, logs / 2**20)


def _family(process: int) -> Iterator[int]:
    yield process
    for thread in os.listdir(f"/proc/{process}/task"):
        for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split():
            yield from _family(int(child))


def growth(readings: Sequence[Reading]) -> dict[str, tuple[float, float]]:
    """The medians of each count in the second and in the last tenth of a run's steps."""
    last = readings[-1].step
    early = [r for r in readings if last / 10 <= r.step < last / 5]
    late = [r for r in readings if r.step >= 9 * last / 10]
    names = [name for name in Reading.__dataclass_fields__ if name != "step"]
    return {
        name: (median(getattr(r, name) for r in early), median(getattr(r, name) for r in late))
        for name in names
    }


def grown(held: dict[str, tuple[float, float]]) -> list[str]:
    """Which counts of `growth` a run should not have more of at its end."""
    allowed = {"memory_mib": 1.05, "log_mib": float("inf")}
    return [name for name, (before, after) in held.items() if after > before * allowed.get(name, 1)]


def draw(whole: Watched, killed: Watched, path: Path) -> None:
    """Each count over the steps, of both runs, with a mark at each kill."""
    figure, axes = plt.subplots(
        len(PANELS), 1, figsize=(9, 10), sharex=True, constrained_layout=True
    )
    for axis, (name, title) in zip(axes, PANELS.items()):
        for run, style, color, label in (
            (killed, ".", "#e0a030", "killed"),
            (whole, "-", "#3b7dd8", "left alone"),
        ):
            steps = [reading.step for reading in run.readings]
            values = [getattr(reading, name) for reading in run.readings]
            axis.plot(steps, values, style, color=color, linewidth=1, markersize=2, label=label)
        axis.plot(killed.killed_at, [0] * len(killed.killed_at), "|", color="#d3506a", label="kill")
        axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=10, loc="left")
    axes[0].legend(fontsize=8, ncol=3)
    axes[-1].set_xlabel("step")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
