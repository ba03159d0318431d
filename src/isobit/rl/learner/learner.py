"""The learner: one rollout batch in, some optimizer steps, metrics out.

Old log-probabilities are the rollout's own under a unified precision, where they are the learner's
bit for bit (the mismatch metrics of the first optimizer step prove it in every batch), and
recomputed before any update otherwise: once, also where the KL in the reward has asked for them
before (`reference_kl`). Between optimizer steps the working weights are requantized; after the last
one that is the training loop's `sync`.

The gradient is that of the whole optimizer batch, however it is split into micro-batches: up to the
rounding of sums, and, where WGrad runs in FP8, up to its scales, which blocks of 128 tokens share
(tests/rl/test_learner.py). A load-balancing loss takes the load of the whole batch, for which
several micro-batches have a forward more (tests/rl/test_router_loss.py).

Samples whose advantage is exactly 0 teach nothing. Micro-batches of them alone are left out where
no other term of the loss needs them (`zero_advantage.py`), but for a few, on which the mismatch is
measured all the same.

A step whose loss or gradient is not finite, or whose tokens a correction has all rejected, changes
neither weights nor optimizer; it is counted, and left out of the other metrics, which are NaN if no
step was taken.

Left out: rewards and rollouts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from isobit.errors import NonFiniteError
from isobit.model import Model
from isobit.model.forward.recompute import Recompute
from isobit.rl.algorithm.advantages import Advantage
from isobit.rl.algorithm.correction import correct
from isobit.rl.algorithm.divergence import Divergence
from isobit.rl.algorithm.entropy import EntropyBonus
from isobit.rl.algorithm.functions import loss_function
from isobit.rl.algorithm.given import COMPARED_LOSSES, PAIR_LOSSES, kl_of_mismatched, mismatched
from isobit.rl.algorithm.loss import kl_penalty
from isobit.rl.algorithm.objective import ResolvedObjective, shares_prompts
from isobit.rl.algorithm.samples import Sample
from isobit.rl.algorithm.token_advantages import squared_norms
from isobit.rl.learner.agreement import (
    Compared,
    Disagreement,
    corrected,
    promises_bits,
    require_agreement,
)
from isobit.rl.learner.batch import (
    SampleKey,
    TrainingBatch,
    by_key,
    mismatch_of,
    rollout_logprobs,
    sample_key,
    training_batch,
)
from isobit.rl.learner.forward import (
    PolicyForward,
    Teacher,
    entropies_of,
    halved_of,
    logprobs_of,
)
from isobit.rl.learner.gradient import Differentiation
from isobit.rl.learner.routing import RoutingTotals
from isobit.rl.learner.schedule import Cutting, MicroBatches, Schedule
from isobit.rl.learner.totals import Totals
from isobit.rl.optim.schedule import learning_rate
from isobit.rl.optim.sharded import ShardedOptimizer


@dataclass(frozen=True)
class Learned:
    """The results of a rollout batch. `pairs`: the samples that the mismatch was measured on."""

    metrics: Mapping[str, float]
    pairs: Sequence[Compared] = ()

    @cached_property
    def compared(self) -> Mapping[SampleKey, Sequence[float]]:
        """The learner's log-probabilities of these, one for each completion token (0.0 for given
        ones)."""
        return by_key(self.pairs)


class Learner:
    """Trains `model` on rollout batches. `reference` is the frozen model of the KL penalty, if
    there is one.

    `on_mismatch` (stop, warn or correct) is what a differing token does where the learner
    `expects_equal_bits`; None: where the flow promises them. Every `check_gradients_every` steps,
    if it is not 0, the first micro-batch is differentiated twice. The mismatch is measured on
    `measured_zero_advantage` of the samples of a step that teach nothing and are left out.
    """

    def __init__(
        self,
        model: Model,
        optimizer: ShardedOptimizer,
        objective: ResolvedObjective,
        *,
        reference: Model | None = None,
        micro_batch_tokens: int = 16384,
        recompute: Recompute = False,
        seed: int = 0,
        on_mismatch: str = "warn",
        expects_equal_bits: bool | None = None,
        check_gradients_every: int = 0,
        measured_zero_advantage: int = 0,
    ) -> None:
        compares = objective.kl_coefficient > 0 or objective.loss in COMPARED_LOSSES
        assert (reference is not None) == compares
        self.model = model
        self.optimizer = optimizer
        self.objective = objective
        self.reference = reference
        loss = loss_function(objective.loss)
        self.differentiation = Differentiation(optimizer, model.transformer.masters.leaves, loss)
        self._ranks = optimizer.shards.ranks
        self.micro_batch_tokens, self.recompute = micro_batch_tokens, recompute
        self._check_gradients_every = check_gradients_every
        self.on_mismatch = on_mismatch
        self.expects_equal_bits = (
            promises_bits(model) if expects_equal_bits is None else expects_equal_bits
        )
        self.bad_steps_in_a_row = 0
        self.entropy_bonus = EntropyBonus.of(objective)
        mixture, recurrent = model.config.routed is not None, model.config.linear is not None
        wanted = optimizer.settings.share_prompts
        self.share_prompts = shares_prompts(wanted, objective, mixture=mixture, recurrent=recurrent)
        self._cutting = Cutting(
            micro_batch_tokens,
            self.share_prompts,
            optimizer.settings.separate_zero_advantage,
            0 if mixture else measured_zero_advantage,  # whose forwards are computed all the same
            objective.updates_per_batch,
            objective.epochs,
            seed,
            together=2 if objective.loss in PAIR_LOSSES else 1,
        )
        self._old: dict[SampleKey, Tensor] = {}  # of the weights of this version
        self._old_version = model.weights_version

    def restore(self, bad_steps_in_a_row: int, entropy_bonus: EntropyBonus) -> None:
        """Restore a checkpoint's state of a learner besides weights and optimizer: how many
        optimizer steps were skipped since the last good one, and how far an entropy bonus has
        adapted."""
        self.bad_steps_in_a_row, self.entropy_bonus = bad_steps_in_a_row, entropy_bonus

    def learn(
        self, samples: Sequence[Sample], advantages: Sequence[Advantage], step: int
    ) -> Learned:
        """Optimizer steps on one rollout batch; `step` counts batches and sets the learning rate.

        The working weights must be those that sampled. Mismatch is measured with them: over all
        samples whose old log-probabilities are recomputed, else over those of the first optimizer
        step that are not left out, and some that are. Samples that are known to be of older weights
        have no part in it; their distance is reported as `staleness/*`.

        Raises Disagreement, before anything has changed, if tokens differ that must not, under
        on_mismatch: stop. Under correct such a batch is learned from with an objective that
        corrects it.
        """
        strict = self.expects_equal_bits and self.on_mismatch != "warn"
        if not strict or self.on_mismatch == "stop":
            return self._learn(samples, advantages, step, self.objective, strict)
        try:
            learned, weighed = self._learn(samples, advantages, step, self.objective, strict), 0.0
        except Disagreement:
            learned = self._learn(
                samples, advantages, step, corrected(self.objective), strict=False
            )
            weighed = 1.0
        return replace(learned, metrics={**learned.metrics, "mismatch/corrected": weighed})

    def compare(self, samples: Sequence[Sample]) -> list[Compared]:
        """Samples of the present working weights that are learned from later, by other weights.
        Raises Disagreement as `learn`, and under on_mismatch: correct too where no correction will
        weigh them."""
        rows = rollout_logprobs(samples)
        compared = list(zip(samples, rows, self.logprobs(samples), strict=True))
        weighed = self.on_mismatch == "correct" and self.objective.rule.active
        if self.expects_equal_bits and self.on_mismatch != "warn" and not weighed:
            require_agreement(compared, samples)
        return compared

    def logprobs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the log-probabilities by the present working weights, [trained tokens] of each
        sample, without a gradient."""
        parts = self._cutting.whole(samples)
        found, _ = logprobs_of(self._forward(), samples, parts, self._ranks)
        return [found[i] for i in range(len(samples))]

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the log-probabilities by the frozen reference, as `logprobs`."""
        return self._reference(samples, self._cutting.whole(samples))

    def kl_baseline(self, samples: Sequence[Sample]) -> float:
        """KTO's estimate of KL(policy ‖ reference), of the mismatched pairs of these answers."""
        pairs = mismatched(samples, self.model.config.max_positions)
        return kl_of_mismatched(self.logprobs(pairs), self.reference_logprobs(pairs))

    def logit_norms(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        """Return for each trained token the squared norm of its gradient by the logits of the
        present working weights (`token_advantages.squared_norms`); where a correction weighs
        tokens, times the square of that weight, as verl scales it (arXiv 2602.07078).
        Log-probabilities that are recomputed as old ones are known then."""
        found = halved_of(self._forward(), samples, self._cutting.whole(samples), self._ranks)
        rows = [found[i] for i in range(len(samples))]
        norms = [squared_norms(*row.unbind(-1)) for row in rows]
        if self.objective.recompute_old:
            old = [row[:, 0] for row in rows]
            self._unknown(samples)  # forgets those of other weights
            self._old |= {sample_key(s): row for s, row in zip(samples, old, strict=True)}
            norms = self._weighed(norms, old, rollout_logprobs(samples))
        return [tuple(row.tolist()) for row in norms]

    def _weighed(
        self, norms: Sequence[Tensor], old: Sequence[Tensor], rollout: Sequence[Tensor]
    ) -> list[Tensor]:
        """Norms times the square of each token's weight in the correction, if there is one."""
        lengths = [len(row) for row in norms]
        if not self.objective.rule.active or not any(lengths):
            return list(norms)
        found = correct(self.objective.rule, torch.cat([*old]), torch.cat([*rollout]), lengths)
        weights = found.weights.double().split(lengths)
        return [norm * weight**2 for norm, weight in zip(norms, weights, strict=True)]

    def reference_kl(
        self, samples: Sequence[Sample], prompts: Sequence[tuple[int, ...] | None] | None = None
    ) -> list[tuple[float, ...] | None]:
        """Per sample and trained token, the estimate of KL(policy ‖ reference) that is charged to
        the reward. `prompts`: what the reference reads before each completion, in the place of its
        own prompt; None of one that has no teacher, nor a KL then.

        Of the old log-probabilities, as verl's `apply_kl_penalty` takes them, not of the rollout's
        where those are another flow's: a reference that is the policy costs exactly nothing
        (tests/rl/test_reference_kl.py).
        """
        read = [s.prompt_ids for s in samples] if prompts is None else prompts
        taught = [
            replace(sample, prompt_ids=before)
            for sample, before in zip(samples, read, strict=True)
            if before is not None
        ]
        reference = iter(self.reference_logprobs(taught))
        old = rollout_logprobs(samples)
        if self.objective.recompute_old:
            parts = self._cutting.old(samples, self._unknown(samples), [False] * len(samples), 0)
            old = list(self._old_logprobs(samples, parts, self._forward()).values())
        estimator = self.objective.estimator
        return [
            None
            if before is None
            else tuple(kl_penalty(mine.double(), next(reference).double(), estimator).tolist())
            for mine, before in zip(old, read, strict=True)
        ]

    def check_memory(self) -> None:
        """Raise Corruption, on every rank, if on one of them working weights, masters or moments
        have changed since they were written; only once their checksums are kept
        (`Trained.keep_checksums`)."""

        def compare() -> None:
            self.model.transformer.checksums.compare()
            self.optimizer.checksums.compare()

        self._ranks.run_on_all(compare)

    def _learn(
        self,
        samples: Sequence[Sample],
        advantages: Sequence[Advantage],
        step: int,
        objective: ResolvedObjective,
        strict: bool,
    ) -> Learned:
        """Learn from a batch. `strict`: raise Disagreement for tokens that differ."""
        rate = learning_rate(step, self.optimizer.settings)
        every, totals, policy = self._check_gradients_every, Totals(), self._forward(objective)
        if objective.loss == "kto":
            objective = replace(objective, kl_baseline=self.kl_baseline(samples))
        batch = training_batch(objective, samples, advantages, self.model.weights_version)
        unknown = self._unknown(samples) if objective.recompute_old else ()
        everything = objective.rule.of_batch or self.model.config.routed is not None
        old_zero = [False] * len(samples) if everything else batch.zero
        schedule = self._cutting.schedule(samples, batch.zero, step, unknown, old_zero)
        metrics: dict[str, float] = {}
        compared: dict[int, Compared] = {}
        try:
            if objective.recompute_old or self._penalized:
                batch, metrics = self._with_logprobs(batch, schedule, policy)
            if objective.top_entropy_quantile < 1:
                entropies = entropies_of(policy, samples, schedule.whole, self._ranks)
                batch = batch.of_high_entropy([entropies[i] for i in range(len(samples))])
        except NonFiniteError:
            self._skip(totals)
            return Learned(totals.metrics(rate))
        if objective.recompute_old:
            compared = batch.compared({i: batch.old[i] for i in batch.known})
            metrics |= batch.staleness()
            if strict:
                require_agreement([*compared.values()], samples)
        for update in schedule.updates:
            if not update.micro_batches:
                continue  # nothing to learn from is no reason to decay the weights
            one = batch.optimizer_batch(update, self.entropy_bonus.applied(objective))
            if one is None:
                totals.skipped += 1
                continue
            moved = bool(totals.norms)
            if moved:
                self.model.sync(rollout=False)
            compares = not moved and not objective.recompute_old
            checked = not moved and every > 0 and step % every == 0
            now = replace(
                policy, sampled=not moved, recompute=self.recompute, teacher=self._teacher
            )
            gradient = self.differentiation.gradient(one, now, checked=checked, measures=compares)
            found = batch.compared(gradient.logprobs) if compares else {}
            compared |= found
            if gradient.finite:
                if strict and compares:
                    require_agreement([*found.values()], [samples[i] for i in update.part])
                self.check_memory()
                self.optimizer.step(rate, gradient.norm)
                totals.add(gradient.totals, gradient.norm)
                self.entropy_bonus.stepped(gradient.totals.mean_entropy, objective)
                self.bad_steps_in_a_row = 0
            else:
                self._skip(totals)
            self.optimizer.zero_grad()
        if not totals.norms:
            self.check_memory()
        pairs = [*compared.values()]
        metrics |= mismatch_of(pairs) | {
            "mismatch/comparable_tokens": float(batch.comparable_tokens)
        }
        if objective.pays_entropy:
            metrics["entropy_coefficient"] = self.entropy_bonus.applied(objective)
        return Learned(metrics | totals.metrics(rate) | policy.totals.metrics(), pairs)

    @property
    def _penalized(self) -> bool:
        """Whether the loss compares with the reference: a KL penalty, or a loss of pairs."""
        return self.reference is not None and not self.objective.kl_in_reward

    @property
    def _teacher(self) -> Teacher | None:
        """Whose whole distribution is learned from, if any."""
        objective = self.objective
        if objective.loss != "divergence":
            return None
        assert self.reference is not None
        given = Divergence(objective.divergence_beta, objective.divergence_top_k)
        return Teacher(self.reference, given)

    def _with_logprobs(
        self, batch: TrainingBatch, schedule: Schedule, policy: PolicyForward
    ) -> tuple[TrainingBatch, dict[str, float]]:
        """Return the batch with its old and reference log-probabilities and its correction, and the
        correction's metrics."""
        objective, samples = batch.objective, batch.samples
        old = self._old_logprobs(samples, schedule.old, policy) if objective.recompute_old else None
        reference = self._reference(samples, schedule.whole) if self._penalized else None
        return batch.given(old, reference)

    def _forward(self, objective: ResolvedObjective | None = None) -> PolicyForward:
        return PolicyForward(
            self.model,
            objective or self.objective,
            RoutingTotals(),
            share_prompts=self.share_prompts,
        )

    def _unknown(self, samples: Sequence[Sample]) -> list[int]:
        """Return the samples whose log-probabilities by the working weights are not known."""
        if self._old_version != self.model.weights_version:
            self._old, self._old_version = {}, self.model.weights_version
        return [i for i, sample in enumerate(samples) if sample_key(sample) not in self._old]

    def _old_logprobs(
        self, samples: Sequence[Sample], parts: MicroBatches, policy: PolicyForward
    ) -> dict[int, Tensor]:
        """Return the log-probabilities by the working weights, by index, computed once while these
        last; of the micro-batches `parts`, which are not known yet, and those that are."""
        found, _ = logprobs_of(policy, samples, parts, self._ranks)
        self._old |= {sample_key(samples[i]): row for i, row in found.items()}
        keys = [sample_key(sample) for sample in samples]
        return {i: self._old[key] for i, key in enumerate(keys) if key in self._old}

    def _reference(self, samples: Sequence[Sample], parts: MicroBatches) -> list[Tensor]:
        """Return the reference's log-probabilities of each sample, [trained tokens]."""
        assert self.reference is not None
        reference = replace(self._forward(), model=self.reference, plain=True)
        return list(logprobs_of(reference, samples, parts, self._ranks)[0].values())

    def _skip(self, totals: Totals) -> None:
        self.check_memory()
        totals.skipped += 1
        self.bad_steps_in_a_row += 1
