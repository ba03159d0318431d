"""Many clients of many tenants over all routes at once, some of whom go away, read slowly or send
nonsense: each honest answer is the one that the request has alone, as bytes; afterwards all pages
are free, and memory and descriptors are what they were.

    python -m tests.serve.load --minutes 10 --clients 256 --tenants 16
"""

import argparse
import asyncio
import hashlib
import io
import json
import logging
import math
import random
import statistics
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.common import Claim, Result, Row
from isobit.serve.requests import Limits
from tests.models import trained_adapters

from . import helpers, hostile
from .helpers import Running, base_model, serving
from .hostile_routes import Valid, new_world
from .training import data, message

LIMITS = Limits(
    body_bytes=60000, body_seconds=5.0, reader_seconds=5.0, open_samples=6, connections=500
)
_PROTOBUF = {"Content-Type": "application/x-protobuf"}
_STEPS = 2  # of a training run
_OPENED_LATE = 8
"""Descriptors that libraries open once, when they are first needed, such as SQLite's own files."""


def honest() -> list[tuple[str, dict[str, Any]]]:
    """Requests whose answers are compared."""
    found = list[tuple[str, dict[str, Any]]]()
    for number, model in enumerate(("tiny", "math", "code")):
        sampling = {"model": model, "seed": 10 + number, "max_tokens": 6 + 4 * number}
        found.append(("/v1/completions", {**sampling, "prompt": "12+3=", "logprobs": 1, "n": 2}))
        chat = {"messages": [{"role": "user", "content": f"say {number}"}], "logprobs": True}
        found.append(("/v1/chat/completions", {**sampling, **chat}))
        tokens = {"token_ids": [5, 6, 7 + number], "sampling_params": {"max_tokens": 9, "seed": 3}}
        found.append(("/inference/v1/generate", {**tokens, "model": model}))
    return found


def essence(content: bytes) -> Any:
    """Of an answer, what must always be the same."""
    found = json.loads(content)
    return found.get("choices", found)


def joined(content: bytes) -> str:
    """The text of a stream."""
    pieces = [line[6:] for line in content.decode().splitlines() if line.startswith("data: ")]
    assert pieces[-1] == "[DONE]", content[-300:]
    text = ""
    for piece in map(json.loads, pieces[:-1]):
        for choice in piece["choices"]:
            if choice["index"] == 0:
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text


def text_of(choices: Any) -> str:
    """Of an answer that is not streamed."""
    first = choices[0]
    return str(first["text"] if "text" in first else first["message"]["content"])


