"""A server goes on where an earlier one of its state ended: runs, sessions, sampling clients."""

import os
import signal
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from isobit.engine.engine import Engine
from isobit.errors import IsobitError, RunFailed
from isobit.model import Model
from isobit.rl.stepwise import StepwiseLearner
from isobit.serve import app
from isobit.serve.listening import listen
from isobit.serve.state.database import FILE
from isobit.serve.state.state import State
from isobit.serve.tinker import resume

from .helpers import KEY, LONG, Running, serving

tinker: Any = pytest.importorskip("tinker")

from . import kills  # noqa: E402
from .test_runs import answer, created, gradients, new, started, step, weights  # noqa: E402
from .training import data, sampled  # noqa: E402


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.serve.helpers.TOKENS", (KEY,))
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@pytest.fixture
def served(folder: Path, tmp_path: Path) -> Any:
    """Begins a server on the same state."""

    def begin(**more: Any) -> Any:
        return serving(folder / "base", state=tmp_path / "state", **more)

    return begin


def mine(server: Running) -> Running:
    server.token = KEY
    return server


def in_one_life(served: Any) -> str:
    """The weights of a run that no restart has interrupted."""
    with served() as server:
        mine(server)
        run = new(server)
        for number in (1, 2):
            answer(server, gradients(server, run, number, data(number)))
        answer(server, step(server, run, 3))
        return weights(server, run)


