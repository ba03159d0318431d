"""A fleet that is asked request by request, without its processes."""

from functools import partial
from types import SimpleNamespace
from typing import Any

from isobit.engine.fleet.asked import FleetEngine
from isobit.engine.fleet.fleet import Batch
from isobit.engine.types import Completion, Sampling
from tests.models import tiny_model


class Counted(dict[int, Any]):
    """A table that counts how often it is gone through."""

    walks = 0

    def items(self) -> Any:
        self.walks += 1
        return super().items()


class OneBatch:
    """A fleet with one batch, whose first two requests that are not done have an answer."""

    def __init__(self) -> None:
        config = SimpleNamespace(vocab_size=9)
        self.model = SimpleNamespace(config=config, tokenizer=tiny_model("bf16").tokenizer)
        self.batch = Batch(0, [], 4)

    def begin(self, *_: object) -> Batch:
        return self.batch

    def advance(self, batch: Batch) -> list[int]:
        new = [index for index in range(len(batch.requests)) if index not in batch.done][:2]
        done = partial(Completion, 0, 0, [5], [6], "a", [0.0], "stop", 0)
        batch.done |= {index: [done()] for index in new}
        return new


def test_a_request_is_cancelled_without_going_through_the_others() -> None:
    """And it alone: the others, alike in all else, are answered; one that is answered, or was
    cancelled before, changes nothing."""
    fleet: Any = OneBatch()
    engine = FleetEngine(fleet, 6, 1, print)
    table = engine._open = Counted()
    asked = [engine.submit([5, 6], Sampling()) for _ in range(6)]
    for _ in range(2):
        engine.cancel(asked[1])
    assert engine.num_open == 5
    answered = [request for request, _ in engine.step()]
    assert answered == [asked[0], asked[2]]
    engine.cancel(asked[0])
    engine.cancel(asked[5])
    while engine.num_open:
        answered += [request for request, _ in engine.step()]
    assert answered == [asked[0], asked[2], asked[3], asked[4]]
    assert fleet.batch.done[1] == fleet.batch.done[5] == []
    assert table.walks == 0
    assert not engine._indices
