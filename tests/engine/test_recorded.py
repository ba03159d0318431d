"""Decode steps that a CPU has recorded give every bit of those that it computes anew: tokens,
log-probabilities, and what is in the cache; by the base and by several adapters."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from isobit.engine.captured import RecordedCalls
from isobit.engine.engine import Engine
from isobit.engine.graphs import DecodeGraphs
from isobit.engine.types import Sampling
from isobit.errors import IsobitError, NonFiniteError
from isobit.kernels.native import available
from isobit.kernels.native.recording import Recording
from isobit.model import Model
from isobit.model.adapters.multi_lora import MultiLora, Table
from isobit.model.adapters.targets import NewAdapter, new_adapter
from tests.models import ALPHABET, tiny_model

from .helpers import Outcome, fresh, outcome, rollout, scale, tiny
from .test_graphs import STOPPING
from .test_invariance import PROMPT_IDS, PROMPTS, SAMPLING

pytestmark = pytest.mark.skipif(not available()[0], reason=f"native backend: {available()[1]}")

MakeEngine = Callable[..., Engine]
PRESETS = {
    "float32": None, "bf16": None, "fp8": None, "fp8-rollout": None,
    "nvfp4": "__bool__ of a tensor",  # its codes are made in PyTorch
}  # fmt: skip
"""And why a step is computed anew there."""


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Of every step that was made again, why it was computed anew; and several contexts."""
    found: list[str | None] = []
    run = Recording.run

    def counted(self: Recording) -> None:
        found.append(self.refused)
        run(self)

    monkeypatch.setattr(Recording, "run", counted)
    monkeypatch.setattr("isobit.engine.graphs.SMALLEST_CONTEXT", 16)
    return found


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
    ("family", "refused"), [("qwen3_5_text", None), ("qwen3_moe", "tolist of a tensor")]
)
def test_states_are_recorded_and_experts_computed_anew(
    family: str, refused: str | None, make_engine: MakeEngine, replays: list[str | None]
) -> None:
    model = tiny_model("fp8", family, alphabet=ALPHABET, backend="native")
    sampling = replace(SAMPLING, ignore_eos=True)
    plain, recorded = both(make_engine, model, sampling, kv_pages=200, page_size=4)
    assert recorded == plain
    assert set(replays) == {refused}


@pytest.mark.parametrize("what", ["position", "page table"])
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
        if what == "position":
            return replace(layout, positions=layout.positions.clone())
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


SOME = ["q_proj", "down_proj"]
ADAPTERS = {
    "a": NewAdapter(4, 8, seed=1), "b": NewAdapter(3, 2, SOME, seed=2),
    "wide": NewAdapter(40, 8, seed=3),
}  # fmt: skip
BATCHES = {
    "one": ["a"] * 8, "several": ["a", "b", "wide", "b", "a", "b", "wide", "a"],
    "and the base": [None, "a", None, "b", "b", None, "wide", "a"], "the base": [None] * 8,
}  # fmt: skip


def add(model: Model, name: str, given: NewAdapter) -> None:
    """An adapter whose B is not 0."""
    made = new_adapter(model.config, given)
    random = torch.Generator().manual_seed(given.seed)
    for factors in made.tensors.values():
        factors.copy_(0.2 * torch.randn(factors.shape, generator=random))
    model.transformer.add_adapter(name, made)


def serving(preset: str | None) -> Model:
    model = tiny(preset, "native").serving({})
    for name, given in ADAPTERS.items():
        add(model, name, given)
    return model


def by_adapters(engine: Engine, names: list[str | None], tokens: int = 14) -> Outcome:
    sampling = replace(SAMPLING, max_new_tokens=tokens)
    return outcome(engine.generate(PROMPTS, sampling, PROMPT_IDS, adapters=names))


