"""Ends the ranks of this machine that stand still, so that no process waits for them any more.

Which process is a rank is the kernel's word: a child of the launcher that started this one, with
this run's environment. Nothing that ranks tell each other decides it. Without /proc their launcher
ends them, half a minute later.
"""

import os
import signal
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from isobit.distributed.board import Board

_OF_A_RUN = ("WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ISOBIT_RANKS_FOLDER")
_STOPPED = "Tt"
"""States of a process that was stopped, by a signal or by a debugger."""


def end_siblings(late: Collection[int], board: Board) -> None:
    """End the ranks of this machine that are `late`, and any that was stopped."""
    for rank, process, state in _siblings():
        if rank in late or state in _STOPPED:
            board.set(f"ended-{rank}", "")
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _siblings() -> Iterator[tuple[int, int, str]]:
    """Yield (rank, process, state) of the others that this process's launcher has started."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):  # it has ended, or is another user's
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) != os.getppid() or int(folder.name) == os.getpid():
                continue
            pairs = (
                line.partition("=")
                for line in os.fsdecode((folder / "environ").read_bytes()).split("\0")
            )
            environment = {name: value for name, _, value in pairs}
            if all(environment.get(name) == os.environ.get(name) for name in _OF_A_RUN):
                yield int(environment["RANK"]), int(folder.name), state
