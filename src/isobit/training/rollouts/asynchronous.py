"""Batches that a fleet of engines samples beside the learner: those of `sources.Ahead`, bit for bit.

`Ahead` is the definition: before the learner learns batch t with the weights of version t, batch t + k is sampled with
them. Here that sampling begins before the learner learns, in a thread, and has ended when it has learned: a step ends
when both have, so a checkpoint, the metrics and the state of a step are those of one process
(tests/fleet/test_training.py). Reward functions run beside the learner too; what the learner's own process computes of
rewards, by models that are frozen, waits until it has learned, and so does whatever depends on it. A KL in the reward
that needs the policy's log-probabilities needs the weights before they are learned, so such a batch is waited for; and
so is every batch without `rollouts_ahead`. Where there are several ranks, the first one has the fleet and scores, and
the others get its batches. Left out: who samples what (`isobit.fleet`).
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from threading import Event, Thread
from typing import Any

import torch

from isobit.distributed import ALONE
from isobit.engine.engine import OnGroup
from isobit.engine.prompts import Prompt
from isobit.engine.sequences import Stats
from isobit.engine.types import Completion
from isobit.fleet.fleet import Fleet
from isobit.rl import Group
from isobit.rl.algorithm.credit import StepBatch
from isobit.rl.algorithm.samples import groups_from_json, groups_to_json
from isobit.training.context import Context
from isobit.training.measuring.meter import Meter
from isobit.training.parts import Parts
from isobit.training.rollouts.sources import Sampled


def open_fleet(parts: Parts) -> Fleet | None:
    """The engines that a config asks for, starting; None if it asks for none, and on ranks that are not the first.
    Raises IsobitError where Ray is not installed, cannot be reached, or has no room for them."""
    config = parts.config
    if not config.fleet.engines or not parts.ranks.first:
        return None
    sequences, most = config.prompts_per_step * parts.sampling.n, config.sampling.max_new_tokens
    return Fleet(config.fleet, parts.engine, sequences, most, config.engine, config.run.check_memory)


class Beside:
    """Batches ahead of the learner by `steps`, sampled by the first rank's fleet. A context manager, which ends it."""

    def __init__(self, context: Context, fleet: Fleet | None, steps: int) -> None:
        self._context, self._fleet, self._steps = context, fleet, steps
        self._ranks = context.parts.ranks
        self._meter = Meter(lambda phase: None, torch.device("cpu"))  # the thread's own, until its batch is there
        self._learned = Event()
        self._thread: Thread | None = None
        self._under_way = False  # on every rank
        self._found: StepBatch | BaseException
        if fleet is not None:
            alone = replace(context, parts=replace(context.parts, ranks=ALONE), meter=self._meter)
            self._source = _OnFleet(alone, fleet, self._learned)
            fleet.note = context.display.note

    def __enter__(self) -> "Beside":
        self._context.parts.engine.sleep()  # evaluation has an engine of its own
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._fleet is None:
            return
        self._fleet.stop()
        if self._thread is not None:
            self._learned.set()
            self._thread.join()
        self._fleet.close()

    def next(self) -> StepBatch:
        """The batch of the present step; from now on the one that is `steps` ahead is sampled."""
        queue, meter = self._context.state.queue, self._context.meter
        with meter.timed("send"), self._context.saver.broken_weights_end_the_run():
            self._ranks.run_on_all(self._send)
        while len(queue) < max(self._steps, 1):  # at the beginning there is nothing to learn from meanwhile
            self._begin()
            self.settle()
        if self._steps:
            self._begin()
        objective = self._context.parts.objective
        if objective.kl_in_reward and objective.recompute_old:  # several updates of a batch change the policy
            self.settle()
        return queue.pop(0)

    def settle(self) -> None:
        """The learner has learned: wait for the batch that is sampled beside it, and put it into the queue. Raises what
        sampling or scoring has raised."""
        if not self._under_way:
            return
        meter, began = self._context.meter, time.perf_counter()
        meter.phase("rollout")
        self._under_way = False
        batch, metrics = self._arrived(self._ranks.on_first(self._joined))
        meter.count("time/rollout_waited", time.perf_counter() - began)
        for name, value in metrics.items():
            if name.startswith("quant/"):  # a fraction: of the last batch, as in one process
                meter.metrics[name] = value
            else:
                meter.count(name, value)
        self._context.state.queue.append(batch)

    def _joined(self) -> StepBatch:
        """What the thread has found, at its end."""
        assert self._thread is not None
        self._learned.set()
        self._thread.join()
        self._thread = None
        if isinstance(self._found, BaseException):
            raise self._found
        return self._found

    def _arrived(self, found: StepBatch | None) -> tuple[StepBatch, dict[str, float]]:
        """The batch that the first rank `found`, with its metrics, on every rank, and what it changed in the state."""
        state, wanted = self._context.state, self._context.parts.config.prompts_per_step
        mine: dict[str, Any] | None = None
        if found is not None and self._ranks.size > 1:
            mine = {
                "batch": found.to_json(),
                "pending": groups_to_json(state.pending),
                "cursor": state.cursor,
                "metrics": self._meter.metrics,
            }
        given = self._ranks.all_gather_json(mine)[0]
        if found is not None:
            return found, self._meter.metrics
        state.cursor = given["cursor"]
        state.pending = groups_from_json(given["pending"])
        return StepBatch.from_json(given["batch"], wanted), given["metrics"]

    def _send(self) -> None:
        if self._fleet is not None:
            self._fleet.send()

    def _begin(self) -> None:
        self._under_way = True
        if self._fleet is None:
            return
        self._learned.clear()
        self._meter.begin()
        self._thread = Thread(target=self._sample, name="isobit-fleet", daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        try:
            self._found = self._source.next()
        except BaseException as error:  # raised again by `settle`
            self._found = error


class _OnFleet(Sampled):
    """`Sampled`, on the fleet's engines and in a thread: what this process computes waits for the learner."""

    def __init__(self, context: Context, fleet: Fleet, learned: Event) -> None:
        super().__init__(context)
        parts = context.parts
        self._computes = bool(parts.scorer.models or parts.objective.kl_in_reward)
        self._fleet, self._until = fleet, learned

    def _groups(
        self, prompts: Sequence[Prompt], ids: Sequence[int], add: OnGroup
    ) -> tuple[dict[int, list[Completion]], Stats]:
        groups = self._fleet.generate(prompts, self._context.parts.sampling, ids, on_group=add)
        return dict(enumerate(groups)), self._fleet.stats

    def score(self, groups: Sequence[Group]) -> list[Group]:
        if self._computes:
            self._until.wait()
        return super().score(groups)