@dataclass
class Load:
    """What all clients share."""

    server: Running
    tokens: tuple[str, ...]
    end: float = math.inf
    seed: int = 0
    alone: list[Any] = field(default_factory=list)
    trained: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    wrong: list[tuple[Any, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    took: float = 0.0
    routes: list[Valid] = field(default_factory=list)
    numbers: Counter[str] = field(default_factory=Counter)

    def compare(self, found: Any, alone: Any) -> None:
        """Count what is otherwise than it is alone."""
        self.wrong += [(found, alone)] * (found != alone)

    @property
    def over(self) -> bool:
        """Whether no more is asked."""
        return time.monotonic() > self.end

    def client(self, tenant: int) -> httpx.AsyncClient:
        """Of a tenant."""
        headers = {"Authorization": f"Bearer {self.tokens[tenant % len(self.tokens)]}"}
        return httpx.AsyncClient(base_url=self.server.url, headers=headers, timeout=300)


async def sent(
    load: Load, client: httpx.AsyncClient, path: str, method: str = "POST", **given: Any
) -> httpx.Response:
    """A response. A connection that the server closes while it is used again, as it may after some
    seconds without a request, or in front of a body that is too long, is tried once more."""
    for _ in range(10):
        try:
            return await client.request(method, path, **given)
        except httpx.TransportError as error:
            load.counts[f"connection closed, and again: {type(error).__name__}"] += 1
    raise AssertionError(f"{path}: no answer in ten times")


async def patient(
    load: Load, client: httpx.AsyncClient, path: str, method: str = "POST", **given: Any
) -> httpx.Response:
    """A response; when there is no room, or the answer is not there yet, it is asked again."""
    while True:
        found = await sent(load, client, path, method, **given)
        if found.status_code not in (408, 429, 503):
            return found
        load.counts[f"{found.status_code}, and again"] += 1
        await asyncio.sleep(0.05)


async def answered(load: Load, client: httpx.AsyncClient, number: int) -> None:
    """An honest request, streamed or not."""
    path, asked = honest()[number]
    streamed = path.startswith("/v1") and load.counts["answers"] % 3 == 0
    began = time.monotonic()
    found = await patient(load, client, path, json={**asked, "stream": streamed})
    assert found.status_code == 200, found.text
    if streamed:
        load.compare(joined(found.content), text_of(load.alone[number]))
        load.counts["streams"] += 1
    else:
        load.compare(essence(found.content), load.alone[number])
    load.counts["answers"] += 1
    load.seconds.append(time.monotonic() - began)


async def goes_away(load: Load, client: httpx.AsyncClient, rng: random.Random) -> None:
    """In the middle of a request, a body, or an answer that it reads slowly."""
    host, port = load.server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=256)
    asked = {"prompt": "abc", "max_tokens": 150, "ignore_eos": True, "stream": rng.random() < 0.6}
    body = json.dumps(asked | {"n": 2}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{authorization(client)}"
    whole = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    kind = rng.choice(["half", "asked", "slow", "never reads"])
    if kind == "never reads":  # more than all buffers take: pipelined, and each is answered
        whole = whole.replace(b"/v1/completions", b"/v1/nothing/at/all") * 4000
    with suppress(ConnectionError, asyncio.TimeoutError):  # the server may end it first
        writer.write(whole[: len(whole) // 2] if kind == "half" else whole)
        await asyncio.wait_for(writer.drain(), 10)
        if kind == "slow":
            for _ in range(4):
                await asyncio.sleep(0.1)
                await reader.read(64)
        elif kind == "never reads":
            await asyncio.sleep(2 * LIMITS.reader_seconds * rng.random())
        else:
            await asyncio.sleep(rng.random() * 0.2)
    writer.transport.abort()
    load.counts[f"gone: {kind}"] += 1


def authorization(client: httpx.AsyncClient) -> str:
    return f"Authorization: {client.headers['authorization']}\r\n"


async def nonsense(load: Load, client: httpx.AsyncClient, rng: random.Random) -> None:
    """A hostile request: refused in one line, or answered."""
    case = hostile.case_of(load.routes, rng, load.numbers)
    found = await sent(load, client, case.path, method=case.method, content=case.content)
    where = f"{case}: {found.status_code} {found.text[:300]}"
    full = found.status_code == 503 and "too many connections" in found.text
    assert found.status_code in (200, 204) or full or 400 <= found.status_code < 500, where
    if found.status_code >= 400:
        hostile.check_error(found.content, where)
    load.counts["hostile"] += 1


async def trains(load: Load, client: httpx.AsyncClient) -> str:
    """The SHA-256 of an adapter that a tenant trains from a new session to its archive."""

    async def post(path: str, value: Any = None, **more: Any) -> dict[str, Any]:
        given = more if value is None else {"json": value, **more}
        found = await patient(load, client, f"/api/v1/{path}", **given)
        assert found.status_code == 200, found.text
        return found.json() if "json" in found.headers["content-type"] else {}

    async def done(asked: dict[str, Any]) -> dict[str, Any]:
        found = await post("retrieve_future", {"request_id": asked["request_id"]})
        assert "error" not in found, found
        return found

    session = (await post("create_session", {"tags": []}))["session_id"]
    lora = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
    run = (await done(await post("create_model", lora | {"lora_config": {"rank": 4, "seed": 7}})))[
        "model_id"
    ]
    adam = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
    for step in range(_STEPS):
        content = message(run, 2 * step + 1, data(step))
        await done(await post("forward_backward", content=content, headers=_PROTOBUF))
        asked = {"model_id": run, "seq_id": 2 * step + 2, "adam_params": adam}
        await done(await post("optim_step", asked))
    kept = {"model_id": run, "seq_id": 2 * _STEPS + 1, "path": "end"}
    await done(await post("save_weights_for_sampler", kept))
    place = f"/api/v1/training_runs/{run}/checkpoints/sampler_weights/end"
    archive = await patient(load, client, f"{place}/archive", "GET")
    assert archive.status_code == 200, archive.text
    dropped = await patient(load, client, place, "DELETE")
    assert dropped.status_code in (204, 404)  # 404: a connection was closed behind it
    await post(f"sessions/{session}/finish", {})
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as files:
        file = files.extractfile("adapter_model.safetensors")
        assert file is not None
        load.counts["runs trained"] += 1
        return hashlib.sha256(file.read()).hexdigest()


async def one_client(load: Load, place: int) -> None:
    """What a client does until the end; one of thirty-two trains."""
    rng = random.Random(f"{load.seed}:{place}")
    async with load.client(place) as client:
        while not load.over:
            if place % 32 == 7:
                load.compare(await trains(load, client), load.trained)
                continue
            kind = rng.random()
            if kind < 0.75:
                await answered(load, client, rng.randrange(len(load.alone)))
            elif kind < 0.87:
                await goes_away(load, client, rng)
            else:
                await nonsense(load, client, rng)


async def watch(load: Load) -> None:
    """The process' memory, and its descriptors, now and then."""
    while not load.over:
        status = Path("/proc/self/status").read_text()
        load.memory.append(int(status.partition("VmRSS:")[2].split()[0]) * 1024)
        load.descriptors.append(descriptors())
        await asyncio.sleep(0.5)


async def crowds(load: Load) -> None:
    """As many connections as there may be, and more, at which nothing is asked; now and then."""
    host, port = load.server.url.removeprefix("http://").split(":")
    while not load.over:
        opened = []
        for _ in range(LIMITS.connections):
            with suppress(ConnectionError):
                opened.append(await asyncio.open_connection(host, int(port)))
        load.counts["connections at which nothing was asked"] += len(opened)
        await asyncio.sleep(1.0)
        for _, writer in opened:
            writer.transport.abort()
        await asyncio.sleep(min(20.0, max(load.end - time.monotonic(), 0.1)))


async def everything(load: Load, seconds: float, clients: int) -> None:
    """First alone, then all together."""
    async with load.client(0) as client:
        for path, asked in honest():
            load.alone.append(essence((await client.post(path, json=asked)).content))
        load.trained = await trains(load, client)
        assert load.trained == await trains(load, client)
    load.counts.clear()
    load.end = time.monotonic() + seconds
    tasks = [asyncio.create_task(one_client(load, place)) for place in range(clients)]
    began = time.monotonic()
    tasks += [asyncio.create_task(each(load)) for each in (watch, crowds)]
    try:
        await asyncio.gather(*tasks)
        load.took = time.monotonic() - began
    finally:
        for task in tasks:
            task.cancel()


def run(
    base: Path, adapters: Any, folder: Path, seconds: float, clients: int, tenants: int
) -> Load:
    """All of it. Raises AssertionError for an answer, a page, a descriptor too many."""
    tokens = tuple(f"tml-tenant-{number:04}-0123456789" for number in range(tenants))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helpers, "TOKENS", tokens)
        with serving(base, adapters, limits=LIMITS, state=folder / "state", grace=30) as server:
            server.token = tokens[0]
            load = Load(server, tokens)
            world = new_world(server)
            load.routes = [each for each in world.routes if not each.ends]
            load.numbers = world.counts
            before = descriptors()
            with logged() as load.errors:
                asyncio.run(everything(load, seconds, clients))
            assert not load.errors, load.errors[:3]
            assert not load.wrong, load.wrong[:3]
            settled = time.monotonic() + 60
            device = server.gateway.device
            while device.num_open or device.num_waiting or descriptors() > before + _OPENED_LATE:
                assert time.monotonic() < settled, (device.num_open, descriptors(), before)
                time.sleep(0.1)
            assert server.gateway.num_samples == 0
            assert server.post(*hostile.HONEST).status_code == 200
            load.counts["descriptors more"] = max(descriptors() - before, 0)
    return load


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the server logs as its own errors meanwhile."""
    found = list[str]()
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(handler)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def result(load: Load, clients: int, tenants: int, minutes: float) -> Result:
    """The figures, which `benchmarks/results/serve_load.json` has."""
    found = Result("serve_load")
    case = f"{clients} clients of {tenants} tenants, {minutes:g} minutes"
    waits = sorted(load.seconds)
    rate = len(waits) / load.took
    found.rows = [
        Row(case, "an answer", statistics.median(waits), waits[0], rate, "answers/s"),
        Row(case, "of a hundred the slowest", waits[int(0.99 * len(waits))], waits[0]),
    ]
    found.parts = {
        "counts": {kind: float(count) for kind, count in sorted(load.counts.items())},
        "MiB": dict(zip(QUARTERS, (size / 2**20 for size in quarters(load.memory)))),
        "descriptors": dict(zip(QUARTERS, quarters(load.descriptors))),
    }
    memory, files = quarters(load.memory), quarters(load.descriptors)
    found.claims = [
        Claim("answers that are others than alone", len(load.wrong), "<=", 0.0),
        Claim("errors in the log", len(load.errors), "<=", 0.0),
        Claim("descriptors more than before", load.counts["descriptors more"], "<=", _OPENED_LATE),
        Claim("memory in the last quarter over the second", memory[3] / memory[1], "<=", 1.1),
        Claim("descriptors in the last quarter over the second", files[3] / files[1], "<=", 1.1),
    ]
    return found


QUARTERS = ("first quarter", "second", "third", "last")


def quarters(values: list[int]) -> list[float]:
    """The medians of the four quarters of some time."""
    size = max(len(values) // 4, 1)
    return [
        float(statistics.median(values[place * size : (place + 1) * size] or values))
        for place in range(4)
    ]


def main() -> None:
    """Run it, and keep the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--tenants", type=int, default=16)
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write serve_load.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = base_model(folder / "base")
        adapters = trained_adapters(folder, helpers.ADAPTERS)
        load = run(base, adapters, folder, 60 * given.minutes, given.clients, given.tenants)
    found = result(load, given.clients, given.tenants, given.minutes)
    found.print()
    if given.out is not None:
        found.write(given.out)
    assert all(claim.holds for claim in found.claims)


if __name__ == "__main__":
    main()
