"""Hostile requests over all routes: each is answered in JSON with a status below 500 and one clear
line. What is answered is answered the same again; honest requests among them have the answers that
they have alone, and an honest run the same adapter.

    python -m tests.serve.hostile --cases 10000
    python -m tests.serve.hostile --cases 10000 --train full

Where the whole model is trained, answers are those of its present weights, so an honest request is
asked where an honest run has trained them.
"""

import argparse
import json
import logging
import random
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httpx

from benchmarks.common import Claim, Result, Row
from isobit.serve.requests import Limits

from .helpers import Running, base_model, serving
from .hostile_routes import PREFIX, SAMPLING, Valid, World, new_world

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**299, -(10**30), 0.5, -0.0, 1e308, float("inf"),
    float("nan"),
    "", "a", "\x00", "</s>", "<s>user\n", "a" * 3000, "é\ud7ff", "~", "null", "{{ 7 * 7 }}",
    "{% for x in y %}", "tinker://a/weights/../b", "../../etc/passwd",
    [], [[]], [None], ["a", 1], [1.5], [True], list(range(300)), ["x"] * 40, {}, {"a": {}},
    {"role": "user"},
    {"type": "image_url"}, {"messages": []}, [{"role": "user", "content": "a"}],
    {"include_usage": 3},
]  # fmt: skip
WORDS = [
    "", ".", "..", "../..", "%00", "%2e%2e", "a" * 400, "é", "a\nb", "weights", "weights/../a",
    "/etc/passwd", "%", "a?b=c", "a#b", "0", "-1", "9" * 30, "null", "present/present", "{run}",
]  # fmt: skip
HONEST = (
    "/v1/completions",
    {"model": "tiny", "prompt": "abc", "max_tokens": 6, "seed": 9, "logprobs": 0},
)
_OF_A_WORLD = 250  # cases
_SKIPPED = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
"""A frame of zstd that has nothing to unpack."""
TIMEOUT = 60.0
"""Seconds after which an answer hangs."""


@dataclass(frozen=True)
class Case:
    """A hostile request: a valid one with something else in it. `number`: the one that it has in
    its line, if nothing has changed it."""

    valid: Valid
    method: str
    path: str
    content: bytes
    headers: dict[str, str]
    number: int | None

    def __str__(self) -> str:
        return f"{self.method} {self.path[:200]} {self.headers} {self.content[:300]!r}"


