"""The gradient of an optimizer batch: a forward and a backward for each of its micro-batches, on one rank or on many.

Micro-batches are a function of the samples alone. Where there are several ranks, each computes every `size`-th one.
Gradients are added in the order of the micro-batches (`isobit.distributed.exchange`), and so is what is counted over
them, so neither depends on the number of ranks (tests/distributed/test_runs.py). Micro-batches of idle samples alone
(`zero_advantage.py`) have no backward, and of a dense model no forward either: their zeros are added at the end. Left
out: which samples are in the batch, and the update.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from isobit.distributed import Ranks
from isobit.distributed.exchange import GradientSum
from isobit.errors import Corruption, IsobitError, NonFiniteError, RankLost
from isobit.model.forward.accumulate_grad import adding_in_place
from isobit.model.weights.checksums import checksums, first_difference
from isobit.rl.algorithm.functions import weighted_sum
from isobit.rl.algorithm.loss import LossFunction, kl_in_loss
from isobit.rl.learner.batch import TrainingBatch
from isobit.rl.learner.packing import pack
from isobit.rl.learner.routing import (
    BatchLoad,
    PolicyForward,
    RoutingTotals,
    batch_load,
    load_of,
    served_experts,
    summed,
)
from isobit.rl.learner.totals import Totals
from isobit.rl.learner.zero_advantage import split, without_teaching
from isobit.rl.optim.adamw import Optimizer


@dataclass(frozen=True, eq=False)
class Gradient:
    """Of an optimizer batch, which is in the parameters: its `norm`, inf if it is not finite; sums over its tokens; the
    policy's log-probabilities by the index of the sample, [trained tokens]."""

    norm: float
    totals: Totals
    logprobs: Mapping[int, Tensor]

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, (self.norm, self.totals.loss, self.totals.kl)))


