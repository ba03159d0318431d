"""A server's state: what is kept, what is refused, and that nothing a stranger left is believed."""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from isobit.errors import IsobitError, RunFailed
from isobit.serve.requests import BadRequest
from isobit.serve.state.database import FILE, VERSION, WEIGHTS
from isobit.serve.state.identity import identity_of
from isobit.serve.state.rows import (
    Answer,
    Checkpoint,
    CheckpointName,
    StoredRun,
    StoredSampler,
    StoredSession,
)
from isobit.serve.state.state import State

TARGETS = {"train_attn": True, "train_mlp": True, "train_unembed": False}


def a_run(name: str = "s:train:0", tenant: str = "0", number: int = 0) -> StoredRun:
    now = time.time()
    return StoredRun(name, tenant, "s", number, "tiny", 4, 7, TARGETS, now, now)


def writes(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "adapter.bin").write_text(text)

    return write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def state(folder: Path) -> Iterator[State]:
    found = State(folder)
    found.add_session(StoredSession("s", "0", time.time(), {"project": "a"}, "mine"))
    found.add_run(a_run())
    yield found
    found.close()


def text_of(state: State, checkpoint: Checkpoint) -> str:
    return (state.folder_of(checkpoint) / "adapter.bin").read_text()


def refused(folder: Path) -> str:
    with pytest.raises(IsobitError) as found:
        State(folder)
    assert "\n" not in str(found.value)
    return str(found.value)


def test_what_is_kept_is_there_after_a_restart(state: State, folder: Path) -> None:
    path = state.save("s:train:0", "training", "one", writes("one"), optimizer=True).path
    sampler = state.save(
        "s:train:0",
        "snapshot",
        "4",
        writes("four"),
        sampler=lambda made: StoredSampler("x", "0", "s", 3, "tiny", snapshot=made.id),
    )
    assert path == "tinker://s:train:0/weights/one"
    state.accept("s:train:0", 1, "optim_step", b"body")
    state.close()
    again = State(folder)
    try:
        found = again.checkpoint("0", path)
        assert found.optimizer
        assert found.bytes > 0
        assert text_of(again, found) == "one"
        client = again.sampler("x")
        assert client is not None
        assert client.snapshot == sampler.id
        assert again.by_id(sampler.id) == sampler
        assert again.session("s") is not None
        assert again.session("s").metadata == {"project": "a"}  # type: ignore[union-attr]
        assert list(again.requests("s:train:0")) == [1]
        kept = again.request("s:train:0", 1)
        assert kept is not None
        assert (kept.body, kept.answer) == (b"body", None)
        assert again.runs("0", 10, 0)[1] == 1
        assert again.run("s:train:0") == state_run(again)
        again.end_session("s")
        assert again.by_id(sampler.id) is None
        assert again.checkpoint("0", path) == found  # what was saved by name stays
        assert list(again.requests("s:train:0")) == []
        assert len(list((folder / WEIGHTS).iterdir())) == 1
    finally:
        again.close()


def state_run(state: State) -> StoredRun:
    (found,) = state.runs_of("s")
    assert found.targets == TARGETS
    assert found.live
    return found


def test_requests_are_done_again_from_the_state_that_was_kept(state: State) -> None:
    run = "s:train:0"
    for number in range(1, 5):
        state.accept(run, number, "optim_step", b"%d" % number)
        state.accept(run, number, "other", b"a retry changes nothing")
    state.answer(run, 1, Answer(200, "application/json", b"{}"))
    state.keep_present(run, 2, writes("two"))
    first = state.present(run)
    assert first is not None
    assert text_of(state, first) == "two"
    assert state.run(run).applied == 2  # type: ignore[union-attr]
    stored = [state.request(run, number) for number in state.requests(run)]
    found = {each.number: (each.body, each.answer) for each in stored if each is not None}
    assert found[1] == (b"", Answer(200, "application/json", b"{}"))
    assert found[3] == (b"3", None)
    state.keep_present(run, 3, writes("three"))
    second = state.present(run)
    assert second is not None
    assert text_of(state, second) == "three"
    assert [path.name for path in (state.folder / WEIGHTS).iterdir()] == [second.id]
    assert state.checkpoints("0") == ([], 0)  # they are the server's, not the client's


def test_a_run_is_begun_once(state: State) -> None:
    assert state.add_run(a_run("other")).id == "s:train:0"
    assert state.add_run(a_run("other", number=1)).id == "other"
    state.end_run("other")
    assert state.run("other") is None  # it has no checkpoint
    state.save("s:train:0", "training", "a", writes("a"))
    state.end_run("s:train:0")
    assert not state.run("s:train:0").live  # type: ignore[union-attr]
    state.delete("0", "tinker://s:train:0/weights/a")
    assert state.run("s:train:0") is None