def mutated(value: Any, rng: random.Random) -> Any:
    """The value with something else in one place."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        found = dict(value)
        key = rng.choice(sorted(found))
        kind = rng.random()
        if kind < 0.1:
            del found[key]
        elif kind < 0.2:
            found[rng.choice(["x", "promt", "", "\n", "a" * 500, "role", "n"])] = rng.choice(VALUES)
        else:
            found[key] = mutated(found[key], rng)
        return found
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], mutated(value[place], rng), *value[place + 1 :]]
    return rng.choice(VALUES)


def changed(content: bytes, rng: random.Random) -> bytes:
    """The bytes with others in a few places."""
    found = bytearray(content)
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(found))
        kind = rng.random()
        if kind < 0.7:
            found[place] = rng.randrange(256)
        elif kind < 0.85:
            del found[place : place + rng.randrange(1, 9)]
        else:
            found[place:place] = rng.randbytes(rng.randrange(1, 9))
    return bytes(found)


def hostile_body(value: Any, rng: random.Random) -> bytes:
    """A body with something else in it."""
    if value is None:
        return rng.choice([b"", b"", b"{}", rng.randbytes(20)])
    if isinstance(value, bytes):
        return changed(value, rng)
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        value = mutated(value, rng)
    text = json.dumps(value).encode()
    kind = rng.random()
    if kind < 0.04:
        return text[: rng.randrange(len(text) + 1)]
    if kind < 0.08:
        place = rng.randrange(len(text) + 1)
        return text[:place] + rng.randbytes(rng.randrange(1, 20)) + text[place:]
    if kind < 0.1:
        deep = b"[" * 5000, b'{"a":' * 300, b"9" * 5000, b'{"seed": ' + b"9" * 400 + b"}"
        return rng.choice([*deep, b"\xff\xfe"])
    return b'{"prompt": "' + b"a" * 70000 + b'"}' if kind < 0.11 else text


def compressed(content: bytes, rng: random.Random) -> bytes:
    """The body in zstd: whole, in many frames, cut, with other bytes in it, or far larger than it
    looks, by its bytes or its parts."""
    import zstandard

    pieces = rng.choice([1, 1, 2, 7, 5000])
    size = max(len(content) // pieces, 1)
    cuts = range(0, max(len(content), 1), size)
    frames = [zstandard.compress(content[start : start + size]) for start in cuts]
    kind = rng.randrange(10)
    if kind == 0:
        frames.insert(rng.randrange(len(frames) + 1), _SKIPPED)
    elif kind == 1:
        frames += [zstandard.compress(b"")] * rng.choice([3, 4097])
    elif kind == 2:
        frames.append(zstandard.compress(bytes(rng.choice([1 << 16, 1 << 24]))))
    elif kind in (3, 4):
        part = rng.choice([b"\x1a\x00", b"\x1a\x02\x0a\x00", b"\x40\x01", b"\x2a\x00"])
        frames.append(zstandard.compress(part * rng.choice([100, 20_000, 29_000])))
    body = b"".join(frames)
    if kind == 5:
        body = body[: rng.randrange(len(body))]
    elif kind == 6:
        body = changed(body, rng)
    elif kind == 7:
        body += rng.randbytes(rng.randrange(1, 9))
    return body


def numbered(valid: Valid, number: int) -> Any:
    """A body with its number in its line."""
    if isinstance(valid.body, bytes):
        from tinker.proto import tinker_public_pb2 as messages

        found = messages.ForwardBackwardRequest()
        found.ParseFromString(valid.body)
        found.seq_id = number
        return bytes(found.SerializeToString())
    key = {"sampling": "sampling_session_seq_id", "model": "model_seq_id"}
    return {**valid.body, key.get(valid.number or "", "seq_id"): number}


def case_of(routes: Sequence[Valid], rng: random.Random, counts: Counter[str]) -> Case:
    """A hostile request to one of the routes."""
    valid = rng.choice(routes)
    number = None if valid.number is None else counts[valid.number]
    body = valid.body if number is None else numbered(valid, number)
    given, query = dict(valid.given), dict(valid.query)
    if given and rng.random() < 0.5:
        given[rng.choice(sorted(given))] = rng.choice(WORDS)
    if query and rng.random() < 0.7:
        query[rng.choice(sorted(query))] = rng.choice(WORDS)
    spelled = {name: quote(value, "/:%") for name, value in given.items()}
    path = valid.path(spelled) + (f"?{urlencode(query)}" if query else "")
    kind = rng.random()
    if kind < 0.02:
        path = rng.choice(["/", "/v1", PREFIX, "/v1/models/%00", "/v1/models/a/b", "//", "/%"])
    elif kind < 0.04:
        path += rng.choice(["/", "/..", "?limit=1&limit=b", "%00", "?%ff=%fe"])
    content, headers = hostile_body(body, rng), dict[str, str]()
    kind = rng.random()
    if kind < 0.1:
        headers["X-Session-ID"] = rng.choice(["a", "b" * 500, "é", ""])
    elif kind < 0.2:
        headers["Content-Encoding"] = rng.choice(["identity", "zstd", "gzip", "zstd, zstd"])
    elif kind < 0.25:
        headers["Host"] = rng.choice(["", "[", "a:b:c", "evil.example", "x" * 900])
    elif kind < 0.3:
        headers["Content-Type"] = rng.choice(["text/plain", "application/x-protobuf", "é"])
    if kind < 0.6 and isinstance(valid.body, bytes):
        content, headers = compressed(content, rng), {"Content-Encoding": "zstd"}
    other = rng.choice(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
    method = valid.method if rng.random() < 0.97 else other
    return Case(valid, method, path, content, headers, number)


def sent(server: Running, client: httpx.Client, case: Case) -> httpx.Response:
    """Its answer. Raises AssertionError for one that it should not have."""
    encoded = {
        key: value.encode("latin-1") for key, value in (server.headers | case.headers).items()
    }
    address = httpx.URL(server.url).copy_with(raw_path=case.path.encode("latin-1", "replace"))
    response = client.request(case.method, address, content=case.content, headers=encoded)
    text, status = response.text, response.status_code
    where = f"{case}: {status} {text[:300]}"
    assert status in (200, 204) or 400 <= status < 500, where
    media = response.headers.get("content-type", "")
    if status >= 400 and case.method != "HEAD":
        check_error(response.content, where)
    elif media.startswith("text/event-stream"):
        assert text.endswith("data: [DONE]\n\n"), where
    elif media == "application/json":
        json.loads(text)
    return response


def check_error(content: bytes, where: str) -> None:
    """One clear line, in OpenAI's words."""
    if not content.startswith(b"{"):  # what uvicorn refuses before any route
        assert content == b"Invalid HTTP request received.", where
        return
    message = json.loads(content)["error"]["message"]
    assert message, where
    assert "\n" not in message, where
    assert "Traceback" not in message, where


