"""Steps that decode and compute prompts, where decode steps are captured: decoding rows go through
graphs, chunks of prompts beside them do not, and the next decode step is under way meanwhile. No
token and no log-probability changes.

The stand-in for graphs is that of test_graphs.py.
"""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from isobit.engine.engine import Engine
from isobit.engine.rows import DecodeRows
from isobit.engine.runner import Runner
from isobit.engine.scheduler import Scheduler
from isobit.engine.types import Sampling
from isobit.errors import IsobitError
from tests.models import slow_where, tiny_model

from .helpers import rollout, tiny
from .test_invariance import FLOWS, PROMPT_IDS, PROMPTS, check
from .test_requests import REQUESTS, TIGHT, alone, arrive, finish

MakeEngine = Callable[..., Engine]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How often it happened that: a step had decoding rows and chunks (`mixed`), of which the rows
    were launched before (`launched`); rows sat out; rows changed places for that; a step was
    launched ahead of a mixed one. Where graphs are as a GPU's, no decoding row is computed outside
    them."""
    found: Counter = Counter()
    compute, look_ahead, launched, put_first = (
        Runner._compute, Scheduler.look_ahead, Scheduler.launched, DecodeRows.put_first,
    )  # fmt: skip

    def spy_compute(self, plan):  # type: ignore[no-untyped-def]
        ahead = self.graphs is not None and self.graphs.asynchronous
        assert not (ahead and plan.decode), "a decoding row beside the graphs"
        return compute(self, plan)

    def spy_ahead(self, plan, going):  # type: ignore[no-untyped-def]
        ahead = look_ahead(self, plan, going)
        found["mixed"] += bool(plan.decode and plan.chunks)
        found["ahead of a mixed step"] += bool(ahead and plan.chunks)
        return ahead

    def spy_launched(self, slots):  # type: ignore[no-untyped-def]
        plan = launched(self, slots)
        if plan is not None:
            found["launched"] += bool(plan.chunks)
            found["sat out"] += self.rows.count - plan.decode
        return plan

    def spy_first(self, chosen):  # type: ignore[no-untyped-def]
        found["changed places"] += not chosen[: chosen.sum()].all()
        put_first(self, chosen)

    monkeypatch.setattr(Runner, "_compute", spy_compute)
    monkeypatch.setattr(Scheduler, "look_ahead", spy_ahead)
    monkeypatch.setattr(Scheduler, "launched", spy_launched)
    monkeypatch.setattr(DecodeRows, "put_first", spy_first)
    return found


SIZES = {
    "preemption": {"kv_pages": 20, "page_size": 4, "max_batch_tokens": 40},
    "prompts in chunks": {"kv_pages": 60, "max_batch_tokens": 9, "max_sequences": 6},
    "few at a time": {"kv_pages": 60, "page_size": 4, "max_sequences": 3},
}


@pytest.mark.parametrize(
    ("preset", "backend", "limits"),
    slow_where(
        [(*flow, limits) for flow in FLOWS for limits in SIZES],
        lambda preset, backend, limits: backend == "reference",
    ),
)
def test_mixed_steps_give_the_bits_of_simple_ones(
    preset: str,
    backend: str,
    limits: str,
    make_captured: MakeEngine,
    seen: Counter,
) -> None:
    own = SIZES[limits]
    engine = make_captured(tiny(preset, backend), **own)
    check(preset, backend, engine)
    assert all(
        seen[what] > 2 for what in ("mixed", "launched", "sat out", "ahead of a mixed step")
    ), seen
    assert engine.stats.preemptions >= 1 or limits != "preemption"
    check(preset, backend, engine)  # whose prompts are found in the cache, as far as it has room
    assert engine.stats.cached_tokens > 0 or own["kv_pages"] * own.get("page_size", 16) < 100


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_text", "nemotron_h"])
def test_of_experts_and_of_linear_attention_too(
    family: str,
    make_engine: MakeEngine,
    make_captured: MakeEngine,
    seen: Counter,
) -> None:
    """A state is read, changed and written in place, so no step may be computed twice."""
    model, sampling = tiny_model("fp8", family), Sampling(3, 9, seed=1)
    prompts = [[3, 4, 5], [6], [7, 8], [9] * 7, [5, 6] * 4]
    plain, captured = (
        make(model, kv_pages=40, page_size=4, max_sequences=4, max_batch_tokens=8).generate(
            prompts, sampling
        )
        for make in (make_engine, make_captured)
    )
    assert plain == captured
    assert min(seen["mixed"], seen["launched"], seen["sat out"]) > 0


def cancelled_beside_one_that_came(engine: Engine) -> bool:
    """Three requests decode; a fourth one comes, and one of the three is cancelled while the next
    step, which the fourth is not in, is under way. Whether the others are what they are alone."""
    long = Sampling(n=2, max_new_tokens=12, seed=7, ignore_eos=True)
    doomed, *requests = [engine.submit(PROMPTS[index], long, index) for index in range(3)]
    for _ in range(3):
        engine.step()
    requests.append(engine.submit(PROMPTS[3], long, 3))
    engine.step()
    assert engine.scheduler.rows.count == 8
    engine.cancel(doomed)
    found = finish(engine)
    return [found[request] for request in requests] == [
        alone(engine.model, (PROMPTS[i], long, i)) for i in (1, 2, 3)
    ]


def test_a_row_that_came_meanwhile_and_one_that_was_cancelled(
    make_captured: MakeEngine,
    seen: Counter,
) -> None:
    """A row that leaves is replaced by the last one, which is not in the step that is under way."""
    assert cancelled_beside_one_that_came(make_captured(tiny("fp8", "native"), kv_pages=200))
    assert seen["changed places"] >= 1


@pytest.mark.slow
def test_requests_that_arrive_and_are_cancelled_between(
    make_captured: MakeEngine,
    seen: Counter,
) -> None:
    model = tiny("fp8", "native")
    wanted = {index: alone(model, request) for index, request in enumerate(REQUESTS)}
    for seed in range(20, 32):
        found = arrive(
            make_captured(model, **({"kv_pages": 200} if seed % 2 else TIGHT)), seed, cancels=True
        )
        assert found == {index: wanted[index] for index in found}
    assert min(seen["launched"], seen["sat out"], seen["ahead of a mixed step"]) > 10


def test_as_many_tokens_are_computed_as_by_simple_steps(
    make_engine: MakeEngine,
    make_captured: MakeEngine,
    seen: Counter,
) -> None:
    """Where none ends early and no page is taken back, nothing is computed for nothing. A sample
    that had no room when its prompt was done computes a token of the prompt again."""
    sampling, stats = Sampling(n=3, max_new_tokens=9, seed=5, ignore_eos=True), []
    for make in (make_engine, make_captured):
        engine = make(
            tiny("bf16", "native"),
            kv_pages=200,
            max_batch_tokens=16,
            max_sequences=6,
            prefix_cache=False,
        )
        rollout(engine, PROMPTS, sampling, PROMPT_IDS)
        stats.append(engine.stats)
    simple, mixed = stats
    assert (
        mixed.decode_tokens + mixed.prefill_tokens == simple.decode_tokens + simple.prefill_tokens
    )
    assert mixed.sampled_tokens == simple.sampled_tokens == 3 * 9 * len(PROMPTS)
    assert seen["ahead of a mixed step"] > 0


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_a_prompt_that_fails_beside_decoding_rows_can_be_taken_again(
    family: str,
    captured: bool,
    make_engine: MakeEngine,
    make_captured: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where states, which are changed in place, were changed by the step that failed."""
    model = tiny_model("bf16", family, backend="native")
    sampling = Sampling(2, 12, seed=7, ignore_eos=True)
    requests = ([3, 4, 5, 6, 7], sampling, 0), ([8] * 6, sampling, 1)
    wanted = [alone(model, request) for request in requests]
    engine = (make_captured if captured else make_engine)(model, kv_pages=200, page_size=4)
    hidden = model.transformer.hidden
    first = engine.submit(*requests[0])
    for _ in range(3):
        engine.step()
    second = engine.submit(*requests[1])
    with monkeypatch.context() as patch:
        patch.setattr(
            model.transformer,
            "hidden",
            lambda tokens, layout, *a, **k: (
                hidden(tokens, layout, *a, **k) * (np.nan if layout.max_rows > 1 else 1.0)
            ),
        )
        for _ in range(2):
            with pytest.raises(
                IsobitError, match="the prompt: the model's logits hold NaN or infinity"
            ):
                engine.step()
            engine.integrity()
    found = finish(engine)
    assert [found[first], found[second]] == wanted


def test_negative_control_rows_that_stay_where_they_are(
    make_captured: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DecodeRows, "put_first", lambda self, chosen: None)
    engine = make_captured(tiny("fp8", "native"), kv_pages=200)
    with pytest.raises((AssertionError, IndexError)):
        assert cancelled_beside_one_that_came(engine)
    for request in list(engine.scheduler.requests):
        engine.cancel(request)


def test_negative_control_first_tokens_before_those_of_decoding_rows(
    make_captured: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Runner.run

    def swapped(self):  # type: ignore[no-untyped-def]
        plan, tokens = run(self)
        if plan.decode and plan.chunks:
            tokens = np.concatenate([tokens[plan.decode :], tokens[: plan.decode]])
            self.scheduler.record.tokens[
                plan.sampled, self.scheduler.record.generated[plan.sampled]
            ] = tokens
        return plan, tokens

    monkeypatch.setattr(Runner, "run", swapped)
    with pytest.raises(AssertionError):
        check("fp8", "native", make_captured(tiny("fp8", "native"), **SIZES["prompts in chunks"]))
