"""Seconds that 32 clients of a server take beside `Engine.generate` for the same work, in one
process.

Hidden 256, 4 layers, `fp8`; each client asks for one answer. The tokens are the same
(tests/serve/test_bits.py). Beside them without a claim: answers that are streamed, a piece for a
token, whose clients are in this process too; and 16 adapters (`adapters.py` has them without a
server). At this size calls from Python take most of the time of both.
"""

import asyncio
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
import uvicorn

from benchmarks.common import Claim, Result, race
from benchmarks.models import save_model
from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.model import Model
from isobit.model.adapters.targets import NewAdapter, new_adapter
from isobit.model.text.tool_formats.table import format_of
from isobit.serve.app import Server, make_app
from isobit.serve.gateway import Gateway
from isobit.serve.requests import Limits
from isobit.serve.state.state import State

CLIENTS, PROMPT, TOKENS, ADAPTERS = 32, 24, 256, 16
TOKEN = "benchmark-token-0123456789"
_PROMPTS = [[3 + (7 * client + place) % 40 for place in range(PROMPT)] for client in range(CLIENTS)]
_SAMPLING = Sampling(max_new_tokens=TOKENS, seed=1, ignore_eos=True)


def run(rounds: int) -> Result:
    result = Result("serve")
    with tempfile.TemporaryDirectory() as name:
        path = save_model(Path(name) / "model", 256, 4, 64, 512)
        base = Model.load(path, "fp8", adapter=NewAdapter(1, 1.0, ()))
        with serving(base.serving({})) as (url, gateway):
            random = torch.Generator().manual_seed(0)
            for number in range(ADAPTERS):
                made = new_adapter(base.config, NewAdapter(8, 16.0, seed=number))
                for factors in made.tensors.values():
                    factors.copy_(0.05 * torch.randn(factors.shape, generator=random))
                gateway.device.snapshots.put(f"a{number}", made)
            engine = Engine(base, kv_pages=2000, max_sequences=64)
            contestants: dict[str, Callable[[], object]] = {
                "generate": lambda: engine.generate(_PROMPTS, _SAMPLING, [0] * CLIENTS),
                "server": lambda: asyncio.run(_ask(url, stream=False)),
                "server, streamed": lambda: asyncio.run(_ask(url, stream=True)),
                "server, 16 adapters": lambda: asyncio.run(
                    _ask(url, stream=False, adapters=ADAPTERS)
                ),
            }
            amount = float(CLIENTS * TOKENS)
            result.rows += race("answers", contestants, rounds, amount=amount, unit="tokens")
    ratio = result.median("generate") / result.median("server")
    result.claims.append(Claim("tokens a second, server over generate", ratio, ">=", 0.9))
    return result


@contextmanager
def serving(
    model: Model, token: str = TOKEN, state: State | None = None, max_sequences: int = 64
) -> Iterator[tuple[str, Gateway]]:
    """A server in a thread of this process; with a `state` it trains."""
    engine = Engine(model, kv_pages=2000, max_sequences=max_sequences)
    gateway = Gateway(engine, "model", format_of("auto", None), Limits(), state)
    app = make_app(gateway, (token,))
    config = uvicorn.Config(
        app, port=0, log_config=None, access_log=False, lifespan="off", ws="none", http="h11"
    )
    server, ports, started = Server(config, gateway, 1.0), list[int](), threading.Event()

    def on_start(port: int) -> None:
        ports.append(port)
        started.set()

    server.on_start = on_start
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        started.wait()
        yield f"http://127.0.0.1:{ports[0]}", gateway
    finally:
        server.should_exit = True
        thread.join()


async def _ask(url: str, stream: bool, adapters: int = 0) -> None:
    """Every client's answer, all at once."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(headers=headers, timeout=300) as client:

        async def one(number: int) -> None:
            value = {
                "model": f"a{number % adapters}" if adapters else "model",
                "prompt": _PROMPTS[number],
                "max_tokens": TOKENS,
                "seed": 1,
                "ignore_eos": True,
                "stream": stream,
            }
            response = await client.post(f"{url}/v1/completions", json=value)
            assert response.status_code == 200, response.text

        await asyncio.gather(*map(one, range(CLIENTS)))
