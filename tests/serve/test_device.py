"""The device thread: turns, snapshots of adapters, and a request that poisons a step and ends
alone."""

import queue
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.engine.engine import Engine
from isobit.engine.shaping import Shaping
from isobit.engine.types import Sampling
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.model.adapters.low_rank import Adapter
from isobit.model.adapters.peft import read_peft
from isobit.serve.device import Device
from isobit.serve.jobs import Begun, Done, Event, Failed, Post, SampleJob, Token, Turns, WorkJob
from isobit.serve.snapshots import Snapshots

from .helpers import bits

PROMPT = (10, 11, 12, 13, 14)


class Asked:
    """A device, and the events of jobs by name."""

    def __init__(self, folder: Path, **sizes: int) -> None:
        self.model = Model.load(folder / "base", "fp8", "native").serving({})
        self.engine = Engine(self.model, **{"kv_pages": 200, "page_size": 4, **sizes})
        self.device = Device(self.engine, self.deliver)
        self.events: dict[str, queue.SimpleQueue[Event]] = {}

    def deliver(self, events: Sequence[tuple[Post, Event]]) -> None:
        for post, event in events:
            post(event)

    def sample(
        self, name: str, adapter: str | None = None, streamed: bool = True, **more: Any
    ) -> SampleJob:
        self.events[name] = queue.SimpleQueue()
        sampling = Sampling(**{"max_new_tokens": 12, "seed": 1, "ignore_eos": True, **more})
        job = SampleJob("t", PROMPT, sampling, adapter, streamed, self.events[name].put)
        self.device.submit(job)
        return job

    def work(self, function: Any) -> Event:
        found: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.device.submit(WorkJob("t", function, found.put))
        return found.get(timeout=60)

    def all(self, name: str, most: int = 1) -> list[Event]:
        """The events up to the last one."""
        found: list[Event] = []
        while sum(isinstance(e, Done) for e in found) < most and not any(
            isinstance(e, Failed) for e in found
        ):
            found.append(self.events[name].get(timeout=60))
        return found

    def __enter__(self) -> "Asked":
        self.device.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.device.stop()
        self.device.join(60)
        assert self.device.failure is None
        self.engine.integrity()
        assert self.engine.pages.num_used == 0


def poison(folder: Path, model: Model) -> Adapter:
    """An adapter whose factors overflow."""
    found = read_peft(folder / "math", model.config)
    return Adapter(
        found.rank,
        found.alpha,
        found.projections,
        {k: torch.full_like(v, 1e30) for k, v in found.tensors.items()},
    )


def test_a_poisonous_request_ends_alone(folder: Path) -> None:
    """The others have the bits that they have without it."""
    with Asked(folder) as asked:
        assert asked.work(lambda: asked.device.snapshots.put("math", folder / "math")) == Done(0)
        assert asked.work(
            lambda: asked.device.snapshots.put("bad", poison(folder, asked.model))
        ) == Done(0)
        for name in ("a", "b"):
            asked.sample(name, "math" if name == "b" else None)
        alone = [bits(asked.all(name)) for name in ("a", "b")]
        asked.sample("a")
        asked.sample("bad", "bad")
        asked.sample("b", "math")
        assert [bits(asked.all(name)) for name in ("a", "b")] == alone
        (*_, failed) = asked.all("bad")
        assert isinstance(failed, Failed)
        assert failed.status == 500
        assert "NaN or infinity" in failed.message
        asked.sample("again")
        assert bits(asked.all("again")) == alone[0]


def test_prompts_count_beside_an_answer_that_cannot_go_on(folder: Path) -> None:
    """Of a step that was not computed, too; what is found in pages is said."""
    again = Asked(folder)
    again.sample("a", max_new_tokens=2)
    again.sample("stuck", shaping=Shaping(allowed=(4,), banned=((4,),)))
    with again:
        assert isinstance(again.all("stuck")[-1], Failed)
        assert isinstance(again.all("a")[-1], Done)
        assert again.device.totals["t"].prompt == 2 * len(PROMPT)
        again.sample("b")
        *_, done = again.all("b")
        assert isinstance(done, Done)
        assert done.cached == again.device.totals["t"].cached > 0