def check_result(world: World, case: Case, asked: str) -> None:
    """The future of a hostile request: an answer, or one line, and no fault of the server's."""
    for _ in range(10):
        found = world.server.post(f"{PREFIX}/retrieve_future", {"request_id": asked})
        if found.status_code != 408:
            break
    where = f"{case}: future {asked}: {found.status_code} {found.text[:300]}"
    assert found.status_code == 200, where
    if found.content.startswith(b'{"error"'):
        value = found.json()
        assert value["category"] == "user", where
        assert value["error"], where
        assert "\n" not in value["error"], where


def check_again(server: Running, case: Case, response: httpx.Response) -> None:
    """What is sampled for a hostile request is sampled for it again."""
    if "json" not in response.headers["content-type"]:
        return
    first, asked = response.json(), json.loads(case.content)
    of_samples = case.valid.route.endswith("generate")
    inner = asked if not of_samples else dict(asked.get("sampling_params") or {})
    inner["seed"] = first["seed"]
    if of_samples:
        asked["sampling_params"] = inner
    again = server.post(case.valid.route, content=json.dumps(asked).encode()).json()
    assert essence(again) == essence(first), f"{case}: {essence(first)}, then {essence(again)}"


def essence(answer: dict[str, Any]) -> Any:
    """Without what is another each time: the ids of calls."""
    told = answer["output"] if "output" in answer else answer["choices"]
    return json.loads(json.dumps(told).replace("call_", ""), object_hook=_without_id)


