"""Ranks killed at chosen moments, and the run that goes on: `python -m tests.distributed.kills
--kills 60`.

A run of two to four ranks loses one of them (SIGKILL) when it enters a verb for the n-th time, or
some milliseconds later, and goes on, on another number of ranks, until the next one is killed. Its
end must be that of a run that nobody killed. Started with torchrun as `-m tests.distributed.kills
--rank R --phase P --nth N --after-ms M -- train ...`, this module is that run's ranks.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from isobit.run.checkpoints import all_checkpoints
from tests.distributed.sessions import SMALL, bits, trained, written
from tests.documents import ROOT

PHASES = ("sync", "rollout", "score", "learn", "evaluate", "save")
SETTINGS = ["evaluation.every=3", "run.checkpoint_every=2"]
LONGEST_S = 30.0


def _ranks(given: argparse.Namespace) -> None:
    """One rank of a run; it ends itself if it is the one, in its first life."""
    from isobit.cli import main
    from isobit.distributed.launch import restarted
    from isobit.training.run import Run

    entered, phase = 0, Run._phase

    def counted(self: Run, name: str) -> None:
        nonlocal entered
        phase(self, name)
        if self.ranks.rank == given.rank and name == given.phase and not restarted():
            entered += 1
            if entered == given.nth:
                threading.Timer(
                    given.after_ms / 1000, os.kill, (os.getpid(), signal.SIGKILL)
                ).start()

    Run._phase = counted  # type: ignore[method-assign]
    sys.argv = ["isobit", *given.arguments]
    main()


def launched(
    size: int, options: list[str], arguments: list[str], restarts: int = 0
) -> tuple[int, str, float]:
    """(exit code, what was printed, seconds from the first rank's end to the last's) of ranks that
    torchrun starts."""
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(size),
        *("--monitor-interval", "0.1", "--max-restarts", str(restarts)),
    ]
    command = [
        sys.executable,
        *launcher,
        "-m",
        "tests.distributed.kills",
        *options,
        "--",
        *arguments,
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    printed, ended = "", 0.0
    assert process.stdout is not None
    for line in process.stdout:
        printed += line
        if not ended and "isobit:" in line:
            ended = time.monotonic()
    code = process.wait(timeout=300)
    return code, printed, time.monotonic() - ended if ended else 0.0


def killed(kills: int, seed: int, folder: Path) -> dict[str, int]:
    """Counts of what happened; raises AssertionError for a run that is lost."""
    config, directory, rng = written(folder, steps=12), folder / "run", random.Random(seed)
    whole = trained(config, folder / "alone", 0, SETTINGS)
    counts = dict.fromkeys((*PHASES, "runs", "survived", "too late"), 0)
    done = 0
    while done < kills:
        if not directory.exists():
            counts["runs"] += 1
        size, phase = rng.choice([2, 3, 3, 4]), PHASES[done % len(PHASES)]
        options = [
            *("--rank", str(rng.randrange(size)), "--phase", phase),
            *(
                "--nth",
                str(rng.choice([1, 1, 2, 3])),
                "--after-ms",
                str(rng.choice([0, 0, 1, 5, 20, 60])),
            ),
        ]
        new = not (directory / "config.yaml").is_file()
        arguments = ["train", str(config), *SMALL, *SETTINGS, f"run.dir={directory}"]
        code, printed, seconds = launched(
            size, options, arguments if new else ["train", "--resume", str(directory)]
        )
        done += 1
        if code == 0:
            counts["too late"] += 1  # the run ended before its rank entered the verb so often
        else:
            counts[phase] += 1
            assert seconds < LONGEST_S, f"{seconds:.0f} s until all had ended\n{printed}"
            said = [line for line in printed.splitlines() if line.startswith("isobit: ")]
            own = [
                line for line in said if re.search("gone|did not come|cannot reach|waited", line)
            ]
            assert options[1] == "0" or own, printed
        if code == 0 or (all_checkpoints(directory / "checkpoints") and done == kills):
            code, printed, _ = launched(
                2,
                ["--rank", "-1", "--phase", "", "--nth", "0"],
                ["train", "--resume", str(directory)],
            )
            assert code == 0, printed
            assert bits(directory) == whole, f"another end, after {options}"
            counts["survived"] += 1
            directory.rename(folder / f"done {done}")
    return counts


def main() -> None:
    """As the module says."""
    parser = argparse.ArgumentParser("python -m tests.distributed.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--phase")
    parser.add_argument("--nth", type=int)
    parser.add_argument("--after-ms", type=float, default=0)
    parser.add_argument("arguments", nargs="*")
    given = parser.parse_args()
    if given.rank is not None:
        _ranks(given)
        return
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        print(killed(given.kills, given.seed, Path(folder)))


if __name__ == "__main__":
    main()
