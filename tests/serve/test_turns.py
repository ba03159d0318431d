"""Long work of one tenant beside others: it is done in parts, between which samples have as much
time as a part took, and no bit is another one."""

import hashlib
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.engine.types import Sampling
from isobit.rl.stepwise import Adam, Datum, Outputs, Parts, StepwiseLearner
from isobit.serve.jobs import Done, Event, Failed, SampleJob, Token, WorkJob
from isobit.serve.scoring import Scoring

from .helpers import ADAPTERS
from .test_device import PROMPT, Asked

PART = 10.0
"""Seconds of a part, where a step of samples takes one."""


class Told:
    """A device whose time passes by what it does, and all that it does, in its order."""

    def __init__(self, folder: Path, **sizes: int) -> None:
        self.now, self.log, self.failed = 0.0, list[str](), list[Failed]()
        self.asked = Asked(folder, **sizes)
        self.device = self.asked.device
        self.device._clock = lambda: self.now
        step = self.device.engine.step

        def timed(*given: Any) -> Any:
            self.now += 1
            return step(*given)

        self.device.engine.step = timed  # type: ignore[method-assign]

    def sample(self, name: str, tenant: str = "b", tokens: int = 12, **more: Any) -> None:
        """Ask for a sample whose tokens are told."""
        sampling = Sampling(seed=1, ignore_eos=True, max_new_tokens=tokens)
        self.device.submit(SampleJob(tenant, PROMPT, sampling, None, True, self.post(name), **more))

    def post(self, name: str) -> Callable[[Event], None]:
        def told(event: Event) -> None:
            if isinstance(event, (Token, Done)):
                self.log.append(name if isinstance(event, Token) else f"{name} done")
            if isinstance(event, Failed):
                self.failed.append(event)

        return told

    def work(
        self, name: str, work: Callable[[], Any], tenant: str = "a", alone: bool = False
    ) -> None:
        self.device.submit(WorkJob(tenant, work, self.post(name), alone))

    def parts(self, name: str, count: int) -> Callable[[], Iterator[None]]:
        def parts() -> Iterator[None]:
            for place in range(count):
                if place:
                    yield
                self.now += PART
                self.log.append(f"{name} {place}")

        return parts

    def until_idle(self) -> None:
        """Do in this thread what the device's does, until there is nothing left."""
        device = self.device
        device._receive(wait=False)
        while device._open or device.num_waiting:
            device._receive(wait=False)
            device._do_work()
            device._admit()
            device._score()
            device._step()
            device._send()


@pytest.fixture
def told(folder: Path) -> Iterator[Told]:
    made = Told(folder)
    yield made
    made.device.engine.integrity()
    assert made.device.engine.pages.num_used == 0


def test_samples_have_as_much_time_as_a_part_of_work(told: Told) -> None:
    """The first token waits for one part, and not for all of them."""
    told.work("work", told.parts("work", 3))
    told.sample("s", tokens=25)
    told.until_idle()
    assert told.log[0] == "work 0"
    assert told.log[1:11] == ["s"] * 10
    assert told.log[11] == "work 1"
    assert told.log[12:22] == ["s"] * 10
    assert told.log[22:] == ["work 2", "work done", *["s"] * 5, "s done"]


def test_negative_control_work_that_is_no_generator_is_done_at_once(told: Told) -> None:
    told.work("work", lambda: list(told.parts("work", 3)()))
    told.sample("s", tokens=2)
    told.until_idle()
    assert told.log == ["work 0", "work 1", "work 2", "work done", "s", "s", "s done"]


def test_without_samples_nothing_waits(told: Told) -> None:
    """Nor does a short piece of work for long, where there are some."""
    told.work("work", told.parts("work", 3))
    told.until_idle()
    assert told.log == ["work 0", "work 1", "work 2", "work done"]
    assert told.now == 3 * PART


def test_other_tenants_work_between_parts_and_ones_own_after_them(told: Told) -> None:
    """What a tenant asks for is done in its order: a step follows all its gradients."""
    told.work("gradients", told.parts("gradients", 3))
    told.work("step", lambda: told.log.append("step"))
    told.work("other", lambda: told.log.append("other"), tenant="b")
    told.work("more", lambda: told.log.append("more"), tenant="b")
    told.until_idle()
    assert [line for line in told.log if "done" not in line] == [
        *("gradients 0", "other", "gradients 1", "more", "gradients 2", "step")
    ]


def test_new_weights_wait_for_work_that_has_begun(told: Told) -> None:
    """And for samples that came before; what came later begins with the new ones."""
    told.work("work", told.parts("work", 3))
    told.device._receive(wait=False)
    told.device._do_work()
    told.sample("before", tokens=2)
    told.work("update", lambda: told.log.append("update"), tenant="c", alone=True)
    told.sample("after", tokens=1)
    told.until_idle()
    update = told.log.index("update")
    assert {"work done", "before done"} < set(told.log[:update])
    assert told.log[update + 2 :] == ["after", "after done"]


