"""Tokens and log-probabilities do not depend on the order of work: not one bit, under any engine
setting."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.engine.calibration import Calibrator
from isobit.engine.engine import Engine
from isobit.engine.scheduler import Scheduler
from isobit.engine.types import EngineSize, Sampling
from tests.kernels.helpers import threads
from tests.models import slow_where

from .helpers import Outcome, outcome, rollout, tiny

MakeEngine = Callable[..., Engine]

# lengths below, at and above multiples of the page sizes; ids in no order
LENGTHS = (1, 15, 16, 17, 33, 40, 4, 32)
PROMPT_IDS = [11, 5, 1000, 0, 7, 2**32 - 1, 3, 12]
PROMPTS = [[3 + (7 * i + 5 * length) % 40 for i in range(length)] for length in LENGTHS]
SAMPLING = Sampling(n=3, max_new_tokens=14, temperature=0.9, seed=2**40 + 17)
PRESETS = ["float32", "bf16", "fp8"]
FLOWS = [("fp8", "reference"), *((preset, "native") for preset in PRESETS)]
"""The engine is the same for every flow, and the reference operators take four times as long: they
do one."""


@lru_cache
def baseline(preset: str, backend: str) -> Outcome:
    """All sequences in one batch, each prompt in one chunk, and every step computed anew."""
    engine = Engine(tiny(preset, backend), kv_pages=200, cuda_graphs=False)
    return outcome(engine.generate(PROMPTS, SAMPLING, PROMPT_IDS))


def check(preset: str, backend: str, engine: Engine) -> None:
    assert rollout(engine, PROMPTS, SAMPLING, PROMPT_IDS) == baseline(preset, backend)


def test_the_baseline_is_worth_comparing() -> None:
    results = baseline("float32", "reference")
    lengths = {len(token_ids) for token_ids, *_ in results.values()}
    assert len(results) == 24
    assert len(lengths) >= 3, "sequences end at different times"
    assert {reason for *_, reason in results.values()} == {"stop", "length"}
    assert len({tuple(tokens) for tokens, *_ in results.values()}) > 20
    assert baseline("float32", "reference") != baseline("fp8", "reference")


@pytest.mark.parametrize(
    ("preset", "backend", "max_sequences"),
    slow_where(
        [(*flow, max_sequences) for flow in FLOWS for max_sequences in (1, 5)],
        lambda preset, backend, max_sequences: backend == "reference" and max_sequences == 1,
    ),
)
def test_batch_size(preset: str, backend: str, max_sequences: int, make_engine: MakeEngine) -> None:
    check(
        preset,
        backend,
        make_engine(tiny(preset, backend), kv_pages=200, max_sequences=max_sequences),
    )


@pytest.mark.parametrize(
    ("preset", "backend", "budget"),
    slow_where(
        [(*flow, budget) for flow in FLOWS for budget in (2, 7)],
        lambda preset, backend, budget: backend == "reference" and budget == 2,
    ),
)
def test_chunked_prefill(preset: str, backend: str, budget: int, make_engine: MakeEngine) -> None:
    engine = make_engine(tiny(preset, backend), kv_pages=200, max_batch_tokens=budget)
    check(preset, backend, engine)
    # samples that find no row at the fork compute their prompt's last, partial page again
    assert engine.stats.prefill_tokens + engine.stats.cached_tokens >= sum(LENGTHS)


@pytest.mark.parametrize(("preset", "backend"), FLOWS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_page_size(preset: str, backend: str, page_size: int, make_engine: MakeEngine) -> None:
    engine = make_engine(tiny(preset, backend), kv_pages=1600 // page_size, page_size=page_size)
    check(preset, backend, engine)
    assert engine.stats.shared_pages > sum(length // page_size for length in LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", ["bf16[engines=separate]", "fp8-rollout", "fp8-rollout-kv", "fp8-e2e"]
)
def test_two_engines_repeat_their_rollouts_on_any_number_of_threads(preset: str) -> None:
    """The same work gives the same bits; the order of work is not promised here. The control is
    another seed."""
    found = []
    for count in (1, 2, 1):
        with threads(count):
            model = tiny(preset, "native")
            if model.precision.calibrated:
                Calibrator(model).calibrate(["abc"])
            found.append(
                outcome(
                    Engine(model, kv_pages=200, max_sequences=9).generate(
                        PROMPTS, SAMPLING, PROMPT_IDS
                    )
                )
            )
    assert found[0] == found[1] == found[2]
    assert found[0] != outcome(
        Engine(model, kv_pages=200).generate(PROMPTS, replace(SAMPLING, seed=1), PROMPT_IDS)
    )


@pytest.mark.parametrize(("preset", "backend"), FLOWS)
def test_preemption(preset: str, backend: str, make_engine: MakeEngine) -> None:
    engine = make_engine(tiny(preset, backend), kv_pages=20, page_size=4, max_batch_tokens=40)
    check(preset, backend, engine)
    assert engine.stats.preemptions >= 3


@pytest.mark.parametrize(("preset", "backend"), FLOWS)
def test_order_of_admission(preset: str, backend: str, make_engine: MakeEngine) -> None:
    engine = make_engine(tiny(preset, backend), kv_pages=60, max_sequences=7)
    for seed in range(2):
        order = random.Random(seed).sample(range(len(PROMPTS)), len(PROMPTS))
        prompts, ids = [PROMPTS[i] for i in order], [PROMPT_IDS[i] for i in order]
        assert rollout(engine, prompts, SAMPLING, ids) == baseline(preset, backend)


@pytest.mark.parametrize(("preset", "backend"), FLOWS)
def test_shared_prompts_against_separate_ones(
    preset: str, backend: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sample as a prompt of its own, with the key that it has in its group."""
    n = SAMPLING.n
    alone = Sampling(1, SAMPLING.max_new_tokens, SAMPLING.temperature, seed=SAMPLING.seed)
    monkeypatch.setattr(
        Scheduler, "key", lambda self, s: (alone.seed, PROMPT_IDS[s.number // n], s.number % n)
    )
    engine = make_engine(tiny(preset, backend), kv_pages=200)
    separate = rollout(engine, [prompt for prompt in PROMPTS for _ in range(n)], alone)
    assert engine.stats.shared_pages == 0
    assert list(separate.values()) == list(baseline(preset, backend).values())


def test_a_call_of_its_own_for_every_prompt(make_engine: MakeEngine) -> None:
    engine = make_engine(tiny("fp8"), kv_pages=20)
    results: Outcome = {}
    for prompt, prompt_id in zip(PROMPTS, PROMPT_IDS):
        results |= rollout(engine, [prompt], SAMPLING, [prompt_id])
    assert results == baseline("fp8", "reference")


@pytest.mark.slow
@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    page_size=st.sampled_from([1, 2, 3, 16]),
    spare=st.integers(0, 40),
    budget=st.integers(2, 60),
    max_sequences=st.integers(1, 24),
    order=st.permutations(range(len(PROMPTS))),
)
def test_any_setting(
    page_size: int, spare: int, budget: int, max_sequences: int, order: list[int]
) -> None:
    needed = -(-(max(LENGTHS) + SAMPLING.max_new_tokens - 1) // page_size)
    engine = Engine(
        tiny("fp8", "native"), EngineSize(needed + spare, page_size, budget, max_sequences)
    )
    prompts, ids = [PROMPTS[i] for i in order], [PROMPT_IDS[i] for i in order]
    assert rollout(engine, prompts, SAMPLING, ids) == baseline("fp8", "native")
    engine.integrity()


@pytest.mark.slow
def test_negative_control_a_scale_shared_by_the_batch(make_engine: MakeEngine) -> None:
    """With one activation scale for all rows of a batch, the batch does change bits: the comparison
    can fail."""
    model = tiny({"preset": "fp8", "activation_granularity": "tensor", "activation_scale": "fp32"})
    many = rollout(make_engine(model, kv_pages=200), PROMPTS, SAMPLING, PROMPT_IDS)
    alone = rollout(
        make_engine(model, kv_pages=200, max_sequences=1), PROMPTS, SAMPLING, PROMPT_IDS
    )
    differing = [key for key in many if many[key][1] != alone[key][1]]
    assert len(differing) > len(many) // 2


@pytest.mark.slow
def test_negative_control_seed_and_ids_matter(make_engine: MakeEngine) -> None:
    engine = make_engine(tiny("float32"), kv_pages=200)
    base = list(baseline("float32", "reference").values())
    other_seed = rollout(engine, PROMPTS, Sampling(3, 18, 0.9, seed=SAMPLING.seed + 1), PROMPT_IDS)
    other_ids = rollout(engine, PROMPTS, SAMPLING, [i ^ 1 for i in PROMPT_IDS])
    for changed in (other_seed, other_ids):
        assert sum(a == b for a, b in zip(base, changed.values())) <= 2


def test_many_logits_are_sampled_in_parts(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isobit.engine.sampler.LOGITS_AT_ONCE", 3 * tiny().config.vocab_size + 1)
    check("float32", "reference", make_engine(tiny("float32"), kv_pages=200))


@pytest.mark.slow
def test_long_completions_grow_the_record(make_engine: MakeEngine) -> None:
    sampling = Sampling(n=2, max_new_tokens=90, seed=1, ignore_eos=True)
    whole = rollout(make_engine(tiny("float32")), [[5, 6]], sampling)
    short = rollout(
        make_engine(tiny("float32")), [[5, 6]], Sampling(2, 30, seed=1, ignore_eos=True)
    )
    assert [len(tokens) for tokens, *_ in whole.values()] == [90, 90]
    assert [value[0][:30] for value in whole.values()] == [value[0] for value in short.values()]
    assert torch.tensor([value[1] for value in whole.values()]).isfinite().all()
