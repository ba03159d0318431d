"""Requests to runs that wait: how much of a tenant, of all and of one run may, what of them is in
memory, and that none is refused for ever."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from isobit.errors import IsobitError
from isobit.serve.requests import Limits
from isobit.serve.state import store
from isobit.serve.state.rows import Answer
from isobit.serve.tinker import sampling
from isobit.serve.tinker.room import training_bytes

from .helpers import KEY, OTHER_KEY, Running, serving

pytest.importorskip("tinker")
zstandard: Any = pytest.importorskip("zstandard")

from .test_faults import until  # noqa: E402
from .test_runs import (  # noqa: E402
    PROTOBUF,
    answer,
    created,
    gradients,
    new,
    started,
    step,
    weights,
)
from .training import data, datum, message, run_of  # noqa: E402

ZSTD = PROTOBUF | {"Content-Encoding": "zstd"}
EMPTY = b"\x1a\x00"  # a datum


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.serve.helpers.TOKENS", (KEY, OTHER_KEY))


def post(server: Running, content: bytes) -> httpx.Response:
    packed = zstandard.ZstdCompressor().compress(content)
    return server.post("/api/v1/forward_backward", content=packed, headers=ZSTD)


def large(run: str, number: int, most: int) -> bytes:
    """A request that packs well: one datum, whose weights take so many bytes."""
    found = message(run, number, [datum([5] * (most // 16))])
    assert abs(len(found) - most) < 1000
    return found


def stranger_of(server: Running) -> Running:
    return Running(server.url, server.gateway, server.server, OTHER_KEY, server.app)


@pytest.fixture(scope="module")
def base(folder: Path) -> Path:
    return folder / "base"


@pytest.fixture
def narrow(base: Path, tmp_path: Path) -> Iterator[Running]:
    limits = Limits(waiting_bytes=100_000, all_waiting_bytes=150_000, run_requests=50)
    with serving(base, state=tmp_path / "state", limits=limits) as server:
        server.token = KEY
        yield server


def test_a_small_body_of_very_many_parts_is_refused_as_it_arrives(narrow: Running) -> None:
    """And is not kept. The control has as many as there may be, and waits."""
    run, state = new(narrow), narrow.gateway.state
    head = message(run, 2, [])
    for hidden in (
        EMPTY * 70_000,
        b"\x1a\x8c\x95\x06" + b"\x0a\x00" * 51_270,  # of a datum: chunks
        b"\x40\x01" * 70_000,  # a flag, again and again
        b"\x2a\x00" * 70_000,  # options of a loss
    ):
        refused = post(narrow, head + hidden * (2 if hidden[:2] == b"\x1a\x8c" else 1))
        assert refused.status_code == 400
        assert "65,536 data, chunks and tensors; send fewer" in refused.text
    assert state is not None
    assert list(state.requests(run)) == [0]
    assert post(narrow, head + EMPTY * 40_000).status_code == 200
    assert list(state.requests(run)) == [0, 2]


def test_what_waits_of_a_tenant_and_of_all_is_bounded(narrow: Running) -> None:
    """By its bytes when it is unpacked; the one whose turn it is, and another tenant's share, are
    not refused."""
    run, stranger = new(narrow), stranger_of(narrow)
    other = new(stranger)
    sent = [post(narrow, large(run, number, 60_000)) for number in (2, 3)]
    assert [each.status_code for each in sent] == [200, 429]
    said = sent[1].json()["error"]["message"]
    assert said.startswith("requests to your runs that wait have ")
    assert "100,000 may be" in said
    assert post(stranger, large(other, 2, 60_000)).status_code == 200
    assert "the runs of all tenants" in post(stranger, large(other, 3, 38_000)).text
    assert post(stranger, message(other, 3, data(1))).status_code == 200
    asked = post(narrow, large(run, 1, 60_000))
    assert asked.status_code == 200
    answer(narrow, asked)
    answer(narrow, sent[0])
    assert post(narrow, large(run, 4, 60_000)).status_code == 200  # there is room again


def held(length: int, but: list[bytes]) -> int:
    """How many bodies of this length, and messages read of one, something still refers to."""
    gc.collect()
    found, own = dict[int, Any](), {id(each) for each in but}
    for referrer in gc.get_objects():
        for each in gc.get_referents(referrer):
            if type(each) is bytes:
                if len(each) == length and id(each) not in own:
                    found[id(each)] = each
            elif type(each).__name__ in ("ForwardBackwardRequest", "Batch"):
                found[id(each)] = each
    return len(found)


def test_memory_is_shared_by_tenants(
    folder: Path, adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What trains, and what is sampled from: by the limit, or by the machine where it has less."""
    with serving(folder / "base", adapters) as server:
        model, snapshots = server.gateway.model, server.gateway.device.snapshots
        limits = Limits(adapter_bytes=1000)
        assert [training_bytes(limits, model, tenants) for tenants in (1, 4)] == [1000, 250]
        small = tmp_path / "memory.max"
        small.write_text("1200\n")
        monkeypatch.setattr("isobit.engine.memory._CGROUPS", (str(small),))
        assert training_bytes(limits, model, 4) == 150
        size = snapshots.open("a", lambda: adapters["math"], "0").bytes
        snapshots.most_bytes, snapshots.tenants = 4 * size, 2
        snapshots.open("b", lambda: adapters["math"], "0")
        with pytest.raises(IsobitError, match="weights that you sample from would have more than"):
            snapshots.open("c", lambda: adapters["math"], "0")
        held = [snapshots.open(name, lambda: adapters["math"], "1") for name in "cd"]
        assert len(held) == 2