@pytest.mark.slow
@pytest.mark.parametrize("forgets", [False, True])
def test_gradients_before_a_restart_count_after_it(
    served: Any, forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same answers, and the same weights; the control does nothing again."""
    expected = in_one_life(served)
    with served() as server:
        run = new(mine(server))
        first = answer(server, gradients(server, run, 1, data(1)))
    if forgets:
        monkeypatch.setattr(resume, "_CHANGING", ())
    with served() as server:
        asked = gradients(mine(server), run, 1, data(1))  # a client that has no answer yet
        assert answer(server, asked).content == first.content
        answer(server, gradients(server, run, 2, data(2)))
        answer(server, step(server, run, 3))
        assert (weights(server, run) == expected) is not forgets


@pytest.mark.slow
def test_a_request_that_was_taken_is_done_by_the_next_server(served: Any) -> None:
    """Also one whose turn has not come: the number before it comes after the restart."""
    expected = in_one_life(served)
    with served() as server:
        run = new(mine(server))
        later = [gradients(server, run, 2, data(2)), step(server, run, 3)]
    with served() as server:
        answer(mine(server), gradients(server, run, 1, data(1)))
        for each in later:
            assert answer(server, each).status_code == 200
        assert weights(server, run) == expected


@pytest.mark.slow
def test_create_is_answered_again(served: Any) -> None:
    with served() as server:
        session = started(mine(server))
        asked = created(server, session)
        first = answer(server, asked).json()
    with served() as server:
        assert answer(mine(server), asked).json() == first
        assert answer(server, created(server, session)).json() == first
        unloaded = server.post("/api/v1/unload_model", {"model_id": first["model_id"]})
        answer(server, unloaded)
    with served() as server:
        assert step(mine(server), first["model_id"], 1).status_code == 404


def test_a_session_is_finished_again(served: Any) -> None:
    """A kill can come between its end and the answer, and then the client asks again. The control
    is a session that has not ended."""

    def status(server: Running, path: str, body: dict[str, str]) -> int:
        return mine(server).post(f"/api/v1/{path}", body).status_code

    with served() as server:
        ended, goes_on = started(mine(server)), started(server)
        assert [status(server, f"sessions/{ended}/finish", {}) for _ in range(2)] == [200, 200]
    with served() as server:
        assert status(server, f"sessions/{ended}/finish", {}) == 200
        assert status(server, "session_heartbeat", {"session_id": ended}) == 410
        assert status(server, "session_heartbeat", {"session_id": goes_on}) == 200


@pytest.mark.slow
def test_saved_weights_sample_and_train_as_before(served: Any) -> None:
    """A sampling client of a path, one of weights without a name, and training that goes on from a
    state with its optimizer, bit for bit. The control has a new optimizer."""

    def stepped(server: Running, path: str, optimizer: bool) -> str:
        service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        made = (
            service.create_training_client_from_state_with_optimizer
            if optimizer
            else service.create_training_client_from_state
        )
        client = made(path).result()
        client.forward_backward(data(5), "cross_entropy").result()
        client.optim_step(tinker.AdamParams(learning_rate=3e-2)).result()
        found = weights(server, client.model_id)
        service.close("success").result()
        return found

    with served() as server:
        service = tinker.ServiceClient(base_url=mine(server).url, api_key=KEY)
        client = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
        for seed in (1, 2):
            client.forward_backward(data(seed), "cross_entropy").result()
            client.optim_step(tinker.AdamParams(learning_rate=3e-2)).result()
        path = client.save_weights_for_sampler("a").result().path
        state = client.save_state("a").result().path
        unnamed = client.save_weights_and_get_sampling_client().result()
        before = sampled(unnamed, 4)
        assert sampled(service.create_sampling_client(model_path=path).result(), 4) == before
        name, went_on = unnamed._sampling_session_id, stepped(server, state, True)
        service.holder.close()  # and the session goes on
    with served() as server:
        again = tinker.ServiceClient(base_url=mine(server).url, api_key=KEY)
        assert sampled(again.create_sampling_client(model_path=path).result(), 4) == before
        assert server.get(f"/api/v1/samplers/{name}").status_code == 200
        assert stepped(server, state, True) == went_on
        assert stepped(server, state, False) != went_on
        again.close("success").result()


@pytest.mark.slow
def test_a_sampling_client_never_samples_from_other_weights_of_its_name(served: Any) -> None:
    """A name that is saved again: before a restart the client keeps its weights, and after it, they
    being gone, it is told so."""
    with served() as server:
        service = tinker.ServiceClient(base_url=mine(server).url, api_key=KEY)
        client = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
        path = client.save_weights_for_sampler("a").result().path
        sampler = service.create_sampling_client(model_path=path).result()
        before, name = sampled(sampler, 4), sampler._sampling_session_id
        for seed in (1, 2):
            client.forward_backward(data(seed), "cross_entropy").result()
            client.optim_step(tinker.AdamParams(learning_rate=0.3)).result()
        assert client.save_weights_for_sampler("a").result().path == path
        assert sampled(sampler, 4) == before
        new = service.create_sampling_client(model_path=path).result()
        assert sampled(new, 4) != before  # the control
        kept = new._sampling_session_id
        service.holder.close()
    with served() as server:
        assert mine(server).get(f"/api/v1/samplers/{name}").status_code == 404
        assert server.get(f"/api/v1/samplers/{kept}").status_code == 200


@pytest.mark.slow
def test_a_damaged_state_of_a_run_ends_that_run_alone(
    served: Any, folder: Path, tmp_path: Path
) -> None:
    """Where the server was told to drop what cannot go on; else it does not begin."""
    with served() as server:
        runs = [new(mine(server)) for _ in range(2)]
        state = server.gateway.state
        assert state is not None
        present = state.present(runs[0])
        assert present is not None
        file = state.folder_of(present) / "adapter_model.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(IsobitError, match=f"training run {runs[0]} cannot go on: .* is damaged"):
        alone(folder / "base", tmp_path / "state")
    with served(drops=True) as server:
        assert step(mine(server), runs[0], 1).status_code == 404
        assert answer(server, step(server, runs[1], 1)).status_code == 200


@pytest.mark.slow
def test_what_the_server_cannot_do_ends_no_run(
    served: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends instead, with one line, or at a signal; the next one goes on. The control is a run
    that cannot be read (`test_a_damaged_state_of_a_run_ends_that_run_alone`)."""
    with served() as server:
        run = new(mine(server))
        answer(server, gradients(server, run, 1, data(1)))

    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(StepwiseLearner, "load", no_memory)
        with pytest.raises(
            RunFailed, match=f"^the server cannot go on where it ended: training run {run}: "
        ):
            alone(folder / "base", tmp_path / "state")
    going = threading.Event()

    def slow(*given: Any, **named: Any) -> None:
        going.set()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        assert loaded is not None
        loaded(*given, **named)

    with monkeypatch.context() as patch:
        loaded = StepwiseLearner.load
        patch.setattr(StepwiseLearner, "load", slow)
        alone(folder / "base", tmp_path / "state")
        assert going.is_set()
    with served() as server:
        assert answer(mine(server), step(server, run, 2)).status_code == 200


def change(state: Path, statement: str) -> None:
    """Something in the tables, as another isobit may have written it."""
    with closing(sqlite3.connect(state / FILE)) as connection, connection:
        connection.execute(statement)


def test_what_cannot_go_on_stays_until_it_may_be_dropped(
    served: Any, folder: Path, tmp_path: Path
) -> None:
    """A run of another model, one whose weights are gone, and a request of a newer isobit; the
    control is the same state as it was."""
    state = tmp_path / "state"
    with served(identity="a" * 64) as server:
        run = new(mine(server))
        answer(server, gradients(server, run, 1, data(1)))
    for broken, mended, why in (
        ("model = 'b'", "model = ''", "it is of another model, whose weights have the SHA-256 b"),
        ("rank = NULL", "rank = 4", "it goes on with --train full"),
    ):
        change(state, f"UPDATE runs SET {broken}")
        with pytest.raises(IsobitError, match=f"training run {run} cannot go on: {why}") as found:
            alone(folder / "base", state)
        assert not isinstance(found.value, RunFailed)
        assert "end what cannot go on with --drop-runs" in str(found.value)
        change(state, f"UPDATE runs SET {mended}")
    change(state, "UPDATE requests SET kind = 'new_' || kind WHERE number = 1")
    with pytest.raises(IsobitError, match="request 1 is none that a server keeps: new_forward_b"):
        alone(folder / "base", state)
    change(state, "UPDATE requests SET kind = substr(kind, 5) WHERE number = 1")
    with served(identity="a" * 64) as server:
        assert answer(mine(server), step(server, run, 2)).status_code == 200
    change(state, "UPDATE runs SET model = 'b'")
    with served(identity="a" * 64, drops=True) as server:
        assert step(mine(server), run, 3).status_code == 404


def test_a_sampling_client_of_another_model_waits_for_it(served: Any) -> None:
    """It is told so, also where its number is asked for again, and another is not."""
    with served(identity="a" * 64) as server:
        session = started(mine(server))
        asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        made = server.post("/api/v1/create_sampling_session", asked).json()
    show = f"/api/v1/samplers/{made['sampling_session_id']}"
    with served(identity="b" * 64) as server:
        for found in (
            mine(server).get(show),
            server.post("/api/v1/create_sampling_session", asked),
        ):
            assert found.status_code == 404
            assert "it is of another model" in found.text
        asked["sampling_session_seq_id"] = 1
        assert server.post("/api/v1/create_sampling_session", asked).status_code == 200
    with served(identity="a" * 64) as server:
        assert mine(server).get(show).status_code == 200


def alone(base: Path, state: Path) -> None:
    """A server in this thread, until it ends."""
    kept = State(state, model="a" * 64)
    try:
        engine = Engine(Model.load(base, "fp8", "native").serving({}), kv_pages=100)
        listener = listen("127.0.0.1", 0, "--port")
        app.run(engine, "tiny", {}, (KEY,), app.ServerOptions(1.0), listener, state=kept)
    finally:
        kept.close()


@pytest.mark.slow
def test_sigterm_leaves_the_state_whole_and_open_requests_to_the_next_server(
    folder: Path, tmp_path: Path
) -> None:
    """The official client waits for the next server, and gets its answers from it."""
    server = kills.Server(folder / "base", tmp_path)
    server.start()
    try:
        server.wait(threading.Event())
        expected = kills.work(server.url)
        with ThreadPoolExecutor(1) as pool:
            going = pool.submit(kills.work, server.url)
            headers = {"X-Api-Key": KEY}
            listed = f"{server.url}/api/v1/training_runs"
            while (
                httpx.get(listed, headers=headers, timeout=LONG).json()["cursor"]["total_count"] < 2
            ):
                assert not going.done()
            server.stop(signal.SIGTERM)
            assert server.process is not None
            assert server.process.returncode == 0
            server.start()
            assert going.result() == expected
    finally:
        assert server.process is not None
        server.process.kill()
        server.process.wait(LONG)
    assert "Traceback" not in server.log
