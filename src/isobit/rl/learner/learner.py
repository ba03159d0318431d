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

What has to be known of the samples first is what the loss and the objective say that they need
(`needs_of`). Samples whose advantage is exactly 0 teach nothing. Micro-batches of them alone are
left out where no other term of the loss needs them (`schedule.py`), but for a few, on which the
mismatch is measured all the same.

A step whose loss or gradient is not finite, or whose tokens a correction has all rejected, changes
neither weights nor optimizer; it is counted, and left out of the other metrics, which are NaN if no
step was taken.

Left out: rewards and rollouts.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
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
from isobit.rl.algorithm.given import kl_of_mismatched, mismatched
from isobit.rl.algorithm.loss import kl_penalty, needs_of
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
from isobit.rl.learner.forward import Computed, PolicyForward, Teacher, values_of
from isobit.rl.learner.gradient import Differentiation, Gradient, OptimizerBatch
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
        self._loss = loss = loss_function(objective.loss)
        compares = objective.kl_coefficient > 0 or "reference" in loss.needs
        assert (reference is not None) == compares
        self.model = model
        self.optimizer = optimizer
        self.objective = objective
        self.reference = reference
        self.differentiation = Differentiation(model, optimizer, loss)
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
            together=2 if "pairs" in loss.needs else 1,
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
        """Do the optimizer steps on one batch; `step` counts batches and sets the learning rate.

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
        """Compare samples of the present working weights that are learned from later, by other
        weights. Raises Disagreement as `learn`, and under on_mismatch: correct too where no
        correction will weigh them."""
        rows = rollout_logprobs(samples)
        compared = list(zip(samples, rows, self.logprobs(samples), strict=True))
        weighed = self.on_mismatch == "correct" and self.objective.rule.active
        if self.expects_equal_bits and self.on_mismatch != "warn" and not weighed:
            require_agreement(compared, samples)
        return compared

    def logprobs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the log-probabilities by the present working weights, [trained tokens] of each
        sample, without a gradient."""
        return self._whole(self._forward(), samples)

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the log-probabilities by the frozen reference, as `logprobs`."""
        assert self.reference is not None
        return self._whole(replace(self._forward(), model=self.reference, plain=True), samples)

    def kl_baseline(self, samples: Sequence[Sample]) -> float:
        """Return KTO's estimate of KL(policy ‖ reference), of the mismatched pairs of these
        answers."""
        pairs = mismatched(samples, self.model.config.max_positions)
        return kl_of_mismatched(self.logprobs(pairs), self.reference_logprobs(pairs))

    def logit_norms(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        """Return for each trained token the squared norm of its gradient by the logits of the
        present working weights (`token_advantages.squared_norms`); where a correction weighs
        tokens, times the square of that weight, as verl scales it (arXiv 2602.07078).
        Log-probabilities that are recomputed as old ones are known then."""

        def halves(computed: Computed) -> Tensor:
            assert computed.beside is not None
            return torch.stack([computed.logprobs, computed.beside], -1)

        rows = self._whole(replace(self._forward(), halves=True), samples, halves)
        norms = [squared_norms(*row.unbind(-1)) for row in rows]
        if self.objective.recompute_old:
            old = [row[:, 0] for row in rows]
            self._unknown(samples)  # forgets those of other weights
            self._old |= {sample_key(s): row for s, row in zip(samples, old, strict=True)}
            lengths, rule = [len(row) for row in norms], self.objective.rule
            if rule.active and any(lengths):
                rollout = torch.cat(rollout_logprobs(samples))
                weights = correct(rule, torch.cat(old), rollout, lengths).weights.double()
                norms = [norm * w**2 for norm, w in zip(norms, weights.split(lengths), strict=True)]
        return [tuple(row.tolist()) for row in norms]

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
            replace(sample, prompt_ids=frozen)
            for sample, frozen in zip(samples, read, strict=True)
            if frozen is not None
        ]
        reference = iter(self.reference_logprobs(taught))
        old = rollout_logprobs(samples)
        if self.objective.recompute_old:
            micro_batches = self._cutting.old(
                samples, self._unknown(samples), [False] * len(samples), 0
            )
            old = list(self._old_logprobs(samples, micro_batches, self._forward()).values())
        estimator = self.objective.estimator
        return [
            None
            if frozen is None
            else tuple(kl_penalty(mine.double(), next(reference).double(), estimator).tolist())
            for mine, frozen in zip(old, read, strict=True)
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
        rate, totals = learning_rate(step, self.optimizer.settings), Totals()
        needs = needs_of(self._loss, objective)
        if "kl_baseline" in needs:
            objective = replace(objective, kl_baseline=self.kl_baseline(samples))
        policy = self._forward(objective)
        batch = training_batch(objective, samples, advantages, self.model.weights_version)
        unknown = self._unknown(samples) if "old" in needs else ()
        everything = objective.rule.of_batch or self.model.config.routed is not None
        schedule = batch.cut(self._cutting, step, unknown, everything)
        try:
            batch, metrics = self._with_needs(batch, schedule, policy, needs)
        except NonFiniteError:
            self._skip(totals)
            return Learned(totals.metrics(rate))
        compared: dict[int, Compared] = {}
        if "old" in needs:
            compared = batch.compared({i: batch.old[i] for i in batch.known})
            metrics |= batch.staleness()
            if strict:
                require_agreement([*compared.values()], samples)
        policy = replace(policy, recompute=self.recompute, teacher=self._teacher(needs))
        for update in schedule.updates:
            if not update.micro_batches:
                continue  # nothing to learn from is no reason to decay the weights
            data = OptimizerBatch.of(batch, update, self.entropy_bonus.applied(objective))
            if data is None:
                totals.skipped += 1
                continue
            first = not totals.norms
            if not first:
                self.model.sync(rollout=False)
            measures, every = first and "old" not in needs, self._check_gradients_every
            gradient = self.differentiation.forward_backward(
                data,
                replace(policy, sampled=first),
                checked=first and every > 0 and step % every == 0,
                measures=measures,
            )
            rows = batch.compared(gradient.logprobs) if measures else {}
            compared |= rows
            if gradient.finite:
                if strict:
                    require_agreement([*rows.values()], [samples[i] for i in update.samples])
                self.optim_step(rate, gradient, objective)
                totals.add(gradient.totals, gradient.norm)
            else:
                self._skip(totals)
            self.optimizer.zero_grad()
        if not totals.norms:
            self.check_memory()
        pairs = [*compared.values()]
        metrics |= mismatch_of(pairs)
        metrics["mismatch/comparable_tokens"] = float(batch.comparable_tokens)
        if objective.pays_entropy:
            metrics["entropy_coefficient"] = self.entropy_bonus.applied(objective)
        return Learned(metrics | totals.metrics(rate) | policy.totals.metrics(), pairs)

    def optim_step(self, rate: float, gradient: Gradient, objective: ResolvedObjective) -> None:
        """Update the masters once by the gradient, and adapt the entropy bonus to its batch."""
        self.check_memory()
        self.optimizer.step(rate, gradient.norm)
        self.entropy_bonus.stepped(gradient.totals.mean_entropy, objective)
        self.bad_steps_in_a_row = 0

    def _with_needs(
        self,
        batch: TrainingBatch,
        schedule: Schedule,
        policy: PolicyForward,
        needs: Collection[str],
    ) -> tuple[TrainingBatch, dict[str, float]]:
        """Return the batch with what the step needs to know of its tokens before their gradient,
        and the metrics of a correction."""
        samples, old, reference = batch.samples, None, None
        if "old" in needs:
            old = self._old_logprobs(samples, schedule.old, policy)
        if "reference" in needs:
            reference = self.reference_logprobs(samples)
        batch, metrics = batch.given(old, reference)
        if "entropies" in needs:
            forward = self._forward(batch.objective)
            entropies = self._whole(forward, samples, lambda computed: computed.entropy)
            batch = batch.of_high_entropy(entropies)
        return batch, metrics

    def _teacher(self, needs: Collection[str]) -> Teacher | None:
        """Return the reference whose whole distribution is learned from, if it is needed."""
        if "divergence" not in needs or self.reference is None:
            return None
        beta, top_k = self.objective.divergence_beta, self.objective.divergence_top_k
        return Teacher(self.reference, Divergence(beta, top_k))

    def _forward(self, objective: ResolvedObjective | None = None) -> PolicyForward:
        return PolicyForward(
            self.model, objective or self.objective, share_prompts=self.share_prompts
        )

    def _whole(
        self,
        policy: PolicyForward,
        samples: Sequence[Sample],
        read: Callable[[Computed], Tensor] = lambda computed: computed.logprobs,
    ) -> list[Tensor]:
        """Return what is `read` of a forward over each sample, [trained tokens]."""
        micro_batches = self._cutting.whole(samples)
        return [*values_of(policy, samples, micro_batches, self._ranks, read)[0].values()]

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
        by_index, _ = values_of(policy, samples, parts, self._ranks)
        self._old |= {sample_key(samples[i]): row for i, row in by_index.items()}
        keys = [sample_key(sample) for sample in samples]
        return {i: self._old[key] for i, key in enumerate(keys) if key in self._old}

    def _skip(self, totals: Totals) -> None:
        self.check_memory()
        totals.skipped += 1
        self.bad_steps_in_a_row += 1
