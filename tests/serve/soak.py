"""One hostile tenant of each kind beside honest ones, at a server that trains in a process of its
own: honest answers are those that they are alone, as bytes, an honest run trains the same adapter,
and the server keeps its memory and its descriptors.

    python -m tests.serve.soak --minutes 10 --out soak.json
"""

import argparse
import asyncio
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
import zstandard

from isobit.serve.requests import Limits

from . import load as loads
from .helpers import Running, base_model
from .kills import Server
from .load import QUARTERS, Load, quarters
from .training import datum, message

POSITIONS = 1024
LONG_TOKENS = 100_000  # of a request that trains
HALF_OPEN = 2_300
BODY = 8 << 20
HONEST, HOSTILE = 2, ("texts", "zstd", "trains", "floods")
ASKED = {"prompt": "12+3=", "max_tokens": 8, "seed": 5, "logprobs": 1, "model": "tiny"}
_PROTOBUF = {"Content-Type": "application/x-protobuf"}
_ZSTD = {**_PROTOBUF, "Content-Encoding": "zstd"}
_PAUSE = 0.2  # of an honest client between two requests


@dataclass
class Soak:
    """What all clients share. Tenants: the honest ones, then a hostile one of each kind."""

    server: Server
    tokens: tuple[str, ...]
    end: float
    alone: Any = None
    trained: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether no more is asked."""
        return time.monotonic() > self.end

    def client(self, tenant: int) -> httpx.AsyncClient:
        """Of a tenant."""
        headers = {"Authorization": f"Bearer {self.tokens[tenant]}"}
        limits = httpx.Limits(max_connections=16)
        return httpx.AsyncClient(
            base_url=self.server.url, headers=headers, timeout=300, limits=limits
        )

    async def hostile(self, client: httpx.AsyncClient, kind: str, path: str, **given: Any) -> Any:
        """A hostile request: it may be refused, and never with a fault."""
        try:
            found = await client.post(path, **given)
        except httpx.TransportError as error:
            self.counts[f"{kind}: {type(error).__name__}"] += 1
            return None
        self.counts[f"{kind}: {found.status_code}"] += 1
        if found.status_code in (500, 502):
            self.wrong.append(f"{kind}: {found.status_code} {found.text[:200]}")
        return found


async def honest(soak: Soak, tenant: int) -> None:
    """Short answers, each the one that it is alone."""
    async with soak.client(tenant) as client:
        while not soak.over:
            began = time.monotonic()
            try:
                found = await client.post("/v1/completions", json=ASKED)
                status, value = found.status_code, loads.essence(found.content)
            except httpx.TransportError as error:
                status, value = 0, type(error).__name__
            soak.seconds.append(time.monotonic() - began)
            soak.counts["honest: answers"] += 1
            if status != 200 or value != soak.alone:
                soak.wrong.append(f"honest: {status} {str(value)[:200]}")
            await asyncio.sleep(_PAUSE)


async def trained(soak: Soak) -> str:
    """The SHA-256 of the adapter that an honest tenant trains."""
    load = Load(cast(Running, soak.server), soak.tokens)
    async with soak.client(0) as client:
        return await loads.trains(load, client)


async def honest_runs(soak: Soak) -> None:
    """Again and again, the same adapter."""
    while not soak.over:
        began = time.monotonic()
        if (found := await trained(soak)) != soak.trained:
            soak.wrong.append(f"honest: an adapter {found} in the place of {soak.trained}")
        soak.counts["honest: runs trained"] += 1
        slowest = max(soak.counts["honest: slowest run, ms"], 1000 * (time.monotonic() - began))
        soak.counts["honest: slowest run, ms"] = int(slowest)


async def long_texts(soak: Soak) -> None:
    """Bodies of 8 MB, eight at a time: texts, chats, token ids, lists in lists, long numbers."""
    text = ("Once upon a time " * (BODY // 17))[: BODY - 1000]
    number = "9" * 299 + ","
    bodies = [
        ("/tokenize", json.dumps({"prompt": text})),
        ("/tokenize", json.dumps({"prompt": text[: 1 << 20]})),
        ("/tokenize", json.dumps({"prompt": "<s>" * 300_000})),
        ("/v1/completions", json.dumps({"prompt": text})),
        (
            "/v1/chat/completions",
            json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
        ),
        ("/v1/completions", json.dumps({"prompt": [5] * 2_500_000})),
        ("/v1/completions", '{"prompt":[' + "[]," * 2_700_000 + "[]]}"),
        ("/detokenize", '{"tokens":[' + number * (BODY // 300 - 10) + "1]}"),
    ]

    async def again(place: int) -> None:
        while not soak.over:
            path, body = bodies[place]
            await soak.hostile(client, "texts", path, content=body)

    async with soak.client(HONEST) as client:
        await asyncio.gather(*(again(place) for place in range(len(bodies))))


async def begun_run(soak: Soak, client: httpx.AsyncClient, kind: str) -> str:
    """A new training run of a hostile tenant."""
    post = f"{kind}: run"
    session = await soak.hostile(client, post, "/api/v1/create_session", json={"tags": []})
    asked = {"session_id": session.json()["session_id"], "model_seq_id": 0, "base_model": "tiny"}
    asked |= {"lora_config": {"rank": 4}}
    future = (await soak.hostile(client, post, "/api/v1/create_model", json=asked)).json()
    await finished(soak, client, kind, future)
    return str(future["request_id"]).rpartition(":")[0]


async def finished(soak: Soak, client: httpx.AsyncClient, kind: str, future: Any) -> None:
    """Wait for a future."""
    asked = {"request_id": future["request_id"]}
    while not soak.over:
        found = await soak.hostile(client, kind, "/api/v1/retrieve_future", json=asked)
        if found is not None and found.status_code not in (408, 429, 503):
            return
        await asyncio.sleep(0.1)


async def packed(soak: Soak) -> None:
    """Bodies in zstd that unpack to 8 MB of empty data, for turns that never come."""
    from tinker.proto import tinker_public_pb2 as messages

    number = messages.ForwardBackwardRequest.DESCRIPTOR.fields_by_name["data"].number
    empty = bytes([number << 3 | 2, 0])
    async with soak.client(HONEST + 1) as client:
        run = await begun_run(soak, client, "zstd")
        place = 1
        while not soak.over:
            place += 1
            head = messages.ForwardBackwardRequest(
                model_id=run, seq_id=place, loss_fn="cross_entropy"
            ).SerializeToString()
            body = head + empty * ((BODY - len(head) - 64) // 2)
            content = zstandard.ZstdCompressor(level=3).compress(body)
            path = "/api/v1/forward_backward"
            await soak.hostile(client, "zstd", path, content=content, headers=_ZSTD)
            await asyncio.sleep(0.05)


async def long_steps(soak: Soak) -> None:
    """`forward_backward` of many tokens, one after the other."""
    rng = random.Random(3)
    given = [
        datum([rng.randrange(4, 60) for _ in range(POSITIONS)])
        for _ in range(LONG_TOKENS // POSITIONS)
    ]
    async with soak.client(HONEST + 2) as client:
        run, number = await begun_run(soak, client, "trains"), 0
        while not soak.over:
            number += 1
            content = message(run, number, given)
            path = "/api/v1/forward_backward"
            found = await soak.hostile(client, "trains", path, content=content, headers=_PROTOBUF)
            if found is None or found.status_code != 200:
                number -= 1
                await asyncio.sleep(0.1)
                continue
            await finished(soak, client, "trains: done", found.json())


async def floods(soak: Soak) -> None:
    """Cheap requests, 16 at a time: with a token, and without one."""

    async def again(client: httpx.AsyncClient, kind: str) -> None:
        while not soak.over:
            try:
                found = await client.get("/v1/models")
                soak.counts[f"{kind}: {found.status_code}"] += 1
            except httpx.TransportError as error:
                soak.counts[f"{kind}: {type(error).__name__}"] += 1
                await asyncio.sleep(0.05)

    strangers = httpx.AsyncClient(base_url=soak.server.url, timeout=60)
    async with soak.client(HONEST + 3) as client, strangers:
        tasks = [again(client, "floods") for _ in range(4)]
        await asyncio.gather(*tasks, *(again(strangers, "no token") for _ in range(16)))


async def half_open(soak: Soak) -> None:
    """More connections than there may be, at which a request is begun; then junk at others."""
    place = ("127.0.0.1", soak.server.port)
    rng = random.Random(4)
    while not soak.over:
        writers = list[asyncio.StreamWriter]()
        for number in range(HALF_OPEN):
            if soak.over:
                break
            with suppress(OSError):
                _, writer = await asyncio.open_connection(*place)
                junk = rng.randbytes(200) if number % 10 == 0 else b""
                writer.write(junk or b"POST /v1/completions HTTP/1.1\r\n")
                writers.append(writer)
                soak.counts["half open: junk" if junk else "half open"] += 1
        await asyncio.sleep(min(5.0, max(soak.end - time.monotonic(), 0.0)))
        for writer in writers:
            writer.transport.abort()


async def watch(soak: Soak) -> None:
    """The server's memory and descriptors, now and then."""
    assert soak.server.process is not None
    folder = Path(f"/proc/{soak.server.process.pid}")
    while not soak.over:
        status = (folder / "status").read_text()
        soak.memory.append(int(status.partition("VmRSS:")[2].split()[0]) * 1024)
        soak.descriptors.append(len(os.listdir(folder / "fd")))
        await asyncio.sleep(0.5)


