"""Requests to a run are done in the order of their numbers, once each, and within limits."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from isobit.serve.jobs import WorkJob
from isobit.serve.requests import BadRequest, Limits
from isobit.serve.tinker import lines, sampling, sessions
from isobit.serve.tinker.lines import Line

from .helpers import KEY, LONG, OTHER_KEY, Running, serving

pytest.importorskip("tinker")

from tests.until import until

from .training import data, datum, message, outputs, run_of

PROTOBUF = {"Content-Type": "application/x-protobuf"}


def started(server: Running) -> str:
    """A session."""
    return str(server.post("/api/v1/create_session", {}).json()["session_id"])


def created(server: Running, session: str, number: int = 0, rank: int = 4) -> httpx.Response:
    """Ask for a run."""
    asked = {
        "session_id": session,
        "model_seq_id": number,
        "base_model": "tiny",
        "lora_config": {"rank": rank, "seed": 1},
        "optimizer_config": {"type": "adamw"},
    }
    return server.post("/api/v1/create_model", asked)


def answer(server: Running, asked: httpx.Response) -> httpx.Response:
    """What a future is answered."""
    assert asked.status_code == 200, asked.text
    while True:
        name = {"request_id": asked.json()["request_id"]}
        found = server.post("/api/v1/retrieve_future", name)
        if found.status_code != 408:
            return found


def new(server: Running, session: str | None = None, number: int = 0) -> str:
    """A run's name."""
    asked = created(server, session or started(server), number)
    return str(answer(server, asked).json()["model_id"])


def gradients(server: Running, run: str, number: int, given: list[Any], **more: Any) -> Any:
    content = message(run, number, given)
    return server.post("/api/v1/forward_backward", content=content, headers=PROTOBUF, **more)


def step(server: Running, run: str, number: int) -> httpx.Response:
    adam = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
    return server.post(
        "/api/v1/optim_step", {"model_id": run, "seq_id": number, "adam_params": adam}
    )


@pytest.mark.parametrize(
    "name", ["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"]
)
def test_a_number_that_is_none_is_refused(trainer: Running, name: str) -> None:
    """The client writes NaN as null, and the default would train. The control leaves it out."""
    run = new(trainer)
    for number, adam in ((1, {name: None}), (2, {})):
        asked = {"model_id": run, "seq_id": number, "adam_params": adam}
        found = answer(trainer, trainer.post("/api/v1/optim_step", asked)).json()
        refused = f"{name}: expected a number, got null, which NaN becomes" in str(found)
        assert refused is bool(adam), found


def weights(server: Running, run: str) -> bytes:
    tensors = run_of(server, run).trains.adapter().tensors
    return b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))


def in_order(server: Running, order: list[int], times: int = 1) -> bytes:
    """The weights after two gradients, a step, a gradient and a step, sent in some order."""
    run = new(server)
    asked = []
    for number in order:
        for _ in range(times):
            send = step(server, run, number) if number in (3, 5) else None
            asked.append(send or gradients(server, run, number, data(number)))
    for one in asked:
        assert "error" not in answer(server, one).text
    return weights(server, run)


@pytest.mark.slow
def test_requests_are_done_in_the_order_of_their_numbers_and_once(trainer: Running) -> None:
    """The control has other numbers for the same requests."""
    expected = in_order(trainer, [1, 2, 3, 4, 5])
    assert in_order(trainer, [5, 3, 4, 2, 1]) == expected
    assert in_order(trainer, [2, 1, 4, 3, 5], times=3) == expected
    run = new(trainer)
    for number, given in enumerate((1, 4, 0, 2, 0), 1):  # two of them change places
        send = gradients(trainer, run, number, data(given)) if given else step(trainer, run, number)
        answer(trainer, send)
    assert weights(trainer, run) != expected


@pytest.mark.slow
def test_a_retried_request_has_the_answer_of_the_first(trainer: Running) -> None:
    run = new(trainer)
    first, again = (gradients(trainer, run, 1, data(1)) for _ in range(2))
    assert first.json() == again.json()
    assert answer(trainer, first).content == answer(trainer, again).content
    once = float(answer(trainer, step(trainer, run, 2)).json()["metrics"]["grad_norm"])
    other = new(trainer)
    for number in (1, 2):  # the control: twice
        answer(trainer, gradients(trainer, other, number, data(1)))
    twice = float(answer(trainer, step(trainer, other, 3)).json()["metrics"]["grad_norm"])
    assert twice == pytest.approx(2 * once, rel=1e-3)


