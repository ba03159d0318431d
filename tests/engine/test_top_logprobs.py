"""The likeliest tokens beside each that is drawn: asking changes no bit, and they are the bits that
the same tokens have where they are drawn or scored."""

import math
from dataclasses import replace

import pytest
import torch

from isobit.engine.engine import Engine
from isobit.engine.types import Completion, Sampling
from isobit.errors import IsobitError
from isobit.kernels.sampling import top as likeliest_tokens
from isobit.kernels.sampling.top import likeliest
from isobit.model import Model
from tests.models import require, tiny_model

PROMPTS = ["1+1=", "23*4=", "567+89="]
SAMPLINGS = {
    "plain": Sampling(n=2, max_new_tokens=6, seed=5, ignore_eos=True),
    "warm": Sampling(n=2, max_new_tokens=6, seed=5, temperature=0.7, ignore_eos=True),
    "greedy": Sampling(max_new_tokens=6, temperature=0, ignore_eos=True),
    "filtered": Sampling(n=2, max_new_tokens=6, seed=5, top_k=3, top_p=0.9, ignore_eos=True),
    "penalized": Sampling(max_new_tokens=6, seed=5, repetition_penalty=1.5, ignore_eos=True),
}


@pytest.fixture(scope="module", params=["native", "reference"])
def model(request: pytest.FixtureRequest) -> Model:
    require(request.param)
    return tiny_model("bf16", backend=request.param, scale=4)


def _all(engine: Engine, sampling: Sampling) -> list[Completion]:
    return [one for group in engine.generate(PROMPTS, sampling) for one in group]


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_asking_changes_no_drawn_token(model: Model, kind: str) -> None:
    """With chunks, a batch of one, and beside requests that do not ask. Each drawn token's
    log-probability is that of the same token among the likeliest, as bytes."""
    sampling = SAMPLINGS[kind]
    asked = replace(sampling, top_logprobs=4)
    wanted = _all(Engine(model, page_size=4), sampling)
    found = _all(Engine(model, page_size=4), asked)
    assert [(c.token_ids, c.logprobs) for c in found] == [(c.token_ids, c.logprobs) for c in wanted]
    assert all(c.top_logprobs is None for c in wanted)
    assert _all(Engine(model, page_size=4, max_batch_tokens=3, max_sequences=1), asked) == found
    met = 0
    for completion in found:
        assert completion.top_logprobs is not None
        assert len(completion.top_logprobs) == len(completion.token_ids)
        drawn = zip(completion.token_ids, completion.logprobs, completion.top_logprobs)
        for token, logprob, top in drawn:
            assert 1 <= len(top) <= 4
            values = [value for _, value in top]
            assert values == sorted(values, reverse=True)
            assert all(math.isfinite(value) for value in values)
            if token in dict(top):
                assert dict(top)[token] == logprob
                met += 1
            else:
                assert logprob <= values[-1]
    assert met > 0
    if kind == "greedy":
        tops = [top for c in found for top in c.top_logprobs or []]
        assert [top[0][0] for top in tops] == [t for c in found for t in c.token_ids]


def test_a_request_that_asks_beside_one_that_does_not(model: Model) -> None:
    engine = Engine(model, page_size=4)
    one = SAMPLINGS["plain"]
    requests = [
        engine.submit("1+1=", replace(one, top_logprobs=2), 0),
        engine.submit("1+1=", one, 0),
        engine.submit("1+1=", replace(one, top_logprobs=20), 0),
    ]
    heard: dict[object, list[object]] = {}
    done: dict[object, list[Completion]] = {}
    while engine.num_open:
        for request, completion in engine.step(
            lambda request, sample, token, logprob, top: heard.setdefault(
                (request, sample), []
            ).append(top)
        ):
            done.setdefault(request, []).append(completion)
    few, none, many = (sorted(done[r], key=lambda c: c.sample_index) for r in requests)
    for a, b, c in zip(few, none, many):
        assert (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs) == (c.token_ids, c.logprobs)
        assert b.top_logprobs is None
        assert a.top_logprobs == [top[:2] for top in c.top_logprobs or []]
        assert heard[requests[0], a.sample_index] == a.top_logprobs
        assert heard[requests[1], a.sample_index] == [[] for _ in a.token_ids]
    assert not engine.scheduler.record.top


def test_ten_of_a_whole_vocabulary_are_those_that_it_scores(model: Model) -> None:
    """Of prompts: the bits of `Model.logprobs` of the same token. The control: another adapter of
    the same prompt, another place."""
    tokens = model.tokenizer.encode("23*4=92")
    found = model.top_logprobs(tokens, 10)
    assert len(found) == len(tokens) - 1
    for place, top in enumerate(found, 1):
        for token, value in top[:3]:
            scored = model.logprobs([[*tokens[:place], token]])[0]
            assert scored[-1].item() == value
            other = model.logprobs([[*tokens[: place - 1], token]])[0] if place > 1 else scored[:0]
            assert not len(other) or other[-1].item() != value
    assert model.top_logprobs(tokens, 10, first=len(tokens) - 1) == found[-1:]


def test_ties_go_to_the_lower_token_and_what_is_excluded_is_left_out() -> None:
    inf = math.inf
    logits = torch.tensor([1.0, 3.0, -inf, 3.0, 2.0, 3.0, 2.0])
    assert likeliest(logits, 1).tolist() == [1]
    assert likeliest(logits, 2).tolist() == [1, 3]
    assert likeliest(logits, 5).tolist() == [1, 3, 5, 4, 6]
    assert likeliest(logits, 20).tolist() == [1, 3, 5, 4, 6, 0]
    assert likeliest(torch.tensor([-0.0, 0.0, -1.0]), 2).tolist() == [0, 1]


def test_the_control_another_row(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The likeliest tokens of rows that stand elsewhere are noticed."""
    asked = replace(SAMPLINGS["plain"], top_logprobs=4)
    wanted = _all(Engine(model), asked)
    original = likeliest_tokens.top_logprobs
    monkeypatch.setattr(
        "isobit.engine.sampler.top_logprobs",
        lambda hidden, weight, logits, *rest, **more: original(
            hidden, weight, logits.roll(1, 1), *rest, **more
        ),
    )
    found = _all(Engine(model), asked)
    assert [c.token_ids for c in found] == [c.token_ids for c in wanted]
    assert found != wanted


@pytest.mark.parametrize("count", [-1, 21, True, 1.5])
def test_more_than_twenty_are_refused(count: object) -> None:
    with pytest.raises(IsobitError, match="top_logprobs"):
        Sampling(top_logprobs=count)  # type: ignore[arg-type]


def test_turns_keep_theirs(model: Model) -> None:
    engine = Engine(model)
    asked = replace(SAMPLINGS["greedy"], top_logprobs=3)
    first = engine.generate(["1+1="], asked)[0][0]
    engine.continue_from(first, [3, 4], SAMPLINGS["greedy"])
    while not (done := engine.step()):
        pass
    turns = done[0][1]
    assert turns.top_logprobs is not None
    assert len(turns.top_logprobs) == len(turns.token_ids)
    assert turns.top_logprobs[: len(first.token_ids)] == first.top_logprobs
    assert not any(turns.top_logprobs[len(first.token_ids) :])
