"""Tinker's own client, unmodified, samples: the bits of the other routes, and log-probabilities of
prompts that are those of sampling, bit for bit."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from isobit.serve.jobs import Done, WorkJob
from isobit.serve.tinker import sessions as routes
from tests.until import until

from .helpers import KEY, Running, serving

tinker: Any = pytest.importorskip("tinker")


@pytest.fixture(scope="module")
def service(running: Running) -> Iterator[Any]:
    client = tinker.ServiceClient(base_url=running.url, api_key=KEY)
    yield client
    # else it tells a server that is gone of its life, to the end of all tests
    client.close("success").result()


def sampled(
    client: Any, tokens: list[int], **given: Any
) -> list[tuple[list[int], list[float], str]]:
    count = given.pop("num_samples", 1)
    params = tinker.SamplingParams(**{"max_tokens": 8, "seed": 3, **given})
    prompt = tinker.ModelInput.from_ints(tokens)
    found = client.sample(prompt=prompt, num_samples=count, sampling_params=params).result()
    return [
        (list(s.tokens), [float(x) for x in s.logprobs], s.stop_reason) for s in found.sequences
    ]


def replaced(server: Running, name: str, folder: Path) -> None:
    """The adapter of this name is another one from now on."""
    done = list[Any]()
    work = server.gateway.device.snapshots.put
    server.gateway.device.submit(WorkJob("test", lambda: work(name, folder), done.append))
    until(lambda: done)
    assert isinstance(done[0], Done)


@pytest.mark.slow
def test_a_client_of_an_untested_version_is_told_of_once(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """The official client that is here was tested, and nothing is said of it."""
    assert version("tinker") in routes.TESTED
    for given in (version("tinker"), "9.1\n0", "9.1\n0", None, "a" * 5000):
        asked = {"tags": [], "sdk_version": given, "user_metadata": None}
        assert running.post("/api/v1/create_session", asked).status_code == 200

    def logged() -> list[str]:
        """The server's lines; clients of other tests have lines of their own."""
        return [each.getMessage() for each in caplog.records if each.name == "isobit.serve"]

    lines = logged()
    assert len(lines) == 2
    assert lines[0].startswith("a client of tinker '9.1\\n0' has begun a session; tested is")
    assert all("\n" not in line and len(line) < 200 for line in lines)
    for number in range(100):
        running.post("/api/v1/create_session", {"sdk_version": f"8.{number}"})
    assert len(logged()) <= routes._MOST_UNTESTED


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "user_metadata: expected a JSON object"),
        ({str(number): "a" for number in range(65)}, "at most 64 entries, got 65"),
        ({"a" * 257: "b"}, "a key of at most 256"),
        ({"a": "b" * 1025}, "a value of 1,024"),
        ({"a": {"b": ["c" * 1025]}}, "a value of 1,024"),
    ],
)
def test_metadata_that_is_too_much_is_refused(running: Running, given: Any, said: str) -> None:
    found = running.post("/api/v1/create_session", {"user_metadata": given})
    assert found.status_code == 400
    assert said in found.json()["error"]["message"]


def test_capabilities(service: Any, running: Running, folder: Path) -> None:
    models = service.get_server_capabilities().supported_models
    assert [model.model_name for model in models] == [str(folder / "base"), "tiny"]
    assert not any(model.trainable for model in models)


def test_samples_are_those_of_the_other_routes(service: Any, running: Running) -> None:
    """The control samples by another adapter."""
    tokens = running.gateway.tokenizer.encode("abc")
    clients = {
        "tiny": service.create_sampling_client(base_model="tiny").result(),
        "math": service.create_sampling_client(model_path="tinker://math").result(),
    }
    found = {}
    for name, client in clients.items():
        given = {"model": name, "prompt": tokens, "max_tokens": 8, "seed": 3, "n": 3, "logprobs": 1}
        choices = running.post("/v1/completions", given | {"return_token_ids": True}).json()[
            "choices"
        ]
        theirs = [
            (c["token_ids"], c["logprobs"]["token_logprobs"], c["finish_reason"]) for c in choices
        ]
        found[name] = sampled(client, tokens, num_samples=3)
        assert found[name] == theirs
    assert found["tiny"] != found["math"]


