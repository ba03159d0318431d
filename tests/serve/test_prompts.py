"""What a completion tells of its prompt: `echo` and `prompt_logprobs`, in the learner's bits."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from isobit.model import Model
from isobit.serve.scoring import scores_in_parts
from tests.documents import ROOT

from .helpers import Running

PAGE = (ROOT / "docs" / "how-to" / "serve.md").read_text()
PATH = "/v1/completions"
TEXT = "say 12+3=15, and go on"
ASKED: dict[str, Any] = {"prompt": TEXT, "max_tokens": 6, "seed": 3}


@pytest.fixture(scope="module")
def learner(folder: Path) -> Model:
    """The base as a learner has it, read apart from the server."""
    return Model.load(folder / "base", "fp8", "native")


def choice(server: Running, **more: Any) -> dict[str, Any]:
    found = server.post(PATH, {**ASKED, **more})
    assert found.status_code == 200, found.text
    (only,) = found.json()["choices"]
    return dict(only)


def refused(server: Running, **more: Any) -> str:
    found = server.post(PATH, {**ASKED, **more})
    assert found.status_code == 400, found.text
    return str(found.json()["error"]["message"])


def own(found: dict[str, Any], tokens: list[int]) -> list[float]:
    """Of `prompt_logprobs`, those of the prompt's tokens."""
    assert found["prompt_logprobs"][0] is None
    later = zip(tokens[1:], found["prompt_logprobs"][1:], strict=True)
    return [each[str(token)]["logprob"] for token, each in later]


@pytest.mark.parametrize("model", ["tiny", "math", "code"])
def test_log_probabilities_of_a_prompt_are_the_learners(
    server: Running, learner: Model, folder: Path, model: str
) -> None:
    """Of the base and of adapters that train, bit for bit. The control is another adapter."""
    tokens = server.gateway.tokenizer.encode_text(TEXT)
    by = learner if model == "tiny" else learner.adapted(folder / model)
    expected = by.logprobs([tokens])[0].tolist()
    found = choice(server, model=model, prompt_logprobs=0)
    assert own(found, tokens) == expected
    echoed = choice(server, model=model, echo=True, logprobs=0)["logprobs"]
    assert echoed["token_logprobs"][: len(tokens)] == [None, *expected]
    other = learner.adapted(folder / ("code" if model == "math" else "math"))
    assert own(found, tokens) != other.logprobs([tokens])[0].tolist()


def test_an_echoed_answer_has_the_log_probabilities_that_it_was_sampled_with(
    server: Running,
) -> None:
    """As the end of a prompt. The control is a prompt with other tokens in front."""
    first = choice(server, model="math", logprobs=0, return_token_ids=True)
    prompt = first["prompt_token_ids"] + first["token_ids"]
    again = choice(server, model="math", prompt=prompt, echo=True, logprobs=0, max_tokens=0)
    sampled = first["logprobs"]["token_logprobs"]
    assert again["logprobs"]["token_logprobs"][-len(sampled) :] == sampled
    prompt[1] = prompt[2]
    other = choice(server, model="math", prompt=prompt, echo=True, logprobs=0, max_tokens=0)
    assert other["logprobs"]["token_logprobs"][-len(sampled) :] != sampled


def test_an_echo_is_the_prompt_and_the_answer_alone(server: Running) -> None:
    alone = choice(server, logprobs=3)
    found = choice(server, logprobs=3, echo=True)
    assert found["text"] == TEXT + alone["text"]
    assert found["finish_reason"] == alone["finish_reason"]
    plain, shown = alone["logprobs"], found["logprobs"]
    count = len(shown["tokens"]) - len(plain["tokens"])
    for key in ("tokens", "token_logprobs", "top_logprobs"):
        assert shown[key][count:] == plain[key]
    assert shown["text_offset"][count:] == [len(TEXT) + place for place in plain["text_offset"]]
    assert shown["token_logprobs"][0] is shown["top_logprobs"][0] is None
    assert all(len(top) == 3 for top in shown["top_logprobs"][1:])
    for place in range(count):  # special tokens have no text
        word, start = shown["tokens"][place], shown["text_offset"][place]
        assert TEXT[start:].startswith(word) or word in ("<s>", "</s>")
    assert choice(server, echo=True)["text"] == found["text"]
    assert choice(server, echo=True)["logprobs"] is None
    ids = server.gateway.tokenizer.encode_text(TEXT)
    assert choice(server, echo=True, prompt=ids)["text"] == found["text"]


