"""The same request has the same tokens and log-probabilities, as bytes: alone, among many others,
streamed or not, before and after a restart."""

import asyncio
import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from .helpers import TOKENS, Running, serving

Bits = list[tuple[list[int], list[float]]]
CHAT = [{"role": "user", "content": "count to 9"}]


def request(number: int) -> tuple[str, dict[str, Any]]:
    """Requests of many kinds, each its own."""
    model = ["tiny", "math", "code"][number % 3]
    given: dict[str, Any] = {
        "model": model,
        "max_tokens": 3 + number % 11,
        "seed": number,
        "return_token_ids": True,
    }
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 0},
        {"top_p": 0.9},
        {"stop": ["e"]},
        {"top_k": 7, "temperature": 0.7},
    ]
    given |= settings[number % 5]
    if number % 2:
        return "/v1/chat/completions", {
            **given,
            "messages": CHAT * (1 + number % 4 * 2),
            "logprobs": True,
        }
    return "/v1/completions", {
        **given,
        "prompt": "abc" * (1 + number % 7),
        "n": 1 + number % 3,
        "logprobs": 0,
    }


def bits(choices: list[dict[str, Any]]) -> Bits:
    found = []
    for choice in choices:
        shown = choice["logprobs"]
        logprobs = (
            [e["logprob"] for e in shown["content"]]
            if "content" in shown
            else shown["token_logprobs"]
        )
        found.append((choice["token_ids"], logprobs))
    return found


def whole(server: Running, number: int) -> Bits:
    response = server.post(*request(number))
    assert response.status_code == 200, response.text
    return bits(response.json()["choices"])


def streamed(server: Running, number: int) -> Bits:
    path, given = request(number)
    *events, last = server.stream(path, given | {"stream": True})
    assert last == "[DONE]"
    found: dict[int, tuple[list[int], list[float]]] = {}
    for event in events:
        for choice in json.loads(event)["choices"]:
            tokens, logprobs = found.setdefault(choice["index"], ([], []))
            if choice["logprobs"] is not None:
                tokens += bits([choice])[0][0]
                logprobs += bits([choice])[0][1]
    return [found[index] for index in sorted(found)]


@pytest.mark.slow
def test_alone_among_others_streamed_and_after_a_restart(
    folder: Path, adapters: dict[str, Path], server: Running
) -> None:
    numbers = range(60)
    alone = [whole(server, number) for number in numbers]
    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(lambda number: whole(server, number), numbers)) == alone
        assert list(pool.map(lambda number: streamed(server, number), numbers)) == alone
    with (
        serving(folder / "base", adapters, kv_pages=100, max_batch_tokens=24) as again,
        ThreadPoolExecutor(24) as pool,
    ):
        assert list(pool.map(lambda number: whole(again, number), numbers)) == alone


@pytest.mark.parametrize("change", [{"seed": 1000}, {"model": "code"}])
def test_negative_control_another_seed_or_adapter(server: Running, change: dict[str, Any]) -> None:
    path, given = request(13)
    assert bits(server.post(path, given | change).json()["choices"]) != whole(server, 13)


def test_they_are_those_of_generate(
    server: Running, folder: Path, adapters: dict[str, Path]
) -> None:
    from isobit.engine.engine import Engine
    from isobit.engine.types import Sampling
    from isobit.model import Model

    engine = Engine(Model.load(folder / "base", "fp8", "native", adapter=adapters["math"]))
    (group,) = engine.generate(["abcabcabcabcabc"], Sampling(n=2, max_new_tokens=7, seed=4), [0])
    path, given = request(4)
    assert given["model"] == "math"
    del given["top_k"], given["temperature"]
    assert bits(server.post(path, given).json()["choices"]) == [
        (c.token_ids, c.logprobs) for c in group
    ]


def turns(server: Running, seed: int) -> bool:
    """Three turns of a session; whether, as a control, the answers' texts would be encoded
    otherwise."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    asked: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 8,
        "seed": seed,
        "return_token_ids": True,
    }
    ends = server.gateway.tokenizer.eos_ids[0]
    before, differs = list[int](), False
    for turn in range(3):
        path, given = "/v1/chat/completions", asked | {"messages": messages}
        found = server.post(path, given, headers={"X-Session-ID": f"mine {seed}"}).json()
        prompt = found["prompt_token_ids"]
        assert prompt[: len(before)] == before
        if turn:
            ended = [] if before[-1] == ends else [ends]
            more = server.gateway.tokenizer.encode(f"\n<s>user\nmore {turn}</s>\n<s>assistant\n")
            assert prompt[len(before) :] == [*ended, *more]
            differs |= server.post(path, given).json()["prompt_token_ids"] != prompt
        before = prompt + found["choices"][0]["token_ids"]
        messages += [
            found["choices"][0]["message"],
            {"role": "user", "content": f"more {turn + 1}"},
        ]
    other = server.post(
        path, given | {"messages": messages[-1:]}, headers={"X-Session-ID": f"mine {seed}"}
    ).json()
    assert len(other["prompt_token_ids"]) < len(before)
    return differs


@pytest.mark.slow
def test_a_session_keeps_the_tokens_that_were_sampled(server: Running) -> None:
    assert sum(turns(server, seed) for seed in range(8)) > 0
    asked = {"messages": CHAT, "n": 2}
    refused = server.post("/v1/chat/completions", asked, headers={"X-Session-ID": "mine"})
    assert "X-Session-ID: expected n = 1" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_among_256_others_some_of_whom_go_away(server: Running) -> None:
    """At one time: whole and streamed answers, of two tenants."""

    async def one(client: httpx.AsyncClient, number: int) -> Bits | None:
        path, given = request(number % 60)
        headers = {"Authorization": f"Bearer {TOKENS[number % 2]}"}
        if number % 8 == 7:
            with contextlib.suppress(httpx.TimeoutException):
                await client.post(
                    server.url + path,
                    json=given | {"max_tokens": 200},
                    headers=headers,
                    timeout=0.5,
                )
            return None
        response = await client.post(
            server.url + path, json=given | {"stream": number % 3 == 0}, headers=headers
        )
        assert response.status_code == 200, response.text
        return None if number % 3 == 0 else bits(response.json()["choices"])

    async def all_at_once() -> list[Bits | None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:
            return await asyncio.gather(*(one(client, number) for number in range(256)))

    alone = [whole(server, number) for number in range(60)]
    found = asyncio.run(all_at_once())
    assert [f is None or f == alone[number % 60] for number, f in enumerate(found)] == [True] * 256
    assert sum(f is not None for f in found) > 100
    server.gateway.device.engine.integrity()
