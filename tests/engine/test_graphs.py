"""Captured decode steps, over their stand-in on a CPU: padding, fixed buffers and steps launched
ahead change no bit.

The stand-in calls what a GPU would replay. Whether a GPU captures everything, the last test shows,
where there is one.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.engine.calibration import Calibrator
from isobit.engine.captured import graph_kind
from isobit.engine.engine import Engine
from isobit.engine.graphs import DecodeGraphs, ladder
from isobit.engine.types import EngineSize, Sampling
from isobit.errors import IsobitError
from isobit.kernels import BACKENDS, KVStore
from tests.models import tiny_model

from .helpers import EagerGraph, fresh, rollout, scale, tiny
from .test_invariance import FLOWS, LENGTHS, PROMPT_IDS, PROMPTS, SAMPLING, check

MakeEngine = Callable[..., Engine]


@pytest.mark.parametrize(("preset", "backend"), FLOWS)
def test_captured_steps_give_the_bits_of_plain_ones(
    preset: str, backend: str, make_captured: MakeEngine
) -> None:
    engine = make_captured(tiny(preset, backend), kv_pages=20, page_size=4, max_batch_tokens=40)
    check(preset, backend, engine)
    assert engine.graphs is not None
    assert engine.graphs.num_captured >= 4
    assert engine.stats.preemptions >= 3


@pytest.mark.parametrize(
    "sizes",
    [
        {"kv_pages": 200},
        {"kv_pages": 1600, "page_size": 1, "max_sequences": 5},
        {"kv_pages": 60, "max_batch_tokens": 7},
        {"kv_pages": 60, "max_sequences": 1},
    ],
)
def test_under_other_settings_too(sizes: dict[str, int], make_captured: MakeEngine) -> None:
    check("fp8", "native", make_captured(tiny("fp8", "native"), **sizes))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_text", "nemotron_h"])
def test_padded_rows_are_without_effect(
    family: str, make_engine: MakeEngine, make_captured: MakeEngine
) -> None:
    """A mixture's go through experts too, and through their routers' choices; those of linear
    attention have a state, in a page of their own."""
    model = tiny_model("fp8", family)
    prompts, sampling = [[3, 4, 5], [6], [7, 8]], Sampling(3, 6, seed=1)
    plain, captured = (
        make(model, kv_pages=60, page_size=4).generate(prompts, sampling)
        for make in (make_engine, make_captured)
    )
    assert plain == captured


@pytest.mark.parametrize("rungs", [[24], [3, 24], list(range(1, 25))])
def test_any_ladder_gives_the_same_bits(rungs: list[int], make_captured: MakeEngine) -> None:
    engine = make_captured(tiny("fp8", "native"), kv_pages=200, max_sequences=24)
    graphs = engine._ready_graphs()
    assert graphs is not None
    graphs.ladder = rungs
    check("fp8", "native", engine)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    page_size=st.sampled_from([1, 2, 3, 16]),
    spare=st.integers(0, 40),
    budget=st.integers(1, 60),
    max_sequences=st.integers(1, 24),
)
def test_any_setting(page_size: int, spare: int, budget: int, max_sequences: int) -> None:
    needed = -(-(max(LENGTHS) + SAMPLING.max_new_tokens - 1) // page_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isobit.engine.engine.graph_kind", lambda model, wanted: EagerGraph)
        engine = Engine(
            tiny("bf16", "native"), EngineSize(needed + spare, page_size, budget, max_sequences)
        )
    check("bf16", "native", engine)
    engine.integrity()


def test_negative_control_padding_in_a_page_of_a_sequence(make_captured: MakeEngine) -> None:
    engine = make_captured(tiny("fp8", "native"), kv_pages=200)
    graphs = engine._ready_graphs()
    assert graphs is not None
    graphs.spare_page = 0  # the first prompt's
    with pytest.raises(AssertionError):
        check("fp8", "native", engine)


def test_negative_control_a_step_ahead_with_other_tokens(
    make_captured: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step's tokens come from the device: from the wrong rows, they are noticed."""
    launch = DecodeGraphs.launch

    def rolled(self, rows, which, source=None, adapters=None):  # type: ignore[no-untyped-def]
        return launch(self, rows, which, None if source is None else np.roll(source, 1), adapters)

    monkeypatch.setattr(DecodeGraphs, "launch", rolled)
    with pytest.raises(AssertionError):
        check("fp8", "native", make_captured(tiny("fp8", "native"), kv_pages=200))