@pytest.mark.parametrize(
    ("preset", "refused"),
    [
        ("bf16", None),
        ("fp8", None),
        ("float32", "tolist of a tensor"),
        ("nvfp4", "__bool__ of a tensor"),
    ],
)
def test_steps_of_adapters_are_recorded(
    preset: str, refused: str | None, make_engine: MakeEngine, replays: list[str | None]
) -> None:
    """One engine for all batches, so that a recording of one serves the others. Where the factors
    are not read from memory, steps are computed anew."""
    model = serving(preset)
    plain, recorded = make_engine(model, cuda_graphs=False), make_engine(model)
    names = BATCHES.values() if refused is None else [BATCHES["and the base"]]
    found = []
    for batch in names:
        found.append(by_adapters(plain, batch))
        assert by_adapters(recorded, batch) == found[-1]
    assert replays
    assert set(replays) == {refused}
    assert all(one != other for place, one in enumerate(found) for other in found[:place])


def test_adapters_come_and_go_between_recorded_steps(
    make_engine: MakeEngine, replays: list[str | None]
) -> None:
    """Others take the places of those that left, in the recordings that there are."""
    model = serving("fp8")
    engine, plain = make_engine(model), make_engine(model, cuda_graphs=False)
    names = BATCHES["and the base"]
    before = by_adapters(engine, names)
    captured = engine.graphs.num_captured if engine.graphs is not None else 0
    model.remove_adapter("a")
    add(model, "new", replace(ADAPTERS["a"], seed=9))
    others = ["new" if name == "a" else name for name in names]
    after = by_adapters(engine, others)
    assert after == by_adapters(plain, others)
    assert {key for key, drawn in after.items() if drawn != before[key]} == {
        key for key in after if names[PROMPT_IDS.index(key[0])] == "a"
    }
    assert engine.graphs is not None
    assert engine.graphs.num_captured == captured > 0
    assert set(replays) == {None}


def test_an_adapter_comes_while_requests_are_open(
    make_engine: MakeEngine, replays: list[str | None]
) -> None:
    found = []
    for captures in (False, True):
        model, drawn = serving("fp8"), dict[int, list[int]]()
        engine = make_engine(model, cuda_graphs=captures)
        sampling = replace(SAMPLING, n=1, max_new_tokens=30, ignore_eos=True)
        asked = {engine.submit(PROMPTS[0], sampling, 0): 0}
        for place, name in enumerate(["a", "late", "b", None], 1):
            for _ in range(4):
                engine.step()
            if name == "late":
                add(model, name, NewAdapter(8, 16, seed=7))
            asked[engine.submit(PROMPTS[place], sampling, place, adapter=name)] = place
        while engine.num_open:
            drawn |= {asked[request]: done.token_ids for request, done in engine.step()}
        found.append(drawn)
    assert found[0] == found[1]
    assert len(found[0]) == 5
    assert replays


def test_a_recorded_step_reads_no_adapter_that_left(make_engine: MakeEngine) -> None:
    """Its addresses are forgotten, and an open request by it gets an error and not a step."""
    model = serving("fp8")
    engine = make_engine(model)
    request = engine.submit(PROMPTS[0], SAMPLING, adapter="a")
    for _ in range(4):
        engine.step()
    served = model.transformer.served
    assert served is not None
    assert served.table is not None
    assert any(x.any() for x in served.table.addresses)
    model.remove_adapter("a")
    assert not any(x.any() for x in served.table.addresses)
    with pytest.raises(IsobitError, match="'a' is not served any more; cancel its requests"):
        engine.step()
    engine.cancel(request)


@pytest.mark.parametrize("what", ["addresses", "rows"])
def test_negative_control_a_table_that_is_stale(
    what: str,
    make_engine: MakeEngine,
    replays: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other adapters, or rows of them, than those of the step that was recorded."""
    model = serving("fp8")
    engine, plain = make_engine(model), make_engine(model, cuda_graphs=False)
    names, others = BATCHES["and the base"], BATCHES["several"]
    by_adapters(engine, names)
    wanted, take, fill = by_adapters(plain, others), MultiLora.take, Table.fill
    if what == "addresses":
        monkeypatch.setattr(
            Table, "fill", lambda self, order, starts, of: fill(self, order, starts, of[::-1])
        )
    else:
        monkeypatch.setattr(
            MultiLora,
            "take",
            lambda self, numbers, *rest: take(self, np.roll(numbers, 1), *rest),
        )
    assert by_adapters(engine, others) != wanted
    assert set(replays) == {None}
