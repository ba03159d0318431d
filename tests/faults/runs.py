"""Runs under `shim.c`, recorded or with a fault; and whether the run that goes on is the one that
nothing happened to."""

import shutil
import subprocess
from functools import cache
from pathlib import Path

from isobit.kernels.native.recipe import compiler
from tests import warm
from tests.runs import fingerprint, write_config

from .crash import Change, Disk, read_log

SETTINGS = {
    "evaluation": {"every": 2, "samples": 4},
    "prompts_per_step": 2,
    "sampling": {"group_size": 2},
    "steps": 3,
}
"""A checkpoint after step 2 and at the end; an evaluation and a possible best model before the one,
and after the other for being the last."""
KINDS = ("io", "full", "short", "interrupted", "kill")


@cache
def shim(folder: Path) -> Path:
    """The shim, compiled."""
    library = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run(
        [compiler(), "-x", "c", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"],
        check=True,
    )
    return library


class Place:
    """A folder with a config, whose run is under test, and the run that nothing happens to."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.config = write_config(
            folder, model, **SETTINGS, run={"checkpoint_every": 2, "keep_last": 1}
        )
        self._preload = str(shim(folder))
        self.changes = self._record()
        self.unbroken = fingerprint(self.run)
        self.outcomes: dict[int, str | None] = {}
        """Of what a power cut left, by its hash: most moments leave what another did."""

    def _record(self) -> list[Change]:
        log = self.folder / "changes.log"
        done = self._isobit("train", FAULT_LOG=str(log))
        assert done.returncode == 0, done.stderr
        # what comes before the run directory is none of its own
        return read_log(log, self.run)

    def _isobit(self, *words: str, **faults: str) -> "subprocess.CompletedProcess[str]":
        where = {"LD_PRELOAD": self._preload, "FAULT_ROOT": str(self.run)} if faults else {}
        target = [str(self.config)] if words == ("train",) else []
        command = ["isobit", *words, *target, "--quiet"]
        return warm.start(command, self.folder, **where, **faults).wait()

    def faulty(self, number: int, kind: str) -> str | None:
        """Run anew with a fault at the change of that number, and go on: what was lost or badly
        said, or None."""
        shutil.rmtree(self.run, ignore_errors=True)
        done = self._isobit("train", FAULT_AT=str(number), FAULT_KIND=kind)
        if "Traceback" in done.stderr or (kind == "interrupted" and done.returncode):
            return done.stderr[-300:]
        return self._goes_on()

    def cut(self, disk: Disk) -> str | None:
        """Go on from what a power cut left: what was lost or badly said, or None."""
        left = hash(tuple(disk.contents()))
        if left not in self.outcomes:
            shutil.rmtree(self.run, ignore_errors=True)
            disk.write(self.run)
            self.outcomes[left] = self._goes_on()
        return self.outcomes[left]

    def _goes_on(self) -> str | None:
        begun = (self.run / "config.yaml").is_file()
        done = self._isobit(*(("train", "--resume", str(self.run)) if begun else ("train",)))
        if done.returncode:
            return f"exit code {done.returncode}: {done.stderr[-300:]}"
        return None if fingerprint(self.run) == self.unbroken else "it ends as another run"