STOPPING = {
    "end of sequence and length": Sampling(n=4, max_new_tokens=18, temperature=0.9, seed=5),
    "stop strings": Sampling(n=4, max_new_tokens=18, seed=5, stop=("a", "e", "7")),
    "one token": Sampling(n=4, max_new_tokens=1, seed=5),
    "two tokens": Sampling(n=3, max_new_tokens=2, seed=5, ignore_eos=True),
    "greedy": Sampling(n=2, max_new_tokens=18, temperature=0, seed=5),
    "truncated": Sampling(n=3, max_new_tokens=18, top_k=9, top_p=0.9, min_p=0.01, seed=5),
}


@pytest.mark.parametrize(
    "sizes", [{"kv_pages": 200}, {"kv_pages": 24, "page_size": 4, "max_sequences": 6}]
)
@pytest.mark.parametrize("sampling", STOPPING.values(), ids=STOPPING)
def test_steps_launched_ahead_end_where_simple_ones_do(
    sampling: Sampling,
    sizes: dict[str, int],
    make_engine: MakeEngine,
    make_captured: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens, log-probabilities, texts and reasons of the simple step, and pages in order after
    every step."""
    simple = rollout(make_engine(tiny("bf16", "native"), **sizes), PROMPTS, sampling, PROMPT_IDS)
    ahead: list[bool] = []
    launch = DecodeGraphs.launch

    def count(self, rows, which, source=None, adapters=None):  # type: ignore[no-untyped-def]
        ahead.append(source is not None)
        return launch(self, rows, which, source, adapters)

    monkeypatch.setattr(DecodeGraphs, "launch", count)
    assert (
        rollout(make_captured(tiny("bf16", "native"), **sizes), PROMPTS, sampling, PROMPT_IDS)
        == simple
    )
    if sampling.max_new_tokens > 2:
        assert sum(ahead) > len(ahead) / 2, "most steps were launched ahead"


@pytest.mark.slow
def test_a_step_that_nothing_goes_on_from_is_dropped(
    make_captured: MakeEngine, make_engine: MakeEngine
) -> None:
    """Sequences that end together, when the next step is under way, and prompts that wait for their
    pages."""
    prompts, sizes = [[5, 6, 7]] * 6, {"kv_pages": 12, "page_size": 4, "max_sequences": 3}
    simple, engine = make_engine(tiny(), **sizes), make_captured(tiny(), **sizes)
    text = simple.generate(prompts[:1], Sampling(max_new_tokens=9, temperature=0, ignore_eos=True))[
        0
    ][0].text
    sampling = Sampling(
        max_new_tokens=20, temperature=0, stop=(text[:6],), ignore_eos=True
    )  # greedy: all alike
    whole = rollout(simple, prompts, sampling)
    assert rollout(engine, prompts, sampling) == whole
    lengths = {len(tokens) for tokens, *_ in whole.values()}
    assert len(lengths) == 1
    assert 3 < max(lengths) < 20
    # what was under way when they stopped was computed, and is not counted
    assert (engine.stats.steps, engine.stats.decode_tokens) == (
        simple.stats.steps,
        simple.stats.decode_tokens,
    )


def test_the_ladder_reaches_every_number_of_rows_with_little_padding() -> None:
    for most in (1, 2, 3, 8, 9, 64, 100, 256, 512, 700):
        rungs = ladder(most)
        assert rungs == sorted(set(rungs))
        assert rungs[-1] == most
        for rows in range(17, most + 1):
            rung = next(step for step in rungs if step >= rows)
            assert rung - rows < rung / 3
    assert ladder(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert len(ladder(512)) < 40


def test_pytorch_operators_are_not_captured_on_a_cpu(make_engine: MakeEngine) -> None:
    engine = make_engine(tiny(), kv_pages=8)
    assert graph_kind(tiny(), True) is None
    assert not engine.captures
    engine.generate([[5]], Sampling(max_new_tokens=2))
    assert engine.graphs is None
    (store, *_) = engine.stores
    assert isinstance(store, KVStore)
    assert store.k.shape[0] == 8 * 16, "no spare page"


@pytest.mark.slow
def test_graphs_are_kept_while_weights_and_stores_stay_where_they_are(
    make_captured: MakeEngine,
) -> None:
    model = fresh("fp8")
    engine = make_captured(model)
    captured: list[int] = []
    sampling = Sampling(n=2, max_new_tokens=12, seed=3, ignore_eos=True)

    def generate() -> object:
        before = None if engine.graphs is None else dict(engine.graphs._graphs)
        found = rollout(engine, PROMPTS, sampling, PROMPT_IDS)
        assert engine.graphs is not None
        captured.append(
            sum(
                (before or {}).get(key) is not graph for key, graph in engine.graphs._graphs.items()
            )
        )
        return found

    first = generate()
    scale(model, 1.01)
    second = generate()
    assert captured[0] > 0
    assert captured[1] == 0
    assert first != second
    assert second == rollout(Engine(model), PROMPTS, sampling, PROMPT_IDS)
    model.transformer._working = model.under(
        "fp8"
    ).transformer._working  # the same values elsewhere
    assert generate() == second
    assert captured[2] == captured[0], "weights that have moved are noticed"


def test_an_engine_that_slept_gives_the_same_bits(
    make_captured: MakeEngine, make_engine: MakeEngine
) -> None:
    for make in (make_engine, make_captured):
        engine = make(tiny("fp8", "native"), kv_pages=200)
        size = engine.kv_bytes
        check("fp8", "native", engine)
        engine.sleep()
        assert engine.stores == []
        assert engine.graphs is None or engine.graphs.num_captured == 0
        assert (engine.kv_bytes, engine.cache_metrics()) == (size, {})
        engine.integrity()
        check("fp8", "native", engine)
        engine.sleep()
        engine.wake()
        assert sum(store.nbytes for store in engine.stores) == size
        check("fp8", "native", engine)


def test_an_engine_at_work_does_not_sleep(make_engine: MakeEngine) -> None:
    engine = make_engine(tiny())
    with pytest.raises(IsobitError, match=r"Engine\.sleep: 1 requests are open"):
        engine.generate([[5]], Sampling(), progress=lambda *_: engine.sleep())


def test_padded_rows_are_not_counted_as_clamped_or_written(
    make_captured: MakeEngine, make_engine: MakeEngine
) -> None:
    """No sequence ends early, so no step is computed for nothing, and both engines write the same
    elements."""
    model = tiny_model("fp8[kv_cache=e4m3-calibrated]")
    Calibrator(model).calibrate(["1+1="])
    assert model.transformer.kv_scales is not None
    model.transformer.kv_scales.values.div_(4)  # so that some are clamped
    sampling = Sampling(n=5, max_new_tokens=9, ignore_eos=True)
    counts = []
    for make in (make_engine, make_captured):
        engine = make(model, kv_pages=32, page_size=4)
        engine.generate(["1+1=", "23*4="], sampling)
        counts.append(
            [store.counts.tolist() for store in engine.stores if store.counts is not None]
        )
    assert counts[0] == counts[1]
    assert all(0 < clamped < written for clamped, written in counts[0])


def test_logits_that_are_not_finite_stop_a_captured_step(
    make_captured: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("float32")
    hidden = model.transformer.hidden
    monkeypatch.setattr(
        model.transformer,
        "hidden",
        lambda tokens, layout, stores, **more: (
            hidden(tokens, layout, stores, **more) * (torch.nan if layout.max_rows == 1 else 1.0)
        ),
    )
    with pytest.raises(IsobitError, match="prompt 0: the model's logits hold NaN or infinity"):
        make_captured(model).generate([[5, 6]], Sampling(max_new_tokens=4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or "triton" not in BACKENDS, reason="needs a GPU")
@pytest.mark.parametrize("preset", ["bf16", "fp8", "fp8[kv_cache=e4m3-calibrated]"])
@pytest.mark.parametrize("sampling", [SAMPLING, *STOPPING.values()], ids=["plain", *STOPPING])
def test_on_a_gpu_captured_steps_give_the_bits_of_eager_ones(
    preset: str, sampling: Sampling, make_engine: MakeEngine
) -> None:
    """Real graphs: kept while the weights are synchronized, captured again after sleep. The control:
    other weights, without which kernels that do nothing would pass."""
    model = fresh(preset, "triton", 3, head_dim=32)
    sizes = {"kv_pages": 40, "page_size": 4, "max_batch_tokens": 64}
    eager, captured = make_engine(model, **sizes, cuda_graphs=False), make_engine(model, **sizes)
    assert (eager.captures, captured.captures) == (False, True)
    seen: list[object] = []
    for change in (1.0, 1.3, 0.9):
        scale(model, change)
        eager.calibrate(PROMPTS)
        expected = rollout(eager, PROMPTS, sampling, PROMPT_IDS)
        assert expected not in seen
        seen.append(expected)
        graphs = None if captured.graphs is None else dict(captured.graphs._graphs)
        assert rollout(captured, PROMPTS, sampling, PROMPT_IDS) == expected
        if change == 1.3:
            assert captured.graphs is not None
            assert graphs or sampling.max_new_tokens == 1, "a first token needs no decode step"
            assert graphs is not None
            assert graphs.items() <= captured.graphs._graphs.items(), "captured once"
            captured.sleep()
