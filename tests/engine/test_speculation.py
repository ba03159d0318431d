"""Drafts change no bit: tokens, log-probabilities, texts, ends and routes are those of decoding one
token after the other, whatever is drafted. Two controls say that the comparison can fail: drafts
that count without being the token that is sampled, and a key and value that a draft has left behind.

An oracle drafts what will be sampled, with mistakes in it, so that drafts of every length count.
"""

import random
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.engine import runner, speculation
from isobit.engine.calibration import Calibrator
from isobit.engine.engine import Engine
from isobit.engine.record import Record
from isobit.engine.runner import Runner
from isobit.engine.sequences import Sequence, StepPlan
from isobit.engine.speculation import Speculation, cannot_speculate
from isobit.engine.types import Completion, EngineSize, Sampling
from isobit.errors import NonFiniteError
from isobit.kernels import KVStore
from isobit.model import Model
from tests.dialogues import FakeEnvironments
from tests.models import tiny_model

from .helpers import Outcome, fresh, rollout, tiny
from .test_adapters import NAMES, folder, served
from .test_adapters import PROMPTS as ADAPTED
from .test_architectures import random_model
from .test_episodes import flat, run
from .test_episodes import model as talking
from .test_invariance import FLOWS, LENGTHS, PROMPT_IDS, PROMPTS, SAMPLING, baseline
from .test_requests import REQUESTS, TIGHT, alone, arrive, finish

MakeEngine = Callable[..., Engine]
Oracle = Callable[[dict[tuple[int, int], list[int]]], None]
__all__ = ["folder", "talking"]  # fixtures

SIZES: dict[str, dict[str, Any]] = {
    "room for all": {"kv_pages": 200},
    "preemption": {"kv_pages": 20, "page_size": 4, "max_batch_tokens": 40},
    "pages of one token": {"kv_pages": 1600, "page_size": 1, "max_sequences": 5},
    "few tokens a step": {"kv_pages": 60, "page_size": 4, "max_batch_tokens": 9},
    "one at a time": {"kv_pages": 60, "page_size": 2, "max_sequences": 1},
}


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    """Lets sequences, by prompt id and sample, draft what they are going to sample; of four drafts
    three have a mistake somewhere."""

    def use(known: dict[tuple[int, int], list[int]]) -> None:
        rng = random.Random(0)

        def draft(
            self: Speculation, sequence: Sequence, record: Record, room: int, rows: int
        ) -> list[int]:
            request = sequence.owner.request
            start = int(record.generated[sequence.slot])
            right = known[request.prompt_id, sequence.sample_index]
            tokens = right[start : start + min(room, 5)]
            place = rng.randrange(7)
            if place < len(tokens):
                tokens[place] = (tokens[place] + 1) % 40
            return tokens

        monkeypatch.setattr(Speculation, "draft", draft)

    return use


def known_of(found: Outcome) -> dict[tuple[int, int], list[int]]:
    return {key: tokens for key, (tokens, *_) in found.items()}


def right(*completions: Completion) -> dict[tuple[int, int], list[int]]:
    return {(c.prompt_id, c.sample_index): c.token_ids for c in completions}


def check_counts(engine: Engine, accepted: int = 10) -> None:
    """Drafts were made, some counted and some did not."""
    stats = engine.stats
    assert accepted < stats.num_accepted_tokens < stats.num_draft_tokens, stats


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("preset", "backend"), FLOWS[1:])
def test_drafts_change_no_bit(
    preset: str, backend: str, sizes: str, make_engine: MakeEngine, oracle: Oracle
) -> None:
    wanted = baseline(preset, backend)
    oracle(known_of(wanted))
    engine = make_engine(tiny(preset, backend), num_speculative_tokens=5, **SIZES[sizes])
    assert rollout(engine, PROMPTS, SAMPLING, PROMPT_IDS) == wanted
    check_counts(engine)
    assert engine.stats.preemptions >= 1 or sizes != "preemption"
    assert engine.stats.sampled_tokens == sum(len(tokens) for tokens, *_ in wanted.values())


