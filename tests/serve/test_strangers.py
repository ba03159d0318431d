"""A second tenant, and somebody without a token, try each route with the first tenant's ids: it is
as if nothing was there, and nothing of the first one's has changed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from .helpers import LONG, OTHER_KEY, Running

pytest.importorskip("tinker")

from .test_runs import PROTOBUF, answer, gradients, new, started, step, weights
from .training import data, message

API = "/api/v1"
OF_NOBODY = {
    ("GET", "/health"),
    ("GET", "/metrics"),  # test_tenants.py
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name:path}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/generate"),
    ("GET", f"{API}/healthz"),
    ("GET", f"{API}/get_server_capabilities"),
    ("POST", f"{API}/client/config"),
    ("POST", f"{API}/client/dynamic_config"),
    ("POST", f"{API}/telemetry"),
    ("POST", f"{API}/create_session"),
    *((method, f"{API}/{{path:path}}") for method in ("GET", "POST", "PUT", "DELETE")),
}
"""Routes that take no id of anybody's."""


@dataclass(frozen=True)
class Owned:
    """What the first tenant has."""

    session: str
    run: str
    sampler: str
    future: str
    sample: str
    path: str
    response: str
    chat: str = "a conversation"


def post(server: Running, path: str, value: Any) -> dict[str, Any]:
    found = server.post(f"{API}/{path}", value)
    assert found.status_code == 200, found.text
    return dict(found.json())


SAMPLE = {
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
    "sampling_params": {"max_tokens": 2, "seed": 1},
}


def talk(server: Running, *more: dict[str, str]) -> None:
    """A turn of a conversation."""
    messages = [{"role": "user", "content": "a"}, *more]
    value = {"messages": messages, "max_tokens": 3, "seed": 1}
    name = {"X-Session-ID": Owned.chat}
    assert server.post("/v1/chat/completions", value, headers=name).status_code == 200


@pytest.fixture(scope="module")
def owned(trainer: Running) -> Owned:
    session = started(trainer)
    run = new(trainer, session)
    future = gradients(trainer, run, 1, data(1))
    answer(trainer, future)
    for number, kind in ((2, "save_weights"), (3, "save_weights_external")):
        asked = {"model_id": run, "seq_id": number, "path": "one"}
        answer(trainer, trainer.post(f"{API}/{kind}", asked))
    begin = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = post(trainer, "create_sampling_session", begin)["sampling_session_id"]
    sample = post(trainer, "asample", {**SAMPLE, "sampling_session_id": sampler, "seq_id": 0})
    talk(trainer)
    asked = {"input": "a", "max_output_tokens": 1}
    response = str(trainer.post("/v1/responses", asked).json()["id"])
    name = str(future.json()["request_id"])
    path = f"tinker://{run}/weights/one"
    return Owned(session, run, sampler, name, sample["request_id"], path, response)


Try = tuple[str, str, str, Any, int]


def tries(owned: Owned, own_session: str) -> Iterator[Try]:
    """(method, route, path, body, the status that a stranger gets)."""
    run, session, sampler, path = owned.run, owned.session, owned.sampler, owned.path

    def posted(route: str, status: int, name: str = "", **value: Any) -> Try:
        return "POST", f"{API}/{route}", f"{API}/{name or route}", value, status

    yield posted("session_heartbeat", 410, session_id=session)
    yield posted("sessions/{name}/finish", 200, f"sessions/{session}/finish")
    for theirs, status in ((session, 410), (own_session, 404)):
        asked = {"session_id": theirs, "sampling_session_seq_id": 7, "model_path": path}
        yield posted("create_sampling_session", status, **asked)
        asked = {"session_id": theirs, "model_seq_id": 7, "path": path}
        yield posted("load_weights", status, **asked)
    yield posted("asample", 404, **SAMPLE, sampling_session_id=sampler, seq_id=1)
    for name in (owned.future, owned.sample):
        yield posted("retrieve_future", 410, request_id=name)
        yield posted("cancel_future", 200, request_id=name)
    lora = {"rank": 4, "seed": 1}
    asked = {"session_id": session, "model_seq_id": 8, "base_model": "tiny", "lora_config": lora}
    yield posted("create_model", 410, **asked)
    yield posted("get_info", 404, model_id=run)
    yield posted("unload_model", 200, model_id=run)  # as where it has ended, and nothing ends
    saves = ("save_weights", "save_weights_for_sampler", "save_weights_external")
    for number, kind in enumerate(saves, 5):
        yield posted(kind, 404, model_id=run, seq_id=number, path="two")
    yield posted("optim_step", 404, model_id=run, seq_id=8, adam_params={"learning_rate": 0.5})
    yield posted("load_weights", 404, model_id=run, seq_id=10, path=path)
    yield posted("weights_info", 404, tinker_path=path)
    body = message(run, 9, data(2))
    yield "POST", f"{API}/forward_backward", f"{API}/forward_backward", body, 404
    yield "GET", f"{API}/samplers/{{name}}", f"{API}/samplers/{sampler}", None, 404
    yield from kept(owned)
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    yield "POST", "/v1/chat/completions", "/v1/chat/completions", chat, 200
    on = {"input": "b", "max_output_tokens": 1, "previous_response_id": owned.response}
    yield "POST", "/v1/responses", "/v1/responses", on, 404


