"""Requests that arrive, run together with their own settings, go on after given tokens and are
cancelled: the bits of each are those of the request alone in an engine."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from isobit.engine.engine import Engine
from isobit.engine.scheduler import Scheduler
from isobit.engine.types import Completion, Request, Sampling
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.rl.learner.forward import forward
from isobit.rl.learner.packing import pack
from isobit.training.rollouts.sources import sample_of
from tests.models import slow_where

from .helpers import fresh, tiny
from .test_invariance import FLOWS, LENGTHS, PROMPT_IDS, PROMPTS

MakeEngine = Callable[..., Engine]
Asked = tuple[list[int], Sampling, int]

SETTINGS = [
    Sampling(n=3, max_new_tokens=14, temperature=0.9, seed=2**40 + 17),
    Sampling(n=2, max_new_tokens=9, seed=5),
    Sampling(n=2, max_new_tokens=12, temperature=0),
    Sampling(n=4, max_new_tokens=7, temperature=1.3, top_k=5, seed=1),
    Sampling(n=1, max_new_tokens=20, top_p=0.8, seed=3, ignore_eos=True),
    Sampling(n=2, max_new_tokens=16, min_p=0.05, seed=3, stop=("a", "e7")),
    Sampling(n=3, max_new_tokens=1, seed=9),
    Sampling(
        n=1, max_new_tokens=18, top_k=9, top_p=0.9, min_p=0.01, temperature=0.7, seed=8, stop=("b",)
    ),
]
REQUESTS: list[Asked] = list(zip(PROMPTS, SETTINGS, PROMPT_IDS, strict=True))
TIGHT = {"kv_pages": 24, "page_size": 4, "max_batch_tokens": 24, "max_sequences": 7}


def finish(engine: Engine) -> dict[Request, list[Completion]]:
    """Step until nothing is open, proving after every step that all is in order."""
    found: dict[Request, list[Completion]] = {}
    while engine.num_open:
        for request, completion in engine.step():
            found.setdefault(request, []).append(completion)
        engine.integrity()
    return {request: sorted(done, key=lambda c: c.sample_index) for request, done in found.items()}


def complete(engine: Engine, request: Request) -> list[Completion]:
    return finish(engine)[request]


def alone(model: Model, request: Asked) -> list[Completion]:
    engine = Engine(model, kv_pages=200)
    return complete(engine, engine.submit(*request))


def arrive(engine: Engine, seed: int, cancels: bool = False) -> dict[int, list[Completion]]:
    """Submit the requests in some order, with steps between; of every three cancel one somewhere.
    By index."""
    rng = random.Random(seed)
    requests: dict[Request, int] = {}
    found: dict[int, list[Completion]] = {}
    coming = rng.sample(range(len(REQUESTS)), len(REQUESTS))
    doomed = set(coming[::3]) if cancels else set()
    while coming or engine.num_open:
        while coming and rng.random() < 0.4:
            index = coming.pop(0)
            requests[engine.submit(*REQUESTS[index])] = index
        for request, completion in engine.step():
            found.setdefault(requests[request], []).append(completion)
        for request, index in requests.items():
            if index in doomed and rng.random() < 0.3:
                engine.cancel(request)
                engine.cancel(request)
        engine.integrity()
    assert engine.pages.num_used == 0
    whole = {
        i: sorted(c, key=lambda c: c.sample_index)
        for i, c in found.items()
        if len(c) == REQUESTS[i][1].n
    }
    assert whole.keys() >= set(range(len(REQUESTS))) - doomed
    return whole


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "backend"), FLOWS)
def test_requests_in_any_order_give_the_bits_of_each_alone(
    preset: str, backend: str, make_engine: MakeEngine
) -> None:
    model = tiny(preset, backend)
    wanted = {index: alone(model, request) for index, request in enumerate(REQUESTS)}
    assert len({c.finish_reason for done in wanted.values() for c in done}) == 2
    for seed, sizes in enumerate(({"kv_pages": 200}, TIGHT)):
        found = arrive(make_engine(model, **sizes), seed, cancels=True)
        assert found == {index: wanted[index] for index in found}


@pytest.mark.parametrize("sizes", [{"kv_pages": 200}, TIGHT])
def test_captured_steps_and_steps_ahead_too(
    sizes: dict[str, int],
    make_engine: MakeEngine,
    make_captured: MakeEngine,
) -> None:
    model = tiny("fp8", "native")
    wanted = {index: alone(model, request) for index, request in enumerate(REQUESTS)}
    for seed in range(4):
        engine = make_captured(model, **sizes)
        found = arrive(engine, seed, cancels=True)
        assert found == {index: wanted[index] for index in found}
        assert engine.graphs is not None
        assert engine.graphs.num_captured > 3


def test_negative_control_a_key_by_order_of_arrival(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("bf16", "native")
    wanted = {index: alone(model, request) for index, request in enumerate(REQUESTS)}
    monkeypatch.setattr(
        Scheduler, "key", lambda self, s: (s.owner.request.sampling.seed, 0, s.number)
    )
    with pytest.raises(AssertionError):
        assert arrive(make_engine(model, kv_pages=200), 1) == wanted


def test_negative_control_settings_of_the_next_row(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("bf16", "native")
    wanted = {index: alone(model, request) for index, request in enumerate(REQUESTS)}
    engine = make_engine(model, kv_pages=200)
    add = engine.scheduler.rows.add

    def mixed_up(*row: object) -> None:
        add(*row)  # type: ignore[arg-type]
        engine.scheduler.rows.settings[:2] = engine.scheduler.rows.settings[:2][::-1].copy()

    monkeypatch.setattr(engine.scheduler.rows, "add", mixed_up)
    with pytest.raises(AssertionError):
        assert arrive(engine, 1) == wanted


def test_a_cancelled_request_frees_its_pages_at_once_and_changes_no_other(
    make_engine: MakeEngine,
) -> None:
    model = tiny("fp8", "native")
    wanted = alone(model, REQUESTS[1])
    for steps in range(6):
        engine = make_engine(model, kv_pages=200, page_size=4, max_batch_tokens=20)
        kept, dropped = engine.submit(*REQUESTS[1]), engine.submit(*REQUESTS[4])
        for _ in range(steps):
            assert engine.step() == []
            engine.integrity()
        engine.cancel(dropped)
        engine.integrity()
        assert engine.num_open == 1
        held = {page for sequence in engine.scheduler.running.values() for page in sequence.pages}
        assert engine.pages.num_used == len(held)
        assert finish(engine)[kept] == wanted


def test_negative_control_a_cancelled_request_that_keeps_its_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(tiny(), kv_pages=20)
    request = engine.submit(*REQUESTS[4])
    engine.step()
    monkeypatch.setattr(engine.pages, "release", lambda pages: None)
    engine.cancel(request)
    with pytest.raises(AssertionError, match="references, but 0 holders"):
        engine.integrity()


@pytest.mark.slow
def test_many_requests_leave_nothing_behind(
    make_engine: MakeEngine, make_captured: MakeEngine
) -> None:
    """What a week of serving would do: bookkeeping is as large as what was ever open at once, not
    as what was done."""
    rng = random.Random(3)
    for make in (make_engine, make_captured):
        engine = make(
            tiny("bf16", "native"), kv_pages=30, page_size=4, max_sequences=8, max_batch_tokens=64
        )
        scheduler, most_open, captured = engine.scheduler, 0, set()
        for number in range(400):
            sampling = replace(
                rng.choice(SETTINGS), n=rng.randint(1, 3), max_new_tokens=rng.randint(1, 6)
            )
            sampling = replace(sampling, stop=(str(number), "zz") if rng.random() < 0.3 else ())
            request = engine.submit(
                [rng.randrange(3, 40) for _ in range(rng.randint(1, 30))], sampling, number
            )
            if rng.random() < 0.2:
                engine.cancel(request)
            most_open = max(
                most_open, sum(len(group.members) for group in scheduler.requests.values())
            )
            while engine.num_open > rng.randint(0, 5):
                engine.step()
                engine.integrity()
            if engine.graphs is not None:
                captured |= engine.graphs._graphs.keys()
        finish(engine)
        assert most_open < 25
        assert scheduler.record.num_slots <= 32
        assert scheduler.record.num_free == scheduler.record.num_slots
        assert scheduler.record.tokens.shape[1] == 64
        assert not any(
            (
                scheduler.requests,
                scheduler.at,
                scheduler.running,
                scheduler.waiting,
                scheduler.prefilling,
            )
        )
        assert len(engine.pages._page_of) == len(engine.pages._entry_of) <= 30
        assert engine.pages.num_free == 30
        assert engine._endings._stops.cache_info().currsize <= 64
        # for four numbers of rows, or on a CPU for each, three contexts, and every mix of settings
        # that occurred
        rows, contexts, mixes, _ = (
            (len(set(part)) for part in zip(*captured)) if captured else (0, 0, 0, 0)
        )
        assert rows <= (8 if make is make_engine else 4)
        assert contexts <= 3
        assert mixes <= 30


@pytest.mark.parametrize(
    ("preset", "backend", "sizes"),
    slow_where(
        [
            (*flow, {"kv_pages": 200, **more})
            for flow in FLOWS
            for more in ({}, {"page_size": 4, "prefix_cache": False})
        ],
        lambda preset, backend, sizes: backend == "reference" and len(sizes) > 1,
    ),
)
def test_an_extension_gives_the_bits_of_all_its_tokens_afresh(
    preset: str, backend: str, sizes: dict[str, int], make_engine: MakeEngine
) -> None:
    """Three turns of every sample of a group, side by side."""
    model, engine = tiny(preset, backend), make_engine(tiny(preset, backend), **sizes)
    prompt, sampling, prompt_id = PROMPTS[3], replace(SETTINGS[0], stop=("a",)), 12
    turns = complete(engine, engine.submit(prompt, sampling, prompt_id))
    for given in ([7, 8, 9, 10, 11], [30], []):
        requests = {engine.continue_from(before, given, sampling): before for before in turns}
        extended = {request: done[0] for request, done in finish(engine).items()}
        for request, before in requests.items():
            after, so_far = extended[request], [*prompt, *before.token_ids, *given]
            fresh = Engine(model, kv_pages=200)
            again = fresh.submit(so_far, replace(sampling, n=1), prompt_id, before.sample_index)
            wanted = complete(fresh, again)[0]
            assert after.token_ids == [*before.token_ids, *given, *wanted.token_ids]
            assert after.logprobs == [*before.logprobs, *[0.0] * len(given), *wanted.logprobs]
            assert (after.text, after.finish_reason) == (wanted.text, wanted.finish_reason)
            assert (after.prompt_token_ids, after.prompt_id) == (prompt, prompt_id)
            assert after.sample_index == before.sample_index
            assert after.sampled == [
                *before.sampled,
                *[False] * len(given),
                *[True] * len(wanted.token_ids),
            ]
        # all that was computed, also in pages that are not full: all but the last token
        computed = sum(len(prompt) + len(before.token_ids) - 1 for before in turns)
        assert engine.stats.cached_tokens == (computed if sizes.get("prefix_cache", True) else 0)
        turns = list(extended.values())
    other = fresh.submit(so_far, replace(sampling, n=1), prompt_id + 1, before.sample_index)
    assert complete(fresh, other)[0].logprobs != wanted.logprobs, "negative control: another key"


def test_a_mask_is_written_where_there_are_given_tokens(make_engine: MakeEngine) -> None:
    engine, sampling = make_engine(tiny()), Sampling(max_new_tokens=4, ignore_eos=True)
    first = complete(engine, engine.submit([5, 6], sampling))[0]
    assert first.completion_mask is None
    assert complete(engine, engine.continue_from(first, [], sampling))[0].completion_mask is None
    mask = complete(engine, engine.continue_from(first, [9, 9], sampling))[0].completion_mask
    assert mask == [True] * 4 + [False] * 2 + [True] * 4


@pytest.mark.parametrize("preset", ["bf16", "fp8", "fp8-unified"])
def test_turns_have_the_learners_log_probabilities(preset: str, make_engine: MakeEngine) -> None:
    """All turns packed as one sequence; a mask that is off by one would compare others."""
    model = tiny(preset, "native")
    engine = make_engine(model, page_size=4)
    sampling = Sampling(n=3, max_new_tokens=6, ignore_eos=True)
    turns = complete(engine, engine.submit(PROMPTS[4], sampling))
    for given in ([7, 8, 9], [30, 31]):
        requests = [engine.continue_from(before, given, sampling) for before in turns]
        done = finish(engine)
        turns = [done[request][0] for request in requests]
    samples = [sample_of(completion, 0) for completion in turns]
    with torch.no_grad():
        learned = forward(model, pack(samples), 1.0)[0].tolist()
    recorded = [c.logprobs[i] for c, s in zip(turns, samples) for i in s.trained]
    assert len(recorded) == 3 * 18
    assert learned == recorded
    shifted = [c.logprobs[i - 1] for c, s in zip(turns, samples) for i in s.trained]
    assert learned != shifted


def test_requests_that_can_never_be_answered_are_refused_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(tiny(), kv_pages=4)
    done = complete(engine, engine.submit([5] * 20, Sampling(max_new_tokens=20, ignore_eos=True)))[
        0
    ]
    for refused, message in (
        (
            lambda: engine.submit([5] * 96),
            "the prompt has 96 tokens, but the model's context of 96 takes at most 95",
        ),
        (
            lambda: engine.submit([5] * 60),
            "needs 6 pages of 16 tokens with 36 new ones, but the engine has 4: raise",
        ),
        (lambda: engine.submit([]), "the prompt is empty"),
        (
            lambda: engine.submit([64]),
            "the prompt: token id 64 is not in the model's vocabulary of 64",
        ),
        (lambda: engine.submit([5], Sampling(), -1), "prompt_id: expected a whole number from 0"),
        (
            lambda: engine.submit([5], Sampling(), 0, 2**32),
            "sample_index: expected a whole number from 0",
        ),
        (lambda: engine.submit([5], {"n": 2}), r"sampling: expected Sampling\(n=4, ...\), got"),
        (
            lambda: engine.continue_from(done, [5] * 60),
            "the prompt has 100 tokens, but the model's context of 96",
        ),
        (lambda: engine.continue_from(done, [5] * 30), "needs 6 pages of 16 tokens"),
        (
            lambda: engine.continue_from(done, "7"),
            "Engine.continue_from: expected token ids, got a text",
        ),
        (lambda: engine.continue_from(done, [64]), "token id 64 is not in the model's vocabulary"),
    ):
        with pytest.raises(IsobitError, match=message) as raised:
            refused()
        assert "\n" not in str(raised.value)
    assert engine.num_open == 0


def test_what_open_requests_forbid(make_engine: MakeEngine) -> None:
    model = fresh("float32")
    engine, sampling = make_engine(model), Sampling(max_new_tokens=4, ignore_eos=True)
    done = complete(engine, engine.submit([5], sampling))[0]
    assert engine.step() == []
    request = engine.submit([5], sampling)
    for forbidden in (engine.sleep, lambda: engine.generate([[5]])):
        with pytest.raises(IsobitError, match="1 requests are open; finish or cancel them first"):
            forbidden()
    engine.step()
    model.sync()
    with pytest.raises(
        IsobitError, match=r"Engine\.step: the weights changed while 1 requests are open"
    ):
        engine.step()
    engine.cancel(request)
    engine.sleep()
    with pytest.raises(
        IsobitError, match="the completion is of version 0 of the weights, which are at version 1"
    ):
        engine.continue_from(done, [5], sampling)
    again = complete(engine, engine.submit([5], sampling))[0]
    assert (again.token_ids, again.logprobs) == (done.token_ids, done.logprobs)


def test_a_step_that_fails_can_be_taken_again(
    make_captured: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits that are not finite end no other request: after cancelling the one, or as here when
    they are finite again, all goes on with the same bits."""
    model = tiny("bf16", "native")
    wanted = alone(model, REQUESTS[4])
    engine = make_captured(model, kv_pages=200)
    request, hidden = engine.submit(*REQUESTS[4]), model.transformer.hidden
    for _ in range(5):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(model.transformer, "hidden", lambda *a, **k: hidden(*a, **k) * torch.nan)
        engine.step()  # was launched before
        for _ in range(2):
            with pytest.raises(
                IsobitError, match="the prompt: the model's logits hold NaN or infinity"
            ):
                engine.step()
            engine.integrity()
    assert finish(engine)[request] == wanted