def test_nor_by_the_reference_operators(make_engine: MakeEngine, oracle: Oracle) -> None:
    wanted = baseline("fp8", "reference")
    oracle(known_of(wanted))
    engine = make_engine(tiny("fp8", "reference"), kv_pages=200, num_speculative_tokens=5)
    assert rollout(engine, PROMPTS, SAMPLING, PROMPT_IDS) == wanted
    check_counts(engine)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    page_size=st.sampled_from([1, 2, 3, 16]),
    spare=st.integers(0, 40),
    budget=st.integers(2, 60),
    max_sequences=st.integers(1, 24),
    mistakes=st.integers(0, 1000),
)
def test_under_any_setting(
    page_size: int, spare: int, budget: int, max_sequences: int, mistakes: int
) -> None:
    wanted = baseline("fp8", "native")
    known, rng = known_of(wanted), random.Random(mistakes)

    def draft(
        self: Speculation, sequence: Sequence, record: Record, room: int, rows: int
    ) -> list[int]:
        start = int(record.generated[sequence.slot])
        tokens = known[sequence.owner.request.prompt_id, sequence.sample_index][start:]
        count = rng.randrange(min(room, 9) + 1)
        return [t if rng.random() < 0.8 else rng.randrange(40) for t in tokens[:count]]

    needed = -(-(max(LENGTHS) + SAMPLING.max_new_tokens - 1) // page_size)
    size = EngineSize(needed + spare, page_size, budget, max_sequences, num_speculative_tokens=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speculation, "draft", draft)
        engine = Engine(tiny("fp8", "native"), size)
        assert rollout(engine, PROMPTS, SAMPLING, PROMPT_IDS) == wanted
    engine.integrity()
    assert engine.pages.num_used == 0


def test_control_a_draft_that_counts_unchecked(
    make_engine: MakeEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = baseline("fp8", "native")
    oracle(known_of(wanted))
    monkeypatch.setattr(runner, "counts", lambda draft, sampled: True)
    engine = make_engine(tiny("fp8", "native"), kv_pages=200, num_speculative_tokens=5)
    found = rollout(engine, PROMPTS, SAMPLING, PROMPT_IDS)
    assert sum(found[key] != wanted[key] for key in wanted) > len(wanted) // 2


def test_control_a_key_that_a_draft_has_left_behind(
    make_engine: MakeEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a draft that does not count has written must be written anew. Here it comes back after
    it was."""
    wanted = baseline("fp8", "native")
    oracle(known_of(wanted))
    left: dict[int, list[tuple[int, torch.Tensor]]] = {}
    compute = Runner._compute

    def stale(self: Runner, plan: StepPlan) -> Any:
        rows = self.scheduler.rows
        slots = [
            int(rows.slots_at(np.array([row]), rows.position[[row]] + 1)[0]) for row in plan.drafts
        ]
        found = compute(self, plan)
        for layer, store in enumerate(self.stores):
            assert isinstance(store, KVStore)
            for slot, key in left.get(layer, ()):
                store.k[slot] = key
            left[layer] = [(slot, store.k[slot].clone()) for slot in slots]
        return found

    monkeypatch.setattr(Runner, "_compute", stale)
    engine = make_engine(tiny("fp8", "native"), kv_pages=200, num_speculative_tokens=5)
    found = rollout(engine, PROMPTS, SAMPLING, PROMPT_IDS)
    assert sum(found[key] != wanted[key] for key in wanted) > 3


def test_requests_with_their_own_settings_come_and_go(
    make_engine: MakeEngine, oracle: Oracle
) -> None:
    """Greedy and truncated sampling, stop strings, ends that are ignored; some are cancelled."""
    model = tiny("fp8", "native")
    wanted = {index: alone(model, request) for index, request in enumerate(REQUESTS)}
    oracle(right(*(c for done in wanted.values() for c in done)))
    for seed, sizes in enumerate(({"kv_pages": 200}, TIGHT)):
        engine = make_engine(model, num_speculative_tokens=5, **sizes)
        found = arrive(engine, seed, cancels=True)
        assert found == {index: wanted[index] for index in found}
        assert engine.stats.num_accepted_tokens > 0


def told_of(engine: Engine, sampling: Sampling) -> tuple[list[Completion], list[tuple]]:
    """All completions, and what was told of each token when it was sampled."""
    told, found = list[tuple](), list[Completion]()
    for prompt, prompt_id in zip(PROMPTS, PROMPT_IDS):
        engine.submit(prompt, sampling, prompt_id)
    while engine.num_open:
        over = engine.step(lambda request, *what: told.append((request.prompt_id, *what)))
        found += [completion for _, completion in over]
    found.sort(key=lambda c: (c.prompt_id, c.sample_index))
    return found, sorted(told, key=lambda what: what[:2])


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.7},
        {"stop": ("a", "e7"), "ignore_eos": True},
        {"stop_tokens": (7, 9, 30)},
        {"top_k": 6, "temperature": 1.4},
        {"top_logprobs": 3},
        {"temperature": 0.0},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_way_to_draw_and_to_end(
    changes: dict[str, Any], make_engine: MakeEngine, oracle: Oracle
) -> None:
    model, sampling = tiny("fp8", "native"), Sampling(n=3, max_new_tokens=20, seed=3)
    sampling = Sampling(**{**vars(sampling), **changes})
    plain = make_engine(model, kv_pages=200, page_size=4)
    wanted, wanted_told = told_of(plain, sampling)
    oracle(right(*wanted))
    engine = make_engine(model, kv_pages=200, page_size=4, num_speculative_tokens=5)
    found, told = told_of(engine, sampling)
    assert found == wanted
    assert told == wanted_told
    assert (engine.stats.num_accepted_tokens > 0) == ("top_logprobs" not in changes)


@pytest.mark.parametrize(
    ("family", "preset"),
    [
        ("mistral", "fp8"),
        ("gemma3_text", "fp8"),
        ("gemma4_text", "fp8"),
        ("gpt_oss", "fp8"),
        ("deepseek_v3", "fp8"),
        ("qwen3", "fp8[kv_cache=int8]"),
        ("qwen3", "fp8[kv_cache=e4m3-calibrated]"),
        ("qwen3", "bf16"),
    ],
)
def test_windows_caches_and_experts(
    family: str, preset: str, make_engine: MakeEngine, oracle: Oracle
) -> None:
    model = random_model(family, preset, "native")
    if model.precision.calibrated:
        Calibrator(model).calibrate(["abc"])
    sampling, found = Sampling(3, 14, seed=2), list[list[Completion]]()
    for most in (0, 5):
        sizes = {"kv_pages": 40, "page_size": 4, "max_batch_tokens": 40}
        engine = make_engine(model, num_speculative_tokens=most, record_routes=True, **sizes)
        found.append(flat(engine.generate(PROMPTS, sampling, PROMPT_IDS)))
        oracle(right(*found[0]))
    assert found[0] == found[1]
    assert (found[0][0].routes is None) == (model.config.routed is None)
    check_counts(engine)


def test_adapters_in_one_batch(folder: Path, oracle: Oracle) -> None:
    model, found = served(folder), list[list[Completion]]()
    sampling = Sampling(n=2, max_new_tokens=6, seed=5)
    for most in (0, 5):
        engine = Engine(model, page_size=4, num_speculative_tokens=most)
        found.append(flat(engine.generate(ADAPTED, sampling, range(6), adapters=NAMES)))
        oracle(right(*found[0]))
    assert found[0] == found[1]
    check_counts(engine, 3)


def test_conversations(talking: Model) -> None:
    """Of several turns; drafts are the engine's own."""
    wanted, _ = run(talking, FakeEnvironments())
    found, episodes = run(talking, FakeEnvironments(), num_speculative_tokens=4)
    assert flat(found) == flat(wanted)
    assert episodes.stats.num_draft_tokens > 0


@pytest.mark.parametrize("most", [3, "auto"])
def test_what_was_sampled_before_is_drafted(most: int | str, make_engine: MakeEngine) -> None:
    """The same prompts again, drawn with other numbers, and with the same: then all is known."""
    model = fresh("fp8", "native")
    sampling = Sampling(n=2, max_new_tokens=40, seed=1, temperature=0.7, ignore_eos=True)
    plain = make_engine(model, kv_pages=400)
    engine = make_engine(model, kv_pages=400, num_speculative_tokens=most)
    steps = []
    for seed in (1, 2, 1):
        again = Sampling(**{**vars(sampling), "seed": seed})
        found = [flat(each.generate(PROMPTS[:1], again)) for each in (plain, engine)]
        assert found[0] == found[1]
        steps.append(engine.stats.steps)
    stats = engine.stats
    assert stats.num_accepted_tokens > 0.8 * stats.num_draft_tokens > 0
    assert steps[2] < plain.stats.steps


def test_many_long_prompts_with_short_answers_are_not_kept(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a prompt takes is counted, and is no more for a long one: the bound on tokens is one on
    prompts too. The control: those that are kept are the newest."""
    monkeypatch.setattr(speculation, "KEPT_TOKENS", 20 * speculation._OF_A_PROMPT)
    engine = make_engine(fresh("fp8", "native"), kv_pages=400, num_speculative_tokens="auto")
    drafts = engine.scheduler.speculation
    assert drafts is not None
    sampling = Sampling(n=1, max_new_tokens=2, seed=0)
    prompts = [[1 + i % 9, 1 + i // 9, *[3] * (20 * (1 + i % 3))] for i in range(30)]
    for prompt in prompts:
        engine.generate([prompt], sampling)
    assert len(drafts._texts) < 20
    assert {len(key) for key in drafts._texts} == {32}
    assert drafts._kept == sum(texts.size for texts in drafts._texts.values())
    newest = sha256(np.array(prompts[-1], np.int32)).digest()
    oldest = sha256(np.array(prompts[0], np.int32)).digest()
    assert newest in drafts._texts
    assert oldest not in drafts._texts


def test_nothing_is_drafted_where_it_would_not_be_exact(make_engine: MakeEngine) -> None:
    """A state of linear attention is overwritten by a draft; with other flows a row's bits depend on
    its batch."""

    def reason(model: Model) -> str | None:
        return cannot_speculate(model.config, model.precision, model.ops.consistency)

    linear = tiny_model("fp8", "qwen3_5_text")
    assert "linear attention" in str(reason(linear))
    others = ("fp8[activation_granularity=tensor]", "bf16[engines=separate]")
    reasons = {reason(tiny(preset, "native")) for preset in others}
    reasons.add(reason(tiny("fp8", "native", "fast")))
    assert len(reasons) == 1
    assert "depend on its batch" in str(reasons.pop())
    assert reason(tiny("fp8", "native")) is None
    sampling = Sampling(3, 9, seed=1)
    prompts = [[3, 4, 5], [6], [7, 8]]
    engines = (make_engine(linear), make_engine(linear, num_speculative_tokens=4))
    plain, drafting = (rollout(each, prompts, sampling) for each in engines)
    assert plain == drafting
    assert engines[1].scheduler.speculation is None


@pytest.mark.parametrize("sizes", ["room for all", "preemption"])
def test_captured_steps_with_drafts(
    sizes: str, make_captured: MakeEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are rows of a captured step as others are; none is launched ahead of its tokens."""
    wanted = baseline("fp8", "native")
    oracle(known_of(wanted))
    engine = make_captured(tiny("fp8", "native"), num_speculative_tokens=5, **SIZES[sizes])
    assert rollout(engine, PROMPTS, SAMPLING, PROMPT_IDS) == wanted
    check_counts(engine)
    assert engine.graphs is not None
    assert engine.graphs.num_captured > 3


def test_a_step_that_a_callback_breaks_off_leaves_nothing(
    make_engine: MakeEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sampled behind its drafts is not of the requests that have the slots next."""
    wanted = baseline("fp8", "native")
    oracle(known_of(wanted))
    engine = make_engine(tiny("fp8", "native"), kv_pages=200, num_speculative_tokens=5)
    requests = [engine.submit(p, SAMPLING, i) for p, i in zip(PROMPTS, PROMPT_IDS, strict=True)]

    def broken(*told: object) -> None:
        if engine.stats.num_draft_tokens:
            raise KeyError

    def until_it_breaks() -> None:
        while engine.num_open:
            engine.step(broken)

    with pytest.raises(KeyError):
        until_it_breaks()
    monkeypatch.setattr(Speculation, "draft", lambda *given: [])
    for request in requests[:-1]:
        engine.cancel(request)
    for prompt, prompt_id in zip(PROMPTS[-2::-1], PROMPT_IDS[-2::-1], strict=True):
        engine.submit(prompt, SAMPLING, prompt_id)
    found = [completion for done in finish(engine).values() for completion in done]
    assert right(*found) == known_of(wanted)


def test_what_is_not_finite_behind_a_draft_is_nobodys_fault(make_engine: MakeEngine) -> None:
    """A token that is never sampled, and whose embedding is not finite, is drafted; what follows is
    as if it were not. Sampled or given it is an error."""
    model = fresh("bf16", "native", seed=8)
    with torch.no_grad():
        parameters = model.named_parameters()
        parameters["embed"][45] = float("inf")
        parameters["head"][45] = 0.0  # never among the three likeliest
    model.sync()
    sampling = Sampling(2, 12, seed=1, top_k=3, ignore_eos=True)
    wanted = rollout(make_engine(model), PROMPTS, sampling)
    assert not any(45 in tokens for tokens, *_ in wanted.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speculation, "draft", lambda *given: [45][: given[3]])
        engine = make_engine(model, num_speculative_tokens=1)
        assert rollout(engine, PROMPTS, sampling) == wanted
        assert engine.stats.num_draft_tokens > 10
        assert engine.stats.num_accepted_tokens == 0
    with pytest.raises(NonFiniteError):
        rollout(make_engine(model), [[45]], sampling)
