"""Answers that a length limit interrupts go on: under the same weights with the bits of an answer
that was never interrupted, under others with the bits that these give to all tokens so far."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from isobit.engine.engine import Engine
from isobit.engine.types import Completion, Sampling
from isobit.errors import IsobitError

from .helpers import fresh, scale, tiny
from .test_invariance import PROMPTS
from .test_requests import complete

MakeEngine = Callable[..., Engine]
MOST = 24
SAMPLING = Sampling(n=3, max_new_tokens=MOST, temperature=0.9, seed=7)


def in_parts(engine: Engine, first: Completion, sampling: Sampling, budget: int) -> Completion:
    """What an interrupted answer becomes with `budget` tokens at a time."""
    found = first
    while found.finish_reason == "length" and len(found.token_ids) < MOST:
        left = min(budget, MOST - len(found.token_ids))
        request = engine.resume(found, replace(sampling, max_new_tokens=left))
        found = complete(engine, request)[0]
    return found


@pytest.mark.parametrize("preset", ["fp8", "bf16"])
@pytest.mark.parametrize("budget", [1, 5, 16])
def test_parts_are_the_whole(preset: str, budget: int, make_engine: MakeEngine) -> None:
    engine = make_engine(tiny(preset, "native"), kv_pages=60, page_size=4)
    for settings in ({}, {"top_p": 0.8, "repetition_penalty": 1.2}):
        sampling = replace(SAMPLING, **settings)
        wanted = complete(engine, engine.submit(PROMPTS[3], sampling, 12))
        begun = engine.submit(PROMPTS[3], replace(sampling, max_new_tokens=budget), 12)
        found = [in_parts(engine, one, sampling, budget) for one in complete(engine, begun)]
        assert found == wanted
    other = replace(sampling, seed=8)
    assert [in_parts(engine, one, other, budget) for one in found[:1]] == found[:1]  # it has ended
    cut = complete(engine, engine.submit(PROMPTS[3], replace(sampling, max_new_tokens=2), 12))
    assert in_parts(engine, cut[0], other, budget) != wanted[0], "negative control: another seed"


def test_a_stop_string_across_an_interruption_is_found(make_engine: MakeEngine) -> None:
    engine = make_engine(tiny("fp8", "native"))
    free = replace(SAMPLING, n=1, ignore_eos=True)
    text = complete(engine, engine.submit(PROMPTS[2], free))[0].text
    at = next(i for i in range(3, len(text) - 2) if text.find(text[i : i + 2]) == i)
    sampling = replace(free, stop=(text[at : at + 2],))
    wanted = complete(engine, engine.submit(PROMPTS[2], sampling))[0]
    assert (wanted.text, wanted.finish_reason) == (text[:at], "stop")
    budget = len(wanted.token_ids) - 1  # which ends between the two characters
    cut = complete(engine, engine.submit(PROMPTS[2], replace(sampling, max_new_tokens=budget)))[0]
    assert complete(engine, engine.resume(cut, sampling))[0] == wanted
    turn = complete(engine, engine.continue_from(cut, [], replace(sampling, max_new_tokens=1)))[0]
    assert turn.finish_reason == "length", "negative control: a turn of its own begins anew"


def test_new_weights_go_on_after_all_tokens_so_far(make_engine: MakeEngine) -> None:
    model = fresh("fp8", "native")
    engine = make_engine(model, page_size=4)
    sampling = replace(SAMPLING, ignore_eos=True)
    begun = complete(engine, engine.submit(PROMPTS[3], replace(sampling, max_new_tokens=9), 12))
    stale = [in_parts(engine, one, sampling, MOST) for one in begun]
    scale(model, 1.5)
    rest = replace(sampling, n=1, max_new_tokens=MOST - 9)
    for before, old in zip(begun, stale, strict=True):
        found = complete(engine, engine.resume(before, rest))[0]
        so_far = [*before.prompt_token_ids, *before.token_ids]
        again = Engine(model, kv_pages=60)
        wanted = complete(again, again.submit(so_far, rest, 12, before.sample_index))[0]
        assert found.token_ids == [*before.token_ids, *wanted.token_ids]
        assert found.logprobs == [*before.logprobs, *wanted.logprobs]
        assert found.weights_version == model.weights_version == before.weights_version + 1
        assert found.logprobs[9:] != old.logprobs[9:], "negative control: the old weights' bits"


def test_what_has_ended_does_not_go_on(make_engine: MakeEngine) -> None:
    engine = make_engine(tiny())
    done = complete(engine, engine.submit([5, 6], Sampling(max_new_tokens=4, ignore_eos=True)))[0]
    ended = replace(done, finish_reason="stop")
    with pytest.raises(IsobitError, match="got one whose finish_reason is 'stop'"):
        engine.resume(ended)