def test_lengths_differ() -> None:
    assert len(set(LENGTHS)) == len(REQUESTS), "one setting for each"


def test_each_token_is_reported_as_it_is_sampled(
    make_engine: MakeEngine,
    make_captured: MakeEngine,
) -> None:
    """With the completion's log-probabilities, in its order; cancelled requests report no more. The
    control reports the tokens of the sequence after."""
    model = tiny("fp8", "native")
    for make, sizes in (
        (make_engine, {"kv_pages": 200}),
        (make_engine, TIGHT),
        (make_captured, TIGHT),
    ):
        engine = make(model, **sizes)
        seen: dict[tuple[Request, int], list[tuple[int, float]]] = {}

        def hear(request: Request, sample: int, token: int, logprob: float, _: object) -> None:
            seen.setdefault((request, sample), []).append((token, logprob))  # noqa: B023

        requests = [engine.submit(*asked) for asked in REQUESTS]
        done: list[tuple[Request, Completion]] = []
        while engine.num_open:
            done += engine.step(hear)
            engine.cancel(requests[0])
        heard = {key: ([t for t, _ in got], [p for _, p in got]) for key, got in seen.items()}
        whole = {(request, c.sample_index): (c.token_ids, c.logprobs) for request, c in done}
        assert len(whole) == sum(sampling.n for _, sampling, _ in REQUESTS[1:])
        assert {key: got for key, got in heard.items() if key[0] is not requests[0]} == whole
        assert all(len(tokens) == 1 for key, (tokens, _) in heard.items() if key[0] is requests[0])


