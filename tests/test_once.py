"""What is made once (`once.py`)."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.once import once


class Workers:
    """The folders of a session with several workers."""

    def __init__(self, base: Path) -> None:
        self._base = base

    def getbasetemp(self) -> Path:
        return self._base


def test_it_is_made_once_for_all_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes meanwhile waits for it. The controls: another name, and one that has failed, are
    made."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    makings, all_there = list[Path](), threading.Barrier(3)
    for number in range(3):
        (tmp_path / f"gw{number}").mkdir()

    def make(folder: Path) -> None:
        makings.append(folder)
        (folder / "file").write_text(str(len(makings)))

    def asked(number: int) -> str:
        all_there.wait()
        workers = Workers(tmp_path / f"gw{number}")
        return (once(workers, "run", make) / "file").read_text()  # type: ignore[arg-type]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(asked, range(3))) == ["1", "1", "1"]
    assert len(makings) == 1
    workers: pytest.TempPathFactory = Workers(tmp_path / "gw0")  # type: ignore[assignment]
    once(workers, "other", make)
    assert len(makings) == 2

    def fails(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError

    with pytest.raises(OSError):
        once(workers, "failed", fails)
    assert os.listdir(once(workers, "failed", make)) == ["file"]
