"""A valid request to each route, from which hostile ones are made: sampling, and a small world of
Tinker's in which they can do harm, with a session, sampling clients, a run and its checkpoints."""

import hashlib
import io
import tarfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import numpy as np

from .helpers import Running

PREFIX = "/api/v1"
CHECKPOINT = f"{PREFIX}/training_runs/{{run}}/checkpoints/{{checkpoint:path}}"


@dataclass(frozen=True)
class Valid:
    """A request that is answered. `route`: as the server declares it; `given`: its parameters, by
    name; `body`: of JSON or bytes, None: none; `number`: the key by which the client counts such
    requests, in the world's line of that name; `ends`: others cannot be answered after it."""

    method: str
    route: str
    body: Any = None
    given: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    number: str | None = None
    ends: bool = False

    def path(self, given: Mapping[str, str]) -> str:
        """With these parameters."""
        found = self.route.replace(":path}", "}")
        for name, value in given.items():
            found = found.replace(f"{{{name}}}", value)
        return found


SAMPLING = [
    Valid(
        "POST",
        "/v1/completions",
        {
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
    ),
    Valid(
        "POST",
        "/v1/completions",
        {
            "prompt": ["a", [5, 6]],
            "echo": True,
            "prompt_logprobs": 2,
            "logprobs": 1,
            "seed": 2,
            "stream": False,
        },
    ),
    Valid(
        "POST",
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "go"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "type": "function",
                            "id": "c",
                            "function": {"name": "f", "arguments": "{}"},
                        }
                    ],
                },
                {"role": "tool", "content": "3", "tool_call_id": "c"},
            ],
            "max_tokens": 4,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            "tool_choice": "auto",
            "chat_template_kwargs": {"thinking": False},
            "logprobs": True,
            "prompt_logprobs": 1,
            "stream": False,
            "top_k": 4,
            "min_p": 0.1,
        },
    ),
    Valid(
        "POST",
        "/v1/completions",
        {
            "prompt": "abc",
            "max_tokens": 4,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "logit_bias": {"5": 1.5},
            "bad_words": ["q"],
            "min_tokens": 1,
            "allowed_token_ids": [5, 6, 7],
        },
    ),
    Valid(
        "POST",
        "/generate",
        {
            "input_ids": [[5, 6], [7]],
            "sampling_params": {"max_new_tokens": 3, "n": 2, "temperature": 0.7},
            "return_logprob": True,
            "top_logprobs_num": 2,
        },
    ),
    Valid(
        "POST",
        "/generate",
        {"prompt": {"prompt_token_ids": [5, 6]}, "logprobs": 0, "max_tokens": 3, "seed": 3},
    ),
    Valid(
        "POST",
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "so"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "3"},
            ],
            "instructions": "be brief",
            "max_output_tokens": 4,
            "tools": [{"type": "function", "name": "f", "parameters": {}}],
            "tool_choice": "auto",
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"},
            "include": [],
            "store": True,
            "stream": False,
        },
    ),
    Valid(
        "POST",
        "/inference/v1/generate",
        {
            "token_ids": [5, 6, 7],
            "sampling_params": {"max_tokens": 3, "temperature": 0.0, "prompt_logprobs": 1},
        },
    ),
    Valid("POST", "/tokenize", {"prompt": "abc", "add_special_tokens": True}),
    Valid("POST", "/detokenize", {"tokens": [4, 5, 6]}),
    Valid("GET", "/v1/models"),
    Valid("GET", "/v1/models/{name:path}", given={"name": "tiny"}),
    Valid("GET", "/metrics"),
    Valid("GET", "/health"),
]


@dataclass
class World:
    """What a tenant has. `digest`: SHA-256 of the weights that its run has trained to; `counts`: by
    line, the number of its next request."""

    server: Running
    session: str
    run: str
    sampler: str
    digest: str
    routes: list[Valid]
    counts: Counter[str]

    def end(self) -> None:
        """Give it all back; some may be gone."""
        self.server.post(f"{PREFIX}/sessions/{self.session}/finish", {})