def test_no_tokens_are_asked_for(server: Running) -> None:
    """As evaluation harnesses do, which only score."""
    found = server.post(PATH, {**ASKED, "echo": True, "logprobs": 1, "max_tokens": 0, "n": 2})
    assert found.status_code == 200, found.text
    value = found.json()
    assert [each["index"] for each in value["choices"]] == [0, 1]
    assert all(each["text"] == TEXT for each in value["choices"])
    assert value["usage"]["completion_tokens"] == 0
    whole = choice(server, echo=True, logprobs=1)["logprobs"]
    count = len(value["choices"][0]["logprobs"]["tokens"])
    for key, values in value["choices"][1]["logprobs"].items():
        assert values == whole[key][:count]
    assert "max_tokens: expected a whole number from 1" in refused(server, max_tokens=0)


def test_the_likeliest_tokens_of_a_prompt(server: Running) -> None:
    """vLLM's shape; the likeliest have the bits of `top_logprobs` where they are sampled."""
    found = choice(server, prompt_logprobs=2, echo=True, logprobs=4)
    tops = found["logprobs"]["top_logprobs"]
    for place, each in enumerate(found["prompt_logprobs"]):
        if place == 0:
            assert each is None
            continue
        ranked = sorted((one for one in each.values() if one["rank"]), key=lambda one: one["rank"])
        assert [one["rank"] for one in ranked] == [1, 2]
        assert ranked[0]["logprob"] >= ranked[1]["logprob"]
        values = sorted(tops[place].values(), reverse=True)
        assert [one["logprob"] for one in ranked] == values[:2]
        assert len(each) <= 3
    several = server.post(PATH, {**ASKED, "prompt": ["ab", "cde"], "prompt_logprobs": 1}).json()
    lengths = [len(each["prompt_logprobs"]) for each in several["choices"]]
    encode = server.gateway.tokenizer.encode_text
    assert lengths == [len(encode("ab")), len(encode("cde"))]


