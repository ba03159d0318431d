"""What a completion tells of its prompt: `echo` and `prompt_logprobs`, in the learner's bits."""

from pathlib import Path
from typing import Any

import pytest

from isobit.model import Model

from .helpers import Running

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
    work, whole = server.gateway.work, choice(server, **asked)
    turns = 0

    def counted(*given: Any, **more: Any) -> Any:
        nonlocal turns
        turns += 1
        return work(*given, **more)

    monkeypatch.setattr(server.gateway, "work", counted)
    assert choice(server, **asked) == whole
    few = turns
    monkeypatch.setattr("isobit.serve.scoring._AT_ONCE", 40)
    assert choice(server, **asked) == whole
    assert turns - few == few + 8


def test_what_is_too_much_or_not_offered_is_refused(server: Running) -> None:
    assert "stream: not with echo" in refused(server, echo=True, stream=True)
    assert "from 0 to 20" in refused(server, prompt_logprobs=21)
    assert "from 0 to 20" in refused(server, prompt_logprobs=-1)
    assert "from 0 to 20" in refused(server, prompt_logprobs=True)
    assert "echo: expected true or false" in refused(server, echo=1)
    long = {"prompt": [[5] * 240] * 55, "prompt_logprobs": 20}
    assert "at most 262,144 of a request, got 20 for 13,200 tokens" in refused(server, **long)
    assert "256" in refused(server, prompt=[5] * 300, prompt_logprobs=0)
    messages = [{"role": "user", "content": "a"}]
    for given in ({"prompt_logprobs": 0}, {"echo": True}):
        found = server.post("/v1/chat/completions", {"messages": messages, **given})
        assert found.status_code == 400
        assert "only False is offered" in found.json()["error"]["message"]
    assert choice(server, prompt_logprobs=False, echo=False) == choice(server)


def test_adapters_are_let_go(server: Running) -> None:
    """Also where nothing is sampled."""
    held = server.gateway.device.snapshots._named["math"]
    for more in ({}, {"max_tokens": 0}):
        choice(server, model="math", echo=True, logprobs=0, **more)
    server.post("/tokenize", {"prompt": "a"})
    assert held.holders == 1