def test_a_name_is_taken_once_and_replaced_whole(state: State) -> None:
    run = "s:train:0"
    state.save(run, "training", "a", writes("old"))
    with pytest.raises(BadRequest, match="there already"):
        state.save(run, "training", "a", writes("new"))
    state.save(run, "sampler", "a", writes("sampler"))
    path = state.save(run, "training", "a", writes("new"), overwrite=True).path
    assert text_of(state, state.checkpoint("0", path)) == "new"

    def fails(folder: Path) -> None:
        (folder / "adapter.bin").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(RunFailed, match="No space left on device"):
        state.save(run, "training", "a", fails, overwrite=True)
    assert text_of(state, state.checkpoint("0", path)) == "new"
    assert len(list((state.folder / WEIGHTS).iterdir())) == 2


def test_tenants_and_time(state: State) -> None:
    path = state.save("s:train:0", "training", "a", writes("a"), ttl=3600).path
    with pytest.raises(BadRequest, match="no checkpoint tinker://s:train:0/weights/a") as found:
        state.checkpoint("1", path)
    assert found.value.status == 404
    with pytest.raises(BadRequest):
        state.delete("1", path)
    assert state.checkpoints("1") == ([], 0)
    state.set_ttl("0", path, None)
    assert state.checkpoint("0", path).expires is None
    state.set_ttl("0", path, -1.0)
    with pytest.raises(BadRequest):
        state.checkpoint("0", path)
    assert list((state.folder / WEIGHTS).iterdir()) == []


def test_a_token_is_who_a_tenant_is(folder: Path) -> None:
    """And not its place among tokens."""
    first = State(folder, {"0": "hash-a", "1": "hash-b"})
    first.add_run(a_run())
    path = first.save("s:train:0", "training", "a", writes("a")).path
    first.close()
    second = State(folder, {"0": "hash-b", "1": "hash-a"})
    try:
        assert second.checkpoint("1", path).name == "a"
        assert second.run("s:train:0").tenant == "1"  # type: ignore[union-attr]
        with pytest.raises(BadRequest):
            second.checkpoint("0", path)
    finally:
        second.close()


def test_bounds(folder: Path) -> None:
    state = State(folder, most_bytes=400, most_checkpoints=2)
    try:
        state.add_run(a_run())
        for name in "ab":
            state.save("s:train:0", "training", name, writes(name))
        with pytest.raises(BadRequest, match="may have 2 checkpoints"):
            state.save("s:train:0", "training", "c", writes("c"))
        state.delete("0", "tinker://s:train:0/weights/b")
        with pytest.raises(BadRequest, match="do not fit in your share of the disk, 400; delete"):
            state.save("s:train:0", "training", "c", writes("c" * 400))
        assert len(list((folder / WEIGHTS).iterdir())) == 1
        with pytest.raises(BadRequest, match="no training run"):
            state.save("other", "training", "c", writes("c"))
    finally:
        state.close()


@pytest.mark.parametrize(
    "path",
    [
        "",
        "tinker://",
        "tinker://run",
        "tinker://run/weights/",
        "tinker://run/weights/..",
        "tinker://run/weights/../../etc/passwd",
        "tinker://../weights/a",
        "tinker:///etc/weights/a",
        "tinker://run/other/a",
        "tinker://run/present/a",
        "tinker://run/weights/a\0b",
        "tinker://run/weights/a\n",
        "tinker://run/weights/" + "a" * 101,
        "tinker://run/weights/a/b",
        "tinker://" + "r" * 200 + "/weights/a",
        "tinker://run/weights/\u00e9",
        "/etc/passwd",
        "file://run/weights/a",
    ],
)
def test_a_path_that_is_none(path: str) -> None:
    with pytest.raises(BadRequest) as found:
        CheckpointName.parse(path)
    assert len(str(found.value)) < 400


def test_a_path_that_is_one() -> None:
    found = CheckpointName.parse("tinker://a1b2:train:0/sampler_weights/step-000.4_x")
    assert found == CheckpointName("a1b2:train:0", "sampler", "step-000.4_x")