def kept(owned: Owned) -> Iterator[Try]:
    """The same of what is saved."""
    for listed in ("training_runs", "checkpoints", "sessions"):
        yield "GET", f"{API}/{listed}", f"{API}/{listed}", None, 200
    route, name = f"{API}/training_runs/{{run}}", f"{API}/training_runs/{owned.run}"
    yield "GET", f"{API}/sessions/{{name}}", f"{API}/sessions/{owned.session}", None, 404
    yield "GET", route, name, None, 404
    yield "GET", f"{route}/checkpoints", f"{name}/checkpoints", None, 404
    route, name = f"{route}/checkpoints/{{checkpoint:path}}", f"{name}/checkpoints/weights/one"
    yield "DELETE", route, name, None, 404
    yield "PUT", f"{route}/ttl", f"{name}/ttl", {"ttl_seconds": 3600}, 404
    for kind in ("archive", "external_weights_urls"):
        external = name.replace("/weights/", "/external_weights/")
        yield "GET", f"{route}/{kind}", f"{external}/{kind}", None, 404
    files = f"{API}/files/{'0' * 32}/adapter_model.safetensors?expires=99999999999&signature=00"
    yield "GET", f"{API}/files/{{checkpoint}}/{{file:path}}", files, None, 403


@pytest.fixture(scope="module")
def client(trainer: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=trainer.url, timeout=LONG) as opened:
        yield opened


def asked(client: httpx.Client, method: str, path: str, body: Any, key: str) -> httpx.Response:
    headers = {"X-Api-Key": key, "X-Session-ID": Owned.chat} if key else {}
    given = {"content": body} if isinstance(body, bytes) else {} if body is None else {"json": body}
    kind = PROTOBUF if isinstance(body, bytes) else {}
    return client.request(method, path, headers=headers | kind, **given)


def all_that_is_the_firsts(server: Running, owned: Owned) -> Any:
    """What the first tenant would see change."""
    lists = [
        server.get(f"{API}/{path}").json()
        for path in (
            "training_runs",
            f"training_runs/{owned.run}/checkpoints",
            f"sessions/{owned.session}",
            f"samplers/{owned.sampler}",
        )
    ]
    futures = [
        server.post(f"{API}/retrieve_future", {"request_id": name}).content
        for name in (owned.future, owned.sample)
    ]
    alive = post(server, "session_heartbeat", {"session_id": owned.session})
    return lists, futures, alive, weights(server, owned.run)


@pytest.fixture
def other(trainer: Running) -> Running:
    """The second tenant."""
    return Running(trainer.url, trainer.gateway, trainer.server, OTHER_KEY, app=trainer.app)


def test_a_stranger_with_the_firsts_ids(
    trainer: Running, client: httpx.Client, owned: Owned, other: Running
) -> None:
    before = all_that_is_the_firsts(trainer, owned)
    secrets = [owned.run, owned.session, owned.sampler, *before[0]]
    for method, route, path, body, status in tries(owned, started(other)):
        for key, expected in ((OTHER_KEY, status), ("", 403 if "/files/" in path else 401)):
            found = asked(client, method, path, body, key)
            assert found.status_code == expected, (method, route, found.text)
            if method == "GET" and expected == 200:
                assert not any(str(each) in found.text for each in secrets), route
    assert all_that_is_the_firsts(trainer, owned) == before
    assert answer(trainer, step(trainer, owned.run, 4)).status_code == 200


def test_the_first_is_answered(trainer: Running, client: httpx.Client, owned: Owned) -> None:
    """The control of the same requests, but those that end something: they are no mistakes."""
    ends = ("unload_model", "/finish", "cancel_future", "load_weights")
    for method, route, path, body, _ in tries(owned, owned.session):
        if route.endswith(ends) or method == "DELETE" or "/files/" in route:
            continue
        found = asked(client, method, path, body, trainer.token)
        assert found.status_code in (200, 204), (route, found.text)


def test_each_route_is_tried(trainer: Running, owned: Owned) -> None:
    app: Any = trainer.app
    routes = {(method, route.path) for route in app.routes for method in route.methods - {"HEAD"}}
    tried = {(method, route) for method, route, *_ in tries(owned, "s")}
    assert routes - tried - OF_NOBODY == set()
    assert tried - routes == set()


def test_a_conversation_is_its_tenants(trainer: Running, owned: Owned, other: Running) -> None:
    """Under a name that both use, each goes on with its own last turn."""
    sessions = trainer.gateway.sessions
    before = sessions.find("0", owned.chat)
    assert before is not None
    talk(other, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"})
    assert sessions.find("0", owned.chat) is before
    others = sessions.find("1", owned.chat)
    assert others is not None
    assert len(others.messages) == 3
