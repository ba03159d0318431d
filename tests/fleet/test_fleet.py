"""Completions of a fleet are those of one engine, in every bit, whatever its engines do
meanwhile."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isobit.engine.engine import Engine
from isobit.engine.fleet import wire
from isobit.engine.fleet.fleet import Batch, Fleet
from isobit.engine.fleet.settings import FleetSettings
from isobit.engine.types import Completion, EngineSize, Sampling
from isobit.errors import RunFailed
from tests.models import tiny_model
from tests.until import until

SAMPLING = Sampling(n=3, max_new_tokens=24, seed=5, stop=("99",))
PROMPTS = [f"{a}+{b}=" for a in range(3) for b in (7, 40, 123)]
IDS = list(range(100, 100 + len(PROMPTS)))
MOST = 60.0  # seconds; nothing here waits so long unless something is broken


def an_engine(family: str = "qwen3", precision: str = "fp8") -> Engine:
    model = tiny_model(precision, family, scale=4.0)
    engine = Engine(model, record_routes=family == "qwen3_moe")
    engine.longest_prompt = 8
    return engine


def fleet_of(engine: Engine, engines: int = 2, notes: list[str] | None = None) -> Fleet:
    note = (lambda line: None) if notes is None else notes.append
    settings = FleetSettings(engines=engines, deadline_s=MOST)
    return Fleet(
        settings, engine, 12, SAMPLING.max_new_tokens, EngineSize(max_sequences=6), note=note
    )


def change(engine: Engine, factor: float) -> None:
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(factor)
    engine.model.sync()


def expected(engine: Engine) -> list[list[Completion]]:
    return engine.generate(PROMPTS, SAMPLING, IDS)


def found(
    fleet: Fleet, on_group: Callable[[int, list[Completion]], None] | None = None
) -> list[list[Completion]]:
    fleet.send()
    return fleet.generate(PROMPTS, SAMPLING, IDS, on_group)


def process(fleet: Fleet, place: int) -> int:
    """The id of an engine's process."""
    return int(fleet._engines[place].host.rpartition("process ")[2].rstrip(")"))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return an_engine()


@pytest.fixture(scope="module")
def shared_fleet(ray: Any, engine: Engine) -> Iterator[Fleet]:
    fleet = fleet_of(engine)
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(shared_fleet: Fleet, engine: Engine) -> Fleet:
    """Two engines that take part, whatever a test before did to them: xdist's workers keep no
    file's order."""
    shared_fleet.note = lambda line: None
    while len(shared_fleet.numbers) < 2:
        shared_fleet.add()
    for number in shared_fleet.numbers[2:]:
        shared_fleet.remove(number)
    for _ in range(100):
        found(shared_fleet)
        if all(one.opened for one in shared_fleet._engines):
            break
    return shared_fleet


@pytest.mark.slow
def test_groups_are_given_out_in_order_and_again_where_an_engine_is_gone() -> None:
    """By definition the first that is neither done nor held; each is looked at a few times, however
    many there are."""
    rng, looked = random.Random(0), 0

    class Done(dict[int, list[Completion]]):
        def __contains__(self, index: object) -> bool:
            nonlocal looked
            looked += 1
            return super().__contains__(index)

    batch, engines = Batch(0, [], 8, Done()), [list[int]() for _ in range(4)]
    for turn in range(4000):
        batch.requests += [{"sampling": {"n": 1}}] * (3 if turn < 1000 else 0)
        rng.choice(engines).clear() if rng.random() < 0.02 else None  # it died
        held = {index for one in engines for index in one}
        free = [
            i
            for i in range(len(batch.requests))
            if not (dict.__contains__(batch.done, i) or i in held)
        ]
        batch.held_now(held)
        for one in engines:
            if rng.random() < 0.9 and len(one) < 3:
                assert batch.free() == (free[0] if free else None)
                if free:
                    one.append(batch.take(free.pop(0)))
        for one in engines:
            if one and rng.random() < 0.7:
                batch.done[one.pop(0)] = []
    assert len(batch.done) == 3000
    assert batch.free() is None
    assert looked < 20 * 3000