def test_leftovers_go_and_rows_without_a_folder(state: State, folder: Path) -> None:
    run = "s:train:0"
    kept = state.save(run, "training", "kept", writes("kept"))
    lost = state.save(run, "training", "lost", writes("lost"))
    state.accept(run, 1, "optim_step", b"x")
    state.keep_present(run, 1, writes("present"))
    present = state.present(run)
    assert present is not None
    state.close()
    weights, outside = folder / WEIGHTS, folder.parent / "outside"
    outside.mkdir()
    (outside / "mine").write_text("mine")
    (weights / lost.id).rename(folder.parent / "elsewhere")
    (weights / ".writing-abc").mkdir()
    (weights / ("0" * 32)).mkdir()
    (weights / "link").symlink_to(outside)
    os.mkfifo(weights / "pipe")
    expected = f"the folders of 1 checkpoints are gone, such as weights/{lost.id}; put them back"
    assert expected in refused(folder)
    again = State(folder, drops=True)
    try:
        assert sorted(path.name for path in weights.iterdir()) == sorted([kept.id, present.id])
        assert (outside / "mine").read_text() == "mine"
        with pytest.raises(BadRequest):
            again.checkpoint("0", lost.path)
        assert text_of(again, again.checkpoint("0", kept.path)) == "kept"
        assert again.run(run).live  # type: ignore[union-attr]
    finally:
        again.close()
    (weights / present.id).rename(folder.parent / "present")
    assert present.id in refused(folder)
    third = State(folder, drops=True)
    try:
        assert not third.run(run).live  # type: ignore[union-attr]
    finally:
        third.close()


def test_weights_without_their_tables_stay(state: State, folder: Path) -> None:
    """They would be leftovers. The control is a folder without either."""
    kept = state.save("s:train:0", "training", "a", writes("a"))
    state.close()
    (folder / FILE).rename(folder.parent / FILE)
    for _ in range(2):
        assert f"{FILE}, which names them, is gone; put it back" in refused(folder)
    (folder / WEIGHTS).rename(folder.parent / WEIGHTS)
    State(folder).close()
    (folder / WEIGHTS).rmdir()
    (folder.parent / FILE).rename(folder / FILE)
    (folder.parent / WEIGHTS).rename(folder / WEIGHTS)
    with closing(State(folder)) as again:
        assert text_of(again, again.checkpoint("0", kept.path)) == "a"


def test_a_model_is_known_by_its_files(tmp_path: Path) -> None:
    """And not by its name or its place; a weight or a number of its config makes another one."""
    for name in ("a/model", "b/other", "c/model", "d/model"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text('{"rope_theta": 1}')
        for shard in "12":
            (tmp_path / name / f"model-{shard}.safetensors").write_bytes(b"w" * 100)
    (tmp_path / "c/model/model-2.safetensors").write_bytes(b"w" * 99 + b"x")
    (tmp_path / "d/model/config.json").write_text('{"rope_theta": 2}')
    first, copy, changed, configured = (
        identity_of(tmp_path / name) for name in ("a/model", "b/other", "c/model", "d/model")
    )
    assert first == copy
    assert len({first, changed, configured}) == 3
    os.mkfifo(tmp_path / "d/model/model-3.safetensors")
    with pytest.raises(IsobitError, match="d/model: cannot be read: "):
        identity_of(tmp_path / "d/model")


def test_runs_are_of_one_model(folder: Path) -> None:
    """An adapter of another model is not loaded, and can be taken away; of what is older than this
    check nobody knows, and it is of the model with which it goes on. Weights of a whole model are
    loaded by any."""
    with closing(State(folder, model="a" * 64)) as state:
        state.add_session(StoredSession("s", "0", 1.0))
        for run in (a_run(), replace(a_run("s:train:1", number=1), rank=None)):
            state.add_run(run)
            state.save(run.id, "training", "one", writes("one"))
        assert state.num_of_other_models == 0
        assert state.loadable("0", "tinker://s:train:0/weights/one").name == "one"
    with closing(State(folder, model="b" * 64)) as other:
        assert other.num_of_other_models == 2
        with pytest.raises(BadRequest, match="weights/one: it is of another model, whose weights"):
            other.loadable("0", "tinker://s:train:0/weights/one")
        assert other.loadable("0", "tinker://s:train:1/weights/one").name == "one"
        assert other.checkpoint("0", "tinker://s:train:0/weights/one").name == "one"
        assert len(other.live_runs()) == 2
    change(folder, "UPDATE runs SET model = ''")
    with closing(State(folder, model="b" * 64)) as other:
        assert other.num_of_other_models == 0
        other.adopt()
    with closing(State(folder, model="a" * 64)) as state:
        assert state.num_of_other_models == 2


def test_a_state_of_version_3_goes_on(state: State, folder: Path) -> None:
    """Its tables lack the models, and nothing else. The control lacks a table too."""
    path = state.save("s:train:0", "training", "one", writes("one")).path
    state.close()
    columns = [f"ALTER TABLE {table} DROP COLUMN model" for table in ("runs", "samplers")]
    change(folder, *columns, "PRAGMA user_version=3")
    with closing(State(folder, model="a" * 64)) as again:
        assert text_of(again, again.loadable("0", path)) == "one"
        assert [run.model for run in again.live_runs()] == [""]
    change(folder, *columns, "DROP TABLE samplers", "PRAGMA user_version=3")
    assert "its version is 3, and this isobit reads 4" in refused(folder)


@pytest.mark.parametrize("how", ["changed", "longer", "gone", "manifest", "link", "pipe"])
def test_files_that_are_not_those_that_were_written(state: State, how: str) -> None:
    found = state.save("s:train:0", "training", "a", writes("abc"))
    file = state.folder_of(found) / "adapter.bin"
    if how == "changed":
        file.write_text("abd")
    elif how == "longer":
        file.write_text("abcabc")
    elif how == "manifest":
        file.write_text("abd")
        other = state.save("s:train:0", "training", "b", writes("abd"))
        (file.parent / "manifest.json").write_bytes(
            (state.folder_of(other) / "manifest.json").read_bytes()
        )
    else:
        file.unlink()
        if how == "pipe":
            os.mkfifo(file)
        elif how == "link":
            file.symlink_to("/etc/hostname")
    with pytest.raises(IsobitError, match="tinker://s:train:0/weights/a is damaged"):
        state.folder_of(found)


def test_one_server_at_a_time_and_one_user(state: State, folder: Path, tmp_path: Path) -> None:
    assert "in use by another process" in refused(folder)
    state.close()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o750)
    assert f"run chmod 700 {folder}" in refused(folder)
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    assert "no link to one" in refused(tmp_path / "link")
    (tmp_path / "file").write_text("")
    assert "cannot be made" in refused(tmp_path / "file")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert "another folder in its place" in refused(open_to_all / "state")
    assert "cannot be made" in refused(tmp_path / "a\0b")
    State(folder).close()


