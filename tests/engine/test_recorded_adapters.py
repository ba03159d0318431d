"""Recorded decode steps of several adapters and of the base give every bit of those that are
computed anew, whatever comes, goes or happens in another thread between a recording and a
replay."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from threading import Condition, Thread, current_thread
from typing import Any

import pytest
import torch

from isobit.engine.engine import Engine
from isobit.errors import IsobitError
from isobit.kernels.native import available
from isobit.kernels.native.recording import Recording
from isobit.model import Model
from isobit.model.adapters import multi_lora
from isobit.model.adapters.low_rank import Adapter
from isobit.model.adapters.multi_lora import AdapterRows, Assignment, MultiLora
from isobit.model.adapters.targets import NewAdapter, new_adapter

from .helpers import Outcome, outcome, tiny
from .test_invariance import PROMPT_IDS, PROMPTS, SAMPLING

pytestmark = pytest.mark.skipif(not available()[0], reason=f"native backend: {available()[1]}")

MakeEngine = Callable[..., Engine]
Names = list[str | None]
ADAPTERS = {
    "a": NewAdapter(4, 8, seed=1),
    "b": NewAdapter(3, 2, ["q_proj", "down_proj"], seed=2),
    "wide": NewAdapter(40, 8, seed=3),
}
MIXED: Names = [None, "a", None, "b", "b", None, "wide", "a"]
SEVERAL: Names = ["a", "b", "wide", "b", "a", "b", "wide", "a"]
BATCHES: dict[str, Names] = {
    "one": ["a"] * 8,
    "several": SEVERAL,
    "and the base": MIXED,
    "the base": [None] * 8,
}


def add(model: Model, name: str, given: NewAdapter) -> Adapter:
    """An adapter whose B is not 0."""
    made = new_adapter(model.config, given)
    random = torch.Generator().manual_seed(given.seed)
    for factors in made.tensors.values():
        factors.copy_(0.2 * torch.randn(factors.shape, generator=random))
    model.transformer.add_adapter(name, made)
    return made


def serving(preset: str = "fp8") -> Model:
    model = tiny(preset, "native").serving({})
    for name, given in ADAPTERS.items():
        add(model, name, given)
    return model


def served(model: Model) -> MultiLora:
    assert model.transformer.served is not None
    return model.transformer.served


def by_adapters(
    engine: Engine, names: Names, tokens: int = 14, ignore_eos: bool = False
) -> Outcome:
    sampling = replace(SAMPLING, max_new_tokens=tokens, ignore_eos=ignore_eos)
    return outcome(engine.generate(PROMPTS, sampling, PROMPT_IDS, adapters=names))


def so_far(engine: Engine) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of what is open."""
    record = engine.scheduler.record
    return [
        (record.tokens[slot, :count].tolist(), record.logprobs[slot, :count].tolist())
        for slot, count in enumerate(record.generated.tolist())
    ]


@pytest.mark.parametrize(
    ("preset", "refused"),
    [
        ("bf16", None),
        ("fp8", None),
        ("float32", "tolist of a tensor"),
        ("nvfp4", "__bool__ of a tensor"),
    ],
)
def test_recorded_steps_give_the_bits_of_plain_ones(
    preset: str, refused: str | None, make_engine: MakeEngine, replays: list[str | None]
) -> None:
    """One engine for all batches, so that a recording of one serves the others: of other adapters,
    of other ranks, of none. Where the factors are not read from memory, steps are computed anew."""
    model = serving(preset)
    plain, recorded = make_engine(model, cuda_graphs=False), make_engine(model)
    found = []
    for names in BATCHES.values() if refused is None else [MIXED]:
        found.append(by_adapters(plain, names))
        assert by_adapters(recorded, names) == found[-1]
    assert replays
    assert set(replays) == {refused}
    assert all(one != other for place, one in enumerate(found) for other in found[:place])


def test_others_take_the_places_of_those_that_left(
    make_engine: MakeEngine, replays: list[str | None]
) -> None:
    """In the recordings that there are. Rows of those that stayed have the bits that they had; so
    has one whose factors are trained on, until it is served anew by another name."""
    model = serving()
    trained = add(model, "x", ADAPTERS["a"])
    engine, plain = make_engine(model), make_engine(model, cuda_graphs=False)
    names: Names = ["x" if name == "a" else name for name in MIXED]
    before = by_adapters(engine, names, ignore_eos=True)
    assert before == by_adapters(plain, MIXED, ignore_eos=True)
    assert engine.graphs is not None
    captured = engine.graphs.num_captured
    for factors in trained.tensors.values():
        factors.mul_(2.0)
    assert by_adapters(engine, names, ignore_eos=True) == before
    model.remove_adapter("x")
    model.transformer.add_adapter("new", trained)
    names = ["new" if name == "x" else name for name in names]
    after = by_adapters(engine, names, ignore_eos=True)
    assert after == by_adapters(plain, names, ignore_eos=True)
    assert {key for key, drawn in after.items() if drawn != before[key]} == {
        key for key in after if MIXED[PROMPT_IDS.index(key[0])] == "a"
    }
    assert engine.graphs.num_captured == captured > 0
    assert set(replays) == {None}


@pytest.mark.slow
def test_an_adapter_comes_while_requests_are_open(
    make_engine: MakeEngine, replays: list[str | None]
) -> None:
    found = []
    for captures in (False, True):
        model, drawn = serving(), dict[int, tuple[list[int], list[float]]]()
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
            for request, done in engine.step():
                drawn[asked[request]] = done.token_ids, done.logprobs
        found.append(drawn)
    assert found[0] == found[1]
    assert len(found[0]) == 5
    assert replays