def test_completions_of_each_version(fleet: Fleet, engine: Engine) -> None:
    for factor in (1.0, 1.05, 0.9):
        change(engine, factor)
        groups = dict[int, list[Completion]]()
        result = found(fleet, groups.__setitem__)
        assert result == expected(engine)
        assert groups == dict(enumerate(result))  # each once
        assert {c.weights_version for group in result for c in group} == {
            engine.model.weights_version
        }
        assert fleet.stats.prompt_tokens == engine.stats.prompt_tokens


def test_control_weights_one_version_off_give_other_tokens(fleet: Fleet, engine: Engine) -> None:
    fleet.send()
    change(engine, 1.05)
    tokens = [[c.token_ids for c in group] for group in expected(engine)]
    stale = fleet.generate(PROMPTS, SAMPLING, IDS)
    assert [[c.token_ids for c in group] for group in stale] != tokens
    assert [[c.token_ids for c in group] for group in found(fleet)] == tokens


@pytest.mark.parametrize("how", ["SIGKILL", "ray.kill"])
def test_an_engine_dies_in_the_middle(ray: Any, fleet: Fleet, engine: Engine, how: str) -> None:
    """Its groups go to the other. Ray starts a process that was killed again; `ray.kill` is for
    good."""
    change(engine, 0.95)
    notes, killed = list[str](), list[int]()
    fleet.note = notes.append
    numbers = fleet.numbers

    def kill(index: int, group: list[Completion]) -> None:
        if not killed:
            killed.append(process(fleet, -1))
            if how == "SIGKILL":
                os.kill(killed[0], signal.SIGKILL)
            else:
                ray.kill(fleet._engines[-1].actor)

    assert found(fleet, kill) == expected(engine)
    for _ in range(
        100
    ):  # until what died was noticed, and where it comes back until it takes part again
        change(engine, 1.01)
        assert found(fleet) == expected(engine)
        if notes and (how == "ray.kill" or all(one.opened for one in fleet._engines)):
            break
    if how == "SIGKILL":
        assert "died; its groups go to others" in notes[0]
        assert fleet.numbers == numbers
        assert process(fleet, -1) != killed[0]
    else:
        assert "is lost" in notes[0]
        assert fleet.numbers == numbers[:-1]


@pytest.mark.slow
def test_engines_come_and_go_in_the_middle(fleet: Fleet, engine: Engine) -> None:
    change(engine, 1.05)
    gone = fleet.numbers[0]
    added = fleet.add()

    def leave(index: int, group: list[Completion]) -> None:
        if gone in fleet.numbers:
            fleet.remove(gone)

    assert found(fleet, leave) == expected(engine)
    assert fleet.numbers[-1] == added
    assert gone not in fleet.numbers
    change(engine, 0.95)
    assert found(fleet) == expected(engine)


@pytest.mark.slow
def test_groups_of_an_engine_that_stands_still_are_sampled_by_another(
    fleet: Fleet, engine: Engine
) -> None:
    """The first result counts; the other comes late, to a batch that is done."""
    fleet.add()
    for _ in range(100):
        found(fleet)
        if all(one.opened for one in fleet._engines):
            break
    change(engine, 1.05)
    stopped = process(fleet, 0)
    os.kill(stopped, signal.SIGSTOP)
    try:
        assert found(fleet) == expected(engine)
    finally:
        os.kill(stopped, signal.SIGCONT)
    change(engine, 0.95)
    assert found(fleet) == expected(engine)


