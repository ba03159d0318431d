"""A device that is pumped: nothing is told before it is complete, and what is open when the weights
change has the bits of the new ones."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.serve import pumped
from isobit.serve.device import STOPPING
from isobit.serve.jobs import (
    Begun,
    Done,
    Event,
    Failed,
    Post,
    SampleJob,
    Scored,
    Token,
    WorkJob,
)
from isobit.serve.pumped import PumpedDevice
from isobit.serve.scoring import Scoring

from .helpers import bits

PROMPT = (10, 11, 12, 13, 14)
SAMPLING: dict[str, Any] = {"max_new_tokens": 12, "seed": 1, "ignore_eos": True}


class Asked:
    """A device over a model that can be trained, and the events of each of its jobs."""

    def __init__(self, folder: Path) -> None:
        self.model = Model.load(folder / "base", "fp8", "native")
        self.engine = Engine(self.model, kv_pages=200, page_size=4)
        self.device = PumpedDevice(self.engine, self.deliver)
        self.device.start()

    def deliver(self, events: Sequence[tuple[Post, Event]]) -> None:
        for post, event in events:
            post(event)

    def ask(
        self, scoring: Scoring | None = None, sampled: bool = True, **more: Any
    ) -> tuple[SampleJob, list[Event]]:
        events: list[Event] = []
        given = "t", PROMPT, Sampling(**{**SAMPLING, **more}), None, True, events.append
        job = SampleJob(*given, scoring, sampled)
        self.device.submit(job)
        return job, events

    def pump(self, most: int = 100) -> None:
        for _ in range(most):
            if self.device.busy:
                self.device.pump()

    def change(self, version: int) -> None:
        """New weights."""
        for parameter in self.model.parameters():
            parameter.data.mul_(1.25)
        self.model.sync()
        self.device.version = version

    def alone(self, **more: Any) -> tuple[list[int], list[float]]:
        """What an engine of its own samples with the weights of now."""
        engine = Engine(self.model, kv_pages=200, page_size=4)
        ((found, *_),) = engine.generate([list(PROMPT)], Sampling(**{**SAMPLING, **more}), [0])
        return found.token_ids, found.logprobs


@pytest.fixture
def asked(folder: Path) -> Iterator[Asked]:
    found = Asked(folder)
    yield found
    found.device.end()
    found.engine.integrity()
    assert found.engine.num_open == 0
    assert found.engine.pages.num_used == 0


def test_a_request_that_spans_an_update_has_the_new_bits(asked: Asked) -> None:
    """The control is complete before it, and has the old ones."""
    old = asked.alone()
    _, before = asked.ask()
    asked.pump()
    _, after = asked.ask()
    asked.pump(5)
    assert asked.device.num_open == 1
    assert after == []
    asked.device.begin_again()
    asked.change(1)
    asked.pump()
    new = asked.alone()
    assert (before[0], bits(before)) == (Begun(0), old)
    assert (after[0], bits(after)) == (Begun(1), new)
    assert torch.tensor(old[1]).ne(torch.tensor(new[1])).any()
    assert asked.device.answered == {"requests": 2, "tokens": 24}


@pytest.mark.parametrize("sampled", [True, False])
def test_scores_of_a_prompt_are_of_the_weights_of_its_answer(asked: Asked, sampled: bool) -> None:
    """Also where these change between two parts of them. The control is complete before it."""

    def expected() -> list[float]:
        found: list[float] = asked.model.logprobs([list(PROMPT)])[0].tolist()
        return found

    old, kinds = expected(), [Begun, Scored, *[Token] * 12 * sampled, *[Done] * sampled]
    _, before = asked.ask(Scoring(len(PROMPT), 2), sampled)
    asked.pump()
    _, after = asked.ask(Scoring(len(PROMPT), 2), sampled)
    asked.pump(2)
    assert asked.device.num_open == 1
    assert after == []
    asked.device.begin_again()
    asked.change(1)
    asked.pump()
    for events, version, logprobs in ((before, 0, old), (after, 1, expected())):
        assert [type(event) for event in events] == kinds
        assert events[0] == Begun(version)
        assert isinstance(events[1], Scored)
        assert events[1].scores.logprobs[1:] == logprobs
    assert old != expected()
    if sampled:
        assert bits(after) == asked.alone()


def test_negative_control_what_stays_open_is_refused_by_the_engine(asked: Asked) -> None:
    """A step with other weights than those that it began with ends serving, not the run."""
    _, events = asked.ask()
    asked.pump(5)
    asked.change(1)
    asked.pump()
    assert isinstance(asked.device.failure, IsobitError)
    assert events == [Failed(500, "the server failed; its log says why")]
    assert not asked.device.alive
    asked.pump()


def test_several_samples_are_told_together(asked: Asked) -> None:
    """Of one version, although one of them was complete before the update."""
    short = asked.alone(n=1)[0]
    _, events = asked.ask(n=2, ignore_eos=False, stop_tokens=(short[2],))
    asked.pump(5)
    assert events == []
    asked.device.begin_again()
    asked.change(3)
    asked.pump()
    assert events[0] == Begun(3)
    assert sum(isinstance(event, Done) for event in events) == 2


def test_a_request_that_never_ends_fails(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits beside it keeps its turn behind it."""
    _, long = asked.ask(max_new_tokens=200)
    for _ in range(pumped.MOST_BEGINNINGS):
        assert long == []
        asked.pump(3)
        asked.device.begin_again()
    assert long == [pumped._TOO_LONG]
    _, short = asked.ask(max_new_tokens=2)
    asked.pump()
    assert isinstance(short[-1], Done)


def test_cancelled_jobs_leave_nothing(asked: Asked) -> None:
    jobs = [asked.ask(max_new_tokens=100) for _ in range(3)]
    asked.pump(3)
    asked.device.begin_again()
    asked.device.cancel(jobs[0][0])
    asked.pump(2)
    asked.device.cancel(jobs[1][0])
    asked.pump(300)
    assert [len(events) for _, events in jobs] == [0, 0, 102]
    assert not asked.device._beginnings
    assert not asked.device._kept


def test_the_end_answers_everyone(asked: Asked) -> None:
    _, opened = asked.ask(max_new_tokens=100)
    asked.pump(3)
    _, waiting = asked.ask()
    asked.device.end()
    assert opened == waiting == [STOPPING]
    _, late = asked.ask()
    asked.pump()
    asked.device.stop()
    assert late == [STOPPING]


def test_work_between_steps_is_refused(asked: Asked) -> None:
    found: list[Event] = []
    asked.device.submit(WorkJob("t", lambda: 1, found.append))
    assert found == [Failed(400, "this is not offered by a run that trains")]
    assert not asked.device.busy
