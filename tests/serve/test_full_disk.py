"""A disk that takes no more, at each write in turn: what was done is answered as done, and a server
that begins again has the bits of one whose disk was never full."""

import errno
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from isobit.errors import RunFailed
from isobit.run import checkpoints, durable
from isobit.serve.requests import BadRequest, Limits
from isobit.serve.state import reserve
from isobit.serve.state import state as states
from isobit.serve.state.rows import StoredSession
from isobit.serve.state.state import State
from isobit.serve.state.store import Store

from .helpers import KEY, LONG, Running, serving
from .test_state import a_run, text_of, writes

pytest.importorskip("tinker")

from .test_runs import answer, gradients, new, started, step, weights
from .training import data, run_of

_WRITES = ("INSERT", "UPDATE", "DELETE", "COMMIT")
NO_ROOM = "No space left on device"


class Disk:
    """Counts writes, and refuses some: number `full_at`, and those after it too if it `stays`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count, self.full_at, self.stays = 0, -1, False
        run = Store._run

        def statement(store: Any, statement: str, *values: Any) -> Any:
            if statement.startswith(_WRITES):
                self.write(sqlite3.OperationalError("database or disk is full"))
            return run(store, statement, *values)

        patch.setattr(Store, "_run", statement)
        for module, name in (
            (checkpoints, "_make_empty"),
            (checkpoints, "_sizes"),
            (checkpoints, "_put"),
            (durable, "flush"),
            (durable, "flush_tree"),
        ):
            patch.setattr(module, name, self._refusing(getattr(module, name)))
        saving = "isobit.rl.stepwise.saving"
        for name in ("write_peft", "write_file"):
            module = __import__(saving, fromlist=["_"])
            patch.setattr(module, name, self._refusing(getattr(module, name)))

    def write(self, error: Exception) -> None:
        number, self.count = self.count, self.count + 1
        if number == self.full_at or (self.stays and 0 <= self.full_at <= number):
            raise error

    def _refusing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(*given: Any, **named: Any) -> Any:
            self.write(OSError(errno.ENOSPC, NO_ROOM))
            return function(*given, **named)

        return refusing

    def fills(self, at: int, stays: bool = False) -> None:
        """Count anew."""
        self.count, self.full_at, self.stays = 0, at, stays


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr("tests.serve.helpers.TOKENS", (KEY,))
    return Disk(monkeypatch)


@contextmanager
def begun(folder: Path, tmp_path: Path, every: int = 1) -> Iterator[Running]:
    """A server on one state."""
    many = Limits(runs=1000)
    with serving(folder / "base", state=tmp_path / "state", every=every, limits=many) as server:
        server.token = KEY
        yield server


def done(server: Running, send: Callable[[], Any]) -> Any:
    """The answer to a request, which is sent again while the server cannot take it."""
    for _ in range(3):
        asked = send()
        if asked.status_code < 500:
            break
        said = asked.json()["error"]["message"]
        assert said.startswith("the server could not write this to its disk: "), said
        assert "/" not in said
        assert run_of(server, NAMES[-1]) is not None
    found = answer(server, asked)
    assert b'"error"' not in found.content, found.text
    return found


NAMES = list[str]()
"""Of the runs of a test, the newest last."""


def two_steps(server: Running, run: str, first: int = 1) -> None:
    """A gradient, a step, a gradient, a step."""
    NAMES.append(run)
    for number in range(first, first + 4, 2):
        done(server, lambda n=number: gradients(server, run, n, data(n)))  # type: ignore[misc]
        done(server, lambda n=number: step(server, run, n + 1))  # type: ignore[misc]


def three(server: Running, run: str) -> None:
    """A gradient, a step, and a gradient that waits for one."""
    NAMES.append(run)
    done(server, lambda: gradients(server, run, 1, data(1)))
    done(server, lambda: step(server, run, 2))
    done(server, lambda: gradients(server, run, 3, data(3)))


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_write_changes_no_bit(
    folder: Path, tmp_path: Path, disk: Disk
) -> None:
    """Neither before nor after the server begins again. The control leaves out a gradient."""
    runs = list[str]()
    with begun(folder, tmp_path) as server:
        session = started(server)
        twin = new(server, session)
        disk.fills(-1)
        three(server, twin)
        writes, expected = disk.count, weights(server, twin)
        assert writes > 20
        for at in range(writes):
            run = new(server, session, at + 1)
            disk.fills(at)
            three(server, run)
            disk.fills(-1)
            assert weights(server, run) == expected, at
            runs.append(run)
    with begun(folder, tmp_path) as server:
        assert [weights(server, run) == expected for run in (twin, *runs)] == [True] * (writes + 1)
        for run in (twin, *runs):
            done(server, lambda run=run: step(server, run, 4))  # type: ignore[misc]
        expected = weights(server, twin)
        assert [weights(server, run) == expected for run in runs] == [True] * writes
        control = new(server, session, writes + 1)
        answer(server, gradients(server, control, 1, data(1)))
        answer(server, step(server, control, 2))
        assert weights(server, control) != expected


def test_a_step_is_answered_and_kept_by_the_next_one(
    folder: Path, tmp_path: Path, disk: Disk
) -> None:
    """While the disk stays full nothing is taken; the step that was is done, once."""
    with begun(folder, tmp_path) as server:
        run, twin = new(server), new(server)
        two_steps(server, twin)
        NAMES.append(run)
        done(server, lambda: gradients(server, run, 1, data(1)))
        disk.fills(3, stays=True)  # its request is on the disk, and nothing after it
        asked = step(server, run, 2)
        disk.full_at = 0
        first = answer(server, asked)
        assert first.json()["type"] == "optim_step"
        refused = gradients(server, run, 3, data(3))
        assert (refused.status_code, "/" in refused.json()["error"]["message"]) == (500, False)
        state = server.gateway.state
        assert state is not None
        assert state.run(run).applied == 0  # type: ignore[union-attr]
        assert run_of(server, run).unkept
        disk.fills(-1)
        assert answer(server, step(server, run, 2)).content == first.content  # the same future
        done(server, lambda: gradients(server, run, 3, data(3)))
        done(server, lambda: step(server, run, 4))
        assert state.run(run).applied == 4  # type: ignore[union-attr]
        assert weights(server, run) == weights(server, twin)


@pytest.mark.slow
def test_what_was_loaded_and_not_kept_can_be_loaded_again(
    folder: Path, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody deletes it meanwhile; when the run is kept, or ends, they may."""

    def no_room(*_: object, **__: object) -> None:
        raise RunFailed("the server could not write this to its disk")

    with begun(folder, tmp_path) as server:
        run = new(server)
        two_steps(server, run)
        asked = {"model_id": run, "seq_id": 5, "path": "a"}
        path = answer(server, server.post("/api/v1/save_weights", asked)).json()["path"]
        expected = weights(server, run)
        two_steps(server, run, 6)
        load = {"model_id": run, "seq_id": 10, "path": path, "optimizer": True}
        with monkeypatch.context() as patch:
            patch.setattr(State, "keep_present", no_room)
            loaded = answer(server, server.post("/api/v1/load_weights", load))
            assert loaded.json()["type"] == "load_weights"
            assert weights(server, run) == expected
        state = server.gateway.state
        assert state is not None
        with pytest.raises(BadRequest, match="a run was loaded from it, and could not be kept"):
            state.delete("0", path)
    with begun(folder, tmp_path) as server:
        assert weights(server, run) == expected
        state = server.gateway.state
        assert state is not None
        state.delete("0", path)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[State]:
    found = State(tmp_path / "state")
    found.add_session(StoredSession("s", "0", time.time(), {}, "mine"))
    found.add_run(a_run())
    yield found
    found.close()