def new_world(server: Running) -> World:
    """Made by honest requests alone, so that each has the same adapter, or the same weights where
    the whole model is trained."""
    whole = server.gateway.whole

    def post(path: str, value: Any = None, **more: Any) -> httpx.Response:
        found = server.post(f"{PREFIX}/{path}", value, **more)
        assert found.status_code == 200, found.text
        return found

    def done(path: str, value: Any = None, **more: Any) -> httpx.Response:
        asked = {"request_id": post(path, value, **more).json()["request_id"]}
        found = post("retrieve_future", asked)
        assert '"error"' not in found.text, found.text
        return found

    session = post("create_session", SESSION).json()["session_id"]
    done("create_model", _create(session, 0, whole))
    run = f"{session}:train:0"
    done("forward_backward", content=gradients(run, 1))
    done("optim_step", _step(run, 2))
    kinds = (("", "a"), ("_for_sampler", "a"), ("_external", "a"), ("", "b"))
    for number, (kind, name) in enumerate(kinds, 3):
        done(f"save_weights{kind}", _save(run, number, name))
    begin = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    if whole:  # of which only the present weights are sampled from
        begin["model_path"] = f"tinker://{run}/weights/a"
    sampler = post("create_sampling_session", begin).json()["sampling_session_id"]
    sampled = post("asample", _sample(sampler, 0)).json()["request_id"]
    urls = server.get(
        f"{PREFIX}/training_runs/{run}/checkpoints/external_weights/a/external_weights_urls"
    )
    (link,) = [url for url in urls.json()["urls"].values() if url.partition("?")[0].endswith("s")]
    archive = server.get(f"{PREFIX}/training_runs/{run}/checkpoints/weights/a/archive")
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as files:
        file = files.extractfile(f"{'' if whole else 'adapter_'}model.safetensors")
        assert file is not None
        digest = hashlib.sha256(file.read()).hexdigest()
    routes = [
        *SAMPLING,
        *_of_sessions(session, begin, sampler, sampled),
        *_of_runs(session, run, whole),
        *_kept(session, run, link),
    ]
    counts = Counter({"run": 7, "model": 1, "sampling": 1, "sample": 1})
    return World(server, session, run, sampler, digest, routes, counts)


SESSION = {"tags": ["a"], "user_metadata": {"a": 1}, "sdk_version": "0.38.0", "display_name": "b"}


def _create(session: str, number: int, whole: bool) -> dict[str, Any]:
    rank = 0 if whole else 2
    return {
        "session_id": session,
        "model_seq_id": number,
        "base_model": "tiny",
        "lora_config": {"rank": rank, "seed": 1, "train_mlp": True, "train_attn": True},
        "optimizer_config": {"type": "adamw"},
        "user_metadata": {"a": "b"},
    }


def _step(run: str, number: int) -> dict[str, Any]:
    adam = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "grad_clip_norm": 1}
    return {"model_id": run, "seq_id": number, "adam_params": adam}


def _save(run: str, number: int, name: str) -> dict[str, Any]:
    return {"model_id": run, "seq_id": number, "path": name, "ttl_seconds": 3600}


def _sample(sampler: str, number: int) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "seq_id": number,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": 3, "stop": [7], "temperature": 1.0, "seed": 1},
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
    }


def gradients(run: str, number: int) -> bytes:
    """A body of `forward_backward`, in protobuf."""
    from tinker.proto import tinker_public_pb2 as messages

    found = messages.ForwardBackwardRequest(model_id=run, seq_id=number, loss_fn="cross_entropy")
    datum = found.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(5, 9, dtype=np.int32).tobytes()
    targets, weights = (datum.loss_fn_inputs[name] for name in ("target_tokens", "weights"))
    targets.dtype, weights.dtype = messages.DTYPE_INT64, messages.DTYPE_FLOAT32
    targets.shape.extend((4, 1))
    targets.dense = np.arange(6, 10, dtype=np.int64).tobytes()
    weights.shape.extend((4, 1))
    weights.sparse_csr.values = np.ones(2, np.float32).tobytes()
    weights.sparse_csr.crow_indices = np.array([0, 1, 1, 2, 2]).tobytes()
    weights.sparse_csr.col_indices = np.array([0, 0]).tobytes()
    return bytes(found.SerializeToString())


