"""`/generate` in the two forms in which Atropos' servers ask for it."""

from typing import Any

import pytest

from .helpers import Running

SAMPLING = {"max_new_tokens": 6, "temperature": 0.9, "sampling_seed": 4}


def ids(server: Running, **keys: Any) -> tuple[list[list[int]], list[list[float]]]:
    """The answer of the token route, with which both are compared."""
    given = {"max_tokens": 6, "temperature": 0.9, "seed": 4, **keys}
    made = server.post("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": given})
    choices = made.json()["choices"]
    logprobs = [[one["logprob"] for one in c["logprobs"]["content"]] for c in choices]
    return [choice["token_ids"] for choice in choices], logprobs


def test_sglang_s_form(server: Running) -> None:
    asked = {"input_ids": [5, 6], "sampling_params": SAMPLING, "return_logprob": True}
    made = server.post("/generate", asked).json()
    (tokens,), (logprobs,) = ids(server)
    assert made["output_ids"] == tokens
    about = made["meta_info"]
    assert about["output_token_logprobs"] == [[p, t, None] for p, t in zip(logprobs, tokens)]
    assert about["prompt_tokens"] == 2
    assert about["completion_tokens"] == len(tokens)
    assert about["finish_reason"]["type"] in ("stop", "length")
    assert made["text"] == server.gateway.tokenizer.decode(tokens)
    zero = {**SAMPLING, "sampling_seed": 0, "min_new_tokens": 6}
    seeded = server.post("/generate", {**asked, "sampling_params": zero}).json()
    assert seeded["output_ids"] == ids(server, seed=0, min_tokens=6)[0][0]
    several = server.post("/generate", {**asked, "sampling_params": {**SAMPLING, "n": 2}}).json()
    assert [one["output_ids"] for one in several] == ids(server, n=2)[0]
    batch = server.post("/generate", {**asked, "input_ids": [[5, 6], [7]]}).json()
    assert [one["meta_info"]["prompt_tokens"] for one in batch] == [2, 1]
    assert batch[0]["output_ids"] == tokens
    text = {"text": "abc", "sampling_params": SAMPLING, "top_logprobs_num": 2}
    plain = server.post("/generate", text).json()
    assert "output_token_logprobs" not in plain["meta_info"]
    shown = server.post("/generate", {**text, "return_logprob": True}).json()
    assert shown["output_ids"] == plain["output_ids"]
    assert {len(top) for top in shown["meta_info"]["output_top_logprobs"]} == {2}


def test_vllm_s_form(server: Running) -> None:
    asked = {"prompt": {"prompt_token_ids": [5, 6]}, "logprobs": 0, "n": 2}
    made = server.post(
        "/generate", {**asked, "max_tokens": 6, "temperature": 0.9, "seed": 4}
    ).json()
    tokens, logprobs = ids(server, n=2)
    told = [[next(iter(place[0].items())) for place in sample] for sample in made["logprobs"]]
    assert told == [[(str(t), p) for t, p in zip(*pair)] for pair in zip(tokens, logprobs)]
    assert made["token_ids"] == tokens
    assert len(made["finish_reasons"]) == 2
    scored = server.post(
        "/generate", {"prompt": {"prompt_token_ids": [5, 6]}, "prompt_logprobs": 2, "max_tokens": 1}
    ).json()
    assert [place and len(place) >= 2 for place in scored["prompt_logprobs"]] == [None, True]
    assert "logprobs" not in scored


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({}, "expected either text or input_ids"),
        ({"text": "a", "input_ids": [5]}, "expected either text or input_ids"),
        ({"input_ids": [5], "stream": True}, "stream: a stream; /v1/completions has one"),
        ({"input_ids": [5], "logprob_start_len": 0}, "logprob_start_len: scores of prompts"),
        (
            {"input_ids": ["a", 5]},
            "input_ids: expected token ids or lists of them, got a list of 2",
        ),
        ({"input_ids": [99999]}, "input_ids: token id 99999 is not in the model's vocabulary"),
        ({"input_ids": [[5], [99999]]}, "input_ids: token id 99999 is not in the model's"),
        ({"input_ids": "abc"}, "input_ids: expected token ids or lists of them, got 'abc'"),
        ({"input_ids": ["abc"]}, "input_ids: expected token ids or lists of them"),
        ({"input_ids": [True]}, "input_ids: expected token ids or lists of them"),
        ({"text": {"a": 1}}, "text: expected a text or a list of texts, got an object"),
        ({"text": [5, 6]}, "text: expected a text or a list of texts, got a list of 2"),
        ({"text": ["a"] * 300}, "text: at most 256 at a time"),
        (
            {"text": "a", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 8}},
            "min_new_tokens: expected at most max_new_tokens, 8, got 9",
        ),
        (
            {"text": "a", "sampling_params": {"min_new_tokens": 129}},
            "min_new_tokens: expected at most max_tokens, by default 128, got 129",
        ),
        (
            {"text": "a", "sampling_params": {"min_tokens": 9, "max_tokens": 8}},
            "min_tokens: expected at most max_tokens, 8, got 9",
        ),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": 9, "max_tokens": 8}},
            "max_new_tokens: max_tokens is given too",
        ),
        (
            {"text": "a", "sampling_params": {"sampling_seed": 9, "seed": 8}},
            "sampling_seed: seed is given too",
        ),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": 0}},
            "max_new_tokens: expected a whole",
        ),
        (
            {"prompt": {"prompt_token_ids": [5], "multi_modal_data": {"image": 1}}},
            "prompt: unknown key 'multi_modal_data'",
        ),
        (
            {"prompt": {"prompt_token_ids": [5], "prompt": "zzz"}},
            "prompt: expected either prompt or prompt_token_ids",
        ),
        ({"prompt": {}}, "prompt: expected either prompt or prompt_token_ids"),
        ({"prompt": {"prompt_token_ids": "a"}}, "prompt_token_ids: expected a list of token ids"),
        ({"prompt": {"prompt_token_ids": [99999]}}, "prompt_token_ids: token id 99999 is not"),
        ({"prompt": [99999]}, "prompt: token id 99999 is not"),
        (
            {"input_ids": [5], "sampling_params": {"max_new_token": 3}},
            "unknown key 'max_new_token'",
        ),
        ({"prompt": ["a", "b"]}, "prompt: expected one prompt"),
        ({"prompt": "a", "return_logprob": True}, "unknown key 'return_logprob'"),
        ({"prompt": "a", "stream": True}, "stream: a stream"),
        ([1], "expected a JSON object"),
    ],
)
def test_what_is_not_served_is_refused(server: Running, asked: Any, problem: str) -> None:
    response = server.post("/generate", asked)
    assert response.status_code == 400, response.text
    assert problem in response.json()["error"]["message"]


def test_a_prompt_may_be_an_object_with_its_text(server: Running) -> None:
    """The control is the text alone; other keys of it may be null."""
    asked = {"max_tokens": 4, "seed": 2}
    wrapped = server.post("/generate", {"prompt": {"prompt": "ab", "x": None}, **asked}).json()
    assert (
        wrapped["token_ids"]
        == server.post("/generate", {"prompt": "ab", **asked}).json()["token_ids"]
    )