def test_a_part_that_fails_ends_its_work_alone(told: Told) -> None:
    def parts() -> Iterator[None]:
        yield
        raise ZeroDivisionError

    told.work("work", parts)
    told.work("next", lambda: None)
    told.sample("s", tokens=2)
    told.until_idle()
    assert [failed.status for failed in told.failed] == [500]
    assert {"next done", "s done"} < set(told.log)


def test_stopping_ends_work_that_has_begun(told: Told) -> None:
    """What it holds open is closed, and who asked is told."""
    closed = list[bool]()

    def parts() -> Iterator[None]:
        try:
            yield
        finally:
            closed.append(True)

    told.work("work", parts)
    told.device._receive(wait=False)
    told.device._do_work()
    assert not closed
    told.device.stop()
    told.device._receive(wait=False)
    told.device._end()
    assert closed == [True]
    assert [failed.status for failed in told.failed] == [503]


def data(seed: int, count: int = 6) -> list[Datum]:
    """Random sequences to learn."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        ids = torch.randint(4, 60, (9,), generator=random)
        inputs = {"target_tokens": ids[1:], "weights": torch.rand(8, generator=random)}
        found.append(Datum(tuple(ids[:-1].tolist()), inputs))
    return found


def digest(learner: StepwiseLearner, outputs: Outputs) -> str:
    """SHA-256 of what was computed: log-probabilities, the loss, gradients."""
    found = hashlib.sha256(repr(outputs.metrics).encode())
    for row in outputs.logprobs:
        found.update(row.numpy().tobytes())
    for name, leaf in sorted(learner.model.named_parameters().items()):
        assert leaf.grad is not None
        found.update(name.encode() + leaf.grad.numpy().tobytes())
    return found.hexdigest()


def test_bits_are_those_of_work_without_others(folder: Path) -> None:
    """Gradients of a run, an answer, scores of a prompt and another run's step, all between its
    micro-batches; and the samples are those that they are alone. The control has other data."""
    asked = Asked(folder)
    base = asked.model

    def learner() -> StepwiseLearner:
        return StepwiseLearner(base.adapted(ADAPTERS["math"]), micro_batch_tokens=16)

    alone = learner()
    expected = digest(alone, alone.forward_backward(data(1), "cross_entropy", {}))
    other, mine, others = learner(), learner(), learner()
    assert digest(other, other.forward_backward(data(2), "cross_entropy", {})) != expected
    step = other.optim_step(Adam(1e-2))
    order = list[str]()

    def in_parts() -> Parts[str]:
        parts = mine.forward_backward_in_parts(data(1), "cross_entropy", {})
        while True:
            order.append("part")
            try:
                next(parts)
            except StopIteration as end:
                return digest(mine, end.value)
            yield

    def theirs() -> Parts[Any]:
        yield from others.forward_backward_in_parts(data(2), "cross_entropy", {})
        order.append("other")
        return others.optim_step(Adam(1e-2))

    with asked:
        asked.sample("alone")
        samples = asked.all("alone")
    asked = Asked(folder)
    with asked:
        for name in ("a", "b"):
            asked.sample(name)
        found = [queue.SimpleQueue[Event]() for _ in range(2)]
        asked.device.submit(WorkJob("t", in_parts, found[0].put))
        asked.device.submit(WorkJob("u", theirs, found[1].put))
        assert found[0].get(timeout=60) == Done(expected)
        assert found[1].get(timeout=60) == Done(step)
        for name in ("a", "b"):
            assert asked.all(name)[1:] == samples[1:]
    assert order.count("part") == 3
    assert order.index("other") > 0


def test_a_whole_request_is_several_parts(folder: Path) -> None:
    """`forward` and `forward_backward` have one for each micro-batch; what is not done to its end
    leaves the gradients as they were."""
    learner = StepwiseLearner(Asked(folder).model.adapted(ADAPTERS["math"]), micro_batch_tokens=16)
    for parts in (learner.forward_in_parts, learner.forward_backward_in_parts):
        assert sum(1 for _ in parts(data(1), "cross_entropy", {})) == 2
        assert torch.is_grad_enabled()

    def gradients() -> list[torch.Tensor]:
        leaves = learner.model.named_parameters().values()
        return [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]

    before = gradients()
    begun = learner.forward_backward_in_parts(data(2), "cross_entropy", {})
    next(begun)
    assert not all(map(torch.equal, before, gradients()))
    begun.close()
    assert all(map(torch.equal, before, gradients()))


def test_scores_of_a_prompt_take_turns(told: Told) -> None:
    """Two long prompts that are scored, and a sample that goes on meanwhile."""
    for name in ("x", "y"):
        told.sample(name, tenant=name, scoring=Scoring(len(PROMPT), 5), sampled=False)
    told.sample("s", tokens=6)
    told.until_idle()
    assert told.log.index("s") < len(told.log) - 2
    assert not told.failed