@pytest.mark.slow
def test_what_waits_is_not_in_memory(base: Path, tmp_path: Path) -> None:
    """Neither where it was taken nor where a server begins again; and it is done from the disk. The
    control holds twenty bodies."""
    with serving(base, state=tmp_path / "state") as server:
        server.token = KEY
        run, twin = new(server), new(server)
        content = [message(run, number, [datum([5, 6, *range(8, 20)])]) for number in range(2, 62)]
        length = len(content[0])
        assert {len(each) for each in content} == {length}
        before = held(length, content)
        for each in content:
            server.post("/api/v1/forward_backward", content=each, headers=PROTOBUF)
        server.post("/api/v1/get_info", {"model_id": run})
        assert held(length, content) < before + 20  # threads and connections may have their last
        more = [bytes(bytearray(content[0])) for _ in range(20)]
        assert held(length, content) >= before + len(more)
        del more
    with serving(base, state=tmp_path / "state") as server:
        server.token = KEY
        assert held(length, content) < before + 20
        asked = gradients(server, run, 1, data(1))
        answer(server, step(server, run, 62))
        assert b"error" not in answer(server, asked).content
        answer(server, gradients(server, twin, 1, data(1)))
        answer(server, step(server, twin, 2))
        assert weights(server, run) != weights(server, twin)  # which has no others


@pytest.fixture
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    """As many as three and a half bodies may have."""
    size = len(message("x" * 60, 1, data(1, 16)))
    monkeypatch.setattr(store, "MOST_REQUEST_BYTES", int(size * 3.5))
    return size


@pytest.mark.slow
def test_a_run_goes_on_where_a_step_is_made_of_too_much(
    base: Path, tmp_path: Path, few_bytes: int
) -> None:
    """The request that has no room is told so as its answer, and those behind it are done; after
    the step there is room, however seldom runs are kept."""
    with serving(base, state=tmp_path / "state", every=1000) as server:
        server.token = KEY
        run = new(server)
        sent = [gradients(server, run, number, data(number, 16)) for number in (1, 2, 3)]
        assert all(b"error" not in answer(server, each).content for each in sent)
        ahead = step(server, run, 5)
        refused = answer(server, gradients(server, run, 4, data(4, 16))).json()
        assert refused["category"] == "user"
        assert "is the most that one step may be made of; call optim_step" in refused["error"]
        assert answer(server, ahead).json()["type"] == "optim_step"
        for number in range(6, 18, 3):
            for place in (0, 1):
                found = answer(server, gradients(server, run, number + place, data(number, 16)))
                assert b"error" not in found.content
            assert answer(server, step(server, run, number + 2)).json()["type"] == "optim_step"
        expected = weights(server, run)
    with serving(base, state=tmp_path / "state", every=1000) as server:
        server.token = KEY
        assert weights(server, run) == expected


