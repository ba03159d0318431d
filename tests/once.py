"""What is dear to make and only read, made once for all workers of a session: a wheel, a finished
run. Who writes into it copies it first."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that `make` has filled, here or in another worker, which is waited for."""
    own = factory.getbasetemp()
    place = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "once"
    place.mkdir(exist_ok=True)
    folder, made = place / name, place / f"{name}.made"
    with (place / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of one that has failed
            folder.mkdir()
            make(folder)
            made.touch()
    return folder
