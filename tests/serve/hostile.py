"""Hostile requests over all routes: each is answered in JSON with a status below 500 and one clear
line, and an honest request among them has the answer that it has alone.

    python -m tests.serve.hostile --cases 10000
"""

import argparse
import json
import logging
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from isobit.serve.requests import Limits

from .helpers import Running, base_model, serving

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "tiny",
        "prompt": "abc",
        "max_tokens": 4,
        "n": 1,
        "seed": 1,
        "stop": ["x"],
        "temperature": 1.0,
        "top_p": 0.9,
        "logprobs": 1,
        "stream": False,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    },
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "go"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"type": "function", "id": "c", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "content": "3", "tool_call_id": "c"},
        ],
        "max_tokens": 4,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": "auto",
        "chat_template_kwargs": {"thinking": False},
        "logprobs": True,
        "top_k": 4,
        "min_p": 0.1,
    },
    "/inference/v1/generate": {
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 3, "temperature": 0.0},
    },
    "/tokenize": {"prompt": "abc", "add_special_tokens": True},
    "/detokenize": {"tokens": [4, 5, 6]},
}
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**299, -(10**30), 0.5, -0.0, 1e308, float("inf"),
    float("nan"),
    "", "a", "\x00", "</s>", "<s>user\n", "a" * 3000, "é\ud7ff", "~", "null", "{{ 7 * 7 }}",
    "{% for x in y %}",
    [], [[]], [None], ["a", 1], [1.5], [True], list(range(300)), ["x"] * 40, {}, {"a": {}},
    {"role": "user"},
    {"type": "image_url"}, {"messages": []}, [{"role": "user", "content": "a"}],
    {"include_usage": 3},
]  # fmt: skip
HONEST = (
    "/v1/completions",
    {"model": "tiny", "prompt": "abc", "max_tokens": 6, "seed": 9, "logprobs": 0},
)


def mutated(value: Any, rng: random.Random, depth: int = 0) -> Any:
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
            found[key] = mutated(found[key], rng, depth + 1)
        return found
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], mutated(value[place], rng, depth + 1), *value[place + 1 :]]
    return rng.choice(VALUES)


def with_tinker(server: Running) -> dict[str, Any]:
    """The routes, and those of Tinker for a session."""
    session = server.post("/api/v1/create_session", {}).json()["session_id"]
    begin = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = server.post("/api/v1/create_sampling_session", begin).json()["sampling_session_id"]
    sample = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": 3, "stop": [7], "temperature": 1.0},
        "prompt_logprobs": True,
    }
    asked = server.post("/api/v1/asample", sample).json()
    return ROUTES | {
        "/api/v1/create_sampling_session": begin,
        "/api/v1/session_heartbeat": {"session_id": session},
        "/api/v1/asample": {**sample, "seq_id": 1},
        "/api/v1/retrieve_future": {"request_id": asked["request_id"]},
        "/api/v1/cancel_future": {"request_id": asked["request_id"]},
        **_with_training(server, session),
    }


def _with_training(server: Running, session: str) -> dict[str, Any]:
    """Those of a run."""
    create = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": "tiny",
        "lora_config": {"rank": 2, "seed": 1, "train_mlp": True, "train_attn": True},
        "optimizer_config": {"type": "adamw"},
        "user_metadata": {"a": "b"},
    }
    server.post("/api/v1/create_model", create)
    run = f"{session}:train:0"
    server.post("/api/v1/retrieve_future", {"request_id": f"{run}:0"})
    adam = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "grad_clip_norm": 1}
    save = {"model_id": run, "seq_id": 2, "path": "a", "ttl_seconds": 3600, "user_metadata": {}}
    path = f"tinker://{run}/weights/a"
    return {
        "/api/v1/create_model": {**create, "model_seq_id": 1},
        "/api/v1/get_info": {"model_id": run},
        "/api/v1/optim_step": {"model_id": run, "seq_id": 1, "adam_params": adam},
        "/api/v1/save_weights": {**save, "overwrite": True},
        "/api/v1/save_weights_for_sampler": {**save, "sampling_session_seq_id": 3},
        "/api/v1/load_weights": {"model_id": run, "seq_id": 3, "path": path, "optimizer": True},
        "/api/v1/weights_info": {"tinker_path": path},
        "/api/v1/forward_backward": _gradients(run),
    }