def test_what_comes_too_early_may_come_again(base: Path, tmp_path: Path, few_bytes: int) -> None:
    """One that has no room, whose turn it is not, is told to come again, and then has room."""
    with serving(base, state=tmp_path / "state") as server:
        server.token = KEY
        run = new(server)
        for number in (2, 3, 4):
            assert gradients(server, run, number, data(number, 16)).status_code == 200
        early = gradients(server, run, 6, data(6, 16))
        assert (early.status_code, early.headers["Retry-After"]) == (429, "1")
        answer(server, step(server, run, 1))
        answer(server, step(server, run, 5))
        assert b"error" not in answer(server, gradients(server, run, 6, data(6, 16))).content


@pytest.mark.slow
def test_a_restart_counts_what_is_open_once(base: Path, tmp_path: Path, few_bytes: int) -> None:
    """Also within one body of the most, beside narrower limits than the server before had."""
    with serving(base, state=tmp_path / "state") as server:
        server.token = KEY
        runs = [new(server) for _ in range(2)]
        for number in (1, 2):
            answer(server, gradients(server, runs[0], number, data(number, 16)))
        assert gradients(server, runs[0], 4, data(4, 16)).status_code == 200
    limits = Limits(runs=1, adapter_bytes=1, waiting_bytes=1, run_requests=1)
    with serving(base, state=tmp_path / "state", limits=limits) as server:
        server.token = KEY
        for run in runs:
            assert server.post("/api/v1/get_info", {"model_id": run}).status_code == 200
        answer(server, step(server, runs[0], 3))
        again = answer(server, gradients(server, runs[0], 4, data(4, 16)))
        assert b"error" not in again.content
        assert created(server, started(server)).status_code == 429  # the control is a new one