def test_where_there_is_no_room_for_a_sampling_client_none_is_kept(
    trainer: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control has room."""
    run, state = new(trainer), trainer.gateway.state
    assert state is not None

    def unnamed(number: int) -> str:
        asked = {"model_id": run, "seq_id": number, "sampling_session_seq_id": number}
        return answer(trainer, trainer.post("/api/v1/save_weights_for_sampler", asked)).text

    def kept() -> int:
        return len(state.samplers(run.partition(":")[0]))

    with monkeypatch.context() as patch:
        patch.setattr(trainer.gateway.device.snapshots, "most_bytes", 1)
        assert "weights that you sample from would have more than 1 bytes" in unnamed(1)
    assert kept() == 0
    assert "sampling_session_id" in unnamed(2)
    assert kept() == 1


def test_create_and_sampling_clients_are_made_once(trainer: Running) -> None:
    session = started(trainer)
    names = {created(trainer, session).json()["request_id"] for _ in range(3)}
    assert len(names) == 1
    run = new(trainer, session)
    assert run == f"{session}:train:0"
    asked = {"model_id": run, "seq_id": 1, "sampling_session_seq_id": 4}
    found = {
        answer(trainer, trainer.post("/api/v1/save_weights_for_sampler", asked)).text
        for _ in range(2)
    }
    assert len(found) == 1


def test_another_tenant_has_no_run_of_this_one(trainer: Running) -> None:
    run = new(trainer)
    stranger = Running(trainer.url, trainer.gateway, trainer.server, OTHER_KEY)
    for path in ("get_info", "optim_step", "save_weights"):
        found = stranger.post(f"/api/v1/{path}", {"model_id": run, "seq_id": 1})
        assert (found.status_code, "no training run" in found.text) == (404, True)
    assert gradients(stranger, run, 1, data(1)).status_code == 404
    unloaded = stranger.post("/api/v1/unload_model", {"model_id": run})  # as if it was not there
    assert answer(stranger, unloaded).json()["type"] == "unload_model"
    assert trainer.post("/api/v1/get_info", {"model_id": run}).status_code == 200


def test_zstd_and_what_it_may_hide(trainer: Running) -> None:
    zstandard = pytest.importorskip("zstandard")
    run = new(trainer)
    packed = zstandard.ZstdCompressor().compress(message(run, 1, data(1)))
    headers = PROTOBUF | {"Content-Encoding": "zstd"}

    def post(content: bytes) -> httpx.Response:
        return trainer.post("/api/v1/forward_backward", content=content, headers=headers)

    found = outputs(answer(trainer, post(packed)).content)
    plain = new(trainer)
    same = outputs(answer(trainer, gradients(trainer, plain, 1, data(1))).content)
    assert found == same
    assert post(b"not zstd").status_code == 400
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    assert len(bomb) < 10000
    assert post(bomb).status_code == 413


def test_a_run_that_is_unloaded_answers_those_who_wait(trainer: Running) -> None:
    run = new(trainer)
    waits = gradients(trainer, run, 2, data(1))
    assert answer(trainer, trainer.post("/api/v1/unload_model", {"model_id": run})).json() == {
        "type": "unload_model",
        "model_id": run,
    }
    assert answer(trainer, waits).json()["error"] == "the training run was unloaded"
    assert step(trainer, run, 3).status_code == 404


@pytest.mark.slow
def test_a_request_that_never_comes_fails_those_behind_it(
    trainer: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the run goes on after them, without a gradient of what was not done."""
    run, clean = new(trainer), new(trainer)
    behind = [gradients(trainer, run, 2, data(1)), step(trainer, run, 3)]
    line = run_of(trainer, run).line
    until(lambda: len(line._waiting) == 2)  # else the time could run out between the two
    monkeypatch.setattr(lines, "GAP_SECONDS", 0.2)
    behind.append(gradients(trainer, run, 4, data(1)))
    for one in behind:
        found = answer(trainer, one).json()
        assert found["category"] == "user"
        assert "request 1 of this run did not come within 0.2 seconds" in found["error"]
    assert gradients(trainer, run, 1, data(1)).status_code == 410
    for name, first in ((run, 5), (clean, 1)):
        answer(trainer, gradients(trainer, name, first, data(2)))
        answer(trainer, step(trainer, name, first + 1))
    assert weights(trainer, run) == weights(trainer, clean)


@pytest.mark.slow
def test_limits(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs, bytes of adapters, requests that wait, and bodies before they are parsed."""
    monkeypatch.setattr("tests.serve.helpers.TOKENS", (KEY,))
    limits = Limits(runs=2, run_requests=3, body_bytes=20000, adapter_bytes=1 << 20)
    with serving(folder / "base", state=tmp_path / "state", limits=limits) as server:
        server.token = KEY
        session = started(server)
        run = new(server, session)
        new(server, session, 1)
        refused = created(server, session, 2)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        assert "2 training runs of yours are open" in refused.text
        answer(server, server.post("/api/v1/unload_model", {"model_id": f"{session}:train:1"}))
        asked = {"model_id": run, "sampling_session_seq_id": 1, "seq_id": 1}
        monkeypatch.setattr(server.gateway.device.snapshots, "most_bytes", 10)
        full = answer(server, server.post("/api/v1/save_weights_for_sampler", asked)).json()
        assert full["category"] == "user"
        assert "would have more than 10 bytes together" in full["error"]
        large = created(server, session, 2, rank=4000)
        assert (large.status_code, "choose a lower rank" in large.text) == (400, True)
        assert created(server, session, 3, rank=1 << 40).status_code == 400
        for number in (3, 4, 5):
            assert gradients(server, run, number, data(1)).status_code == 200
        many = gradients(server, run, 6, data(1))
        assert (many.status_code, "are waiting" in many.text) == (429, True)
        long = gradients(server, run, 2, [datum([5] * 2000)])
        assert (long.status_code, "longer than 20,000 bytes" in long.text) == (413, True)
        monkeypatch.setattr(sessions, "IDLE_SECONDS", 0.0)
        learner = run_of(server, run)
        started(server)
        assert learner.learner is None
        assert step(server, run, 2).status_code == 404


def test_a_server_without_train_says_so(running: Running) -> None:
    found = running.post("/api/v1/create_model", {})
    assert (found.status_code, "without --train" in found.text) == (400, True)


def test_what_is_read_for_a_session_that_has_ended_is_let_go(
    trainer: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampling client's weights, which rested, while it is asked. They are in memory meanwhile."""
    monkeypatch.setattr(sampling, "_MOST_AWAKE", 1)
    run, session, samplers = new(trainer), started(trainer), list[str]()
    for number, name in enumerate("ab"):
        asked = {"model_id": run, "seq_id": number + 1, "path": name}
        saved = trainer.post("/api/v1/save_weights_for_sampler", asked)
        begin = {"session_id": session, "sampling_session_seq_id": number}
        begin |= {"model_path": answer(trainer, saved).json()["path"]}
        made = trainer.post("/api/v1/create_sampling_session", begin)
        samplers.append(made.json()["sampling_session_id"])
    snapshots, read = trainer.gateway.device.snapshots, threading.Event()
    goes_on, served = threading.Event(), list[str]()
    opened = snapshots.open

    def slow(*given: Any) -> Any:
        found = opened(*given)
        served.append(found.served or "")
        read.set()
        assert goes_on.wait(LONG)
        return found

    monkeypatch.setattr(snapshots, "open", slow)
    chunk = {"type": "encoded_text", "tokens": [10, 11]}
    asked = {"sampling_session_id": samplers[0], "seq_id": 1, "prompt": {"chunks": [chunk]}}
    sample = trainer.post("/api/v1/asample", asked)
    assert read.wait(LONG)
    names = trainer.gateway.model.transformer.served
    assert names is not None
    assert served[0] in names.names
    with ThreadPoolExecutor(1) as pool:
        finished = pool.submit(trainer.post, f"/api/v1/sessions/{session}/finish", {})
        try:
            assert answer(trainer, sample).json()["error"] == "the request was cancelled"
        finally:
            goes_on.set()
        assert finished.result().status_code == 200
    until(lambda: served[0] not in names.names)


def test_turns_are_taken_in_order_whoever_fails() -> None:
    """Hundreds of requests in a random order; each third one fails."""

    async def all_of_them() -> list[int]:
        line, done = Line(1), list[int]()

        async def one(number: int) -> None:
            async with line.turn(number):
                await asyncio.sleep(0)
                done.append(number)
                if number % 3 == 0:
                    raise ValueError

        order = sorted(range(1, 300), key=lambda number: number * 7919 % 1009)
        found = await asyncio.gather(*map(one, order), return_exceptions=True)
        assert sum(isinstance(each, ValueError) for each in found) == 99
        with pytest.raises(BadRequest, match="came twice, or too late"):
            async with line.turn(5):
                pass
        return done

    assert asyncio.run(all_of_them()) == list(range(1, 300))


@pytest.mark.slow
def test_runs_take_turns(trainer: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for more than one request of another run, of its tenant or of another, that has
    thirty; all come while the device is busy."""
    stranger = Running(trainer.url, trainer.gateway, trainer.server, OTHER_KEY)
    runs = {"many": new(trainer), "own": new(trainer), "stranger": new(stranger)}
    done = list[str]()
    for who, name in runs.items():
        learner = run_of(trainer, name).trains

        def noted(*given: Any, who: str = who, learner: Any = learner) -> Any:
            done.append(who)
            return type(learner).forward_backward_in_parts(learner, *given)

        monkeypatch.setattr(learner, "forward_backward_in_parts", noted)
    go = threading.Event()
    trainer.gateway.device.submit(WorkJob("0", lambda: go.wait(60), lambda event: None))
    asked = [gradients(trainer, runs["many"], number, data(1)) for number in range(1, 31)]
    others = [
        gradients(trainer, runs["own"], 1, data(1)),
        gradients(stranger, runs["stranger"], 1, data(1)),
    ]
    go.set()
    for server, one in zip((trainer, stranger), others, strict=True):
        answer(server, one)
    for one in asked:
        answer(trainer, one)
    assert max(done.index("own"), done.index("stranger")) <= 2
    assert len(done) == 32