@dataclass(frozen=True, eq=False)
class OptimizerBatch:
    """The samples `part` of a batch, in micro-batches of indices; `weights`: of each sample's tokens. Samples without a
    trained token have no gradient, so they are in none. `idle`: the micro-batches whose gradient is 0. `share_prompts`:
    compute the rows of a prompt once for its samples of a micro-batch."""

    batch: TrainingBatch
    micro: Sequence[Sequence[int]]
    weights: Mapping[int, float]
    clip_bounds: tuple[float, float]
    idle: frozenset[int] = frozenset()
    share_prompts: bool = False

    @staticmethod
    def of(
        batch: TrainingBatch,
        part: Sequence[int],
        clip_bounds: tuple[float, float],
        most_tokens: int,
        idle_apart: bool = False,
        share_prompts: bool = False,
    ) -> "OptimizerBatch":
        trained = [i for i in part if batch.samples[i].num_trained]
        micro = split(batch.samples, trained, batch.idle, most_tokens, idle_apart, share_prompts)
        weights = dict(zip(part, batch.weights_of(part)))
        idle = without_teaching(micro, batch.idle)
        return OptimizerBatch(batch, micro, weights, clip_bounds, idle, share_prompts)

    @property
    def idle_samples(self) -> list[int]:
        """Those of the idle micro-batches."""
        return [i for number in sorted(self.idle) for i in self.micro[number]]

    def dealt(self, sum_group: int) -> list[int | None]:
        """The micro-batches in the order in which ranks take them, without groups of `sum_group` that are idle. What is
        idle in another group keeps its place, which says what is added first."""
        numbers = range(len(self.micro))
        groups = [numbers[first : first + sum_group] for first in range(0, len(numbers), sum_group)]
        kept = [group for group in groups if not self.idle.issuperset(group)]
        return [None if number in self.idle else number for group in kept for number in group]

    def sizes(self) -> Totals:
        """How many tokens there are, and how many of them are left out."""
        samples = self.batch.samples
        rows = {i: len(samples[i].prompt_ids) + len(samples[i].completion_ids) for part in self.micro for i in part}
        return Totals(
            tokens=sum(samples[i].num_trained for i in rows),
            rows=sum(rows.values()),
            rows_left_out=sum(rows[i] for i in self.idle_samples),
        )


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What one micro-batch left beside its gradient: sums over its tokens, its routers', and the policy's
    log-probabilities [its trained tokens]."""

    totals: Totals
    routing: RoutingTotals
    logprobs: Tensor


class Differentiation:
    """Puts gradients of `loss` into the optimizer's parameters. With `sum_group` micro-batches are added in groups."""

    def __init__(self, optimizer: Optimizer, leaves: Mapping[str, Tensor], loss: LossFunction) -> None:
        self._optimizer, self._leaves, self.loss = optimizer, leaves, loss
        self._ranks: Ranks = optimizer.shards.ranks
        group = optimizer.settings.sum_group
        self._sum = GradientSum(leaves, optimizer.holders, optimizer.shards, group)

    def gradient(self, one: OptimizerBatch, policy: PolicyForward, checked: bool) -> Gradient:
        """Of one optimizer batch. Raises Corruption if it is `checked`, and the gradient of a rank's first micro-batch
        has other bits when it is computed twice."""
        found: dict[int, MicroBatch] = {}
        self._sum.begin()
        try:
            found = self._backwards(one, policy, checked)
            self._sum.finish()
            self._add_zeros(one, policy, found)
            norm = self._optimizer.gradient_norm()
        except _NotFinite as error:
            found, norm = error.before, math.inf
        totals, logprobs = one.sizes(), dict[int, Tensor]()
        for index, micro in sorted(found.items()):
            totals.merge(micro.totals)
            policy.totals.merge(micro.routing)
            lengths = [one.batch.samples[i].num_trained for i in one.micro[index]]
            logprobs |= zip(one.micro[index], micro.logprobs.split(lengths))
        return Gradient(norm, totals, logprobs)

    def _backwards(self, one: OptimizerBatch, policy: PolicyForward, checked: bool) -> dict[int, MicroBatch]:
        """All micro-batches, by all ranks. Raises _NotFinite on every rank where one meets NaN or infinity."""
        rank, size = self._ranks.rank, self._ranks.size
        dealt: Sequence[int | None] = range(len(one.micro))
        if policy.model.config.routed is None:
            dealt = one.dealt(self._optimizer.settings.sum_group)
        mine: dict[int, MicroBatch] = {}
        failed: IsobitError | None = None
        done = 0
        try:
            load = self._load(one, policy)
        except NonFiniteError:
            raise _NotFinite({}) from None
        for first in range(0, len(dealt), size):
            index = dealt[first + rank] if first + rank < len(dealt) else None
            taught = failed is None and index is not None and index not in one.idle
            now, checked = checked and taught, checked and not taught
            try:
                before = self._try(one, index, policy, load) if now and index is not None else None
                with self._checksums(now) as after, self._sum.round(first, min(size, len(dealt) - first)):
                    if index is not None and failed is None:
                        compute = self._backward if taught else self._forward
                        mine[index] = compute(one, index, policy, load)
                if before is not None:
                    _compare(before, after)
                done += failed is None
            except RankLost:
                raise
            except IsobitError as error:  # it waits for the others, who wait for this rank's rows
                failed = error
                if index is not None:
                    mine.pop(index, None)
        return self._gathered(mine, failed, policy, dealt, done)

    def _gathered(
        self,
        mine: dict[int, MicroBatch],
        failed: IsobitError | None,
        policy: PolicyForward,
        dealt: Sequence[int | None],
        done: int,
    ) -> dict[int, MicroBatch]:
        """Those of all ranks, by index; this one is `done` with so many of those it was dealt."""
        try:
            policy.model.ops.raise_faults()  # of the backwards
        except NonFiniteError as error:
            failed = failed or error
        # a rank stops at its first failure; what is before the first of all was computed at any number of ranks
        broken = isinstance(failed, NonFiniteError)
        self._ranks.raise_on_all(None if broken else failed)
        found = gather_micro_batches(self._ranks, mine)
        ends = self._ranks.all_gather_json([done, broken])
        if any(bad for _, bad in ends):
            first = min(rank + n * self._ranks.size for rank, (n, bad) in enumerate(ends) if bad)
            before = dealt[:first]
            raise _NotFinite({index: micro for index, micro in found.items() if index in before})
        return found

    def _add_zeros(self, one: OptimizerBatch, policy: PolicyForward, found: Mapping[int, MicroBatch]) -> None:
        """What the idle micro-batches would have added: 0 to all masters, but of experts only to those that served them
        (AdamW leaves a master without a gradient alone)."""
        if not one.idle:
            return
        served: Collection[str] = ()
        if policy.model.config.routed is not None:
            samples = [one.batch.samples[i] for i in one.idle_samples]
            served = served_experts(policy, samples, [found[index].routing for index in sorted(one.idle)])
        for name, holder in self._optimizer.holders.items():
            if holder.numel() and (".experts." not in name or name.rpartition(".")[0] in served):
                holder.grad = holder.new_zeros(holder.shape) if holder.grad is None else holder.grad.add_(0.0)

    def _load(self, one: OptimizerBatch, policy: PolicyForward) -> BatchLoad | None:
        """The load of the experts over the whole batch, where a loss balances it."""
        objective, samples = one.batch.objective, one.batch.samples
        if policy.model.config.routed is None or objective.router_aux_coefficient == 0:
            return None
        parts = [[samples[i] for i in indices] for indices in one.micro]
        return batch_load(policy.model, parts, objective.router_replay, self._ranks)

    def _backward(self, one: OptimizerBatch, index: int, policy: PolicyForward, load: BatchLoad | None) -> MicroBatch:
        """Forward and backward of one micro-batch: its part of the loss of the optimizer batch."""
        batch, chosen = one.batch, one.micro[index]
        objective, samples = batch.objective, [batch.samples[i] for i in chosen]
        routing, totals, packed = RoutingTotals(), Totals(), pack(samples, one.share_prompts)
        totals.rows_shared = packed.rows_shared
        logprobs, entropy, tape = replace(policy, totals=routing)(packed, samples)
        weights = [one.weights[i] for i in chosen]
        inputs = batch.loss_inputs(chosen, weights, logprobs, entropy, packed.sequence, one.clip_bounds)
        outputs = self.loss(inputs)
        loss = total = weighted_sum(outputs, inputs)
        if tape is not None and objective.router_aux_coefficient > 0:
            probabilities = summed(tape)
            load = load or load_of(tape, len(probabilities))
            total = total + objective.router_aux_coefficient * load.loss(probabilities)
        kl = None
        if inputs.reference_logprobs is not None:
            kl = kl_in_loss(inputs)
            total = total + objective.kl_coefficient * (kl * inputs.token_weights).sum()
        with adding_in_place(() if self._sum.hooked else self._leaves.values()):
            total.backward()
        totals.count(loss, outputs, entropy, kl)
        return MicroBatch(totals, routing, logprobs.detach())

    @torch.no_grad()
    def _forward(self, one: OptimizerBatch, index: int, policy: PolicyForward, load: BatchLoad | None) -> MicroBatch:
        """Of an idle micro-batch of a mixture of experts: whom its tokens went to, and what is measured."""
        routing, totals, samples = RoutingTotals(), Totals(), [one.batch.samples[i] for i in one.micro[index]]
        packed = pack(samples, one.share_prompts)
        totals.rows_shared = packed.rows_shared
        logprobs, entropy, _ = replace(policy, totals=routing)(packed, samples)
        totals.see(entropy)
        return MicroBatch(totals, routing, logprobs)

    def _try(self, one: OptimizerBatch, index: int, policy: PolicyForward, load: BatchLoad | None) -> dict[str, Tensor]:
        """Checksums of the gradient that `_backward` gives, which leaves nothing else."""
        with policy.model.transformer.watched(lambda ops, layer: ops), self._checksums(True, drop=True) as found:
            self._backward(one, index, policy, load)
        return found

    @contextmanager
    def _checksums(self, wanted: bool, *, drop: bool = False) -> Iterator[dict[str, Tensor]]:
        """Those of the gradients that appear inside, by name; with `drop` nothing else takes them."""
        found: dict[str, Tensor] = {}

        def hook(name: str) -> Callable[[Tensor], None]:
            def take(leaf: Tensor) -> None:
                if leaf.grad is not None:  # an expert that no token chose
                    found.update(checksums({name: leaf.grad}))
                if drop:
                    leaf.grad = None

            return take

        leaves: Mapping[str, Any] = self._leaves if wanted else {}
        hooks = [leaf.register_post_accumulate_grad_hook(hook(name)) for name, leaf in leaves.items()]
        try:
            yield found
        finally:
            for each in hooks:
                each.remove()


