"""A server over a tiny model, in a thread of the test's process."""

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
from starlette.applications import Starlette

from isobit.engine.engine import Engine
from isobit.model import Model
from isobit.model.adapters.targets import NewAdapter
from isobit.model.text.tool_formats.table import format_of
from isobit.serve.app import Server, ServerOptions, server_config
from isobit.serve.gateway import Gateway
from isobit.serve.jobs import Done, Event, Token
from isobit.serve.listening import listen
from isobit.serve.requests import Limits
from isobit.serve.state.state import State
from tests.models import tiny_model

LONG = 600.0
"""Seconds after which something hangs; on a busy machine a server takes minutes to begin and to
end."""
TOKENS = ("test-token-0123456789", "other-token-0123456789")
KEY, OTHER_KEY = "tml-test-key-0123456789", "tml-other-key-0123456789"
ADAPTERS = {"math": NewAdapter(4, 8), "code": NewAdapter(3, 2, ["q_proj", "down_proj"])}
ALPHABET = (
    "abcdefghijklmnopqrstuvwxyz 0123456789+-*/=.,!?\n<>_\"'{}[]():|\\#$&ABCDEFGHIJKLMNOPQRSTUVWXYZ"
)
TEMPLATE = (
    "{% if tools %}<s>tools\n{{ tools | tojson }}</s>\n{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def base_model(folder: Path, max_positions: int = 256) -> Path:
    """A model directory with a chat template."""
    model = tiny_model("bf16", alphabet=ALPHABET, scale=4, max_positions=max_positions)
    model.tokenizer.chat_template = TEMPLATE
    model.save(folder)
    return folder


@dataclass
class Running:
    """A server that runs."""

    url: str
    gateway: Gateway
    server: Server
    token: str = TOKENS[0]
    app: Starlette | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def post(self, path: str, value: Any = None, **more: Any) -> httpx.Response:
        """A request, with a JSON body unless `content` is given."""
        given = more if "content" in more else {"json": value, **more}
        headers = self.headers | given.pop("headers", {})
        return httpx.post(self.url + path, headers=headers, timeout=LONG, **given)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=self.headers, timeout=LONG)

    def stream(self, path: str, value: Any) -> list[str]:
        """The data of a stream's events."""
        with httpx.stream(
            "POST", self.url + path, headers=self.headers, json=value, timeout=LONG
        ) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines)
        return [line[6:] for line in lines]


@contextmanager
def serving(
    base: Path,
    adapters: Mapping[str, Path] | None = None,
    *,
    limits: Limits = Limits(),  # noqa: B008
    tools: str = "auto",
    grace: float = 5.0,
    state: Path | None = None,
    whole: bool = False,
    every: int = 10,
    identity: str = "",
    drops: bool = False,
    **sizes: int,
) -> Iterator[Running]:
    """A server over the model at `base`, which trains where it has a `state`, adapters or the
    `whole` model, and keeps a run `every` so many steps, as of a model of this `identity`, and
    `drops` runs that cannot go on; at the end all its pages must be free."""
    model = Model.load(base, "fp8", "native")
    model = model if whole else model.serving({})
    engine = Engine(model, **{"kv_pages": 400, "page_size": 4, "max_sequences": 16, **sizes})
    kept = None if state is None else State(state, every=every, model=identity, drops=drops)
    chat = format_of(tools, model.tokenizer.chat_template)
    gateway = Gateway(engine, "tiny", chat, limits, kept)
    for name, folder in (adapters or {}).items():
        gateway.device.snapshots.put(name, folder)
    config = server_config(gateway, TOKENS, ServerOptions(grace))
    app: Any = config.app
    server, started, port = Server(config, gateway, grace), threading.Event(), list[int]()

    def on_start(chosen: int) -> None:
        port.append(chosen)
        started.set()

    server.on_start = on_start
    listener = listen("127.0.0.1", 0, "--port")
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([cast(Any, listener)])))
    thread.start()
    try:
        assert started.wait(LONG)
        yield Running(f"http://127.0.0.1:{port[0]}", gateway, server, app=app)
    finally:
        server.should_exit = True
        thread.join(LONG)
        assert not thread.is_alive()
        if kept is not None:
            kept.close()
    assert gateway.device.failure is None
    engine.integrity()
    assert engine.num_open == 0
    assert engine.pages.num_used == 0


def bits(events: Sequence[Event]) -> tuple[list[int], list[float]]:
    """Of a streamed job with one answer, whose tokens are told once and in order."""
    tokens = [event for event in events if isinstance(event, Token)]
    (done,) = (event.completion for event in events if isinstance(event, Done))
    told = [token.token for token in tokens], [token.logprob for token in tokens]
    assert told == (done.token_ids, done.logprobs)
    return told
