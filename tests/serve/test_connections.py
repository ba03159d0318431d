"""Connections within bounds: how many, and for how long those that do nothing."""

import json
import logging
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from isobit.serve import connections
from isobit.serve.connections import _OWN, REFUSED, most_connections
from isobit.serve.requests import Limits
from tests.until import until

from .helpers import Running, serving
from .test_faults import held

MOST = 20
LIMITS = Limits(connections=MOST, body_seconds=1.0, reader_seconds=1.0)
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture(scope="module")
def narrow(folder: Path) -> Iterator[Running]:
    with serving(folder / "base", limits=LIMITS) as server:
        yield server


def asked(server: Running, more: str = "") -> bytes:
    """A request with the server's token."""
    token = f"Authorization: Bearer {server.token}\r\n"
    return f"GET /v1/models HTTP/1.1\r\nHost: a\r\n{token}{more}\r\n".encode()


def opened(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def answer(line: socket.socket, asked: bytes = HEALTH) -> bytes:
    """A whole response."""
    line.sendall(asked)
    found = b""
    while piece := line.recv(65536):
        found += piece
        head, end, body = found.partition(b"\r\n\r\n")
        size = re.search(rb"content-length: (\d+)", head.lower())
        if end and size is not None and len(body) == int(size[1]):
            break
    return found


def closed(line: socket.socket) -> bool:
    """Whether the server ends it, within the socket's time."""
    try:
        while line.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def settled(server: Running) -> None:
    """All that were closed are forgotten."""
    until(lambda: not server.server.server_state.connections)


def test_one_connection_too_many_is_told_so(narrow: Running) -> None:
    """Those that are open go on, and when one is closed the next is answered."""
    with ExitStack() as stack:
        lines = [stack.enter_context(opened(narrow)) for _ in range(MOST)]
        known = asked(narrow)
        assert all(answer(line, known).startswith(b"HTTP/1.1 200") for line in lines)
        more = stack.enter_context(opened(narrow))
        found = answer(more)
        assert found.startswith(b"HTTP/1.1 503")
        assert b"connection: close" in found.lower()
        assert b"retry-after: 1" in found.lower()
        message = json.loads(found.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert message.startswith("too many connections are open")
        assert closed(more)
        assert answer(lines[0], known).startswith(b"HTTP/1.1 200")
        lines[0].close()
        deadline = time.monotonic() + 30
        while not answer(stack.enter_context(opened(narrow))).startswith(b"HTTP/1.1 200"):
            assert time.monotonic() < deadline
    settled(narrow)


def test_half_open_connections_keep_nobody_out(narrow: Running) -> None:
    """Those without a token go, the oldest first; the control has shown one, and goes on. Twice as
    many as there may be have begun a request, and none gets further."""
    known = asked(narrow)
    with ExitStack() as stack:
        first = stack.enter_context(opened(narrow))
        assert answer(first, known).startswith(b"HTTP/1.1 200")
        lines = []
        for _ in range(2 * MOST):
            lines.append(stack.enter_context(opened(narrow)))
            lines[-1].sendall(b"POST /v1/completions HTTP/1.1\r\n")
        honest = stack.enter_context(opened(narrow))
        assert answer(honest, known).startswith(b"HTTP/1.1 200")
        assert all(closed(line) for line in lines[:MOST])
        assert answer(first, known).startswith(b"HTTP/1.1 200")
    settled(narrow)


@pytest.mark.parametrize("token", [True, False])
def test_two_lengths_of_a_body_end_the_connection(narrow: Running, token: bool) -> None:
    """One behind the other is not read as a request; the controls have one length."""
    known = asked(narrow) if token else HEALTH
    head = known.removesuffix(b"\r\n")
    chunked, length = b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n"
    with opened(narrow) as line:
        found = answer(line, head + length + chunked + b"\r\n0\r\n\r\n" + known)
        assert found.startswith(b"HTTP/1.1 400")
        assert b"connection: close" in found.lower()
        assert json.loads(found.partition(b"\r\n\r\n")[2])["error"]["type"]
        assert closed(line)
    for one, body in ((length, b"aaaaa"), (chunked, b"0\r\n\r\n")):
        with opened(narrow) as line:
            assert answer(line, head + one + b"\r\n" + body).startswith(b"HTTP/1.1 200")
            assert answer(line, known).startswith(b"HTTP/1.1 200")


def test_what_is_not_http_is_told_so_and_writes_few_lines(
    narrow: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does an upgrade that is not offered, which is answered as any request."""
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\n"
    junk = (b"\x16\x03\x01 hello\r\n\r\n", b"GET\r\n\r\n", b"a: b\r\n" * 20000)
    broken = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            for sent in (*junk, broken):
                with opened(narrow) as line:
                    found = answer(line, sent)
                    assert found.startswith((b"HTTP/1.1 400", b"HTTP/1.1 401"))
                    value = json.loads(found.partition(b"\r\n\r\n")[2])
                    assert value["error"]["message"]
                    assert closed(line)
            with opened(narrow) as line:
                assert answer(line, asked(narrow, upgrade)).startswith(b"HTTP/1.1 200")
    lines = [record for record in caplog.records if not record.name.startswith("httpx")]
    assert len(lines) <= 1
    assert not any(record.exc_info for record in lines)


@pytest.mark.slow
def test_a_connection_at_which_no_request_comes_is_closed(narrow: Running) -> None:
    """Also after an answer, in the middle of the next request; one that asks again is not. They
    wait side by side."""
    parts = (b"GET /hea", b"GET /health HTTP/1.1\r\nHost: a\r\n")
    with ExitStack() as stack:
        lines = {sent: stack.enter_context(opened(narrow)) for sent in (b"", *parts)}
        for sent, line in lines.items():
            line.sendall(sent)
        after = {sent: stack.enter_context(opened(narrow)) for sent in parts}
        for sent, line in after.items():
            assert answer(line).startswith(b"HTTP/1.1 200")
            line.sendall(sent)
        assert [sent for sent, line in lines.items() if not closed(line)] == []
        assert [sent for sent, line in after.items() if not closed(line)] == []
    with opened(narrow) as line:
        for _ in range(3):
            assert answer(line).startswith(b"HTTP/1.1 200")
            time.sleep(0.6 * LIMITS.body_seconds)


def trickle(line: socket.socket) -> None:
    """A byte now and then, for a minute."""
    for _ in range(300):
        line.sendall(b"a")
        time.sleep(0.2 * LIMITS.body_seconds)


@pytest.mark.slow
def test_a_body_that_nobody_reads_does_not_hold_its_connection(narrow: Running) -> None:
    """Of a request that was answered without it, as strangers' are. In the control it ends in time,
    and the next request is answered."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 400\r\n\r\n"
    with opened(narrow) as line:
        assert answer(line, head).startswith(b"HTTP/1.1 401")
        line.sendall(b"a" * 200)
        time.sleep(0.3 * LIMITS.body_seconds)
        line.sendall(b"a" * 200)
        assert answer(line).startswith(b"HTTP/1.1 200")
    with opened(narrow) as line:
        assert answer(line, head).startswith(b"HTTP/1.1 401")
        with pytest.raises(ConnectionError):
            trickle(line)
    settled(narrow)


@pytest.mark.slow
def test_who_never_reads_is_cut_off(narrow: Running) -> None:
    """What the answer holds is free again; who reads in the same time has all of it."""
    host = f"Host: a\r\nAuthorization: Bearer {narrow.token}\r\n"
    body = json.dumps({"tokens": [5, 6, 7] * 10000}).encode()
    asked = f"POST /detokenize HTTP/1.1\r\n{host}Content-Length: {len(body)}\r\n\r\n".encode()
    with opened(narrow) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.settimeout(60)
        with pytest.raises(OSError):
            line.sendall((asked + body) * 1000)
        assert closed(line)
    settled(narrow)
    found = narrow.post("/detokenize", content=body)
    assert found.status_code == 200
    assert len(found.json()["prompt"]) == 30000


def test_there_are_no_more_than_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process' limit is raised as far as it may be."""
    limits, least = Limits(connections=1000), REFUSED + _OWN
    for soft, hard, most, raised in (
        (100, 50000, 1000, 1000 + least),
        (100, 800, 800 - least, 800),
        (4000, 8000, 1000, None),
        (100, 100, 1, 100),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1000, None),
        (100, resource.RLIM_INFINITY, 1000, 1000 + least),
    ):
        told: list[tuple[int, int]] = []
        monkeypatch.setattr(resource, "getrlimit", lambda kind, pair=(soft, hard): pair)
        monkeypatch.setattr(resource, "setrlimit", lambda kind, pair, told=told: told.append(pair))
        assert most_connections(limits) == most
        assert told == ([] if raised is None else [(raised, hard)])


def completion(server: Running, version: str = "1.1", **more: object) -> bytes:
    """A request for a completion."""
    body = json.dumps({"prompt": "abc", "max_tokens": 8, "ignore_eos": True, **more}).encode()
    head = (
        f"POST /v1/completions HTTP/{version}\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
        f"Authorization: Bearer {server.token}\r\n\r\n"
    )
    return head.encode() + body


INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"


@pytest.mark.parametrize("stream", [False, True])
def test_who_has_ended_sending_is_answered(narrow: Running, stream: bool) -> None:
    """As `nc -N` does. The controls: half of a request is no request, and interim responses are
    not for HTTP/1.0."""
    device, whole = narrow.gateway.device, completion(narrow, stream=stream)
    with opened(narrow) as line:
        with held(device):
            line.sendall(whole)
            line.shutdown(socket.SHUT_WR)
            received = line.recv(65536)
        received += b"".join(iter(lambda: line.recv(65536), b""))
    interim, sign, response = received.rpartition(b"HTTP/1.1 200 OK\r\n")
    assert sign
    assert interim.count(INTERIM) * len(INTERIM) == len(interim)
    assert stream or interim
    assert response.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")
    for sent in (whole[:-5], completion(narrow, "1.0")):
        with opened(narrow) as line, held(device):
            line.sendall(sent)
            line.shutdown(socket.SHUT_WR)
            assert line.recv(65536) == b""
    settled(narrow)


def test_who_is_gone_is_noticed(narrow: Running) -> None:
    """Although the kernel says the same of a connection that is closed and of one at which nothing
    more is sent."""
    with held(narrow.gateway.device):
        with opened(narrow) as line:
            line.sendall(completion(narrow))
            lines: set[Any] = narrow.server.server_state.connections  # type: ignore[assignment]
            until(lambda: any(each.cycle for each in list(lines)))
        settled(narrow)


@pytest.mark.parametrize("stays", [True, False])
def test_who_is_gone_from_a_silent_stream_is_noticed(
    narrow: Running, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    """The control has only ended sending, and hears the rest."""
    engine = narrow.gateway.device.engine
    goes_on, step, steps = threading.Event(), engine.step, list[None]()

    def step_by_step(*arguments: Any) -> Any:
        if steps:
            goes_on.wait(60)
        steps.append(None)
        return step(*arguments)

    monkeypatch.setattr(connections, "_PROBE_S", 0.02)
    monkeypatch.setattr(engine, "step", step_by_step)
    with opened(narrow) as line:
        try:
            line.sendall(completion(narrow, stream=True))
            received = line.recv(65536)
            line.shutdown(socket.SHUT_WR)
            while not received.endswith(b":\n\n\r\n"):
                received += line.recv(65536)
            if not stays:
                line.close()
                settled(narrow)
        finally:
            goes_on.set()
        if stays:
            received += b"".join(iter(lambda: line.recv(65536), b""))
            assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    until(lambda: not narrow.gateway.device.num_open)
    settled(narrow)