def test_what_makes_room_works_on_a_full_disk(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the room that was held back, which is held again after it. The control is a save."""
    held = state.folder / reserve.FILE
    assert held.stat().st_size > 100_000
    for name in "abcde":
        state.save("s:train:0", "training", name, writes(name))
    run = Store._run
    taken = list[str]()

    def full(store: Any, statement: str, *values: Any) -> Any:
        if statement.startswith(_WRITES) and held.exists():
            raise sqlite3.OperationalError("database or disk is full")
        taken.append(statement)
        return run(store, statement, *values)

    monkeypatch.setattr(Store, "_run", full)
    with pytest.raises(RunFailed, match="could not write this to its disk"):
        state.save("s:train:0", "training", "f", writes("f"))
    state.delete("0", "tinker://s:train:0/weights/a")
    assert held.exists()
    state.end_run("s:train:0")
    assert held.exists()
    state.end_session("s")
    assert state.session("s") is None
    assert len(state.checkpoints("0")[0]) == 4


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small disk")
def test_on_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """A checkpoint can be deleted, and others are then saved; where nothing may be mounted this is
    passed over."""
    small = tmp_path / "small"
    small.mkdir()
    if os.system(f"mount -t tmpfs -o size=3m,mode=700 tmpfs {small} 2>/dev/null"):
        pytest.skip("nothing can be mounted")
    try:
        state = State(small / "state")
        state.add_run(a_run())
        path = state.save("s:train:0", "training", "a", writes("a" * 400_000)).path
        with (small / "junk").open("wb", 0) as junk, suppress(OSError):
            while True:
                junk.write(bytes(4096))
        with pytest.raises(RunFailed, match=NO_ROOM):
            state.save("s:train:0", "training", "b", writes("b" * 400_000))

        def many() -> None:
            for number in range(1, 500):
                state.accept("s:train:0", number, "forward_backward", bytes(8000))

        with pytest.raises(RunFailed, match="full"):
            many()
        state.delete("0", path)
        found = state.save("s:train:0", "training", "b", writes("b" * 1000))
        assert text_of(state, found) == "b" * 1000
        state.close()
    finally:
        os.system(f"umount -l {small}")


def test_a_folder_that_is_being_written_is_no_leftover(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it was made while the others were looked at. The control is a leftover."""
    named, goes_on, made = threading.Event(), threading.Event(), threading.Event()
    token_hex, listed = states.secrets.token_hex, Path.iterdir

    def slowly(*given: Any) -> str:
        if threading.current_thread() is writer:
            named.set()
            assert goes_on.wait(LONG)
        return token_hex(*given)

    def write(folder: Path) -> None:
        made.set()
        assert tidied.wait(LONG)
        (folder / "adapter.bin").write_text("whole")

    def after(path: Path) -> Any:
        if path.name == "weights":
            goes_on.set()
            assert made.wait(LONG)
        return listed(path)

    tidied = threading.Event()
    writer = threading.Thread(target=lambda: state.keep_present("s:train:0", 1, write))
    monkeypatch.setattr(states.secrets, "token_hex", slowly)
    writer.start()
    assert named.wait(LONG)
    leftover = state.folder / "weights" / ("0" * 32)
    leftover.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", after)
        state._tidy()
    tidied.set()
    writer.join(LONG)
    present = state.present("s:train:0")
    assert present is not None
    assert text_of(state, present) == "whole"
    assert not leftover.exists()


def test_folders_are_removed_without_the_lock(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others accept requests meanwhile."""
    remove, free = shutil.rmtree, list[bool]()

    def asked() -> None:
        free.append(state._guard.acquire(blocking=False))
        if free[-1]:
            state._guard.release()

    def removing(path: Any, **named: Any) -> None:
        other = threading.Thread(target=asked)
        other.start()
        other.join(LONG)
        remove(path, **named)

    path = state.save("s:train:0", "training", "a", writes("a")).path
    monkeypatch.setattr(states.shutil, "rmtree", removing)
    state.delete("0", path)
    assert free
    assert all(free)


def test_tenants_have_shares_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose is full is told of its own; what is replaced counts no more, and what a run is kept as
    is not refused."""

    class Usage:
        free, total = 10_000, 20_000

    monkeypatch.setattr(states.shutil, "disk_usage", lambda path: Usage)
    state = State(tmp_path / "state", {"0": "a", "1": "b"})
    try:
        for tenant in "01":
            state.add_run(a_run(f"s:train:{tenant}", tenant, int(tenant)))
        state.save("s:train:0", "training", "a", writes("a" * 3000))
        with pytest.raises(
            BadRequest,
            match=r"your checkpoints have 3,\d{3} bytes.*do not fit in your share of the disk, 4,000;",
        ) as found:
            state.save("s:train:0", "training", "b", writes("b" * 2000))
        assert found.value.status == 429
        assert "delete checkpoints of yours" in str(found.value)
        state.save("s:train:0", "training", "a", writes("b" * 3500), overwrite=True)
        state.save("s:train:1", "training", "a", writes("a" * 3000))
        state.keep_present("s:train:0", 1, writes("a" * 3000))
    finally:
        state.close()