@pytest.mark.slow
def test_all_engines_stand_still(ray: Any, engine: Engine) -> None:
    """The run ends in one line that names them, and they end too. As long as another goes on, it
    goes on (above)."""
    fleet = fleet_of(engine, engines=1)  # there is room for no more beside the other tests'
    end = time.monotonic() + MOST
    while not all(one.opened for one in fleet._engines):
        assert time.monotonic() < end
        found(fleet)
    fleet.settings = FleetSettings(engines=1, deadline_s=1.5)
    stopped = process(fleet, 0)
    assert found(fleet) == expected(engine)  # the control: it answers in time
    os.kill(stopped, signal.SIGSTOP)
    change(engine, 1.05)
    with pytest.raises(
        RunFailed,
        match=r"^fleet: none of 1 engines has answered for 1.5 s .*: engine 0 on .*process",
    ):
        found(fleet)
    fleet.close()
    until(lambda: not Path(f"/proc/{stopped}").exists())


class Flipping:
    """Ray whose object store flips a bit in each buffer on the way."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ray, name)

    def put(self, array: Any) -> Any:
        return self._ray.put(flipped(array))


def flipped(array: Any) -> Any:
    """One bit: of an E4M3 code, or of the lower byte of a BF16 number."""
    broken = np.array(array)
    broken[len(broken) // 3 & ~1] ^= 0x10
    return broken


@pytest.mark.slow
def test_a_flipped_byte_is_found(ray: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control first: with digests of what was flipped, that is without the check, tokens are
    others."""
    fleet = fleet_of(engine)  # its own: in the end no engine is left
    try:
        change(engine, 1.05)
        with monkeypatch.context() as patch:
            patch.setattr(fleet, "_ray", Flipping(fleet._ray))
            digest = wire.digest
            patch.setattr(wire, "digest", lambda array: digest(flipped(array)))
            assert found(fleet) != expected(engine)
        change(engine, 0.95)
        with monkeypatch.context() as patch:
            patch.setattr(fleet, "_ray", Flipping(fleet._ray))
            with pytest.raises(
                RunFailed,
                match=r"no engine is left; .* of version \d+ of the weights arrived with other",
            ):
                found(fleet)
    finally:
        fleet.close()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "precision"), [("qwen3_moe", "fp8"), ("llama", "nvfp4")])
def test_other_models_and_flows(ray: Any, family: str, precision: str) -> None:
    """Routes of experts are part of a completion."""
    engine = an_engine(family, precision)
    fleet = fleet_of(engine, engines=1)
    try:
        for factor in (1.0, 1.05):
            change(engine, factor)
            result = found(fleet)
            assert result == expected(engine)
            assert (result[0][0].routes is not None) == (family == "qwen3_moe")
    finally:
        fleet.close()


@pytest.mark.slow
@pytest.mark.parametrize("fact", ["torch", "order"])
def test_an_engine_that_might_compute_other_bits_is_refused(
    ray: Any, engine: Engine, fact: str
) -> None:
    fleet = fleet_of(engine, engines=1)
    fleet._facts = fleet._facts | {fact: "1.0"}
    try:
        with pytest.raises(
            RunFailed,
            match=rf"no engine is left; .* other bits than the learner: it has {fact} \S+, not 1",
        ):
            found(fleet)
    finally:
        fleet.close()


class Occupied:
    """Takes all cores of a cluster."""

    def there(self) -> bool:
        return True


@pytest.mark.slow
def test_engines_that_do_not_come(ray: Any, engine: Engine) -> None:
    left = ray.available_resources().get(
        "CPU", 0
    )  # nothing where engines of other tests have them all
    others = ray.remote(num_cpus=left)(Occupied).remote()
    assert ray.get(others.there.remote())
    fleet = fleet_of(engine, engines=1)
    fleet.settings = FleetSettings(engines=1, deadline_s=0.5)
    try:
        with pytest.raises(
            RunFailed,
            match=r"none of 1 engines has answered for 0.5 s .*; the cluster has 0 CPUs, 0 GPUs",
        ):
            found(fleet)
    finally:
        ray.kill(others)
        fleet.close()
