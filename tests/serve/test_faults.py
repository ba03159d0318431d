"""Clients that go away, that are too many or too slow, and a server that ends."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from isobit.errors import RunFailed
from isobit.serve.device import Device
from isobit.serve.jobs import WorkJob
from isobit.serve.requests import Limits
from isobit.serve.state.state import State
from tests.until import until

from .helpers import TOKENS, Running, serving

LONG: dict[str, Any] = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "seed": 1}


@contextmanager
def held(device: Device) -> Iterator[None]:
    """The engine does nothing meanwhile: what comes waits, on a machine of any speed."""
    begun, ended = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        ended.wait()

    device.submit(WorkJob("holds the engine", hold, lambda _: None))
    assert begun.wait(20)
    try:
        yield
    finally:
        ended.set()


def abandon(server: Running, streamed: bool) -> None:
    """Ask, and go away in the middle of the answer."""
    body = json.dumps(LONG | {"stream": streamed, "n": 2}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as line:
        line.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if streamed:
            assert line.recv(64)
        else:
            until(lambda: server.gateway.device.num_open > 0)


def test_who_goes_away_frees_its_pages(folder: Path) -> None:
    """The control: who stays holds them."""
    with serving(folder / "base") as server:
        device, engine = server.gateway.device, server.gateway.device.engine
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: abandon(server, number % 2 == 0), range(8)))
        sampled = sum(one.sampled for one in device.totals.values())
        until(lambda: device.num_open == 0 and device.num_waiting == 0)
        assert engine.pages.num_used == 0
        assert sampled < 8 * 2 * LONG["max_tokens"]
        with ThreadPoolExecutor(1) as pool:
            staying = pool.submit(server.post, "/v1/completions", LONG)
            until(lambda: device.num_open == 1)
            assert engine.pages.num_used > 0
            assert staying.result().status_code == 200
        assert server.gateway.num_samples == 0


def test_too_many_are_told_to_come_again(folder: Path) -> None:
    with (
        serving(folder / "base", limits=Limits(open_samples=3)) as server,
        ThreadPoolExecutor(3) as pool,
    ):
        device = server.gateway.device
        with held(device):
            going = [pool.submit(server.post, "/v1/completions", LONG) for _ in range(3)]
            until(lambda: device.num_waiting == 3)
            refused = server.post("/v1/completions", LONG)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert [each.result().status_code for each in going] == [200] * 3
        assert server.post("/v1/completions", LONG | {"max_tokens": 1}).status_code == 200


@pytest.mark.slow
def test_tenants_take_turns(folder: Path) -> None:
    """One tenant's line of requests does not stand before another's only one."""
    with serving(folder / "base", max_sequences=1) as server, ThreadPoolExecutor(12) as pool:
        ended = list[str]()

        def ask(tenant: int) -> None:
            headers = {"Authorization": f"Bearer {TOKENS[tenant]}"}
            assert server.post("/v1/completions", LONG, headers=headers).status_code == 200
            ended.append(str(tenant))

        device = server.gateway.device
        with held(device):
            many = [pool.submit(ask, 0) for _ in range(10)]
            until(lambda: device.num_waiting == 10)
            one = pool.submit(ask, 1)
            until(lambda: device.num_waiting == 11)
            assert not ended
        one.result()
        assert "".join(ended).index("1") <= 3
        assert all(each.result() is None for each in many)


@pytest.mark.slow
def test_a_slow_body_and_a_long_one(folder: Path) -> None:
    with serving(folder / "base", limits=Limits(body_bytes=2000, body_seconds=0.3)) as server:
        refused = server.post("/v1/completions", {"prompt": "a" * 3000})
        assert (refused.status_code, refused.json()["error"]["message"]) == (
            413,
            "the body is longer than 2,000 bytes",
        )

        def pieces(count: int, pause: float) -> Any:
            for _ in range(count):
                yield b"a" * 1000
                time.sleep(pause)

        assert server.post("/v1/completions", content=pieces(3, 0)).status_code == 413
        slow = server.post("/v1/completions", content=pieces(2, 0.5))
        assert (slow.status_code, slow.json()["error"]["message"]) == (
            408,
            "the body took longer than 0.3 seconds",
        )


def test_a_full_disk_is_no_mistake_of_the_client(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RunFailed("state: database or disk is full")

    with serving(folder / "base", state=tmp_path / "state") as server:
        assert server.post("/api/v1/create_session", {}).status_code == 200
        monkeypatch.setattr(State, "add_session", full)
        refused = server.post("/api/v1/create_session", {})
        assert refused.status_code == 500
        assert refused.json()["error"]["message"] == "state: database or disk is full"


def test_an_end_lets_open_requests_end(folder: Path) -> None:
    with serving(folder / "base", grace=30) as server, ThreadPoolExecutor(2) as pool:
        going = pool.submit(server.post, "/v1/completions", LONG)
        until(lambda: server.gateway.device.num_open == 1)
        client = httpx.Client(headers=server.headers)
        assert client.get(f"{server.url}/health").status_code == 200
        server.server.should_exit = True
        assert going.result().status_code == 200


def test_an_end_without_grace_answers_503(folder: Path) -> None:
    with (
        serving(folder / "base", grace=0, max_sequences=1) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        whole = [
            pool.submit(server.post, "/v1/completions", LONG | {"n": 4, "max_tokens": 250})
            for _ in range(2)
        ]
        streamed = pool.submit(server.post, "/v1/completions", LONG | {"stream": True, "n": 4})
        until(lambda: server.gateway.device.num_open + server.gateway.device.num_waiting == 3)
        server.server.should_exit = True
        answers = [each.result() for each in whole]
        assert 503 in [answer.status_code for answer in answers]
        for answer in answers:
            if answer.status_code == 503:
                assert answer.json()["error"]["message"].startswith("the server is shutting down")
        text = streamed.result().text
        assert "the server is shutting down" in text or text.endswith("[DONE]\n\n")


@pytest.mark.slow
def test_no_threads_or_descriptors_are_left(folder: Path) -> None:
    """Over many requests, half of whose clients go away."""
    with serving(folder / "base") as server:
        counts = []
        for _ in range(3):
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda number: abandon(server, number % 2 == 0), range(24)))
            until(lambda: server.gateway.device.num_open == 0)
            time.sleep(0.3)
            counts.append((len(list(Path("/proc/self/fd").iterdir())), threading.active_count()))
        assert counts[2][0] <= counts[1][0] + 2
        assert counts[2][1] <= counts[1][1] + 1


def test_a_fault_of_the_device_ends_the_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits is answered, and health says so until it has ended."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with pytest.raises(AssertionError), serving(folder / "base") as server:  # noqa: PT012
        monkeypatch.setattr(server.gateway.device.engine, "step", lambda on_token: 1 / 0)
        answer = server.post("/v1/completions", LONG)
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "the server failed; its log says why"
        until(lambda: not server.gateway.device.alive)
        until(lambda: server.server.should_exit or server.gateway.draining)
    assert isinstance(server.gateway.device.failure, ZeroDivisionError)
