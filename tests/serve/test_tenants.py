"""What one tenant takes, keeps no other from anything: each has bounds of its own."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from isobit.errors import RunFailed
from isobit.serve import sessions as conversations
from isobit.serve.jobs import WorkJob
from isobit.serve.requests import BadRequest, Limits
from isobit.serve.sessions import Sessions, Turn
from isobit.serve.state import store
from isobit.serve.state.rows import StoredRun
from isobit.serve.state.state import State
from isobit.serve.tinker import archive, futures
from isobit.serve.tinker import sessions as of_clients
from isobit.serve.tinker.futures import Futures
from isobit.serve.tinker.sampling import Samplers
from tests.until import until, until_here

from .helpers import TOKENS, Running, serving

LONG = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True}
LIMITS = Limits(open_samples=2, held_bytes=2000, body_bytes=1500)
RUN = StoredRun("s:train:0", "0", "s", 0, "tiny", 4, 7, {"train_attn": True}, 1.0, 1.0)


@pytest.fixture(scope="module")
def narrow(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of two tenants that trains."""
    state = tmp_path_factory.mktemp("tenants") / "state"
    with serving(folder / "base", state=state, limits=LIMITS) as server:
        yield server


def asked(server: Running, tenant: int, path: str, value: Any) -> httpx.Response:
    """The answer to a tenant's request."""
    return server.post(path, value, headers={"Authorization": f"Bearer {TOKENS[tenant]}"})


def test_who_has_as_many_answers_open_as_may_be_is_told_alone(narrow: Running) -> None:
    goes_on = (
        threading.Event()
    )  # the device does nothing meanwhile, or an answer could be over soon
    narrow.gateway.device.submit(WorkJob("", lambda: goes_on.wait(120), lambda event: None))
    with ThreadPoolExecutor(3) as pool:
        try:
            going = [pool.submit(asked, narrow, 0, "/v1/completions", LONG) for _ in range(2)]
            until(lambda: narrow.gateway.num_samples == 2)
            refused = asked(narrow, 0, "/v1/completions", LONG)
            going.append(pool.submit(asked, narrow, 1, "/v1/completions", LONG))
            until(lambda: narrow.gateway.num_samples == 3)
        finally:
            goes_on.set()
        assert refused.status_code == 429
        assert "2 answers of yours are open, and 2 may be" in refused.text
        assert [each.result().status_code for each in going] == [200] * 3


def cached(server: Running, tenant: int, prompt: str, **more: Any) -> int:
    """How many tokens of a prompt were found in the cache."""
    value = {"prompt": prompt, "max_tokens": 1, "seed": 1, **more}
    found = asked(server, tenant, "/v1/completions", value).json()
    return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_nobody_finds_what_another_has_asked(narrow: Running) -> None:
    """A prompt's pages are found by who has asked it, and with the same salt. The answer is the
    same."""
    prompt = "a secret of the first tenant's"
    assert [cached(narrow, who, prompt) for who in (0, 0, 1, 1)] == [0, 28, 0, 28]
    salted = [{"cache_salt": salt} for salt in ("a", "b", "a")]
    assert [cached(narrow, 0, prompt, **one) for one in salted] == [0, 0, 28]
    assert cached(narrow, 1, prompt, cache_salt="a") == 0
    value = {"prompt": prompt, "max_tokens": 3, "seed": 1, "logprobs": 1}
    answers = [
        asked(narrow, who, "/v1/completions", value | more).json()["choices"]
        for who, more in ((0, {}), (1, {}), (0, {"cache_salt": "c"}))
    ]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("route", ["/v1/completions", "/inference/v1/generate"])
def test_a_salt_is_a_text(narrow: Running, route: str) -> None:
    key, value = ("prompt", "ab") if route == "/v1/completions" else ("token_ids", [5, 6])
    for salt, status in (("", 400), (3, 400), ("a", 200), (None, 200)):
        found = asked(narrow, 0, route, {key: value, "cache_salt": salt})
        assert found.status_code == status, found.text
        assert status == 200 or "cache_salt: expected a string" in found.text


def test_a_stream_tells_what_was_cached(narrow: Running) -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}}
    value = {"prompt": "a prompt for streams", "max_tokens": 1}
    assert cached(narrow, 0, str(value["prompt"])) == 0
    found = asked(narrow, 0, "/v1/completions", value | more).text
    assert '"prompt_tokens_details":{"cached_tokens":16}' in found.replace(": ", ":")