def _post(path: str, body: Any, number: str | None = None, ends: bool = False) -> Valid:
    return Valid("POST", f"{PREFIX}/{path}", body, number=number, ends=ends)


def _of_sessions(session: str, begin: dict[str, Any], sampler: str, sampled: str) -> list[Valid]:
    return [
        Valid("GET", f"{PREFIX}/healthz"),
        Valid("GET", f"{PREFIX}/get_server_capabilities"),
        _post("client/config", {"sdk_version": "0.38.0"}),
        _post("client/dynamic_config", {}),
        _post("telemetry", {"events": [], "platform": "a", "sdk_version": "0.38.0"}),
        _post("create_session", SESSION),
        _post("session_heartbeat", {"session_id": session}),
        Valid("POST", f"{PREFIX}/sessions/{{name}}/finish", {}, {"name": session}, ends=True),
        _post("create_sampling_session", begin, "sampling"),
        Valid("GET", f"{PREFIX}/samplers/{{name}}", given={"name": sampler}),
        _post("asample", _sample(sampler, 1), "sample"),
        _post("retrieve_future", {"request_id": sampled}),
        _post("cancel_future", {"request_id": sampled}),
    ]


def _of_runs(session: str, run: str, whole: bool) -> list[Valid]:
    path = f"tinker://{run}/weights/a"
    load = {"model_id": run, "seq_id": 3, "path": path, "optimizer": True}
    begin = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": False}
    save = {**_save(run, 2, "b"), "user_metadata": {"a": "b"}}
    return [
        _post("create_model", _create(session, 1, whole), "model"),
        _post("get_info", {"model_id": run}),
        _post("unload_model", {"model_id": run}, ends=True),
        _post("optim_step", _step(run, 1), "run"),
        _post("save_weights", {**save, "overwrite": True}, "run"),
        _post("save_weights_for_sampler", {**save, "path": "c"}, "run"),
        _post(
            "save_weights_for_sampler",
            {"model_id": run, "seq_id": 1, "sampling_session_seq_id": 3},
            "run",
        ),
        _post("save_weights_external", {**save, "age_encryption_recipients": None}, "run"),
        _post("load_weights", load, "run"),
        _post("load_weights", begin, "model"),
        _post("weights_info", {"tinker_path": path}),
        _post("forward_backward", gradients(run, 1), "run"),
    ]


def _kept(session: str, run: str, link: str) -> list[Valid]:
    of = {"run": run}
    pages = {"limit": "3", "offset": "0"}
    _, _, _, kind, checkpoint, file = urlsplit(link).path.split("/")
    assert kind == "files"
    signed = dict(parse_qsl(urlsplit(link).query))
    return [
        Valid("GET", f"{PREFIX}/training_runs", query=pages),
        Valid("GET", f"{PREFIX}/training_runs/{{run}}", given=of),
        Valid("GET", f"{PREFIX}/training_runs/{{run}}/checkpoints", given=of),
        Valid("GET", f"{PREFIX}/checkpoints", query=pages),
        Valid(
            "PUT",
            f"{CHECKPOINT}/ttl",
            {"ttl_seconds": 7200},
            {**of, "checkpoint": "weights/a"},
        ),
        Valid("GET", f"{CHECKPOINT}/archive", given={**of, "checkpoint": "sampler_weights/a"}),
        Valid(
            "GET",
            f"{CHECKPOINT}/external_weights_urls",
            given={**of, "checkpoint": "external_weights/a"},
        ),
        Valid(
            "GET",
            f"{PREFIX}/files/{{checkpoint}}/{{file:path}}",
            None,
            {"checkpoint": checkpoint, "file": file},
            signed,
        ),
        Valid("DELETE", CHECKPOINT, None, {**of, "checkpoint": "weights/b"}),
        Valid("GET", f"{PREFIX}/sessions", query=pages),
        Valid("GET", f"{PREFIX}/sessions/{{name}}", given={"name": session}),
    ]
