"""Decode steps that a CPU has recorded give every bit of those that it computes anew: tokens,
log-probabilities, and what is in the cache."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from isobit.engine.captured import RecordedCalls
from isobit.engine.engine import Engine
from isobit.engine.graphs import DecodeGraphs
from isobit.engine.types import Sampling
from isobit.errors import NonFiniteError
from isobit.kernels.native import available
from isobit.model import Model
from tests.models import ALPHABET, one_part_values, tiny_model

from .helpers import Outcome, fresh, rollout, scale, tiny
from .test_graphs import STOPPING
from .test_invariance import PROMPT_IDS, PROMPTS, SAMPLING

pytestmark = pytest.mark.skipif(not available()[0], reason=f"native backend: {available()[1]}")

MakeEngine = Callable[..., Engine]
PRESETS = {
    "float32": None, "bf16": None, "fp8": None, "fp8-rollout": None,
    "nvfp4": "__bool__ of a tensor",  # its codes are made in PyTorch
}  # fmt: skip
"""And why a step is computed anew there."""


def both(
    make_engine: MakeEngine, model: Model, sampling: Sampling, **sizes: int
) -> list[tuple[Outcome, list[bytes]]]:
    """Of an engine that computes each step anew, and of one that records: what they sampled, and
    the bytes of their caches."""
    found = []
    for captures in (False, True):
        engine = make_engine(model, cuda_graphs=captures, **sizes)
        assert engine.captures == captures
        outcome = rollout(engine, PROMPTS, sampling, PROMPT_IDS)
        stored = [t.view(torch.uint8) for store in engine.stores for t in store.tensors]
        found.append((outcome, [t.numpy().tobytes() for t in stored]))
    return found


@pytest.mark.parametrize(("preset", "refused"), PRESETS.items())
def test_recorded_steps_give_the_bits_of_plain_ones(
    preset: str, refused: str | None, make_engine: MakeEngine, replays: list[str | None]
) -> None:
    """Sequences end at different times, are preempted, and grow over pages and contexts."""
    sizes = {"kv_pages": 40, "page_size": 4, "max_batch_tokens": 40}
    plain, recorded = both(make_engine, tiny(preset, "native"), SAMPLING, **sizes)
    assert recorded == plain
    assert len(replays) > 10
    assert set(replays) == {refused}


@pytest.mark.parametrize("sampling", STOPPING.values(), ids=STOPPING)
def test_whatever_is_sampled(
    sampling: Sampling, make_engine: MakeEngine, replays: list[str | None]
) -> None:
    plain, recorded = both(make_engine, tiny("fp8", "native"), sampling, kv_pages=200)
    assert recorded == plain
    assert set(replays) <= {None}
    assert replays or sampling.max_new_tokens <= 2


@pytest.mark.parametrize(
    ("family", "own", "refused"),
    [
        ("qwen3_5_text", {}, None),
        ("nemotron_h", one_part_values(("linear_attention", "mlp", "full_attention")), None),
        ("nemotron_h", {}, "tolist of a tensor"),
        ("qwen3_moe", {}, "tolist of a tensor"),
        ("gemma4_text-small", {}, None),
        ("gemma4_text-experts", {}, "tolist of a tensor"),
    ],
)
def test_states_are_recorded_and_experts_computed_anew(
    family: str,
    own: dict[str, Any],
    refused: str | None,
    make_engine: MakeEngine,
    replays: list[str | None],
) -> None:
    model = tiny_model("fp8", family, alphabet=ALPHABET, backend="native", **own)
    sampling = replace(SAMPLING, ignore_eos=True)
    plain, recorded = both(make_engine, model, sampling, kv_pages=200, page_size=4)
    assert recorded == plain
    assert set(replays) == {refused}


@pytest.mark.parametrize("what", ["turn", "page table"])
def test_negative_control_an_argument_that_is_stale(
    what: str,
    make_engine: MakeEngine,
    replays: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An address that is not where the next step's inputs are."""
    layout_of = DecodeGraphs._layout

    def stale(self: DecodeGraphs, count: int, context: int):  # type: ignore[no-untyped-def]
        layout = layout_of(self, count, context)
        if what == "turn":
            return replace(layout, turns=layout.rotated.clone())
        return replace(layout, page_table=layout.page_table.clone())

    monkeypatch.setattr(DecodeGraphs, "_layout", stale)
    plain, recorded = both(make_engine, tiny("fp8", "native"), SAMPLING, kv_pages=200, page_size=2)
    assert replays
    assert recorded[0] != plain[0]


def test_other_weights_and_another_number_of_threads_are_noticed(
    make_engine: MakeEngine, replays: list[str | None]
) -> None:
    model = fresh("fp8", "native")
    engine, plain = make_engine(model), make_engine(model, cuda_graphs=False)
    for change, threads in ((1.0, 1), (1.2, 1), (1.2, 2)):
        scale(model, change)
        torch.set_num_threads(threads)
        expected = rollout(plain, PROMPTS, SAMPLING, PROMPT_IDS)
        assert rollout(engine, PROMPTS, SAMPLING, PROMPT_IDS) == expected
    assert engine.graphs is not None
    assert {threads for *_, threads in engine.graphs._graphs} == {1, 2}


def test_recordings_share_their_memory(make_engine: MakeEngine) -> None:
    engine = make_engine(tiny("fp8", "native"))
    rollout(engine, PROMPTS, SAMPLING, PROMPT_IDS)
    assert engine.graphs is not None
    graphs = list(engine.graphs._graphs.values())
    assert len(graphs) >= 3
    arenas = {id(graph._arena) for graph in graphs if isinstance(graph, RecordedCalls)}
    assert len(arenas) == 1


def test_nan_stops_a_recorded_step_as_it_stops_a_plain_one(
    make_engine: MakeEngine, replays: list[str | None]
) -> None:
    """A token whose embedding is not finite, once it is sampled."""
    model = fresh("fp8", "native", 3)
    sampling = Sampling(n=2, max_new_tokens=30, ignore_eos=True, seed=4)
    first = make_engine(model, cuda_graphs=False).generate([[5, 6]], sampling)[0]
    late = first[0].token_ids[20]
    assert late not in first[0].token_ids[:19]
    with torch.no_grad():
        model.named_parameters()["embed"][late] = float("inf")
    model.sync()
    said = []
    for captures in (False, True):
        with pytest.raises(NonFiniteError) as caught:
            make_engine(model, cuda_graphs=captures).generate([[5, 6]], sampling)
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert replays
