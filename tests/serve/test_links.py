"""A checkpoint is taken away: saved for it, and fetched file by file by links that need no token,
as `tinker checkpoint download` does, unmodified."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest

from isobit.serve.requests import BadRequest
from isobit.serve.tinker import links
from isobit.serve.tinker.links import Links

from .helpers import KEY, OTHER_KEY, Running

tinker: Any = pytest.importorskip("tinker")

from .training import digest, train  # noqa: E402


@pytest.fixture(scope="module")
def client(trainer: Running) -> Iterator[Any]:
    """A run that has trained."""
    service = tinker.ServiceClient(base_url=trainer.url, api_key=KEY)
    found = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
    train(found, 1, 1)
    yield found
    service.close("success").result()


@pytest.fixture
def rest(trainer: Running) -> Any:
    return tinker.RestClient(base_url=trainer.url, api_key=KEY)


def command(server: Running, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """The official command."""
    told = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"}
    given = [sys.executable, "-m", "tinker.cli", *words]
    return subprocess.run(
        given, cwd=folder, env=os.environ | told, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_the_official_command_downloads_a_checkpoint(
    trainer: Running, client: Any, rest: Any, tmp_path: Path
) -> None:
    """And leaves no other behind. The control, a path that is not there, is one line."""
    path = client.save_state("to-take").result().path
    before = rest.list_user_checkpoints().result().cursor.total_count
    done = command(trainer, tmp_path, "checkpoint", "download", path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    (folder,) = tmp_path.iterdir()
    names = {each.name for each in folder.iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    state = trainer.gateway.state
    assert state is not None
    kept = state.folder_of(state.checkpoint("0", path))
    for name in names:
        assert (folder / name).read_bytes() == (kept / name).read_bytes()
    assert rest.list_user_checkpoints().result().cursor.total_count == before
    missing = command(trainer, tmp_path, "checkpoint", "download", path + "-not")
    assert missing.returncode != 0
    assert "no checkpoint" in missing.stderr
    assert "Traceback" not in missing.stderr


def test_weights_that_are_saved_to_be_taken_away(
    trainer: Running, client: Any, rest: Any, tmp_path: Path
) -> None:
    """They are listed, fetched without a token, trained from, and deleted."""
    path = client.save_weights_external("mine", ttl_seconds=3600).result().path
    assert path == f"tinker://{client.model_id}/external_weights/mine"
    kinds = {
        each.checkpoint_type for each in rest.list_checkpoints(client.model_id).result().checkpoints
    }
    assert "external" in kinds
    found = rest.get_external_weights_urls(path).result()
    assert 3000 < found.expires.timestamp() - time.time() <= links.SECONDS
    assert set(found.urls) == {"adapter_config.json", "adapter_model.safetensors"}
    for name, url in found.urls.items():
        assert url.startswith(trainer.url)
        answer = httpx.get(url)
        assert answer.status_code == 200
        assert int(answer.headers["content-length"]) == len(answer.content)
        (tmp_path / name).write_bytes(answer.content)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
    service = tinker.ServiceClient(base_url=trainer.url, api_key=KEY)
    again = service.create_training_client_from_state(path).result()
    assert digest(trainer, again) == digest(trainer, client)
    service.close("success").result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    gone = httpx.get(url)
    assert gone.status_code == 404
    assert "was deleted" in gone.json()["error"]["message"]


@pytest.mark.slow
def test_a_link_is_for_its_file_and_its_time(
    trainer: Running, client: Any, rest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the signature, with another, for another file, checkpoint or time: refused, also to
    who has a token. A stranger's token asks for no links."""
    path = client.save_weights_external("secret").result().path
    url = rest.get_external_weights_urls(path).result().urls["adapter_config.json"]
    address, query = url.partition("?")[0], dict(parse_qsl(urlsplit(url).query))
    signature = query["signature"]
    other = rest.get_external_weights_urls(path).result().urls["adapter_model.safetensors"]
    wrong: list[tuple[str, dict[str, str]]] = [
        (address, {}),
        (address, {"expires": query["expires"]}),
        (address, {**query, "signature": ""}),
        (address, {**query, "signature": signature[:-1] + ("0" if signature[-1] != "0" else "1")}),
        (address, {**query, "signature": signature + "0"}),
        (address, {**query, "signature": "é" * 64}),
        (address, {**query, "expires": str(int(query["expires"]) + 1)}),
        (address, {**query, "expires": "-1"}),
        (address, {**query, "expires": "9" * 500}),
        (other.partition("?")[0], query),
        (address.replace("adapter_config.json", "manifest.json"), query),
        (address.replace("adapter_config.json", "..%2f..%2fstate.sqlite"), query),
    ]
    for place, given in wrong:
        for headers in ({}, trainer.headers):
            found = httpx.get(place, params=given, headers=headers)
            assert found.status_code == 403, (place, given, found.text)
            assert found.json()["error"]["message"].startswith("the link is none of this server's")
    assert httpx.get(url).status_code == 200
    with monkeypatch.context() as patch:
        later = time.time() + links.SECONDS + 1
        patch.setattr("isobit.serve.tinker.links.time.time", lambda: later)
        assert httpx.get(url).status_code == 403
    stranger = tinker.RestClient(base_url=trainer.url, api_key=OTHER_KEY)
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        stranger.get_external_weights_urls(path).result()
    run = client.model_id
    for kind in ("weights", "sampler_weights"):
        asked = f"/api/v1/training_runs/{run}/checkpoints/{kind}/a/external_weights_urls"
        assert "expected external_weights/NAME" in trainer.get(asked).text


def test_a_link_of_another_server_is_none_of_this_one() -> None:
    first, second = Links(), Links()
    until = int(time.time()) + 100
    query = dict(parse_qsl(urlsplit(first.link("a", "b/c", until)).query))
    first.check("a", "b/c", query)
    with pytest.raises(BadRequest, match="none of this server's"):
        second.check("a", "b/c", query)


def test_encrypted_files_are_not_offered(client: Any) -> None:
    with pytest.raises(tinker.RequestFailedError, match=r"encryption .*: not served"):
        client.save_weights_external("a", age_encryption_recipients=["age1a"]).result()