@pytest.mark.parametrize("what", ["addresses", "rows", "offsets"])
def test_negative_control_a_table_that_is_stale(
    what: str,
    make_engine: MakeEngine,
    replays: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a step of as many rows read first is read by the later ones. All adapters stay, so the
    memory is valid."""
    model = serving()
    engine, plain = make_engine(model), make_engine(model, cuda_graphs=False)
    fill, first = Assignment.fill, dict[int, Any]()

    def stale(self: Assignment, numbers: multi_lora.Numbers) -> None:
        fill(self, numbers)
        if engine.graphs is not None and self is engine.graphs._assignment:
            now = getattr(self, f"_{what}")
            now[:] = first.setdefault(len(numbers), now.copy())

    wanted = by_adapters(plain, MIXED), by_adapters(plain, SEVERAL)
    monkeypatch.setattr(Assignment, "fill", stale)
    found = by_adapters(engine, MIXED), by_adapters(engine, SEVERAL)
    assert found[1] != wanted[1]
    assert set(replays) == {None}


@pytest.mark.parametrize("captures", [True, False], ids=["recorded", "plain"])
def test_a_step_ends_with_the_adapters_that_it_began_with(
    captures: bool, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that leaves in the middle of a step, as from another thread, is held until its end; then
    its memory is free, and an open request by it gets an error and not a step. Before the step it
    would have got one: the control."""
    model, sampling = serving(), replace(SAMPLING, n=2, max_new_tokens=30, ignore_eos=True)
    gone = weakref.ref(served(model)._adapters[served(model).number("a")])
    there = list[bool]()

    def leaves(self: Any, *given: Any) -> Any:
        if len(there) == 0:
            model.remove_adapter("a")
            gc.collect()
            there.append(gone() is not None)
        return middle(self, *given)

    engines = make_engine(model, cuda_graphs=captures), make_engine(serving(), cuda_graphs=False)
    for engine in engines:
        for name in ("a", "b"):
            engine.submit(PROMPTS[0], sampling, adapter=name)
        for _ in range(4):
            engine.step()
    owner, method = (Recording, "run") if captures else (AdapterRows, "product")
    middle = getattr(owner, method)
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, leaves)
        engines[0].step()
    engines[1].step()
    assert there == [True]
    assert so_far(engines[0]) == so_far(engines[1])
    gc.collect()
    assert gone() is None
    with pytest.raises(IsobitError, match="'a' is not served any more; cancel its requests"):
        engines[0].step()
    for engine in engines:
        for request in list(engine.scheduler.requests):
            engine.cancel(request)


class _Turns:
    """Two threads take turns, by which each goes on from one place to the next."""

    def __init__(self) -> None:
        self._changed, self._turn, self._working = Condition(), "0", {"0", "1"}

    def next(self, ends: bool = False) -> None:
        """It is the other's turn, until it is the own one again."""
        own = current_thread().name
        if own not in self._working:
            return
        with self._changed:
            if ends:
                self._working.discard(own)
            self._turn = "1" if own == "0" else "0"
            self._changed.notify_all()
            self._changed.wait_for(lambda: ends or self._turn == own or len(self._working) == 1)

    def run(self, functions: list[Callable[[], object]]) -> list[object]:
        """What both return, or have raised."""
        found: list[object] = [None, None]

        def work(number: int) -> None:
            with self._changed:
                self._changed.wait_for(lambda: self._turn == str(number) or number == 0)
            try:
                found[number] = functions[number]()
            except Exception as error:
                found[number] = error
            finally:
                self.next(ends=True)

        threads = [Thread(target=work, args=(number,), name=str(number)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


@pytest.mark.parametrize("captures", [True, False], ids=["recorded", "plain"])
@pytest.mark.parametrize("shared", [False, True], ids=["", "control"])
def test_two_engines_over_one_model_in_two_threads(
    captures: bool, shared: bool, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has the bits that it has alone, also where one computes between the assignment of the
    other's step and its products. The control: they share the assignment, or which one is the
    present. Both have as many rows in every step, so that it reads no memory that is not there."""
    if shared:
        monkeypatch.setattr(multi_lora, "_Present", type("_Present", (), {"assignment": None}))
    model, turns, taken = serving(), _Turns(), list[None]()
    batches = MIXED, SEVERAL
    wanted = [
        by_adapters(make_engine(model, cuda_graphs=False), names, ignore_eos=True)
        for names in batches
    ]
    engines = [make_engine(model, cuda_graphs=captures, prefix_cache=False) for _ in batches]
    if captures:
        for engine in engines:  # makes the graphs, and all recordings
            by_adapters(engine, SEVERAL, ignore_eos=True)
        if shared:
            first, second = (engine.graphs for engine in engines)
            assert first is not None
            assert second is not None
            second._assignment = first._assignment
            second.clear()
            by_adapters(engines[1], SEVERAL, ignore_eos=True)
    owner, method = (Recording, "run") if captures else (AdapterRows, "product")
    middle = getattr(owner, method)

    def in_turns(self: Any, *given: Any) -> Any:
        taken.append(turns.next())
        return middle(self, *given)

    monkeypatch.setattr(owner, method, in_turns)
    found = turns.run(
        [
            lambda engine=engine, names=names: by_adapters(engine, names, ignore_eos=True)  # type: ignore[misc]
            for engine, names in zip(engines, batches)
        ]
    )
    assert len(taken) > 20
    assert (found == wanted) == (not shared)
