"""The gradient of an optimizer batch: a forward and a backward for each of its micro-batches, on
one rank or many.

Micro-batches are a function of the samples alone. Where there are several ranks, each computes
every `size`-th one. Gradients are added in the order of the micro-batches
(`isobit.distributed.exchange`), and so is what is counted over them, so neither depends on the
number of ranks (tests/distributed/test_runs.py). Micro-batches of samples of zero advantage alone
have no backward, and of a dense model no forward either: their zeros are added at the end. Left
out: which samples are in the batch, and the update.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from isobit.distributed import Ranks
from isobit.distributed.exchange import GradientSum
from isobit.errors import Corruption, IsobitError, NonFiniteError, RankLost
from isobit.model import Model
from isobit.model.forward.accumulate_grad import adding_in_place
from isobit.model.weights.checksums import checksums, first_difference
from isobit.rl.algorithm.functions import weighted_sum
from isobit.rl.algorithm.loss import LossFunction, LossInputs, kl_in_loss, without_off_policy
from isobit.rl.algorithm.samples import Sample
from isobit.rl.learner.batch import TrainingBatch, joined
from isobit.rl.learner.forward import (
    Computed,
    MicroBatch,
    PolicyForward,
    gather_micro_batches,
    values_of,
)
from isobit.rl.learner.routing import (
    BatchLoad,
    RoutingTotals,
    batch_load,
    load_of,
    served_experts,
    summed,
)
from isobit.rl.learner.schedule import Update
from isobit.rl.learner.totals import Totals
from isobit.rl.optim.sharded import ShardedOptimizer


@dataclass(frozen=True, eq=False)
class OptimizerBatch:
    """The samples of an `update` of a batch, and by the index of a sample: the weight of a token in
    the loss, the weight of a token that an environment said, where such are learned; the weight of
    the entropy bonus."""

    batch: TrainingBatch
    update: Update
    weights: Mapping[int, float]
    observation_weights: Mapping[int, float]
    entropy_coefficient: float

    @staticmethod
    def of(
        batch: TrainingBatch, update: Update, entropy_coefficient: float = 0.0
    ) -> "OptimizerBatch | None":
        """Return the batch of an update; None where the mask or the correction left nothing of
        it."""
        chosen, importance = update.samples, batch.importance
        if all(batch.masked[i] for i in chosen):
            return None
        if importance is not None and not any(bool(importance[i].any()) for i in chosen):
            return None
        weights = dict(zip(chosen, batch.weights_of(chosen)))
        observed = batch.observation_weights_of(chosen)
        return OptimizerBatch(batch, update, weights, observed, entropy_coefficient)

    def samples(self, number: int) -> list[Sample]:
        """Return the samples of a micro-batch."""
        return [self.batch.samples[i] for i in self.update.micro_batches[number]]

    def loss_inputs(
        self,
        number: int,
        logprobs: Tensor,
        entropy: Tensor,
        sequence: Tensor,
        divergence: Tensor | None = None,
    ) -> LossInputs:
        """Return the loss's inputs of a micro-batch, given the forward of the policy over its
        tokens; `sequence`: of each token its sample's number."""
        batch, chosen = self.batch, self.update.micro_batches[number]

        def of(rows: Sequence[Tensor] | None) -> Tensor | None:
            return None if rows is None else joined(rows, chosen)

        token_weights = torch.tensor([self.weights[i] for i in chosen])[sequence]
        counted, importance = of(batch.averaged), of(batch.importance)
        return LossInputs(
            policy_logprobs=logprobs,
            old_logprobs=joined(batch.old, chosen),
            rollout_logprobs=joined(batch.rollout, chosen),
            advantages=joined(batch.advantages, chosen),
            importance_weights=torch.ones_like(entropy) if importance is None else importance,
            token_weights=token_weights if counted is None else token_weights * counted,
            entropy=entropy,
            sequence=sequence,
            clip_low=batch.objective.clip_low,
            clip_high=batch.objective.clip_high,
            settings=batch.objective,
            reference_logprobs=of(batch.reference),
            divergence=divergence,
        )

    def sizes(self) -> Totals:
        """Return how many tokens there are, and how many of them are left out."""
        samples = self.batch.samples
        rows = {
            i: len(samples[i].prompt_ids) + len(samples[i].completion_ids)
            for micro_batch in self.update.micro_batches
            for i in micro_batch
        }
        return Totals(
            tokens=sum(samples[i].num_trained for i in rows),
            rows=sum(rows.values()),
            rows_left_out=sum(rows[i] for i in self.update.zero_advantage_samples),
        )