def _without_id(value: dict[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in value.items() if key != "id"}


class Hostile:
    """Hostile requests to one server, one after the other."""

    def __init__(self, server: Running, client: httpx.Client, seed: int) -> None:
        self._server, self._client, self._rng = server, client, random.Random(seed)
        self.statuses = Counter[int]()
        self.reached = Counter[str]()
        """Routes, by how often a request to one was answered."""
        self.seconds = list[float]()
        self.worlds, self._left = 0, 0
        self._digest = ""
        self._whole, self._honest = server.gateway.whole, None
        self._world: World | None = None

    def step(self) -> None:
        """One case. Raises AssertionError for an answer that it should not have."""
        if self._world is None or not self._left:
            self._begin()
        assert self._world is not None
        self._left -= 1
        case = case_of(self._world.routes, self._rng, self._world.counts)
        began = time.monotonic()
        response = sent(self._server, self._client, case)
        self.seconds.append(time.monotonic() - began)
        self.statuses[response.status_code] += 1
        if response.status_code >= 400 or case.method != case.valid.method:
            return
        self.reached[f"{case.method} {case.valid.route}"] += 1
        self._follow(self._world, case, response)

    def end(self) -> None:
        """Give back what there is."""
        if self._world is not None:
            self._world.end()
            self._world = None

    def _begin(self) -> None:
        self.end()
        self._world, self._left = new_world(self._server), _OF_A_WORLD
        self.worlds += 1
        self._digest = self._digest or self._world.digest
        assert self._world.digest == self._digest, "an honest run has another digest"
        self.check_honest(self._whole)

    def check_honest(self, asked: bool) -> None:
        """An honest request is answered as the first time, if it is `asked`."""
        if asked:
            answer = self._server.post(*HONEST).json()["choices"]
            self._honest = self._honest or answer
            assert answer == self._honest, "another answer"

    def _follow(self, world: World, case: Case, response: httpx.Response) -> None:
        sampled = case.valid in SAMPLING and '"seed"' in response.text
        if sampled and "X-Session-ID" not in case.headers:
            check_again(self._server, case, response)
        if case.valid.number is None:
            ended = world.run in response.text or world.session in case.path
            self._left *= not (case.valid.ends and ended)
            return
        asked = response.json().get("request_id", "")
        line = {"run": world.run, "sample": world.sampler}.get(case.valid.number)
        mine = f"{line}:{case.number}" if line else f"{world.session}:train:{case.number}:0"
        if asked == mine:
            world.counts[case.valid.number] += 1
            check_result(world, case, asked)
        elif case.valid.number == "sampling":
            world.counts["sampling"] += 1


def raw(server: Running, rng: random.Random) -> None:
    """Bytes that are no HTTP, and a connection that is dropped; no answer is expected."""
    host, port = server.url.removeprefix("http://").split(":")
    sent = rng.choice(
        [
            rng.randbytes(200),
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99\r\n\r\n{",
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
            b"A" * 70000,
        ]
    )
    with socket.create_connection((host, int(port)), timeout=5) as line:
        line.sendall(sent)


def run(server: Running, cases: int, seed: int) -> Hostile:
    """Send so many hostile requests; after each hundredth an honest one is answered as before."""
    rng, logged = random.Random(seed), list[str]()
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        with httpx.Client(timeout=TIMEOUT) as client:
            hostile = Hostile(server, client, seed)
            hostile.check_honest(not server.gateway.whole)
            for case in range(cases):
                hostile.step()
                if case % 50 == 49:
                    raw(server, rng)
                hostile.check_honest(case % 100 == 99 and not server.gateway.whole)
            hostile.end()
    finally:
        logging.getLogger().removeHandler(handler)
    assert not logged, logged[:3]
    return hostile


LIMITS = Limits(body_bytes=60000)


def result(found: Hostile, whole: bool = False) -> Result:
    """The figures, which a file in `benchmarks/results` has, of a server that trains adapters or the
    `whole` model; other answers than there should be have raised before."""
    name, trained = ("serve_hostile_full", "model") if whole else ("serve_hostile", "adapter")
    made, seconds = Result(name), sorted(found.seconds)
    case = f"{len(seconds):,} hostile requests"
    made.rows = [Row(case, "a request", statistics.median(seconds), seconds[0])]
    made.parts = {
        "statuses": {str(status): float(n) for status, n in sorted(found.statuses.items())},
        "answered": {route: float(n) for route, n in sorted(found.reached.items())},
    }
    faults = sum(count for status, count in found.statuses.items() if status >= 500)
    made.claims = [
        Claim("answers with a status from 500 on", faults, "<=", 0),
        Claim("seconds of the slowest answer", seconds[-1], "<=", TIMEOUT),
        Claim(f"honest runs among them, with one {trained}", found.worlds, ">=", 1),
    ]
    return made


def main() -> None:
    """Run cases until all are done."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", choices=("adapters", "full"), default="adapters")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write the figures")
    given = parser.parse_args()
    whole = given.train == "full"
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(
            base_model(Path(folder) / "base"),
            limits=LIMITS,
            state=Path(folder) / "state",
            whole=whole,
        ) as server,
    ):
        found = run(server, given.cases, given.seed)
    figures = result(found, whole)
    figures.print()
    if given.out is not None:
        figures.write(given.out)


if __name__ == "__main__":
    main()
