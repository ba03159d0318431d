"""Every key of vLLM's and SGLang's request classes is served, taken where it asks for nothing, or
refused in one line. Their fields and defaults are kept in data/request_classes.json: of vllm 0.33.0
and sglang 0.5.23."""

import json
from pathlib import Path
from typing import Any

import pytest

from isobit.options.declare import options_of
from isobit.serve.neutral import IGNORED, NEUTRAL
from isobit.serve.protocol import ChatRequest, CompletionRequest, GenerateRequest, TokenSampling
from isobit.serve.requests import BadRequest, Declared, Limits, read
from isobit.serve.tinker.protocol import Sample, Save, SaveToSample, SaveToTrain

from .helpers import Running

CLASSES = json.loads((Path(__file__).parent / "data" / "request_classes.json").read_text())
OURS: dict[str, type[Declared]] = {
    "ChatCompletionRequest": ChatRequest,
    "CompletionRequest": CompletionRequest,
    "GenerateRequest": GenerateRequest,
    "SamplingParams": TokenSampling,
}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ChatCompletionRequest": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "go"}], "max_tokens": 3, "seed": 1},
    ),
    "CompletionRequest": ("/v1/completions", {"prompt": "abc", "max_tokens": 3, "seed": 1}),
    "GenerateRequest": (
        "/inference/v1/generate",
        {"token_ids": [5, 6], "sampling_params": {"seed": 1}},
    ),
    "SamplingParams": ("/inference/v1/generate", {"token_ids": [5, 6]}),
}


def ours(name: str) -> type[Declared]:
    return OURS[name.split()[-1]]


@pytest.mark.parametrize("name", CLASSES)
def test_every_key_is_declared(name: str) -> None:
    """Served, or in the table of keys that are not."""
    schema, fields = ours(name), CLASSES[name]
    keys = {*fields["required"], *fields["defaults"]}
    assert keys <= options_of(schema).keys() | schema.neutral.keys()


@pytest.mark.parametrize("name", CLASSES)
def test_every_default_asks_for_nothing(name: str) -> None:
    """Alone, as null, and all of them together."""
    schema, defaults = ours(name), CLASSES[name]["defaults"]
    nothing = read(schema, {}, Limits())
    for key, value in defaults.items():
        read(schema, {key: value}, Limits())
        assert read(schema, {key: None}, Limits()) == nothing
    read(schema, defaults, Limits())


@pytest.mark.parametrize("name", CLASSES)
def test_a_request_with_all_defaults_has_the_answer_of_one_without(
    server: Running, name: str
) -> None:
    path, asked = REQUESTS[name.split()[-1]]
    defaults = CLASSES[name]["defaults"]
    if name.endswith("SamplingParams"):
        asked, full = ({**asked, "sampling_params": {**more, "seed": 1}} for more in ({}, defaults))
    else:
        full = {**defaults, **asked}
    plain, whole = (server.post(path, value).json() for value in (asked, full))
    assert plain["choices"] == whole["choices"], whole


