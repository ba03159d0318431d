"""The keys that move and forbid single tokens, over HTTP. The distribution is that of
tests/engine/test_shaping.py."""

from typing import Any

import pytest

from .helpers import Running

ASKED: dict[str, Any] = {"prompt": "abc", "max_tokens": 40, "seed": 3, "return_token_ids": True}


def ids(server: Running, path: str = "/v1/completions", **keys: Any) -> list[int]:
    response = server.post(path, {**ASKED, **keys})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def token(server: Running, character: str) -> int:
    return server.gateway.tokenizer.encode(character)[0]


def test_biases_and_allowed_tokens(server: Running) -> None:
    q, z = token(server, "q"), token(server, "z")
    plain = ids(server)
    assert set(ids(server, logit_bias={str(q): 100})) == {q}
    assert set(ids(server, allowed_token_ids=[q, z])) == {q, z}
    assert q not in ids(server, allowed_token_ids=[q, z], logit_bias={str(q): -100})
    nothing = {"logit_bias": {}, "allowed_token_ids": [], "bad_words": [], "min_tokens": 0}
    assert ids(server, **nothing, presence_penalty=0, frequency_penalty=0) == plain


def test_penalties_count_the_answer(server: Running) -> None:
    """Greedily, among two tokens: what was said is avoided, less of what was said more often."""
    q, z = token(server, "q"), token(server, "z")
    two = {"allowed_token_ids": [q, z], "temperature": 0, "prompt": "qqqq", "max_tokens": 20}
    plain = ids(server, **two)
    present = ids(server, **two, presence_penalty=2)
    often = ids(server, **two, frequency_penalty=2)
    assert len({tuple(plain), tuple(present), tuple(often)}) > 1
    assert abs(often.count(q) - often.count(z)) < 8 <= abs(plain.count(q) - plain.count(z))


def test_bad_words_do_not_stand_in_an_answer(server: Running) -> None:
    q, z = token(server, "q"), token(server, "z")
    two = {"allowed_token_ids": [q, z]}
    tokenizer = server.gateway.tokenizer
    assert "qz" in tokenizer.decode(ids(server, **two)), "the control"
    assert "qz" not in tokenizer.decode(ids(server, **two, bad_words=["qz"]))
    assert set(ids(server, **two, bad_words=["q"])) == {z}


def test_no_end_comes_before_the_fewest_tokens(server: Running) -> None:
    eos, q = server.gateway.tokenizer.eos_ids[0], token(server, "q")
    soon = {"logit_bias": {str(eos): 100}}
    assert ids(server, **soon) == [eos]
    assert len(ids(server, **soon, min_tokens=7)) == 8
    stops = {"logit_bias": {str(q): 100}, "stop_token_ids": [q]}
    assert ids(server, **stops) == [q]
    assert len(ids(server, **stops, min_tokens=7)) >= 8


def test_they_are_served_to_messages_and_tokens(server: Running) -> None:
    q = token(server, "q")
    bias = {"logit_bias": {str(q): 100}}
    messages = {"messages": [{"role": "user", "content": "go"}], "prompt": None}
    assert set(ids(server, "/v1/chat/completions", **messages, **bias)) == {q}
    given = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 5, **bias}}
    answer = server.post("/inference/v1/generate", given).json()
    assert answer["choices"][0]["token_ids"] == [q] * 5


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"presence_penalty": 3}, "presence_penalty: expected a number from -2 to 2, got 3"),
        ({"frequency_penalty": True}, "frequency_penalty: expected a number"),
        ({"logit_bias": [1]}, "logit_bias: expected an object"),
        ({"logit_bias": {"a": 1}}, "logit_bias: expected token ids as keys, got 'a'"),
        ({"logit_bias": {"5": 101}}, "logit_bias[5]: expected a number from -100 to 100"),
        ({"logit_bias": {"5": None}}, "logit_bias[5]: expected a number"),
        ({"logit_bias": {"99999": 1}}, "logit_bias: token 99999 is not in the vocabulary"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "at most 1,024 numbers"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids: token -1 is not in the vocabulary"),
        ({"allowed_token_ids": "a"}, "allowed_token_ids: expected a list of token ids"),
        ({"bad_words": [" "]}, "bad_words: expected a list"),
        ({"bad_words": ["a"] * 257}, "bad_words: expected a list of at most 256 texts"),
        ({"min_tokens": 50}, "min_tokens: expected at most max_tokens, 40, got 50"),
        (
            {"min_tokens": 17, "max_tokens": None},
            "min_tokens: expected at most max_tokens, by default 16, got 17",
        ),
        ({"min_tokens": 16, "max_tokens": None}, ""),
        (
            {"min_tokens": 50, "max_completion_tokens": 9},
            "min_tokens: expected at most max_completion_tokens, 9, got 50",
        ),
        ({"presence_penalty": ""}, "presence_penalty: expected a number from -2 to 2, got ''"),
        (
            {"presence_penalty": False},
            "presence_penalty: expected a number from -2 to 2, got False",
        ),
        (
            {"frequency_penalty": []},
            "frequency_penalty: expected a number from -2 to 2, got a list",
        ),
        ({"frequency_penalty": None, "presence_penalty": None}, ""),
        ({"min_tokens": 5, "stop": "a"}, "min_tokens: not offered beside stop strings"),
        ({"min_tokens": -1}, "min_tokens: expected a whole number from 0"),
        (
            {"allowed_token_ids": [5], "bad_words": ["c"], "logit_bias": {"5": 1}},
            "",
        ),
    ],
)
def test_what_is_wrong_is_refused(server: Running, keys: dict[str, Any], problem: str) -> None:
    response = server.post("/v1/completions", {**ASKED, **keys})
    if not problem:
        assert response.status_code == 200
        return
    assert response.status_code == 400
    assert problem in response.json()["error"]["message"]


def test_the_fewest_tokens_fit_the_context(server: Running) -> None:
    """Also of messages, whose answers have no other bound; the control asks for fewer."""
    asked = {"messages": [{"role": "user", "content": "go"}], "seed": 1}
    positions = server.gateway.model.config.max_positions
    response = server.post("/v1/chat/completions", {**asked, "min_tokens": positions - 1})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith("min_tokens: expected at most ")
    assert (error["param"], error["code"]) == ("min_tokens", "context_length_exceeded")
    few = server.post("/v1/chat/completions", {**asked, "min_tokens": 2, "max_tokens": 3})
    assert few.status_code == 200


def test_an_answer_that_cannot_go_on_is_an_error_of_its_own(server: Running) -> None:
    q, z = token(server, "q"), token(server, "z")
    stuck = {"allowed_token_ids": [q, z], "bad_words": ["qq", "qz", "zq", "zz"]}
    response = server.post("/v1/completions", {**ASKED, **stuck})
    assert response.status_code == 400
    assert "the answer cannot go on: no token may come" in response.json()["error"]["message"]
    assert len(ids(server)) <= 40
