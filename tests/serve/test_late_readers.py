"""Clients that read an answer only when they have sent all of their request."""

import json
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from isobit.serve.connections import THROWN_BODIES
from isobit.serve.requests import Limits

from .helpers import Running, serving
from .test_connections import answer, asked, closed, opened, settled
from .test_faults import held, until

BODY = 1 << 16
LIMITS = Limits(body_bytes=BODY)
REST = b"a" * ((THROWN_BODIES - 1) * BODY)
"""More than buffers of sockets take, and less than the server throws away."""
CLOSES = "Connection: close\r\n"


@pytest.fixture(scope="module")
def short(folder: Path) -> Iterator[Running]:
    with serving(folder / "base", limits=LIMITS) as server:
        yield server


def long(version: str, more: str = "", token: str = "", path: str = "/tokenize") -> bytes:
    """The first lines of a request with a body of REST's length."""
    known = f"Authorization: Bearer {token}\r\n" * bool(token)
    return (
        f"POST {path} HTTP/{version}\r\nHost: a\r\n{known}{more}Content-Length: {len(REST)}\r\n\r\n"
    ).encode()


def read_late(line: socket.socket, head: bytes, rest: bytes) -> bytes:
    """The answer to a request whose rest is sent when the answer is there, before it is read."""
    line.sendall(head)
    assert select.select([line], [], [], 30)[0]
    line.sendall(rest)
    return answer(line, b"")


def refused(found: bytes, status: int) -> None:
    head, _, body = found.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), found[:300]
    assert json.loads(body)["error"]["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_long_keeps_its_answer(short: Running, chunked: bool) -> None:
    """And its connection, at which the next request is answered."""
    head = long("1.1", token=short.token)
    rest = REST
    if chunked:
        length = f"Content-Length: {len(REST)}".encode()
        head = head.replace(length, b"Transfer-Encoding: chunked")
        head += b"%x\r\n%s\r\n" % (len(REST), REST[: 2 * BODY])
        head, rest = head.removesuffix(b"\r\n"), REST[2 * BODY :] + b"\r\n0\r\n\r\n"
    with opened(short) as line:
        refused(read_late(line, head, rest), 413)
        assert answer(line, asked(short)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (long("1.1", CLOSES), 401),
        (long("1.0"), 401),
        (long("1.1", CLOSES, "TOKEN"), 413),
        (long("1.1", CLOSES, "TOKEN", "/nowhere"), 404),
        (long("1.1", "Transfer-Encoding: chunked\r\n", "TOKEN"), 400),
        (b"\x16\x03\x01 hello\r\n\r\n", 400),
    ],
)
def test_an_answer_before_a_connection_closes_is_kept(
    short: Running, head: bytes, status: int
) -> None:
    """However it came to close, and it does close; what is behind is thrown away."""
    with opened(short) as line:
        refused(read_late(line, head.replace(b"TOKEN", short.token.encode()), REST), status)
        assert line.recv(1) == b""
    settled(short)


def test_bytes_behind_a_last_request_do_not_take_its_answer(short: Running) -> None:
    """Some clients send a line more than they say; the control sends none. Bytes before a request
    that are no HTTP are still told so."""
    body = b'{"prompt": "abc", "max_tokens": 1}'
    head = long("1.1", CLOSES, short.token, "/v1/completions")
    request = head.replace(str(len(REST)).encode(), str(len(body)).encode()) + body
    device = short.gateway.device
    for more in (b"", b"\r\n", b"\x16\x03\x01 hello\r\n\r\n"):
        with opened(short) as line:
            with held(device):
                line.sendall(request)
                until(lambda: device.num_waiting == 1)
                line.sendall(more)
                with opened(short) as other:  # what came before its request has been read then
                    assert answer(other).startswith(b"HTTP/1.1 200")
            assert answer(line, b"").startswith(b"HTTP/1.1 200")
            assert closed(line)
    with opened(short) as line:
        refused(answer(line, b"\x16\x03\x01 hello\r\n\r\n" + request), 400)
    settled(short)


@pytest.mark.parametrize("more", ["", CLOSES])
def test_what_is_thrown_away_is_bounded(short: Running, more: str) -> None:
    """A body that goes on and on ends its connection, whether it is to close or not; the control is
    below the bound, and the next request begins anew."""
    length = f"Content-Length: {len(REST)}".encode()
    endless = long("1.1", more, short.token).replace(length, b"Content-Length: 99999999999")
    with opened(short) as line:
        refused(answer(line, endless), 413)
        with pytest.raises(ConnectionError):
            line.sendall(bytes(1000 * BODY))  # far more than buffers of sockets take
    with opened(short) as line:
        for _ in range(1 if more else 3):
            refused(read_late(line, long("1.1", more, short.token), REST), 413)
    settled(short)


@pytest.mark.parametrize("head", [long("1.1", CLOSES), long("1.1")])
def test_who_sends_nothing_more_is_cut_off_in_time(folder: Path, head: bytes) -> None:
    """Whether its connection is to close or not."""
    limits = Limits(body_bytes=BODY, body_seconds=0.1)
    with serving(folder / "base", limits=limits) as server, opened(server) as line:
        refused(answer(line, head), 401)
        assert closed(line)
        settled(server)
