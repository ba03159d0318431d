"""Batches that a fleet of engines samples beside the learner: those of `rollouts.Ahead`, bit for bit.

`Ahead` is the definition: before the learner learns batch t with the weights of version t, batch t + k is sampled with
them. Here that sampling begins before the learner learns, in a thread, and has ended when it has learned: a step ends
when both have, so a checkpoint, the metrics and the state of a step are those of one process
(tests/fleet/test_training.py). Reward functions run beside the learner too; what the learner's own process computes of
rewards, by models that are frozen, waits until it has learned, and so does whatever depends on it. A KL in the reward
that needs the policy's log-probabilities needs the weights before they are learned, so such a batch is waited for; and
so is every batch without `rollouts_ahead`. Left out: who samples what (`isobit.fleet`).
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from threading import Event, Thread
from typing import Any

import torch

from isobit.engine.engine import OnGroup
from isobit.engine.prompts import Prompt
from isobit.engine.sequences import Stats
from isobit.engine.types import Completion
from isobit.fleet.fleet import Fleet
from isobit.rl import Group
from isobit.rl.collect import StepBatch
from isobit.training.context import Context
from isobit.training.meter import Meter
from isobit.training.parts import Parts
from isobit.training.rollouts import Sampled


def open_fleet(parts: Parts) -> Fleet | None:
    """The engines that a config asks for, starting; None if it asks for none. Raises IsobitError where Ray is not
    installed, cannot be reached, or has no room for them."""
    config = parts.config
    if not config.fleet.engines:
        return None
    sequences, most = config.prompts_per_step * parts.sampling.n, config.sampling.max_new_tokens
    return Fleet(config.fleet, parts.engine, sequences, most, config.engine, config.run.check_memory)


class Beside:
    """Batches ahead of the learner by `steps`, sampled by a fleet. A context manager, which ends the fleet."""

    def __init__(self, context: Context, fleet: Fleet, steps: int) -> None:
        self._context, self._fleet, self._steps = context, fleet, steps
        self._meter = Meter(lambda phase: None, torch.device("cpu"))  # the thread's own, until its batch is there
        self._learned = Event()
        self._source = _OnFleet(replace(context, meter=self._meter), fleet, self._learned)
        self._thread: Thread | None = None
        self._found: StepBatch | BaseException
        fleet.note = context.display.note

    def __enter__(self) -> "Beside":
        self._context.parts.engine.sleep()  # evaluation has an engine of its own
        return self

    def __exit__(self, *raised: Any) -> None:
        self._fleet.stop()
        if self._thread is not None:
            self._learned.set()
            self._thread.join()
        self._fleet.close()

    def next(self) -> StepBatch:
        """The batch of the present step; from now on the one that is `steps` ahead is sampled."""
        queue, meter = self._context.state.queue, self._context.meter
        with meter.timed("send"), self._context.saver.broken_weights_end_the_run():
            self._fleet.send()
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
        if self._thread is None:
            return
        meter, began = self._context.meter, time.perf_counter()
        meter.phase("rollout")
        self._learned.set()
        self._thread.join()
        self._thread = None
        meter.count("time/rollout_waited", time.perf_counter() - began)
        if isinstance(self._found, BaseException):
            raise self._found
        for name, value in self._meter.metrics.items():
            if name.startswith("quant/"):  # a fraction: of the last batch, as in one process
                meter.metrics[name] = value
            else:
                meter.count(name, value)
        self._context.state.queue.append(self._found)

    def _begin(self) -> None:
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