@dataclass(frozen=True, eq=False)
class Gradient:
    """The gradient of an optimizer batch, which is in the parameters: its `norm`, inf if it is not
    finite; sums over its tokens; the policy's log-probabilities by the index of the sample,
    [trained tokens]."""

    norm: float
    totals: Totals
    logprobs: Mapping[int, Tensor]

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, (self.norm, self.totals.loss, self.totals.kl)))


class Differentiation:
    """Puts gradients of a model's loss into the parameters of its optimizer. With
    `gradient_sum_group` micro-batches are added in groups."""

    def __init__(self, model: Model, optimizer: ShardedOptimizer, loss: LossFunction) -> None:
        self._model, self._optimizer, self.loss = model, optimizer, loss
        self._leaves = model.transformer.masters.leaves
        self._ranks: Ranks = optimizer.shards.ranks
        group = optimizer.settings.gradient_sum_group
        self._sum = GradientSum(self._leaves, optimizer.holders, optimizer.shards, group)

    def forward_backward(
        self,
        one: OptimizerBatch,
        policy: PolicyForward,
        *,
        checked: bool = False,
        measures: bool = False,
    ) -> Gradient:
        """Compute the gradient of one update; if it `measures`, with the log-probabilities and the
        entropy of some of the samples that are left out. Raises Corruption if it is `checked`, and
        the gradient of a rank's first micro-batch has other bits when it is computed twice."""
        micro_batches: dict[int, MicroBatch] = {}
        mixture = policy.model.config.routed is not None
        self._sum.begin()
        try:
            micro_batches = self._rounds(one, policy, checked)
            self._sum.finish()
            if one.update.zero_advantage:
                self._add_zeros(self._served(one, policy, micro_batches) if mixture else ())
            norm = self._optimizer.gradient_norm()
        except _NotFinite as error:
            micro_batches, norm = error.before, math.inf
        totals, logprobs, samples = one.sizes(), dict[int, Tensor](), one.batch.samples
        for index, micro in sorted(micro_batches.items()):
            totals.merge(micro.totals)
            policy.totals.merge(micro.routing)
            chosen = one.update.micro_batches[index]
            lengths = [samples[i].num_trained for i in chosen]
            logprobs |= zip(chosen, micro.logprobs.split(lengths))
        if measures and one.update.measured:
            try:
                more, sums = values_of(policy, samples, one.update.measured, self._ranks)
            except NonFiniteError:
                return Gradient(math.inf, totals, logprobs)
            logprobs |= more
            totals.merge(sums)
        return Gradient(norm, totals, logprobs)

    def _rounds(
        self, one: OptimizerBatch, policy: PolicyForward, checked: bool
    ) -> dict[int, MicroBatch]:
        """Return all micro-batches, by all ranks. Raises _NotFinite on every rank where one meets
        NaN or infinity."""
        rank, size = self._ranks.rank, self._ranks.size
        dealt: Sequence[int | None] = range(len(one.update.micro_batches))
        if policy.model.config.routed is None:
            dealt = one.update.dealt(self._optimizer.settings.gradient_sum_group)
        mine: dict[int, MicroBatch] = {}
        failed: IsobitError | None = None
        done, group = 0, policy.model.transformer.group
        members = range(rank - group.rank, rank - group.rank + group.size)
        untried, untaught = set(members if checked else ()), {None, *one.update.zero_advantage}

        def index_of(place: int) -> int | None:
            return dealt[place] if place < len(dealt) else None

        try:
            load = self._load(one, policy)
        except NonFiniteError:
            raise _NotFinite({}) from None
        for first in range(0, len(dealt), size):
            index = index_of(first + rank)
            taught = {r for r in members if index_of(first + r) not in untaught}
            trying, untried = untried & taught, untried - taught
            now = rank in trying and failed is None
            try:
                first_sums = None
                try:
                    with policy.following(True) if trying else nullcontext():
                        if now and index is not None:
                            first_sums = self._try(one, index, policy, load)
                except RankLost:
                    raise
                except IsobitError as error:  # the others are in the round below
                    failed = error
                with (
                    self._checksums(now) as second_sums,
                    self._sum.round(first, min(size, len(dealt) - first)),
                    policy.following(bool(taught), self._sum.reach),
                ):
                    if index is not None and failed is None:
                        mine[index] = self._micro_batch(one, index, policy, load)
                if first_sums is not None:
                    _compare(first_sums, second_sums)
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
        """Return the micro-batches of all ranks, by index; this rank computed `done` of those that
        it was dealt."""
        try:
            policy.model.ops.raise_faults()  # of the backwards
        except NonFiniteError as error:
            failed = failed or error
        # a rank stops at its first failure; what is before the first of all was computed at any
        # number of ranks
        broken = isinstance(failed, NonFiniteError)
        self._ranks.raise_on_all(None if broken else failed)
        micro_batches = gather_micro_batches(self._ranks, mine)
        ends = self._ranks.all_gather_json([done, broken])
        if any(bad for _, bad in ends):
            first = min(rank + n * self._ranks.size for rank, (n, bad) in enumerate(ends) if bad)
            earlier = dealt[:first]
            raise _NotFinite(
                {index: micro for index, micro in micro_batches.items() if index in earlier}
            )
        return micro_batches

    def _add_zeros(self, served: Collection[str]) -> None:
        """Add the terms of micro-batches of zero advantage: 0 to all masters, but of experts only
        to those that `served` them (AdamW leaves a master without a gradient alone)."""
        for name, holder in self._optimizer.holders.items():
            if holder.numel() and (".experts." not in name or name.rpartition(".")[0] in served):
                holder.grad = (
                    holder.new_zeros(holder.shape) if holder.grad is None else holder.grad.add_(0.0)
                )

    def _served(
        self, one: OptimizerBatch, policy: PolicyForward, found: Mapping[int, MicroBatch]
    ) -> Collection[str]:
        """Return the experts that the micro-batches of zero advantage went to."""
        samples = [one.batch.samples[i] for i in one.update.zero_advantage_samples]
        seen = [found[number].routing for number in sorted(one.update.zero_advantage)]
        return served_experts(policy.model, samples, policy.objective.router_replay, seen)

    def _load(self, one: OptimizerBatch, policy: PolicyForward) -> BatchLoad | None:
        """Return the load of the experts over the whole batch, where a loss balances it."""
        objective = one.batch.objective
        if policy.model.config.routed is None or objective.router_aux_coefficient == 0:
            return None
        micro_batches = [one.samples(number) for number in range(len(one.update.micro_batches))]
        return batch_load(policy.model, micro_batches, objective.router_replay, self._ranks)

    def _micro_batch(
        self, one: OptimizerBatch, index: int, policy: PolicyForward, load: BatchLoad | None
    ) -> MicroBatch:
        """Forward and backward of one micro-batch; of one of zero advantage, which a mixture of
        experts has for the experts of its tokens, the forward alone."""
        routing, totals = RoutingTotals(), Totals()
        taught = index not in one.update.zero_advantage
        observes = taught and bool(one.observation_weights)
        with torch.set_grad_enabled(taught):
            computed = replace(policy, totals=routing, observes=observes)(one.samples(index))
        totals.rows_shared = computed.packed.rows_shared
        if taught:
            total = self._loss(one, index, computed, load, totals)
            twice = computed.beside is not None or computed.observed is not None
            tokens = computed.packed.tokens
            backward(self._model, total, tokens, twice=twice, hooked=self._sum.hooked)
        else:
            totals.see(computed.entropy)
        return MicroBatch(totals, routing, computed.logprobs.detach())

    def _loss(
        self,
        one: OptimizerBatch,
        index: int,
        computed: Computed,
        load: BatchLoad | None,
        totals: Totals,
    ) -> Tensor:
        """Return the part of a micro-batch in the loss of the optimizer batch, and count it."""
        objective, packed = one.batch.objective, computed.packed
        tokens = computed.logprobs, computed.entropy, packed.sequence, computed.beside
        inputs = one.loss_inputs(index, *tokens)
        outputs = without_off_policy(self.loss(inputs), inputs)
        loss = total = weighted_sum(outputs, inputs)
        if computed.tape is not None and objective.router_aux_coefficient > 0:
            probabilities = summed(computed.tape)
            load = load or load_of(computed.tape, len(probabilities))
            total = total + objective.router_aux_coefficient * load.loss(probabilities)
        if one.entropy_coefficient:
            bonus = (inputs.entropy * inputs.token_weights).sum()
            total = total - one.entropy_coefficient * bonus
        kl = None
        if inputs.reference_logprobs is not None and objective.kl_coefficient > 0:
            kl = kl_in_loss(inputs)
            total = total + objective.kl_coefficient * (kl * inputs.token_weights).sum()
        if computed.observed is not None and packed.observed is not None:
            chosen = one.update.micro_batches[index]
            of_samples = torch.tensor([one.observation_weights.get(i, 0.0) for i in chosen])
            weights, cross_entropy = of_samples[packed.observed.sequence], -computed.observed
            total = total + objective.observation_coefficient * (cross_entropy * weights).sum()
            totals.observe(cross_entropy[weights > 0])
        totals.count(loss, outputs, computed.entropy, kl)
        return total

    def _try(
        self, one: OptimizerBatch, index: int, policy: PolicyForward, load: BatchLoad | None
    ) -> dict[str, Tensor]:
        """Return checksums of the gradient of a micro-batch, of which nothing else is left."""
        with (
            policy.model.transformer.watched(lambda ops, layer: ops),
            self._checksums(True, drop=True) as sums,
        ):
            self._micro_batch(one, index, policy, load)
        return sums

    @contextmanager
    def _checksums(self, wanted: bool, *, drop: bool = False) -> Iterator[dict[str, Tensor]]:
        """Yield the checksums, by name, of the gradients that appear inside; with `drop` nothing
        else takes them."""
        sums: dict[str, Tensor] = {}

        def hook(name: str) -> Callable[[Tensor], None]:
            def take(leaf: Tensor) -> None:
                if leaf.grad is not None:  # an expert that no token chose
                    sums.update(checksums({name: leaf.grad}))
                if drop:
                    leaf.grad = None

            return take

        leaves: Mapping[str, Any] = self._leaves if wanted else {}
        hooks = [
            leaf.register_post_accumulate_grad_hook(hook(name)) for name, leaf in leaves.items()
        ]
        try:
            yield sums
        finally:
            for handle in hooks:
                handle.remove()