def numbers(server: Running, tenant: int) -> dict[str, float]:
    """What a tenant sees of the server's counters."""
    headers = {"Authorization": f"Bearer {TOKENS[tenant]}"}
    text = httpx.get(f"{server.url}/metrics", headers=headers, timeout=60).text
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def test_a_tenant_sees_its_own_counters(narrow: Running) -> None:
    """The first one, who is the operator, sees those of all."""
    before = [numbers(narrow, who) for who in (0, 1)]
    for _ in range(2):
        cached(narrow, 0, "counted for the first tenant")
    after = [numbers(narrow, who) for who in (0, 1)]

    def grown(who: int, name: str) -> float:
        return (
            after[who][f"isobit_{name}_tokens_total"] - before[who][f"isobit_{name}_tokens_total"]
        )

    assert [grown(0, name) for name in ("prompt", "cached", "sampled")] == [56, 24, 2]
    assert [grown(1, name) for name in ("prompt", "cached", "sampled")] == [0, 0, 0]
    cached(narrow, 1, "counted for both")
    for who in (0, 1):
        assert numbers(narrow, who)["isobit_prompt_tokens_total"] == (
            after[who]["isobit_prompt_tokens_total"] + 16
        )
    own = numbers(narrow, 1)
    assert all('tenant="1"' in name for name in own if name.startswith("isobit_requests"))
    assert any('route="/v1/completions"' in name for name in own)
    others = {name.partition("{")[0] for name in own}
    assert others == {
        "isobit_requests_created",
        "isobit_requests_total",
        *(f"isobit_{name}_tokens_total" for name in ("sampled", "prompt", "cached")),
    }
    everything = numbers(narrow, 0)
    assert any('tenant="1"' in name for name in everything)
    assert "isobit_free_pages" in everything


@pytest.fixture
def session(narrow: Running) -> Iterator[str]:
    """Of the first tenant."""
    name = asked(narrow, 0, "/api/v1/create_session", {}).json()["session_id"]
    yield name
    assert asked(narrow, 0, f"/api/v1/sessions/{name}/finish", {}).status_code == 200


def test_nobody_finishes_anothers_session(narrow: Running, session: str) -> None:
    """Nor learns that it is there: the answer is that of one which has ended."""
    found = [asked(narrow, 1, f"/api/v1/sessions/{name}/finish", {}) for name in (session, "none")]
    assert [each.status_code for each in found] == [200, 200]
    assert found[0].content == found[1].content
    beat = [
        asked(narrow, who, "/api/v1/session_heartbeat", {"session_id": session}) for who in (0, 1)
    ]
    assert [each.status_code for each in beat] == [200, 410]


def sampler_of(server: Running, session: str, **given: Any) -> httpx.Response:
    """Ask for a sampling client."""
    begin = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny", **given}
    return asked(server, 0, "/api/v1/create_sampling_session", begin)


def test_samples_whose_weights_are_read_are_counted_too(
    narrow: Running, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So who has too many is told to come again, and no future of theirs fails for it."""
    name = sampler_of(narrow, session).json()["sampling_session_id"]
    reads, awake = threading.Event(), Samplers._awake

    async def slow(samplers: Samplers, sampler: Any) -> Any:
        await asyncio.to_thread(reads.wait)
        return await awake(samplers, sampler)

    monkeypatch.setattr(Samplers, "_awake", slow)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
    sample = {"sampling_session_id": name, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
    found = [
        asked(narrow, 0, "/api/v1/asample", {**sample, "seq_id": number}) for number in range(3)
    ]
    assert [each.status_code for each in found] == [200, 200, 429]
    reads.set()
    for each in found[:2]:
        future = {"request_id": each.json()["request_id"]}
        answer = asked(narrow, 0, "/api/v1/retrieve_future", future)
        assert answer.headers["content-type"] == "application/x-protobuf", answer.text
    until(lambda: narrow.gateway.num_samples == 0)
    assert asked(narrow, 0, "/api/v1/asample", {**sample, "seq_id": 3}).status_code == 200


def test_a_sampling_client_that_cannot_be_kept_holds_no_weights(
    narrow: Running, session: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control is kept, and holds them."""
    state, snapshots = narrow.gateway.state, narrow.gateway.device.snapshots
    assert state is not None

    def write(where: Path) -> None:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (where / name).write_bytes((folder / "math" / name).read_bytes())

    def full(*_: object) -> None:
        raise RunFailed("state: database or disk is full")

    state.add_run(replace(RUN, id="u:train:0", session="u"))
    path = state.save("u:train:0", "sampler", "one", write).path
    with monkeypatch.context() as patch:
        patch.setattr(State, "add_sampler", full)
        assert sampler_of(narrow, session, model_path=path).status_code == 500
    assert not snapshots._keyed
    assert sampler_of(narrow, session, model_path=path).status_code == 200
    assert len(snapshots._keyed) == 1


def test_who_has_as_many_bytes_open_as_may_be_is_told_alone(narrow: Running) -> None:
    """Bodies that do not end count as long as they are there."""
    host, port = narrow.url.removeprefix("http://").split(":")
    value = {"prompt": "a", "max_tokens": 1, "user": "a" * 700}
    with socket.create_connection((host, int(port))) as line:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKENS[0]}\r\n"
        line.sendall(f"{head}Content-Length: 1500\r\n\r\n".encode() + b"a" * 1400)
        until(lambda: asked(narrow, 0, "/v1/completions", value).status_code == 429)
        refused = asked(narrow, 0, "/v1/completions", value)
        assert "bodies of your open requests have more than 2,000 bytes" in refused.text
        assert refused.headers["retry-after"] == "1"
        assert asked(narrow, 1, "/v1/completions", value).status_code == 200
    until(lambda: asked(narrow, 0, "/v1/completions", value).status_code == 200)