def test_prompt_logprobs_are_those_of_sampling(service: Any, running: Running) -> None:
    """For the base and each adapter, while all sample; the control scores by another adapter."""
    tokens = running.gateway.tokenizer.encode("12+3=")
    names = ["tiny", "math", "code"]
    clients = [service.create_sampling_client(base_model="tiny").result()]
    clients += [
        service.create_sampling_client(model_path=f"tinker://{name}").result() for name in names[1:]
    ]

    def scored(client: Any, whole: list[int]) -> list[float]:
        found = client.compute_logprobs(tinker.ModelInput.from_ints(whole)).result()
        assert found[0] is None
        return [float(np.float32(x)) for x in found[1:]]

    def one(number: int) -> tuple[list[int], list[float]]:
        ((answer, logprobs, _),) = sampled(clients[number % 3], tokens, seed=number, max_tokens=12)
        whole = [*tokens, *answer]
        assert scored(clients[number % 3], whole)[len(tokens) - 1 :] == logprobs
        return whole, logprobs

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(18)))
    whole, logprobs = found[1]
    assert scored(clients[2], whole)[len(tokens) - 1 :] != logprobs


def test_the_likeliest_tokens(service: Any, running: Running) -> None:
    """Of samples and of prompts, as the client reads them: the bits of what is sampled, which is
    the same without. The control asks another adapter."""
    tokens = running.gateway.tokenizer.encode("12+3=")
    prompt = tinker.ModelInput.from_ints(tokens)
    params = tinker.SamplingParams(max_tokens=8, seed=3)

    def asked(name: str, whole: Any, **given: Any) -> Any:
        client = service.create_sampling_client(model_path=f"tinker://{name}").result()
        return client.sample(prompt=whole, num_samples=1, sampling_params=params, **given).result()

    plain = asked("math", prompt).sequences[0]
    found = asked("math", prompt, topk_sample_logprobs=4).sequences[0]
    assert (list(found.tokens), list(found.logprobs)) == (list(plain.tokens), list(plain.logprobs))
    assert plain.topk_logprobs is None
    assert [len(top) for top in found.topk_logprobs] == [4] * len(found.tokens)
    whole = tinker.ModelInput.from_ints([*tokens, *found.tokens])
    given = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 4}
    scored = asked("math", whole, **given)
    assert scored.topk_prompt_logprobs[0] is None
    assert scored.topk_prompt_logprobs[len(tokens) :] == found.topk_logprobs
    assert asked("code", whole, **given).topk_prompt_logprobs != scored.topk_prompt_logprobs
    last = asked("math", whole, **given, prompt_logprobs_last_n=2).topk_prompt_logprobs
    assert last == [None] * (whole.length - 2) + scored.topk_prompt_logprobs[-2:]
    long = asked("math", tinker.ModelInput.from_ints([5] * 240), topk_prompt_logprobs=20)
    assert [len(top) for top in long.topk_prompt_logprobs[1:]] == [20] * 239


def test_a_sampling_client_is_pinned(service: Any, running: Running, folder: Path) -> None:
    """A new version of its adapter changes nothing for it; the control is a new client."""
    tokens = running.gateway.tokenizer.encode("abc")
    old = service.create_sampling_client(model_path="tinker://math").result()
    before = sampled(old, tokens)
    replaced(running, "math", folder / "code")
    assert sampled(old, tokens) == before
    new = service.create_sampling_client(model_path="tinker://math").result()
    assert sampled(new, tokens) != before
    replaced(running, "math", folder / "math")
    assert (
        sampled(service.create_sampling_client(model_path="tinker://math").result(), tokens)
        == before
    )


def test_stops_and_what_is_refused(service: Any, running: Running) -> None:
    tokens = running.gateway.tokenizer.encode("abc")
    client = service.create_sampling_client(base_model="tiny").result()
    ((long, _, _),) = sampled(client, tokens, max_tokens=30, stop=[])
    assert len(long) == 30
    ((short, _, reason),) = sampled(client, tokens, max_tokens=30, stop=[long[6]])
    assert (short, reason) == (long[: long.index(long[6]) + 1], "stop")
    with pytest.raises(
        tinker.BadRequestError, match="token id 99999 is not in the model's vocabulary"
    ):
        sampled(client, [99999])
    with pytest.raises(tinker.BadRequestError, match="temperature: expected at least 0"):
        sampled(client, tokens, temperature=-1.0)
    with pytest.raises(tinker.RequestFailedError, match="prompt has 300 tokens"):
        sampled(client, tokens * 100)
    with pytest.raises(tinker.NotFoundError, match="model 'art' is not served"):
        sampled(service.create_sampling_client(model_path="tinker://art").result(), tokens)
    with pytest.raises(tinker.BadRequestError, match="it was begun without --train"):
        service.create_lora_training_client(base_model="tiny", rank=4).result()