@pytest.mark.parametrize("key", NEUTRAL)
def test_negative_control_another_value_is_refused(key: str) -> None:
    """In one line that names the key and what is not served; keys that change nothing are not."""
    if key in IGNORED.split():
        assert NEUTRAL[key].values is None
        return
    schema = next(each for each in OURS.values() if key not in options_of(each))
    with pytest.raises(BadRequest) as refused:
        read(schema, {key: {"x": 1}}, Limits())
    assert refused.value.param == key
    assert str(refused.value).startswith(f"{key}: {NEUTRAL[key].what}: not served; expected ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("key", "value"), [("min_tokens", False), ("echo", 0), ("suffix", 0)])
def test_a_value_of_another_kind_asks_for_something(key: str, value: object) -> None:
    """In JSON 0 is not false."""
    with pytest.raises(BadRequest, match=f"{key}: "):
        read(ChatRequest, {key: value}, Limits())


def test_the_usage_is_told_in_each_piece(server: Running) -> None:
    """And the last piece has the whole, with the tokens that were found in the cache."""
    path, asked = REQUESTS["ChatCompletionRequest"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.stream(path, {**asked, "n": 2, "stream": True, "stream_options": options})
    pieces = [json.loads(event)["usage"] for event in events[:-1]]
    counts = [piece["completion_tokens"] for piece in pieces]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == counts[-2] == 6
    assert all(p["total_tokens"] == p["prompt_tokens"] + p["completion_tokens"] for p in pieces)
    assert ["prompt_tokens_details" in piece for piece in pieces] == [False] * (len(pieces) - 1) + [
        True
    ]


@pytest.mark.parametrize("options", [{"include_usage": True}, {"continuous_usage_stats": True}])
def test_negative_control_the_usage_is_told_at_the_end_or_not(
    server: Running, options: dict[str, bool]
) -> None:
    path, asked = REQUESTS["CompletionRequest"]
    events = server.stream(path, {**asked, "stream": True, "stream_options": options})
    told = [json.loads(event).get("usage") for event in events[:-1]]
    assert not any(told[:-1])
    assert bool(told[-1]) == options.get("include_usage", False)


def test_no_likeliest_tokens_are_the_sampled_ones(server: Running) -> None:
    """`logprobs: 0`, as of vLLM, also of an echo and in a stream; true tells none."""
    path, asked = REQUESTS["CompletionRequest"]
    asked = {**asked, "logprobs": 0, "echo": True}
    shown = server.post(path, asked).json()["choices"][0]["logprobs"]
    own = [{t: p} for t, p in zip(shown["tokens"], shown["token_logprobs"])]
    assert shown["top_logprobs"] == [None, *own[1:]]
    pieces = [json.loads(e) for e in server.stream(path, {**asked, "stream": True})[:-1]]
    parts = [piece["choices"][0]["logprobs"] for piece in pieces]
    tops = [top for part in parts if part for top in part["top_logprobs"]]
    assert tops == shown["top_logprobs"]
    shown = server.post(path, {**asked, "logprobs": True}).json()["choices"][0]["logprobs"]
    assert shown["top_logprobs"] is None


@pytest.mark.parametrize("key", Sample.neutral)
def test_what_a_sample_cannot_have_is_said_with_what_can_be_done(key: str) -> None:
    """False and null, which the official client sends, are taken."""
    given = {"sampling_session_id": "a", key: 0 if key.endswith("_k") else False}
    assert read(Sample, given, Limits()) == read(Sample, given | {key: None}, Limits())
    with pytest.raises(BadRequest, match=f"{key}: .*not served; expected") as refused:
        read(Sample, given | {key: 2}, Limits())
    assert ("loss_fn=importance_sampling" in str(refused.value)) == key.startswith("record")


def test_a_seed_of_minus_one_is_a_random_one(server: Running) -> None:
    path, asked = REQUESTS["CompletionRequest"]
    seeds = {server.post(path, {**asked, "seed": -1}).json()["seed"] for _ in range(3)}
    assert len(seeds) == 3
    assert min(seeds) >= 0


def test_the_effort_of_thoughts_is_a_variable_of_the_template(server: Running) -> None:
    """As vLLM has it, with `enable_thinking` beside it unless the client gives that."""
    from isobit.serve.chat import variables_of

    made = [
        variables_of(read(ChatRequest, keys, Limits()))
        for keys in (
            {"reasoning_effort": "high"},
            {"reasoning_effort": "none"},
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {},
        )
    ]
    assert made == [
        {"reasoning_effort": "high", "enable_thinking": True},
        {"reasoning_effort": "none", "enable_thinking": False},
        {"reasoning_effort": "low", "enable_thinking": False},
        {},
    ]
    path, asked = REQUESTS["ChatCompletionRequest"]
    assert server.post(path, {**asked, "reasoning_effort": "high"}).status_code == 200
    assert server.post(path, {**asked, "reasoning_effort": 3}).status_code == 400


@pytest.mark.parametrize(
    ("schema", "keys", "problem"),
    [
        (Sample, {"sampling_params": {"prompt_logprobs": 1}}, "unknown key 'prompt_logprobs'"),
        (Save, {"seq_id": 1, "overwrite": False}, "unknown key 'overwrite'"),
        (SaveToSample, {"seq_id": 1, "overwrite": True}, "unknown key 'overwrite'"),
        (
            SaveToSample,
            {"seq_id": 1, "path": "a", "sampling_session_seq_id": 0},
            "path: weights of a sampling client have no name",
        ),
    ],
)
def test_no_key_is_taken_and_ignored(
    schema: type[Declared], keys: dict[str, Any], problem: str
) -> None:
    """Of Tinker's requests; the control below has each key where it is read."""
    with pytest.raises(BadRequest, match=problem):
        read(schema, keys, Limits())


def test_the_same_keys_are_taken_where_they_are_read() -> None:
    limits = Limits()
    assert read(Sample, {"prompt_logprobs": True}, limits).prompt_logprobs
    assert read(TokenSampling, {"prompt_logprobs": 1}, limits).prompt_logprobs == 1
    assert read(SaveToTrain, {"seq_id": 1, "overwrite": True}, limits).overwrite
    assert read(SaveToSample, {"seq_id": 1, "path": "a"}, limits).path == "a"
    assert read(SaveToSample, {"seq_id": 1, "sampling_session_seq_id": 0}, limits).path is None