def test_sessions_of_one_are_not_those_of_another(
    narrow: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_clients, "_MOST_SESSIONS", 1)
    begin = "/api/v1/create_session"
    first = asked(narrow, 0, begin, {})
    refused, other = asked(narrow, 0, begin, {}), asked(narrow, 1, begin, {})
    assert [each.status_code for each in (first, refused, other)] == [200, 429, 200]
    assert "1 sessions of yours are open" in refused.text
    monkeypatch.setattr(of_clients, "IDLE_SECONDS", 0.0)  # who is heard of lets go of the silent
    name = other.json()["session_id"]
    assert asked(narrow, 1, "/api/v1/session_heartbeat", {"session_id": name}).status_code == 200
    silent = {"session_id": first.json()["session_id"]}
    assert asked(narrow, 0, "/api/v1/session_heartbeat", silent).status_code == 410


def test_results_of_one_are_not_forgotten_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "_MOST_RESULTS", 2)

    async def said() -> Response:
        return Response(b"a")

    async def work(kept: Futures) -> None:
        kept.begin("1", "first", said())
        for number in range(5):
            kept.begin("0", str(number), said())
        await until_here(lambda: not kept.knows("0", "2"))
        assert kept.knows("1", "first")
        assert [kept.knows("0", str(number)) for number in range(5)] == [False] * 3 + [True] * 2

    class Gateway:
        limits = Limits()

    asyncio.run(work(Futures(Gateway())))  # type: ignore[arg-type]


def test_conversations_of_one_are_not_dropped_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are many kept whose bytes become no tokens."""
    turn = Turn((), {}, (1, 2), (3,), {}, 100)
    kept = Sessions()
    monkeypatch.setattr(conversations, "MOST_SESSIONS", 2)
    kept.keep("1", "a", turn)
    for name in "abc":
        kept.keep("0", name, turn)
    assert kept.find("1", "a") is turn
    assert [kept.find("0", name) is not None for name in "abc"] == [False, True, True]
    monkeypatch.setattr(conversations, "MOST_SESSIONS", 100)
    monkeypatch.setattr(conversations, "MOST_BYTES", 350)
    for name in "defgh":
        kept.keep("0", name, turn)
    assert [kept.find("0", name) is not None for name in "bcdefgh"] == [False] * 4 + [True] * 3
    kept.keep("0", "h", replace(turn, num_bytes=1))
    kept.keep("0", "i", turn)
    assert kept.find("0", "f") is not None


def test_requests_of_one_run_are_not_counted_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MOST_REQUEST_BYTES", 100)
    state = State(tmp_path / "state")
    try:
        for run in (RUN, replace(RUN, id="s:train:1", number=1)):
            state.add_run(run)
        state.accept("s:train:0", 1, "optim_step", b"a" * 60)
        with pytest.raises(BadRequest, match="100 is the most that one step may be made of"):
            state.accept("s:train:0", 2, "optim_step", b"a" * 60)
        state.accept("s:train:0", 1, "optim_step", b"a" * 60)  # which is there, and counted once
        state.accept("s:train:1", 1, "optim_step", b"a" * 60)
        assert [list(state.requests(f"s:train:{each}")) for each in (0, 1)] == [[1], [1]]
    finally:
        state.close()


def test_files_of_downloads_are_bounded(narrow: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each tenant and of all; what has ended, or was never read, counts no more."""
    state = narrow.gateway.state
    assert state is not None

    def write(folder: Path) -> None:
        for name in "ab":
            (folder / name).write_bytes(b"a" * 100)

    for number in (0, 1):
        state.add_run(
            replace(RUN, id=f"t:train:{number}", session="t", number=number, tenant=str(number))
        )
        state.save(f"t:train:{number}", "training", "one", write)

    def archive_of(tenant: int) -> httpx.Response:
        path = f"/api/v1/training_runs/t:train:{tenant}/checkpoints/weights/one/archive"
        headers = {"Authorization": f"Bearer {TOKENS[tenant]}"}
        return httpx.get(narrow.url + path, headers=headers, timeout=60)

    monkeypatch.setattr(archive, "_MOST_OF_A_TENANT", 4)
    assert [archive_of(0).status_code for _ in range(4)] == [200] * 4
    waits, goes_on = threading.Event(), archive._blocks

    async def slow(file: Any) -> Any:
        await asyncio.to_thread(waits.wait)
        async for block in goes_on(file):
            yield block

    with ThreadPoolExecutor(3) as pool:
        monkeypatch.setattr(archive, "_blocks", slow)
        going = [pool.submit(archive_of, 0) for _ in range(3)]
        refused = next(as_completed(going)).result()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "too many downloads are open" in refused.text
        monkeypatch.setattr(archive, "_blocks", goes_on)
        assert archive_of(1).status_code == 200
        waits.set()
        assert sorted(each.result().status_code for each in going) == [200, 200, 429]
    assert archive_of(0).status_code == 200