def test_negative_control_the_report_of_another_sequence(make_engine: MakeEngine) -> None:
    engine = make_engine(tiny("fp8", "native"), kv_pages=200)
    engine.submit(*REQUESTS[0])
    heard: dict[int, list[int]] = {}
    done = []
    while engine.num_open:
        done += engine.step(
            lambda _, sample, token, *__: heard.setdefault((sample + 1) % 3, []).append(token)
        )
    assert any(heard[c.sample_index] != c.token_ids for _, c in done)


def test_stop_tokens_end_a_completion_as_its_own_end_does(make_engine: MakeEngine) -> None:
    """The control draws the same tokens without them, and goes on."""
    model = tiny("fp8", "native")
    sampling = Sampling(n=4, max_new_tokens=30, seed=6, ignore_eos=True)
    engine = make_engine(model, kv_pages=200)
    whole = complete(engine, engine.submit(PROMPTS[0], sampling))
    stops = tuple({whole[0].token_ids[7], whole[1].token_ids[11]})
    ended = complete(engine, engine.submit(PROMPTS[0], replace(sampling, stop_tokens=stops)))
    for long, short in zip(whole, ended):
        place = next((i for i, token in enumerate(long.token_ids) if token in stops), None)
        count = len(long.token_ids) if place is None else place + 1
        assert short.token_ids == long.token_ids[:count]
        assert short.logprobs == long.logprobs[:count]
        assert short.finish_reason == ("length" if place is None else "stop")
        shown = short.token_ids if place is None else short.token_ids[:-1]
        assert short.text == model.tokenizer.decode_completion(short.prompt_token_ids, shown)
    assert any(short.finish_reason == "stop" for short in ended)
    with pytest.raises(IsobitError, match="stop_tokens: expected a whole number from 0"):
        Sampling(stop_tokens=(-1,))


def test_extend_is_still_understood() -> None:
    engine = Engine(tiny(), kv_pages=20)
    [[before]] = engine.generate([[5, 6]], Sampling(max_new_tokens=2))
    with pytest.warns(FutureWarning, match="continue_from"):
        request = engine.extend(before, [7], Sampling(max_new_tokens=2))
    complete(engine, request)
