"""Batches that a fleet of engines samples while the learner works: those of
`sources.PrefetchedRollouts`, bit for bit.

`PrefetchedRollouts` is the definition: before the learner learns batch t with the weights of
version t, batch t + k is sampled with them. Here that sampling begins before the learner learns, in
a thread, and has ended when it has learned: a step ends when both have, so a checkpoint, the
metrics and the state of a step are those of one process (tests/fleet/test_training.py). Reward
functions run at that time too; what the learner's own process computes of rewards, by models
that are frozen, waits until it has learned, and so does whatever depends on it. A KL in the reward
that needs the policy's log-probabilities needs the weights before they are learned, so such a batch
is waited for; and so is every batch without `rollouts_ahead`. Where there are several ranks, the
first one has the fleet and scores, and the others get its batches. Left out: who samples what
(`isobit.engine.fleet`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

from isobit.config import Config
from isobit.data.dataset import Example
from isobit.distributed import Ranks
from isobit.engine.dialogue import Dialogue
from isobit.engine.engine import Engine, OnGroup
from isobit.engine.episodes import Episodes
from isobit.engine.fleet.asked import FleetEngine
from isobit.engine.fleet.fleet import Fleet
from isobit.engine.sequences import Stats
from isobit.engine.types import Completion, Sampling
from isobit.rl.algorithm.credit import StepBatch
from isobit.rl.algorithm.samples import groups_from_json, groups_to_json
from isobit.training.context import RunContext
from isobit.training.loop import Rollout, Rollouts
from isobit.training.measuring.meter import added


def open_fleet(config: Config, sampling: Sampling, engine: Engine, ranks: Ranks) -> Fleet | None:
    """Start the engines that a config asks for, each like `engine`. Return None without engines,
    and on ranks after the first. Raises IsobitError where Ray is not installed, cannot be reached,
    or has no room for them."""
    if not config.fleet.engines or not ranks.first:
        return None
    sequences, most = config.prompts_per_step * sampling.n, config.most_tokens
    return Fleet(config.fleet, engine, sequences, most, config.engine, config.run.check_memory)


@dataclass(frozen=True, eq=False)
class FleetGroups:
    """A `sources.Sampler` that asks a fleet's engines, with a `dialogue` for episodes of several
    turns; `note` shows when one of them comes or goes."""

    fleet: Fleet
    sampling: Sampling
    note: Callable[[str], None]
    dialogue: Dialogue | None = None

    @property
    def n(self) -> int:
        return self.sampling.n

    def __call__(
        self, examples: Sequence[Example], ids: Sequence[int], on_group: OnGroup
    ) -> tuple[dict[int, list[Completion]], Stats]:
        if self.dialogue is not None:
            engine = FleetEngine(self.fleet, len(examples), self.n, self.note)
            episodes = Episodes(engine, self.dialogue)
            groups = episodes.generate(examples, self.sampling, ids, on_group=on_group)
            return dict(enumerate(groups)), episodes.stats
        prompts = [example.prompt for example in examples]
        groups = self.fleet.generate(prompts, self.sampling, ids, on_group, self.note)
        return dict(enumerate(groups)), self.fleet.stats


class AsyncRollouts:
    """Batches ahead of the learner, which the first rank's `fleet` samples: its `source` is called
    in a thread, and may wait for `learned`, which is set when the learner has learned.
    `needs_weights`: what a batch is charged needs the weights that sampled it. A context manager,
    which ends the fleet."""

    def __init__(
        self,
        config: Config,
        context: RunContext,
        fleet: Fleet | None,
        source: Rollouts | None,
        learned: Event,
        needs_weights: bool,
    ) -> None:
        self._fleet, self._source, self._learned = fleet, source, learned
        self._state, self._ranks = context.state, context.ranks
        self._meter, self._saver = context.meter, context.saver
        self._steps, self._prompts_per_step = config.rollouts_ahead, config.prompts_per_step
        self._needs_weights = needs_weights
        self._thread: Thread | None = None
        self._under_way = False  # on every rank
        self._found: Rollout | BaseException

    def __enter__(self) -> "AsyncRollouts":
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._fleet is None:
            return
        self._fleet.stop()
        if self._thread is not None:
            self._learned.set()
            self._thread.join()
        self._fleet.close()

    def next(self) -> Rollout:
        """Return the batch of the present step, and begin to sample the one that is `steps`
        ahead."""
        queue, took = self._state.queue, dict[str, float]()
        with self._meter.timed(took, "send"), self._saver.broken_weights_end_the_run():
            self._ranks.run_on_all(self._send)
        while len(queue) < max(
            self._steps, 1
        ):  # at the beginning there is nothing to learn from meanwhile
            self._begin()
            took = added(took, self.settle())
        if self._steps:
            self._begin()
        if self._needs_weights:
            took = added(took, self.settle())
        return Rollout(queue.pop(0), took)

    def settle(self) -> dict[str, float]:
        """Wait, after the learner has learned, for the batch that was sampled at the same time, and
        put it into the queue. Return the metrics of that; raises what sampling or scoring has
        raised."""
        if not self._under_way:
            return {}
        began = time.perf_counter()
        self._meter.phase("rollout")
        self._under_way = False
        arrived = self._arrived(self._ranks.on_first(self._joined))
        self._state.queue.append(arrived.batch)
        return {**arrived.metrics, "time/rollout_waited": time.perf_counter() - began}

    def _joined(self) -> Rollout:
        """Wait for the sampling thread and return its batch, or raise the error that ended it."""
        assert self._thread is not None
        self._learned.set()
        self._thread.join()
        self._thread = None
        if isinstance(self._found, BaseException):
            raise self._found
        return self._found

    def _arrived(self, rollout: Rollout | None) -> Rollout:
        """Return the first rank's rollout on every rank, and bring its changes of the state
        there."""
        state = self._state
        mine: dict[str, Any] | None = None
        if rollout is not None and self._ranks.size > 1:
            mine = {
                "batch": rollout.batch.to_json(),
                "pending": groups_to_json(state.pending),
                "cursor": state.cursor,
                "metrics": dict(rollout.metrics),
            }
        shared: Mapping[str, Any] = self._ranks.all_gather_json(mine)[0] or {}
        if rollout is not None:
            return rollout
        state.cursor = shared["cursor"]
        state.pending = groups_from_json(shared["pending"])
        batch = StepBatch.from_json(shared["batch"], self._prompts_per_step)
        return Rollout(batch, shared["metrics"])

    def _send(self) -> None:
        if self._fleet is not None:
            self._fleet.send()

    def _begin(self) -> None:
        self._under_way = True
        if self._fleet is None:
            return
        self._learned.clear()
        self._thread = Thread(target=self._sample, name="isobit-fleet", daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        assert self._source is not None
        try:
            self._found = self._source.next()
        except BaseException as error:  # raised again by `settle`
            self._found = error