class _NotFinite(Exception):
    """`before`: the micro-batches before the first that was not finite."""

    def __init__(self, before: dict[int, MicroBatch]) -> None:
        super().__init__()
        self.before = before


def gather_micro_batches(ranks: Ranks, mine: Mapping[int, MicroBatch]) -> dict[int, MicroBatch]:
    """Those of all ranks, by index."""
    if ranks.size == 1:
        return dict(mine)
    said = ranks.all_gather_json(
        [[index, micro.totals.to_json(), micro.routing.to_json()] for index, micro in mine.items()]
    )
    tensors = ranks.all_gather_tensors({f"{i}.{k}": t for i, m in mine.items() for k, t in _tensors(m).items()})
    found: dict[int, MicroBatch] = {}
    for values, own in zip(said, tensors):
        for index, totals, routing in values:
            load, probabilities = own.get(f"{index}.load"), own[f"{index}.probabilities"]
            routed = RoutingTotals.from_json(routing, load, probabilities)
            found[index] = MicroBatch(Totals(**totals), routed, own[f"{index}.logprobs"])
    return found


def _tensors(micro: MicroBatch) -> dict[str, Tensor]:
    found = {"logprobs": micro.logprobs, "probabilities": micro.routing.probabilities}
    return found if micro.routing.load is None else found | {"load": micro.routing.load}


def _compare(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    names = before.keys() ^ after.keys()
    if (name := min(names) if names else first_difference(before, after)) is not None:
        raise Corruption(
            f"the gradient of {name} has other bits when it is computed again: a fault of the hardware, or an operator "
            "or a loss that does not repeat itself"
        )
