"""What is kept, by Tinker's own `RestClient`, unmodified."""

import asyncio
import io
import json
import tarfile
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from isobit.serve.state.rows import Checkpoint, StoredRun, StoredSampler, StoredSession
from isobit.serve.state.state import State
from isobit.serve.tinker import archive

from .helpers import KEY, Running

tinker: Any = pytest.importorskip("tinker")
RUN, TARGETS = "s:train:0", {"train_attn": True, "train_mlp": True, "train_unembed": False}


@pytest.fixture(scope="module")
def kept(trainer: Running, folder: Path) -> State:
    """Two runs of this tenant, one of another's, with checkpoints of an adapter."""
    state = trainer.gateway.state
    assert state is not None

    def write(where: Path) -> None:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (where / name).write_bytes((folder / "math" / name).read_bytes())

    now = time.time()
    state.add_session(StoredSession("s", "0", now, {"project": "a"}, "mine"))
    state.add_sampler(StoredSampler("sampler", "0", "s", 0, "tiny"))
    for number, (name, tenant) in enumerate(((RUN, "0"), ("s:train:1", "0"), ("other", "1"))):
        state.add_run(
            StoredRun(
                name, tenant, "s", number, "tiny", 4, 7, TARGETS, now + number, now, {"k": "v"}
            )
        )
    state.save(RUN, "training", "one", write, optimizer=True, metadata={"step": "1"})
    state.save(RUN, "sampler", "one", write, ttl=7200)
    state.save("other", "training", "secret", write)
    return state


@pytest.fixture(scope="module")
def rest(trainer: Running, kept: State) -> Any:
    return tinker.RestClient(base_url=trainer.url, api_key=KEY)


def test_runs_and_checkpoints_are_listed(rest: Any, kept: State) -> None:
    page = rest.list_training_runs(limit=1).result()
    assert [run.training_run_id for run in page.training_runs] == ["s:train:1"]
    assert page.cursor.total_count == 2
    run = rest.get_training_run(RUN).result()
    assert (run.base_model, run.is_lora, run.lora_rank) == ("tiny", True, 4)
    assert run.user_metadata == {"k": "v"}
    assert run.last_checkpoint.tinker_path == f"tinker://{RUN}/weights/one"
    assert run.last_sampler_checkpoint.checkpoint_type == "sampler"
    found = rest.list_checkpoints(RUN).result().checkpoints
    assert {each.checkpoint_id for each in found} == {"weights/one", "sampler_weights/one"}
    (first,) = [each for each in found if each.checkpoint_type == "training"]
    assert first.user_metadata == {"step": "1"}
    assert first.size_bytes == kept.checkpoint("0", first.tinker_path).bytes
    assert rest.list_user_checkpoints().result().cursor.total_count == 2
    info = rest.get_weights_info_by_tinker_path(first.tinker_path).result()
    assert (info.base_model, info.lora_rank, info.train_unembed) == ("tiny", 4, False)


def test_sessions(rest: Any) -> None:
    assert "s" in rest.list_sessions().result().sessions
    found = rest.get_session("s").result()
    assert found.training_run_ids[:2] == [RUN, "s:train:1"]
    assert found.sampler_ids == ["sampler"]
    assert (found.display_name, found.user_metadata) == ("mine", {"project": "a"})


def test_time_and_deletion(rest: Any, kept: State) -> None:
    path = f"tinker://{RUN}/sampler_weights/one"
    assert kept.checkpoint("0", path).expires is not None
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert kept.checkpoint("0", path).expires is None
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    assert kept.checkpoint("0", path).expires == pytest.approx(time.time() + 3600, abs=60)
    with pytest.raises(tinker.BadRequestError, match="ttl_seconds: expected a whole number"):
        rest.set_checkpoint_ttl_from_tinker_path(path, 5).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError, match="no checkpoint tinker://s:train:0/sampler_w"):
        rest.delete_checkpoint_from_tinker_path(path).result()