def change(folder: Path, *statements: str) -> None:
    with sqlite3.connect(folder / FILE) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


@pytest.mark.parametrize(
    ("statements", "said"),
    [
        ([f"PRAGMA user_version={VERSION + 1}"], f"its version is {VERSION + 1}, and this"),
        (["PRAGMA application_id=1"], "no state of a server"),
        (["CREATE TABLE other (x)"], "other tables"),
        (
            ["CREATE TRIGGER t AFTER INSERT ON runs BEGIN DELETE FROM runs; END"],
            "other tables",
        ),
        (["DROP TABLE samplers"], "other tables"),
        (["UPDATE runs SET metadata = '[]'"], "table runs has a row that no server writes"),
        (["UPDATE runs SET targets = '{\"a\": 1}'"], "table runs has a row"),
        (["UPDATE runs SET id = '../x'"], "table runs has a row"),
        (["UPDATE sessions SET metadata = 'x'"], "table sessions has a row"),
        (["UPDATE checkpoints SET name = '../x'"], "table checkpoints has a row"),
        (["UPDATE checkpoints SET digest = ''"], "table checkpoints has a row"),
        (
            ["PRAGMA ignore_check_constraints=1", "UPDATE checkpoints SET id = '../../x'"],
            "is damaged",
        ),
        (
            ["PRAGMA foreign_keys=0", "UPDATE checkpoints SET run = 'gone'"],
            "is damaged",
        ),
    ],
)
def test_tables_that_no_server_wrote(
    state: State, folder: Path, statements: list[str], said: str
) -> None:
    state.save("s:train:0", "training", "a", writes("a"))
    state.close()
    change(folder, *statements)
    if "runs SET id" in statements[-1]:
        change(folder, "UPDATE checkpoints SET run = '../x'")
    assert said in refused(folder)


@pytest.mark.parametrize("name", [FILE, f"{FILE}-wal", ".lock", WEIGHTS])
@pytest.mark.parametrize("what", ["link", "pipe", "noise"])
def test_a_file_that_a_stranger_left(folder: Path, name: str, what: str) -> None:
    """Each is one line, or harmless; nothing is written through a link, and nothing waits."""
    State(folder).close()
    path, outside = folder / name, folder.parent / "outside"
    outside.write_text("mine")
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    if what == "link":
        path.symlink_to(outside)
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(os.urandom(5000))
    if what == "noise" and name in (".lock", f"{FILE}-wal"):
        State(folder).close()
    else:
        assert str(folder) in refused(folder)
    assert outside.read_text() == "mine"