def test_negative_control_without_isolation_all_fail(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_at_fault(self: Device, error: Exception) -> None:
        for found in list(self._by_request.values()):
            self._close(found)
            self._post(found.job.post, Failed(500, str(error)))

    monkeypatch.setattr(Device, "_isolate", all_at_fault)
    with pytest.raises((AssertionError, ValueError)):
        test_a_poisonous_request_ends_alone(folder)


def test_a_snapshot_stays_while_it_is_held(folder: Path) -> None:
    """An open request goes on with the weights that it began with; the control begins with the new
    ones."""
    with Asked(folder) as asked:
        served = asked.model.transformer.served
        assert served is not None
        put = asked.device.snapshots.put
        asked.work(lambda: put("x", folder / "math"))
        asked.sample("whole", "x", max_new_tokens=60)
        whole = asked.all("whole")
        asked.sample("old", "x", max_new_tokens=60)
        assert asked.events["old"].get(timeout=60) == Begun(0)
        assert asked.work(lambda: (put("x", folder / "code"), *served.names)) == Done(
            (1, "x@0", "x@1")
        )
        old = asked.all("old")
        assert bits(old) == bits(whole)
        asked.sample("new", "x", max_new_tokens=60)
        new = asked.all("new")
        assert new[0] == Begun(1)
        assert bits(new) != bits(whole)
        assert asked.work(lambda: tuple(served.names)) == Done(("x@1",))
        asked.work(lambda: asked.device.snapshots.remove("x"))
        assert asked.work(lambda: tuple(served.names)) == Done(())
        asked.sample("none", "x")
        (failed,) = asked.all("none")
        assert failed == Failed(404, "no adapter 'x' is served; there are none")
        assert isinstance(asked.work(partial(put, "x", folder / "nothing")), Failed)


def test_cancelled_jobs_are_dropped_wherever_they_are(folder: Path) -> None:
    with Asked(folder, max_sequences=1) as asked:
        jobs = [asked.sample(str(number), max_new_tokens=200) for number in range(4)]
        assert isinstance(asked.events["0"].get(timeout=60), Begun)
        for job in (jobs[2], jobs[0], jobs[0]):
            asked.device.cancel(job)
        assert len(asked.all("1")) == 202
        assert len(asked.all("3")) == 202
        assert asked.events["2"].empty()


def test_stopping_answers_what_waits(folder: Path) -> None:
    asked = Asked(folder, max_sequences=1)
    asked.device.start()
    for number in range(3):
        asked.sample(str(number), max_new_tokens=240)
    assert isinstance(asked.events["0"].get(timeout=60), Begun)
    asked.device.stop()
    asked.device.join(60)
    for number in range(3):
        (*_, failed) = asked.all(str(number))
        assert isinstance(failed, Failed)
        assert failed.status == 503
    asked.engine.integrity()
    assert asked.engine.pages.num_used == 0


def test_the_first_token_takes_one_step(folder: Path) -> None:
    """Of a request at an idle server; the control has a prompt that takes several."""
    for sizes, steps in (({}, 1), ({"max_batch_tokens": 2}, 3)):
        with Asked(folder, **sizes) as asked:
            asked.sample("first", max_new_tokens=1)
            assert [type(event) for event in asked.all("first")] == [Begun, Token, Done]
            assert asked.device.steps == steps


def test_turns() -> None:
    def job(tenant: str) -> WorkJob:
        return WorkJob(tenant, lambda: None, lambda event: None)

    turns, jobs = Turns[WorkJob](), [job("a"), job("a"), job("a"), job("b"), job("c"), job("b")]
    for each in jobs:
        turns.put(each)
    assert turns.remove(jobs[4])
    assert not turns.remove(jobs[4])
    assert [turns.take().tenant for _ in range(3)] == ["a", "b", "a"]
    assert turns.first() is jobs[5]
    assert list(turns) == [jobs[5], jobs[2]]
    assert len(turns) == 2


def test_a_name_that_cannot_be_served_means_what_it_meant(folder: Path) -> None:
    snapshots = Snapshots(Model.load(folder / "base", "fp8", "native").serving({}))
    snapshots.put("x", folder / "math")
    with pytest.raises(IsobitError):
        snapshots.put("x", folder / "base")
    assert snapshots.hold("x").version == 0
    assert snapshots.put("x", folder / "code") == 1
    with pytest.raises(IsobitError, match="no adapter 'y' is served; there are x"):
        snapshots.remove("y")
    held = snapshots.hold("x")
    snapshots.remove("x")
    assert snapshots.hold(held) is held
    for _ in range(2):
        snapshots.release(held)
    with pytest.raises(IsobitError, match="the snapshot 'x@1' was dropped: nobody held it"):
        snapshots.hold(held)


def test_a_piece_of_work_that_fails_ends_alone(folder: Path) -> None:
    with Asked(folder) as asked:
        asked.sample("a")
        failed = asked.work(lambda: 1 / 0)
        assert failed == Failed(500, "the server failed; its log says why")
        assert bits(asked.all("a"))