def test_the_likeliest_are_computed_in_parts_and_others_have_turns(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the size of the parts, the bits are the same."""
    asked = {"prompt": [5, 9, 7] * 30, "prompt_logprobs": 4, "model": "math"}
    whole, turns = choice(server, **asked), list[int]()

    def counted(*given: Any) -> Any:
        turns.append(0)
        for part in scores_in_parts(*given):
            turns[-1] += 1
            yield part

    monkeypatch.setattr("isobit.serve.device.scores_in_parts", counted)
    assert choice(server, **asked) == whole
    monkeypatch.setattr("isobit.serve.scoring._AT_ONCE", 40)
    assert choice(server, **asked) == whole
    assert turns == [3, 3 + 8]


def test_what_is_too_much_or_not_offered_is_refused(server: Running) -> None:
    assert "from 0 to 20" in refused(server, prompt_logprobs=21)
    assert "from 0 to 20" in refused(server, prompt_logprobs=-1)
    assert "from 0 to 20" in refused(server, prompt_logprobs=True)
    assert "echo: expected true or false" in refused(server, echo=1)
    long = {"prompt": [[5] * 240] * 55, "prompt_logprobs": 20}
    assert "at most 262,144 of a request, got 20 for 13,200 tokens" in refused(server, **long)
    assert "256" in refused(server, prompt=[5] * 300, prompt_logprobs=0)
    assert choice(server, prompt_logprobs=False, echo=False) == choice(server)


def test_adapters_are_let_go(server: Running) -> None:
    """Also where nothing is sampled."""
    held = server.gateway.device.snapshots._named["math"]
    for more in ({}, {"max_tokens": 0}):
        choice(server, model="math", echo=True, logprobs=0, **more)
    server.post("/tokenize", {"prompt": "a"})
    assert held.holders == 1


MESSAGES = {"messages": [{"role": "user", "content": "say 1+2"}], "max_tokens": 5, "seed": 4}
ROUTES: dict[str, dict[str, Any]] = {
    PATH: {**ASKED, "model": "tiny"},
    "/v1/chat/completions": MESSAGES,
    "/inference/v1/generate": {"token_ids": [5, 9, 7], "sampling_params": {"max_tokens": 4}},
}
KEYS: dict[str, dict[str, Any]] = {
    "echo": {"echo": True},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "max_tokens: 0": {"prompt_logprobs": 1, "max_tokens": 0},
}


def asked_of(server: Running, route: str, **more: Any) -> httpx.Response:
    """A request with more keys, which stand where the route has those of sampling."""
    given = dict(ROUTES[route])
    if "sampling_params" in given:
        given["sampling_params"] = given["sampling_params"] | more
    return server.post(route, given if "sampling_params" in given else given | more)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("key", KEYS)
def test_the_table_of_the_page_says_what_each_route_tells(
    server: Running, route: str, key: str
) -> None:
    """What is not offered is refused in one line that names the key."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    (row,) = [cells for cells in rows if cells[0] == f"`{route}`"]
    said = row[1 + list(KEYS).index(key)]
    found = asked_of(server, route, **KEYS[key])
    assert found.status_code == (400 if said == "no" else 200), found.text
    if said == "no":
        message = found.json()["error"]["message"]
        assert re.match(key.partition(":")[0], message)
        assert "\n" not in message
    elif key != "echo":
        value = found.json()
        told = value["choices"][0] if "in each choice" in row[2] else value
        assert len(told["prompt_logprobs"]) > 2


def joined(events: list[str]) -> dict[str, Any]:
    """The choice that the pieces of a stream with one answer make."""
    found: dict[str, Any] = {"text": "", "logprobs": None, "token_ids": []}
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        (piece,) = json.loads(event)["choices"]
        found["text"] += piece.pop("text")
        found["token_ids"] += piece.pop("token_ids")
        shown = piece.pop("logprobs")
        if shown is not None and found["logprobs"] is not None:
            shown = {key: found["logprobs"][key] + shown[key] for key in shown}
        found["logprobs"] = shown or found["logprobs"]
        found |= piece
    return found


@pytest.mark.parametrize("sampled", [{}, {"max_tokens": 0}])
@pytest.mark.parametrize("prompt", [TEXT, [5, 9, 7]])
def test_the_pieces_of_a_stream_are_the_answer_that_is_not_streamed(
    server: Running, sampled: dict[str, Any], prompt: Any
) -> None:
    """With all that is told of its prompt, which comes first."""
    asked = {
        **ASKED,
        "model": "math",
        "prompt": prompt,
        "echo": True,
        "prompt_logprobs": 2,
        "logprobs": 2,
        "return_token_ids": True,
        **sampled,
    }
    whole = choice(server, **asked)
    events = server.stream(PATH, {**asked, "stream": True})
    assert joined(events) == whole
    first = json.loads(events[0])["choices"][0]
    assert whole["text"].startswith(first["text"])
    assert first["prompt_logprobs"] == whole["prompt_logprobs"]
    several = {"prompt": [TEXT, [5, 9, 7]], "n": 2, "stream": True, "max_tokens": 2, "echo": True}
    pieces = [
        piece
        for event in server.stream(PATH, {**asked, **several})[:-1]
        for piece in json.loads(event)["choices"]
    ]
    assert {piece["index"] for piece in pieces} == {0, 1, 2, 3}
    assert sum("prompt_logprobs" in piece for piece in pieces) == 4
    plain = server.stream(PATH, {**ASKED, "echo": True, "stream": True})
    texts = [json.loads(event)["choices"][0]["text"] for event in plain[:-1]]
    assert texts[0] == TEXT
    assert "".join(texts) == choice(server, echo=True)["text"]


def test_messages_and_token_ids_have_the_learners_log_probabilities(
    server: Running, learner: Model
) -> None:
    """Streamed or not. The control is another prompt."""
    ids = [5, 9, 7, 30, 31]
    given = {"token_ids": ids, "sampling_params": {"max_tokens": 3, "prompt_logprobs": 0}}
    found = server.post("/inference/v1/generate", given).json()
    expected = learner.logprobs([ids])[0].tolist()
    assert own(found, ids) == expected
    path, asked = "/v1/chat/completions", {**MESSAGES, "prompt_logprobs": 2}
    whole = server.post(path, {**asked, "return_token_ids": True}).json()
    tokens = whole["prompt_token_ids"]
    assert own(whole, tokens) == learner.logprobs([tokens])[0].tolist() != expected
    events = server.stream(path, {**asked, "return_token_ids": True, "stream": True})
    first, *rest = [json.loads(event) for event in events[:-1]]
    for key in ("prompt_logprobs", "prompt_token_ids"):
        assert first[key] == whole[key]
        assert not any(key in each for each in rest)


def test_what_is_wrong_with_a_stream_is_an_error_and_no_stream(server: Running) -> None:
    """Also where the prompt could be scored, and not be answered."""
    for more in ({"prompt": [5] * 300}, {"prompt": [5] * 256}):
        message = refused(server, prompt_logprobs=1, stream=True, **more)
        assert "256" in message
    assert choice(server, prompt=[5] * 256, prompt_logprobs=1, max_tokens=0)