KINDS: dict[str, Callable[[Soak], Awaitable[None]]] = {
    "texts": long_texts,
    "zstd": packed,
    "trains": long_steps,
    "floods": floods,
    "half-open": half_open,
}


async def alone(soak: Soak) -> None:
    """What honest clients are answered without others, and how long that takes."""
    async with soak.client(0) as client:
        for _ in range(20):
            began = time.monotonic()
            found = await client.post("/v1/completions", json=ASKED)
            soak.seconds.append(time.monotonic() - began)
        soak.alone = loads.essence(found.content)
    soak.trained = await trained(soak)


async def together(soak: Soak, kinds: list[str]) -> None:
    """All at once; hostile clients in a thread of their own, so that theirs is not honest time."""
    failed = list[BaseException]()

    def strangers() -> None:
        async def all_kinds() -> None:
            await asyncio.gather(*(KINDS[kind](soak) for kind in kinds))

        try:
            asyncio.run(all_kinds())
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=strangers)
    thread.start()
    tasks = [honest(soak, tenant) for tenant in range(HONEST) for _ in range(2)]
    await asyncio.gather(*tasks, honest_runs(soak), watch(soak))
    await asyncio.to_thread(thread.join)
    if failed:
        raise failed[0]


def run(folder: Path, seconds: float, kinds: list[str]) -> dict[str, Any]:
    """All of it: figures, and what is wrong."""
    base = base_model(folder / "base", max_positions=POSITIONS)
    server = Server(base, folder, every=10)
    tokens = tuple(f"tml-tenant-{number:04}-0123456789" for number in range(HONEST + len(HOSTILE)))
    (folder / "token").write_text("".join(f"{token}\n" for token in tokens))
    server.start()
    ended = False
    try:
        server.wait(threading.Event())
        soak = Soak(server, tokens, math.inf)
        asyncio.run(alone(soak))
        quiet, soak.seconds, soak.end = soak.seconds, [], time.monotonic() + seconds
        asyncio.run(together(soak, kinds))
        assert server.process is not None
        alive = server.process.poll() is None
        if alive:
            server.stop(signal.SIGTERM)
            ended = True
    finally:
        if not ended and server.process is not None and server.process.poll() is None:
            server.stop()
    lines = [line for line in server.log.splitlines() if line.startswith(("WARNING", "ERROR"))]
    return figures(soak, quiet, alive, server.process.returncode, lines) | {"kinds": kinds}