def test_a_number_that_was_skipped_was_not_done(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not said to have been, nor by the next server. The control was done and forgotten."""
    monkeypatch.setattr("isobit.serve.tinker.futures._MOST_RESULTS", 2)
    with serving(base, state=tmp_path / "state") as server:
        server.token = KEY
        run = new(server)
        answer(server, gradients(server, run, 1, data(1)))
        for number in (4, 5):
            behind = gradients(server, run, number, data(1))
        line, loop = run_of(server, run).line, server.gateway._loop
        until(lambda: len(line._waiting) == 2)
        assert loop is not None
        loop.call_soon_threadsafe(line._give_up)
        assert "did not come within" in answer(server, behind).text
        for _ in range(2):
            answer(server, gradients(server, run, run_of(server, run).line.next, data(1)))
        for number in (2, 3):
            late = gradients(server, run, number, data(1))
            assert (late.status_code, "was not done" in late.text) == (410, True)
        done = gradients(server, run, 1, data(1))
        assert (done.status_code, "its result is forgotten" in done.text) == (410, True)
    with serving(base, state=tmp_path / "state") as server:
        server.token = KEY
        for number in (2, 3):
            late = gradients(server, run, number, data(1))
            assert (late.status_code, "was not done" in late.text) == (410, True)


def test_unload_is_asked_again(base: Path, tmp_path: Path) -> None:
    """It is done, with this server and the next; what is no run's name is not one."""
    with serving(base, state=tmp_path / "state") as server:
        server.token = KEY
        run, other = new(server), new(server)
        asked = {"model_id": run}
        first = answer(server, server.post("/api/v1/unload_model", asked)).json()
        assert answer(server, server.post("/api/v1/unload_model", asked)).json() == first
        assert run_of(server, other).session.closers
    with serving(base, state=tmp_path / "state") as server:
        server.token = KEY
        assert answer(server, server.post("/api/v1/unload_model", asked)).json() == first
        assert server.post("/api/v1/unload_model", {"model_id": "a/../b"}).status_code == 404
        assert server.post("/api/v1/get_info", {"model_id": other}).status_code == 200


@pytest.mark.slow
def test_a_used_number_with_other_content_is_refused(base: Path, tmp_path: Path) -> None:
    """Of gradients, steps, runs, sampling clients and samples; the same content, packed or not, has
    the answer that it had. So it is with the next server."""
    with serving(base, state=tmp_path / "state") as server:
        server.token = KEY
        session = started(server)
        run = new(server, session)
        first = gradients(server, run, 1, data(1))
        answer(server, first)
        answer(server, step(server, run, 2))
        begin = {"session_id": session, "sampling_session_seq_id": 0}
        made = server.post("/api/v1/create_sampling_session", begin).json()
        chunk = {"type": "encoded_text", "tokens": [10, 11]}
        sample = {"sampling_session_id": made["sampling_session_id"], "seq_id": 1}
        sample |= {"prompt": {"chunks": [chunk]}, "sampling_params": {"max_tokens": 2}}
        assert server.post("/api/v1/asample", sample).status_code == 200
        assert server.post("/api/v1/asample", sample).status_code == 200
        sample["sampling_params"] = {"max_tokens": 3}
        saved = server.post(
            "/api/v1/save_weights_for_sampler", {"model_id": run, "seq_id": 3, "path": "a"}
        )
        begin["model_path"] = answer(server, saved).json()["path"]
        for refused in (
            server.post("/api/v1/asample", sample),
            server.post("/api/v1/create_sampling_session", begin),
            created(server, session, 0, rank=2),
        ):
            assert refused.status_code == 400
            assert "a number of its own" in refused.json()["error"]["message"]
        del begin["model_path"]
        assert server.post("/api/v1/create_sampling_session", begin).json() == made
    for _ in range(2):
        with serving(base, state=tmp_path / "state") as server:
            server.token = KEY
            for refused in (gradients(server, run, 1, data(2)), gradients(server, run, 2, data(1))):
                assert refused.status_code == 400
                said = f"request {run}:"
                assert refused.json()["error"]["message"].startswith(said)
            assert gradients(server, run, 1, data(1)).json() == first.json()
            assert post(server, message(run, 1, data(1))).json() == first.json()
            assert created(server, session, 0, rank=2).status_code == 400
            answer(server, created(server, session, 0))


@pytest.mark.slow
def test_snapshots_without_a_name_leave_nothing_behind(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But why some of the newest were dropped, of all sessions together; a client that is still
    there keeps its number."""
    monkeypatch.setattr("isobit.serve.tinker.training._MOST_UNNAMED", 2)
    monkeypatch.setattr(sampling, "_MOST_DROPPED", 3)
    with serving(base, state=tmp_path / "state") as server:
        server.token = KEY
        run, names = new(server), list[str]()
        for number in range(1, 9):
            asked = {"model_id": run, "seq_id": number, "sampling_session_seq_id": number}
            made = server.post("/api/v1/save_weights_for_sampler", asked)
            names.append(answer(server, made).json()["sampling_session_id"])
        told = [server.get(f"/api/v1/samplers/{name}").text for name in names]
        assert ["newer ones of its run" in text for text in told] == [False] * 3 + [True] * 3 + [
            False
        ] * 2
        assert server.app is not None
        (samplers,) = [
            route.endpoint.__self__  # type: ignore[attr-defined]
            for route in server.app.routes
            if getattr(route, "path", "") == "/api/v1/asample"
        ]
        assert len(samplers._numbered) == 2
        assert len(samplers._gone) == 3


def test_a_run_that_cannot_go_on_says_why_and_is_no_ghost(base: Path, tmp_path: Path) -> None:
    """So do its futures that had no answer; those that had one have it. What it cannot go on
    without are weights that it has loaded, which are gone."""
    with serving(base, state=tmp_path / "state", every=1) as server:
        server.token = KEY
        run, state = new(server), server.gateway.state
        assert state is not None
        done = answer(server, gradients(server, run, 1, data(1))).content
        waits = gradients(server, run, 3, data(1))
        load = {"model_id": run, "seq_id": 2, "path": f"tinker://{run}/weights/a"}
        state.accept(run, 2, "load_weights", json.dumps(load).encode())
        state.answer(run, 2, Answer(200, "application/json", b'{"type":"load_weights"}'))
    with serving(base, state=tmp_path / "state", every=1, drops=True) as server:
        server.token = KEY
        ghost = server.post("/api/v1/get_info", {"model_id": run})
        assert ghost.status_code == 404
        assert "it could not go on when the server began again: " in ghost.text
        assert "could not go on" in answer(server, waits).json()["error"]
        first = server.post("/api/v1/retrieve_future", {"request_id": f"{run}:1"})
        assert first.content == done
        assert gradients(server, run, 4, data(1)).status_code == 404