@pytest.mark.slow
def test_a_request_is_done_once_and_belongs_to_its_tenant(running: Running) -> None:
    headers = {"X-Api-Key": KEY}

    def post(path: str, value: dict[str, Any], **more: str) -> httpx.Response:
        return httpx.post(
            f"{running.url}/api/v1/{path}", json=value, headers=headers | more, timeout=60
        )

    session = post("create_session", {"tags": [], "sdk_version": "0"}).json()["session_id"]
    begin = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = post("create_sampling_session", begin).json()["sampling_session_id"]
    assert post("create_sampling_session", begin).json()["sampling_session_id"] == sampler
    chunk = {"type": "encoded_text", "tokens": [10, 11]}
    asked = {"sampling_session_id": sampler, "seq_id": 4, "prompt": {"chunks": [chunk]}}
    asked["sampling_params"] = {"max_tokens": 5}
    names = {post("asample", asked).json()["request_id"] for _ in range(3)}
    assert len(names) == 1
    (name,) = names
    results = {post("retrieve_future", {"request_id": name}).content for _ in range(2)}
    assert len(results) == 1
    assert post("retrieve_future", {"request_id": "other"}).status_code == 410
    assert (
        post("retrieve_future", {"request_id": name}, **{"X-Api-Key": "tml-wrong"}).status_code
        == 401
    )
    assert post("asample", asked | {"seq_id": 5, "topk_sample_logprobs": 21}).status_code == 400
    long = asked | {
        "seq_id": 6,
        "sampling_params": {"max_tokens": 250, "stop": []},
        "num_samples": 8,
    }
    cancelled = {"request_id": post("asample", long).json()["request_id"]}
    assert post("cancel_future", cancelled).status_code == 200
    assert post("retrieve_future", cancelled).json() == {
        "error": "the request was cancelled",
        "category": "user",
    }
    until(lambda: not running.gateway.device.num_open)
    left = {
        "request_id": post("asample", long | {"seq_id": 7, "num_samples": 200}).json()["request_id"]
    }
    assert post(f"sessions/{session}/finish", {}).status_code == 200  # nobody waits for it
    assert post("retrieve_future", left).json()["error"] == "the request was cancelled"
    assert post("asample", asked).status_code == 404
    assert post("session_heartbeat", {"session_id": session}).status_code == 410


def test_what_no_route_takes_is_told_what_would_be_right(running: Running) -> None:
    for method, path, status, said in (
        (
            "POST",
            "/v1/completion",
            404,
            "there is no '/v1/completion'; did you mean '/v1/completions'?",
        ),
        ("GET", "/x", 404, "there is no '/x'; known: /health, /metrics, /v1/completions, "),
        ("GET", "/v1/completions", 405, "GET '/v1/completions': expected POST"),
        ("PUT", "/api/v1/asample", 405, "PUT '/api/v1/asample': expected POST"),
        ("GET", "/a%0Ab", 404, "there is no '/a\\nb'; "),
        ("GET", "/api/v1/a/b", 404, "this server does not offer a/b of Tinker's routes"),
    ):
        found = httpx.request(method, running.url + path, headers=running.headers)
        assert (found.status_code, found.json()["error"]["message"][: len(said)]) == (status, said)
        assert ("POST" in found.headers.get("allow", "")) == (status == 405)
    packed = running.post("/tokenize", {"prompt": "a"}, headers={"Content-Encoding": "gzip"})
    assert (packed.status_code, "gzip is not read here" in packed.text) == (415, True)


def test_an_idle_session_lets_go_of_its_snapshot(
    folder: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.serve.helpers.TOKENS", (KEY,))
    with serving(folder / "base", adapters) as server:
        server.token = KEY
        served = server.gateway.model.transformer.served
        assert served is not None
        session = server.post("/api/v1/create_session", {}).json()["session_id"]
        begin = {"session_id": session, "sampling_session_seq_id": 0, "model_path": "tinker://math"}
        assert server.post("/api/v1/create_sampling_session", begin).status_code == 200
        replaced(server, "math", folder / "code")
        assert sorted(served.names) == ["code@0", "math@0", "math@1"]
        monkeypatch.setattr(routes, "IDLE_SECONDS", 0.0)
        server.post("/api/v1/create_session", {})
        assert sorted(served.names) == ["code@0", "math@1"]