def backward(
    model: Model,
    total: Tensor,
    tokens: Tensor | None = None,
    *,
    twice: bool = False,
    hooked: bool = False,
) -> None:
    """Backward of one micro-batch: add the gradient of `total` to the gradients that the masters
    have, where they are; not where they are `hooked`. `tokens`: those of its rows, if a tied
    embedding has one sum of both its gradients; `twice`: the head was used twice."""
    leaves = {} if hooked else model.transformer.masters.leaves
    tied = leaves.get("embed") if model.config.tie_embeddings and tokens is not None else None
    # the head has two gradients a backward where it is used twice, and where it is the embedding
    # too, of which a `TiedGradient` is made on a CPU alone
    twice = twice or (tied is not None and tied.device.type != "cpu")
    apart = ("embed", "head") if twice else ()
    masters = [leaf for name, leaf in leaves.items() if name not in apart]
    with adding_in_place(masters, None if twice else tied, tokens):
        total.backward()  # type: ignore[no-untyped-call]


class _NotFinite(Exception):
    """`before`: the micro-batches before the first that was not finite."""

    def __init__(self, before: dict[int, MicroBatch]) -> None:
        super().__init__()
        self.before = before


def _compare(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    names = before.keys() ^ after.keys()
    if (name := min(names) if names else first_difference(before, after)) is not None:
        raise Corruption(
            f"the gradient of {name} has other bits when it is computed again: a fault of the "
            "hardware, or an operator or a loss that does not repeat itself"
        )