def _gradients(run: str) -> bytes:
    """A body of `forward_backward`, in protobuf."""
    from tinker.proto import tinker_public_pb2 as messages

    found = messages.ForwardBackwardRequest(model_id=run, seq_id=1, loss_fn="cross_entropy")
    found.loss_fn_config_v2["a"].number = 1.0
    datum = found.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(5, 9, dtype=np.int32).tobytes()
    targets, weights = (datum.loss_fn_inputs[name] for name in ("target_tokens", "weights"))
    targets.dtype, weights.dtype = messages.DTYPE_INT64, messages.DTYPE_FLOAT32
    targets.shape.append(4)
    targets.dense = np.arange(6, 10, dtype=np.int64).tobytes()
    weights.shape.extend((4, 1))
    weights.sparse_csr.values = np.ones(2, np.float32).tobytes()
    weights.sparse_csr.crow_indices = np.array([0, 1, 1, 2, 2]).tobytes()
    weights.sparse_csr.col_indices = np.array([0, 0]).tobytes()
    return bytes(found.SerializeToString())


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


def body(rng: random.Random, routes: dict[str, Any]) -> tuple[str, bytes]:
    """A route, and a request's body for it."""
    path = rng.choice(sorted(routes))
    value: Any = routes[path]
    if isinstance(value, bytes):
        return path, changed(value, rng)
    for _ in range(rng.randrange(1, 4)):
        value = mutated(value, rng)
    text = json.dumps(value).encode()
    kind = rng.random()
    if kind < 0.04:
        return path, text[: rng.randrange(len(text) + 1)]
    if kind < 0.08:
        place = rng.randrange(len(text) + 1)
        return path, text[:place] + rng.randbytes(rng.randrange(1, 20)) + text[place:]
    if kind < 0.1:
        return path, rng.choice(
            [
                b"[" * 5000,
                b'{"a":' * 300,
                b"9" * 5000,
                b'{"seed": ' + b"9" * 400 + b"}",
                b"\xff\xfe",
            ]
        )
    if kind < 0.11:
        return path, b'{"prompt": "' + b"a" * 70000 + b'"}'
    return path, text


def check(
    server: Running,
    rng: random.Random,
    client: httpx.Client,
    routes: dict[str, Any] = ROUTES,
) -> int:
    """Send one case; its status. Raises AssertionError for an answer that it should not have."""
    path, content = body(rng, routes)
    headers = server.headers | rng.choice(
        [
            *({}, {}, {"X-Session-ID": rng.choice(["a", "b" * 500, "é"])}),
            {"Content-Encoding": rng.choice(["identity", "zstd", "gzip"])},
        ]
    )
    method = "POST" if rng.random() < 0.97 else rng.choice(["GET", "PUT", "DELETE"])
    target = (
        path
        if rng.random() < 0.97
        else rng.choice(["/", "/v1", "/v1/models/%00", path + "/", path + "/..", "/v1/models/a/b"])
    )
    encoded = {key: value.encode("latin-1") for key, value in headers.items()}
    response = client.request(method, server.url + target, content=content, headers=encoded)
    text = response.text
    where = f"{method} {target} {content[:300]!r}: {response.status_code} {text[:300]}"
    assert response.status_code == 200 or 400 <= response.status_code < 500, where
    if response.headers["content-type"].startswith("text/event-stream"):
        assert text.endswith("data: [DONE]\n\n"), where
    elif response.status_code != 200:
        error = json.loads(text)["error"]
        assert error["message"], where
        assert "\n" not in error["message"], where
    elif response.headers["content-type"] != "application/x-protobuf":
        json.loads(text)
    return response.status_code


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


def run(server: Running, cases: int, seed: int) -> Counter[int]:
    """Statuses of `cases` hostile requests; after each hundredth an honest one is answered as
    before."""
    rng, found = random.Random(seed), Counter[int]()
    logged: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        with httpx.Client(timeout=60) as client:
            honest, routes = server.post(*HONEST).json()["choices"], with_tinker(server)
            for case in range(cases):
                found[check(server, rng, client, routes)] += 1
                if case % 50 == 49:
                    raw(server, rng)
                if case % 100 == 99:
                    assert server.post(*HONEST).json()["choices"] == honest
    finally:
        logging.getLogger().removeHandler(handler)
    assert not logged, logged[:3]
    return found


LIMITS = Limits(body_bytes=60000)


def main() -> None:
    """Run cases until all are done."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(
            base_model(Path(folder) / "base"), limits=LIMITS, state=Path(folder) / "state"
        ) as server,
    ):
        found = run(server, given.cases, given.seed)
    print(
        f"{given.cases:,} cases in {time.monotonic() - began:.0f} s: {dict(sorted(found.items()))}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
