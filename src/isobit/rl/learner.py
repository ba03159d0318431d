"""The learner: one rollout batch in, some optimizer steps, metrics out.

Old log-probabilities are the rollout's own under a unified precision, where they are the learner's bit for bit (the
mismatch metrics of the first optimizer step prove it in every batch), and recomputed before any update otherwise: once,
also where the KL in the reward has asked for them before (`reference_kl`).
Between optimizer steps the working weights are requantized; after the last one that is the training loop's `sync`.

The gradient is that of the whole optimizer batch, however it is split into micro-batches: up to the rounding of sums,
and, where WGrad runs in FP8, up to its scales, which blocks of 128 tokens share (tests/rl/test_learner.py). A
load-balancing loss takes the load of the whole batch, for which several micro-batches have a forward more
(tests/rl/test_router_loss.py).

A step whose loss or gradient is not finite, or whose tokens a correction has all rejected, changes neither weights nor
optimizer; it is counted, and left out of the other metrics, which are NaN if no step was taken.

Left out: rewards and rollouts.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from isobit.errors import NonFiniteError
from isobit.model import Model
from isobit.model.moe import RouteTape, decode_routes
from isobit.rl.agreement import Disagreement, corrected, promises_bits, require_agreement
from isobit.rl.batch import Advantage, Batch, per_token
from isobit.rl.correction import correct, correction_metrics, step_metrics
from isobit.rl.forward import forward
from isobit.rl.loss import kl_penalty, policy_loss, token_weights
from isobit.rl.objective import Objective
from isobit.rl.optim import Optimizer
from isobit.rl.packing import PackedBatch, micro_batches, minibatches, pack
from isobit.rl.routing import BatchLoad, RoutingTotals, load_of, summed
from isobit.rl.samples import Sample
from isobit.rl.schedule import learning_rate
from isobit.rl.shadow import calibrated_bounds, log_ratios, shadow_metrics
from isobit.rl.totals import Totals


class Learner:
    """Trains `model` on rollout batches. `reference` is the frozen model of the KL penalty, if there is one.

    `bad_steps_in_a_row` counts skipped optimizer steps since the last good one; a resumed run sets it again.
    `clip_bounds` are the objective's, or those that the last shadow pass calibrated. `compared` holds the learner's
    log-probabilities of the last batch's completion tokens, of those samples that the mismatch was measured on, by
    (prompt_index, sample_index). `on_mismatch` (stop, warn or correct) is what a differing token does where the flow
    has `promised` that there is none.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        objective: Objective,
        *,
        reference: Model | None = None,
        micro_batch_tokens: int = 16384,
        seed: int = 0,
        on_mismatch: str = "warn",
    ) -> None:
        assert (reference is not None) == (objective.kl_coefficient > 0)
        self.model, self.optimizer, self.objective, self.reference = model, optimizer, objective, reference
        self.micro_batch_tokens = micro_batch_tokens
        self.seed = seed
        self.on_mismatch, self.promised = on_mismatch, promises_bits(model)
        self.bad_steps_in_a_row = 0
        self.compared: dict[tuple[int, int], list[float]] = {}
        self.clip_bounds = (objective.clip_low, objective.clip_high)
        self._routing = RoutingTotals()
        self._old: dict[tuple[int, int], Tensor] = {}
        self._old_version = model.weights_version

    def learn(self, samples: Sequence[Sample], advantages: Sequence[Advantage], step: int) -> dict[str, float]:
        """`optimize`, and once more for a batch that disagrees and is to be corrected.

        Raises Disagreement, before anything has changed, if tokens differ that must not; unless they are to be
        corrected, or only counted.
        """
        if not self.promised or self.on_mismatch != "correct":
            return self.optimize(samples, advantages, step)
        try:
            return self.optimize(samples, advantages, step) | {"mismatch/corrected": 0.0}
        except Disagreement:
            self._routing = RoutingTotals()
        objective, self.objective, self.promised = self.objective, corrected(self.objective), False
        try:
            return self.optimize(samples, advantages, step) | {"mismatch/corrected": 1.0}
        finally:
            self.objective, self.promised = objective, True

    def optimize(self, samples: Sequence[Sample], advantages: Sequence[Advantage], step: int) -> dict[str, float]:
        """Optimizer steps on one rollout batch; `step` counts batches and sets the learning rate. Returns metrics.

        The working weights must be those that sampled. Mismatch is measured with them: over all samples where old
        log-probabilities are recomputed, else over those of the first optimizer step. Where samples of older weights
        are meant to be there, they have no part in it, and how far they are is told apart.
        """
        objective, metrics = self.objective, dict[str, float]()
        self.compared = {}
        totals, rate = Totals(), learning_rate(step, self.optimizer.settings)
        try:
            batch = self._prepare(samples, advantages, metrics)
        except NonFiniteError:
            self._count_bad(totals)
            return metrics | totals.metrics(rate)
        due = objective.shadow_every > 0 and step % objective.shadow_every == 0
        shadow = self._shadow(samples) if due and any(s.num_trained for s in samples) else None
        first: list[tuple[int, Tensor]] | None = None if objective.recompute_old else []
        for epoch in range(objective.epochs):
            for part in minibatches(len(samples), objective.updates_per_batch, self.seed, step, epoch):
                if totals.norms:  # the weights have changed
                    self.model.sync(rollout=False)
                    first = None
                self._update(batch, part, rate, totals, first)
                if first is not None:
                    metrics |= self._compare(batch, first)
        if shadow is not None:
            metrics |= self._compare_with_shadow(batch, shadow)
        routing, self._routing = self._routing, RoutingTotals()
        return metrics | totals.metrics(rate) | routing.metrics()

    def _compare(self, batch: Batch, found: Sequence[tuple[int, Tensor]]) -> dict[str, float]:
        """The mismatch over samples of the present weights, by index, which are kept in `compared`."""
        fresh = [(i, logprobs) for i, logprobs in found if batch.fresh[i]]
        for i, logprobs in fresh:
            sample = batch.samples[i]
            values = [0.0] * len(sample.completion_ids)
            for position, value in zip(sample.trained, logprobs.tolist(), strict=True):
                values[position] = value
            self.compared[_key(sample)] = values
        return batch.mismatch(fresh)

    def _require_agreement(self, batch: Batch, found: Sequence[tuple[int, Tensor]], part: Sequence[int]) -> None:
        if self.promised and self.on_mismatch != "warn":
            fresh = [(batch.samples[i], logprobs) for i, logprobs in found if batch.fresh[i]]
            require_agreement(fresh, [batch.samples[i] for i in part])

    def reference_kl(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        """Per sample and token, the estimate of KL(policy ‖ reference) that the reward pays for.

        Of the old log-probabilities, as verl's `apply_kl_penalty` takes them, not of the rollout's where those are
        another flow's: a reference that is the policy costs exactly nothing (tests/rl/test_reference_kl.py).
        """
        assert self.reference is not None
        reference = self._logprobs(self.reference, samples)
        old = self._old_logprobs(samples) if self.objective.recompute_old else _rollout_logprobs(samples)
        return [
            tuple(kl_penalty(mine.double(), other.double(), self.objective.kl_estimator).tolist())
            for mine, other in zip(old, reference)
        ]

    def _old_logprobs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Of the working weights; computed once for as long as they last."""
        if self._old_version != self.model.weights_version:
            self._old, self._old_version = {}, self.model.weights_version
        missing = [sample for sample in samples if _key(sample) not in self._old]
        self._old |= zip(map(_key, missing), self._logprobs(self.model, missing))
        return [self._old[_key(sample)] for sample in samples]

    def _shadow(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Log-probabilities of the masters as they are, in BF16."""
        return self._logprobs(self.model.under("bf16"), samples)

    def _compare_with_shadow(self, batch: Batch, before: list[Tensor]) -> dict[str, float]:
        """Once the weights have moved: the ratio's noise, and bounds of the clip that allow for it."""
        objective = self.objective
        moved = self.model.under(self.model.precision)
        moved.transformer.kv_scales = self.model.transformer.kv_scales
        try:
            noisy = log_ratios(self._logprobs(moved, batch.samples), batch.old)
        except NonFiniteError:
            return {}  # the next step will find it too, and counts it
        clean = log_ratios(self._shadow(batch.samples), before)
        if not bool(torch.isfinite(noisy).all() & torch.isfinite(clean).all()):
            return {}
        arguments = (noisy, clean, torch.cat(batch.advantages), objective.clip_low, objective.clip_high)
        metrics = shadow_metrics(*arguments)
        if objective.shadow_calibrates_clip:
            self.clip_bounds = calibrated_bounds(*arguments)
            metrics |= {"shadow/clip_low": self.clip_bounds[0], "shadow/clip_high": self.clip_bounds[1]}
        return metrics

    def _count_bad(self, totals: Totals) -> None:
        totals.skipped += 1
        self.bad_steps_in_a_row += 1

    def _prepare(self, samples: Sequence[Sample], advantages: Sequence[Advantage], metrics: dict[str, float]) -> Batch:
        rollout = _rollout_logprobs(samples)
        version, stale = self.model.weights_version, self.objective.stale_samples
        fresh = [not stale or s.weights_version == version for s in samples]
        batch = Batch(samples, per_token(samples, advantages), rollout, rollout, fresh)
        if self.objective.recompute_old:
            batch.old = self._old_logprobs(samples)
            self._require_agreement(batch, list(enumerate(batch.old)), range(len(samples)))
            metrics |= self._compare(batch, list(enumerate(batch.old)))
            metrics |= batch.staleness()
        if self.reference is not None and not self.objective.kl_in_reward:
            batch.reference = self._logprobs(self.reference, samples)
        lengths = [len(r) for r in rollout]
        if self.objective.correction.active and any(lengths):
            correction = correct(self.objective.correction, torch.cat(batch.old), torch.cat(rollout), lengths)
            batch.weights = list(correction.weights.split(lengths))
            before = self._token_weights(lengths)
            if self.objective.correction.denominator == "kept":
                batch.kept = list(correction.kept.split(lengths))
            sizes = (torch.cat(batch.advantages), lengths, before, self._token_weights(batch.counted))
            metrics |= correction_metrics(correction) | step_metrics(correction, *sizes)
        return batch

    def _token_weights(self, counted: Sequence[int]) -> list[float]:
        return token_weights(counted, self.objective.loss_aggregation, self.objective.max_new_tokens)

    @torch.no_grad()
    def _logprobs(self, model: Model, samples: Sequence[Sample]) -> list[Tensor]:
        results: list[Tensor] = []
        for part in micro_batches(samples, self.micro_batch_tokens):
            chosen = [samples[i] for i in part]
            logprobs, _ = self._forward(model, pack(chosen), chosen, compare=model is self.model)[:2]
            results += logprobs.split([s.num_trained for s in chosen])
        return results

    def _forward(
        self, model: Model, packed: PackedBatch, samples: Sequence[Sample], compare: bool
    ) -> tuple[Tensor, Tensor, RouteTape | None]:
        """`forward`, following the policy's routers, which may have to repeat the rollout's choices; `compare`: its
        weights are those of the rollout."""
        experts = model.config.experts
        if experts is None or model is not self.model:
            return *forward(model, packed, self.objective.temperature), None
        tape, recorded = self._tape(samples)
        compare &= all(s.weights_version == model.weights_version for s in samples)
        found = forward(model, packed, self.objective.temperature, tape)
        self._routing.see(tape, experts.count, recorded if compare else None)
        return *found, tape

    def _tape(self, samples: Sequence[Sample]) -> tuple[RouteTape, Tensor | None]:
        """For a forward over the samples, and what the rollout recorded for all of its rows, if it did."""
        config, recorded = self.model.config, None
        assert config.experts is not None
        if all(s.routes is not None for s in samples):
            layers, per_token = config.num_mixtures, config.experts.per_token
            recorded = torch.cat([decode_routes(s.routes or "", layers, per_token) for s in samples])
        assert recorded is not None or not self.objective.router_replay, "the rollout did not record its routes"
        replayed = recorded is not None and self.objective.router_replay
        return RouteTape(recorded.to(self.model.ops.device) if recorded is not None and replayed else None), recorded

    @torch.no_grad()
    def _batch_load(self, batch: Batch, spans: Sequence[Sequence[int]]) -> BatchLoad | None:
        """The experts' load over all micro-batches of an optimizer batch, by a pass of its own; None if there is no
        router to balance, or one micro-batch, whose own forward tells."""
        experts = self.model.config.experts
        if experts is None or not self.objective.router_aux_coefficient or len(spans) < 2:
            return None
        load = BatchLoad(torch.zeros(experts.count, dtype=torch.int64), 0)
        for chosen in spans:
            samples = [batch.samples[i] for i in chosen]
            tape, packed = self._tape(samples)[0], pack(samples)
            self.model.transformer.hidden(packed.tokens, packed.layout, use="learner", tape=tape)
            load += load_of(tape, experts.count)
        return load

    def _update(
        self, batch: Batch, part: list[int], rate: float, totals: Totals, first: list[tuple[int, Tensor]] | None
    ) -> None:
        """One optimizer step over the samples `part`; keeps the policy's log-probabilities in `first`, if given."""
        lengths = [batch.samples[i].num_trained for i in part]
        if not any(lengths):
            return  # nothing to learn from is no reason to decay the weights
        if batch.weights is not None and not any(bool(batch.weights[i].any()) for i in part):
            totals.skipped += 1  # all of it was rejected
            return
        counted = batch.counted
        weight = dict(zip(part, self._token_weights([counted[i] for i in part])))
        part = [i for i in part if batch.samples[i].num_trained]  # what has no token has no gradient
        self.optimizer.zero_grad()
        own = Totals()
        try:
            spans = [
                [part[i] for i in span]
                for span in micro_batches([batch.samples[i] for i in part], self.micro_batch_tokens)
            ]
            load = self._batch_load(batch, spans)
            for chosen in spans:
                self._accumulate(batch, chosen, [weight[i] for i in chosen], load, own, first)
            norm = self.optimizer.gradient_norm()
            self.model.ops.raise_faults()  # of the backwards
        except NonFiniteError:
            norm = float("inf")
        if math.isfinite(own.loss) and math.isfinite(own.kl) and math.isfinite(norm):
            self._require_agreement(batch, first or [], part)
            self.optimizer.step(rate, norm)
            own.norms.append(norm)
            totals.add(own)
            self.bad_steps_in_a_row = 0
        else:
            self._count_bad(totals)
        self.optimizer.zero_grad()

    def _accumulate(
        self,
        batch: Batch,
        chosen: list[int],
        weights: list[float],
        load: BatchLoad | None,
        totals: Totals,
        first: list[tuple[int, Tensor]] | None,
    ) -> None:
        """Forward and backward of one micro-batch: its part of the loss of the whole optimizer batch."""
        objective = self.objective
        samples = [batch.samples[i] for i in chosen]
        packed = pack(samples)
        logprobs, entropy, tape = self._forward(self.model, packed, samples, compare=first is not None)
        token_weight = torch.tensor(weights)[packed.sequence]
        if batch.kept is not None:
            token_weight = token_weight * torch.cat([batch.kept[i] for i in chosen])
        surrogate = policy_loss(
            logprobs,
            torch.cat([batch.old[i] for i in chosen]),
            torch.cat([batch.advantages[i] for i in chosen]),
            clip_low=self.clip_bounds[0],
            clip_high=self.clip_bounds[1],
            weights=None if batch.weights is None else torch.cat([batch.weights[i] for i in chosen]),
            surrogate=objective.surrogate,
            dual_clip=objective.dual_clip,
            ratio=objective.ratio,
            sequence=packed.sequence,
        )
        loss = (surrogate.loss * token_weight).sum()
        total = loss
        if tape is not None and objective.router_aux_coefficient > 0:
            probabilities = summed(tape)
            load = load or load_of(tape, len(probabilities))
            total = total + objective.router_aux_coefficient * load.loss(probabilities)
        if batch.reference is not None:
            kl = kl_penalty(logprobs, torch.cat([batch.reference[i] for i in chosen]), objective.kl_estimator)
            total = total + objective.kl_coefficient * (kl * token_weight).sum()
            totals.kl += float(kl.detach().double().sum())
        total.backward()
        totals.loss += float(loss.detach())
        totals.entropy += float(entropy.double().sum())
        totals.clipped += int(surrogate.clipped.sum())
        totals.tokens += packed.num_targets
        if first is not None:
            first += zip(chosen, logprobs.detach().split([s.num_trained for s in samples]))


def _rollout_logprobs(samples: Sequence[Sample]) -> list[Tensor]:
    return [torch.tensor([s.rollout_logprobs[i] for i in s.trained], dtype=torch.float32) for s in samples]


def _key(sample: Sample) -> tuple[int, int]:
    return sample.prompt_index, sample.sample_index