def figures(
    soak: Soak, quiet: list[float], alive: bool, code: int | None, lines: list[str]
) -> dict[str, Any]:
    """The result, as JSON has it."""
    waits = sorted(soak.seconds)
    most = Limits().connections + 400
    wrong = list(soak.wrong)
    if not alive or code != 0:
        wrong.append(f"the server ended by itself, or with exit code {code}")
    if max(soak.descriptors, default=0) > most:
        wrong.append(f"{max(soak.descriptors):,} descriptors, more than {most:,}")
    if any(line.startswith("ERROR") for line in lines):
        wrong.append(f"errors in the log: {lines[:3]}")
    return {
        "honest": {
            "answers": len(waits),
            "alone_median_s": statistics.median(quiet),
            "median_s": statistics.median(waits),
            "p99_s": waits[int(0.99 * (len(waits) - 1))],
            "slowest_s": waits[-1],
        },
        "server": {
            "MiB": dict(zip(QUARTERS, (size / 2**20 for size in quarters(soak.memory)))),
            "MiB_most": max(soak.memory, default=0) / 2**20,
            "descriptors": dict(zip(QUARTERS, quarters(soak.descriptors))),
            "descriptors_most": max(soak.descriptors, default=0),
            "alive": alive,
            "exit_code": code,
            "log_lines": len(lines),
        },
        "counts": dict(sorted(soak.counts.items())),
        "wrong": wrong[:20],
        "num_wrong": len(wrong),
    }


def main() -> None:
    """Run it, and print the figures; exit 1 where something is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result there too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = run(Path(name), 60 * given.minutes, given.kinds)
    text = json.dumps(found, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")
    sys.exit(1 if found["num_wrong"] else 0)


if __name__ == "__main__":
    main()