def test_what_is_anothers_is_not_there(rest: Any) -> None:
    with pytest.raises(tinker.NotFoundError, match="no training run other"):
        rest.get_training_run("other").result()
    for path in ("tinker://other/weights/secret", f"tinker://{RUN}/weights/secret"):
        with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
            rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError, match="does not offer"):
        rest.publish_checkpoint_from_tinker_path(f"tinker://{RUN}/weights/one").result()


def test_an_archive_is_the_adapter(trainer: Running, kept: State, tmp_path: Path) -> None:
    """Whose files load as they are; twice the same bytes."""
    path = f"/api/v1/training_runs/{RUN}/checkpoints/weights/one/archive"
    first, second = trainer.get(path), trainer.get(path)
    assert first.status_code == 200
    assert first.content == second.content
    assert len(first.content) == int(first.headers["content-length"])
    with tarfile.open(fileobj=io.BytesIO(first.content)) as files:
        files.extractall(tmp_path, filter="data")
    source = kept.folder_of(kept.checkpoint("0", f"tinker://{RUN}/weights/one"))
    names = {each.name for each in tmp_path.iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    for name in names:
        assert (tmp_path / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_deleted_while_it_is_asked_for_was_deleted(
    trainer: Running, kept: State, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Before its files are checked, or after that: never a part of them, and no fault."""

    def write(where: Path) -> None:
        (where / "a").write_text("a")

    checked = State.folder_of

    def meanwhile(state: State, checkpoint: Checkpoint) -> Path:
        if when == "before":
            state.delete("0", checkpoint.path)
        folder = checked(state, checkpoint)
        if when == "after":
            state.delete("0", checkpoint.path)
        return folder

    place = f"/api/v1/training_runs/{RUN}/checkpoints/external_weights/gone"
    for archived in (True, False):
        kept.save(RUN, "external", "gone", write)
        (link,) = trainer.get(f"{place}/external_weights_urls").json()["urls"].values()
        path = f"{place}/archive" if archived else link.removeprefix(trainer.url)
        assert trainer.get(path).status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr(State, "folder_of", meanwhile)
            found = trainer.get(path)
        assert found.status_code == 404, found.text
        told = found.json()["error"]["message"]
        assert told == f"tinker://{RUN}/external_weights/gone was deleted"


def test_an_archive_may_have_files_of_many_gigabytes() -> None:
    """Whose size eleven octal digits do not hold."""
    entry = tarfile.TarInfo("model.safetensors")
    entry.size = 9 << 30
    head: bytes = asyncio.run(anext(archive._tar([(entry, io.BytesIO())])))
    assert tarfile.TarInfo.frombuf(head, "utf-8", "strict").size == 9 << 30


@pytest.mark.parametrize(
    "path",
    [
        "weights/../../state.sqlite",
        "weights/..%2f..%2fstate.sqlite",
        "present/present",
        "weights/%00",
        "weights/" + "a" * 300,
        "//etc/passwd",
        "%2e%2e/%2e%2e/lock",
    ],
)
def test_no_path_leaves_its_folder(trainer: Running, kept: State, path: str) -> None:
    for method, end in (("GET", "/archive"), ("PUT", "/ttl"), ("DELETE", "")):
        url = f"{trainer.url}/api/v1/training_runs/{RUN}/checkpoints/{path}{end}"
        body = {"ttl_seconds": 3600} if method == "PUT" else None
        found = httpx.request(method, url, json=body, headers=trainer.headers)
        assert found.status_code in (400, 404, 405), found.text
        assert "\n" not in found.json()["error"]["message"]
    assert kept.folder.joinpath("state.sqlite").exists()
    assert len(kept.checkpoints("1")[0]) == 1


@pytest.mark.parametrize("query", ["limit=-1", "offset=x", "limit=9999999999", "limit="])
def test_pages_are_whole_numbers(trainer: Running, kept: State, query: str) -> None:
    found = trainer.get(f"/api/v1/training_runs?{query}")
    assert found.status_code == 400
    assert "expected a whole number" in found.json()["error"]["message"]
