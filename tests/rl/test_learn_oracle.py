"""Whole steps of `Learner.learn` in float32, on the native backend, against own formulas in float64:
random objectives, samples and micro-batches. An objective's formula is of `Step`; the model's own
backward, which has tests of its own, brings it to the weights."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from isobit.model import Model
from isobit.rl import ResolvedObjective, Sample
from isobit.rl.algorithm.correction_rule import CORRECTIONS, CorrectionRule, Rejection
from isobit.rl.algorithm.objective import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    LOSS_KINDS,
    OWN_RATIO,
    RATIOS,
)
from isobit.rl.learner.forward import Teacher, forward_compared
from isobit.rl.learner.learner import Learner
from isobit.rl.learner.packing import pack
from tests.models import tiny_model
from tests.rl.helpers import distance, make_learner
from tests.rl.test_observations import CASES, episode

QUICK, ALL = 36, 400
TOLERANCE = 1e-4
RULES = [
    *CORRECTIONS.values(),
    CorrectionRule("token", cap=3.0, floor=0.5, normalize=True),
    CorrectionRule("sequence", cap=2.0, normalize=True, veto=1e-3),
    CorrectionRule(
        "token", rejection=Rejection("k2", "sequence_max", high=1.5), denominator="kept"
    ),
    CorrectionRule(rejection=Rejection("inverse_ratio", "token", 0.3, 3.0), denominator="kept"),
    CorrectionRule("token", 2.0, rejection=Rejection("k1", "sequence_mean", -0.5, 0.5)),
]


@dataclass(frozen=True)
class Step:
    """What a formula is given: [T] float64 of all trained tokens, `p` with a gradient."""

    p: Tensor
    old: Tensor
    rollout: Tensor
    advantages: Tensor
    sequence: Tensor
    settings: ResolvedObjective

    def mean(self, values: Tensor) -> Tensor:
        """Of each token's sequence."""
        chosen = (self.sequence[:, None] == self.sequence[None]).double()
        return chosen @ values / chosen.sum(1)

    def total(self, values: Tensor) -> Tensor:
        return (self.sequence[:, None] == self.sequence[None]).double() @ values

    @property
    def token_ratio(self) -> Tensor:
        return (self.p - self.old).clamp(-20, 20).exp()

    @property
    def ratio(self) -> Tensor:
        difference = self.p - self.old
        if self.settings.ratio == "sequence":
            shared = self.mean(difference).detach() + self.p - self.p.detach()
            return shared.clamp(max=10).clamp(-20, 20).exp()
        summed = self.settings.ratio == "sequence_sum"
        return (self.total(difference) if summed else difference).clamp(-20, 20).exp()

    @property
    def bounds(self) -> tuple[float, float]:
        return 1 - self.settings.clip_low, 1 + self.settings.clip_high


def clip(step: Step) -> Tensor:
    a, r = step.advantages, step.ratio
    found = torch.minimum(r * a, r.clamp(*step.bounds) * a)
    most = step.settings.dual_clip
    return -found if most is None else -torch.where(a < 0, torch.maximum(found, most * a), found)


def cispo(step: Step) -> Tensor:
    return -step.ratio.clamp(*step.bounds).detach() * step.advantages * step.p


def reinforce(step: Step) -> Tensor:
    return -step.advantages * step.p


def sapo(step: Step) -> Tensor:
    rise, fall = step.settings.sapo_temperatures
    t = torch.where(step.advantages > 0, *torch.tensor([rise, fall]).double())
    return -4 / t / (1 + torch.exp(-t * (step.ratio - 1))) * step.advantages


def gmpo(step: Step) -> Tensor:
    low, high, up = step.settings.clip_low, step.settings.clip_high, step.advantages > 0
    log = step.token_ratio.log()
    log = torch.where(up, log.clamp(max=high), log.clamp(min=-low))
    shared = step.mean(log).detach() + log - log.detach()
    return -shared.clamp(max=10).exp() * step.advantages


def _dppo(step: Step, far: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    new, old, up = step.p.detach().exp(), step.old.exp(), step.advantages > 0
    limit = torch.where(up, *torch.tensor([step.settings.clip_high, step.settings.clip_low]))
    leaves = torch.where(up, new > old, new < old) & (far(new, old) > limit)
    return torch.where(leaves, 0.0, -step.token_ratio * step.advantages)


def dppo_tv(step: Step) -> Tensor:
    return _dppo(step, lambda new, old: (new - old).abs())


def dppo_kl(step: Step) -> Tensor:
    def far(new: Tensor, old: Tensor) -> Tensor:
        new, old = new.clamp(max=1 - 1e-8), old.clamp(max=1 - 1e-8)
        return old * (old / new).log() + (1 - old) * ((1 - old) / (1 - new)).log()

    return _dppo(step, far)


def vespo(step: Step) -> Tensor:
    (k1, k2), (l1, l2) = step.settings.vespo_k, step.settings.vespo_lambda
    up = step.advantages >= 0
    k, rate = (torch.where(up, *torch.tensor(pair).double()) for pair in ((k1, k2), (l1, l2)))
    w = step.total(step.token_ratio.log().detach()).clamp(np.log(1e-8), 20).exp()
    return -(w**k) * torch.exp(rate * (1 - w)) * step.advantages * step.p


FORMULAS: dict[str, Callable[[Step], Tensor]] = {
    each.__name__: each for each in (clip, cispo, reinforce, sapo, gmpo, dppo_tv, dppo_kl, vespo)
}  # and divergence, which is of logits


def distances(policy: Tensor, teacher: Tensor, settings: ResolvedObjective) -> Tensor:
    """The divergence [T] of logits [T, V] float64, of probabilities."""
    p, q = (torch.softmax(x / settings.temperature, -1) for x in (policy, teacher))
    if settings.divergence_top_k:
        top = p.detach().argsort(descending=True)
        top, others = top[:, : settings.divergence_top_k], top[:, settings.divergence_top_k :]
        p, q = (
            torch.cat([x.gather(1, top), x.gather(1, others).sum(1)[:, None]], 1) for x in (p, q)
        )
    beta = settings.divergence_beta
    m = {0.0: p, 1.0: q}.get(beta, (1 - beta) * p + beta * q)
    forwards, reverse = ((x * (x / m).log()).sum(1) for x in (q, p))
    return beta * forwards + (1 - beta) * reverse if 0 < beta < 1 else forwards + reverse


def penalties(step: Step, reference: Tensor) -> Tensor:
    kind, x = step.settings.estimator, reference - step.p
    k3 = x.clamp(max=20).exp() - x.clamp(max=20) - 1
    if kind == "low_var_kl":
        x = x.clamp(-20, 20)
        return (x.exp() - x - 1).clamp(max=10)
    if kind == "k3-unbiased":  # its gradient; where all tokens have their own ratio it is -r·x
        if step.settings.ratio == "token":
            return -(step.token_ratio * x).detach() * step.p
        assert float(x.detach().max()) < 20
        log = step.p - step.old
        log = step.total(log) if step.settings.ratio == "sequence_sum" else step.mean(log)
        assert float(log.detach().abs().max()) < 20
        return log.exp() * (x.exp() - x - 1)
    return {"k1": -x, "k2": x**2 / 2, "k3": k3}[kind]


def weights_of(
    rule: CorrectionRule, old: Tensor, rollout: Tensor, step: Step
) -> tuple[Tensor, Tensor]:
    """(weights, which tokens are kept), [T]."""
    lr = old - rollout
    of = step.total(lr) if rule.weight == "sequence" else lr
    weights = torch.ones_like(lr)
    if rule.weight != "none":
        weights = of.clamp(-20, 20).exp().clamp(rule.floor, rule.cap)
    if rule.normalize:
        share = 1 / step.total(torch.ones_like(lr)) if rule.weight == "sequence" else 1 + 0 * lr
        weights = weights / ((weights * share).sum() / share.sum())
    kept = torch.ones_like(lr, dtype=torch.bool)
    if rule.rejection is not None:
        kind, level = rule.rejection.measure, rule.rejection.level
        sign = -1 if kind == "inverse_ratio" else 1
        bounded = lr.clamp(-20, 20)
        p, q = (x.exp().clamp(1e-8, 1 - 1e-8) for x in (old, rollout))
        both = [
            a * (a / b).log() + (1 - a) * ((1 - a) / (1 - b)).log() for a, b in ((p, q), (q, p))
        ]
        values = {
            "k1": -bounded,
            "k2": bounded**2 / 2,
            "k3": bounded.exp() - 1 - bounded,
            "binary_kl": torch.maximum(*both),
        }.get(kind, (sign * bounded).exp())
        if level == "sequence_max":
            same = step.sequence[:, None] == step.sequence[None]
            values = torch.where(same, values[None], -torch.inf).amax(1)
        elif level != "token":
            over = step.total if level == "sequence_sum" else step.mean
            ratio = kind in ("ratio", "inverse_ratio")
            values = over(sign * lr).clamp(-20, 20).exp() if ratio else over(values)
        low, high = rule.rejection.low, rule.rejection.high
        kept &= (values >= (-torch.inf if low is None else low)) & (
            values <= (torch.inf if high is None else high)
        )
    if rule.veto:
        kept &= step.total((lr < np.log(rule.veto)).double()) == 0
    return torch.where(kept, weights, 0.0), kept


def shares(settings: ResolvedObjective, step: Step, counted: Tensor, sequences: int) -> Tensor:
    """The weight of each token in the loss; `counted` [T]: whether it is averaged over."""
    own, whole = step.total(counted.double()).clamp(min=1), max(float(counted.sum()), 1.0)
    each = {
        "token_mean": torch.full_like(own, 1 / whole),
        "sequence_mean": 1 / (sequences * own),
        "sequence_sum": torch.full_like(own, 1 / sequences),
        "constant": torch.full_like(own, 1 / (sequences * settings.max_new_tokens)),
    }[settings.loss_aggregation]
    return each * counted


class Oracle:
    """The loss of a whole batch in float64, on the learner's own forward of the policy."""

    def __init__(self, learner: Learner, samples: Sequence[Sample], advantages: Sequence[object]):
        self.learner, self.samples, self.settings = learner, samples, learner.objective
        self.advantages = torch.tensor(
            [
                value
                for sample, given in zip(samples, advantages)
                for value in (given if isinstance(given, tuple) else [given] * sample.num_trained)
            ],
            dtype=torch.float32,
        ).double()
        self.rollout = torch.tensor(
            [s.rollout_logprobs[i] for s in samples for i in s.trained]
        ).double()
        self.masked = torch.tensor(
            [
                self.settings.mask_truncated and s.truncated
                for s in samples
                for _ in range(s.num_trained)
            ]
        )
        self.old: Tensor | None = None
        self.high: Tensor | None = None
        self.reference = None
        if learner.reference is not None:
            self.reference = self._forward(learner.reference)[0].detach()

    def _forward(self, model: Model) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
        observes = self.settings.observation_coefficient > 0
        packed = pack(self.samples, observes=observes)
        temperature = self.settings.temperature
        found = forward_compared(model, packed, temperature, None, None, False, lambda rows: rows)
        logprobs, entropy, rows, observed = (x if x is None else x.double() for x in found)
        assert logprobs is not None
        assert entropy is not None
        return logprobs, entropy, rows, observed, packed.sequence

    def loss(self) -> Tensor:
        model, settings = self.learner.model, self.settings
        p, entropy, rows, observed, sequence = self._forward(model)
        if self.old is None:
            self.old = p.detach() if settings.recompute_old else self.rollout
            least = np.quantile(
                entropy.detach()[~self.masked].float().numpy(), 1 - settings.top_entropy_quantile
            )
            self.high = (entropy.detach() >= float(least)) | (settings.top_entropy_quantile == 1)
        step = Step(p, self.old, self.rollout, self.advantages, sequence, settings)
        weights, kept = torch.ones_like(self.old), ~self.masked | self.masked
        if settings.recompute_old:
            weights, kept = weights_of(settings.rule, self.old, self.rollout, step)
        counted = ~self.masked
        if settings.rule.denominator == "kept":
            counted = counted & kept
        share = shares(settings, step, counted, len(self.samples))
        if settings.loss == "divergence":
            teacher = Teacher(self.learner.reference, None).reads(self.samples, False)  # type: ignore[arg-type]
            head = model.transformer._working["learner"].outside.head.master  # type: ignore[union-attr]
            assert rows is not None
            logits = teacher.logits(slice(None)).double()
            each = distances(rows @ head.double().t(), logits, settings)
        else:
            each = FORMULAS[settings.loss](step)
        limit = settings.off_policy_mask_threshold
        if limit is not None:
            gone = step.mean(self.rollout - p.detach()) > limit
            each = torch.where(gone & (self.advantages < 0), 0.0, each)
        total = (each * weights * self.high * share).sum()
        total = total - settings.entropy_coefficient * (entropy * share).sum()
        if self.reference is not None and not settings.kl_in_reward:
            total = (
                total + settings.kl_coefficient * (penalties(step, self.reference) * share).sum()
            )
        if observed is not None:
            total = total - settings.observation_coefficient * self._observed(observed)
        return total

    def _observed(self, logprobs: Tensor) -> Tensor:
        masked = self.settings.mask_truncated
        counts = torch.tensor(
            [not (masked and s.truncated) for s in self.samples for _ in s.observed]
        )
        return (logprobs * counts).sum() / max(int(counts.sum()), 1)


def drawn(seed: int) -> tuple[ResolvedObjective, int, random.Random]:
    """An objective, how large its model's logits are, and random numbers for the rest."""
    rng = random.Random(seed)
    loss = LOSS_KINDS[seed % len(LOSS_KINDS)]
    recompute = rng.random() < 0.4
    settings = ResolvedObjective(
        loss=loss,
        ratio="token" if loss in (*OWN_RATIO, "divergence") else rng.choice(RATIOS),
        loss_aggregation=rng.choice(AGGREGATIONS),
        clip_low=rng.choice((0.1, 0.2)),
        clip_high=rng.choice((0.2, 0.5)),
        dual_clip=rng.choice((None, 2.0)),
        divergence_beta=rng.choice((0.0, 0.3, 1.0)),
        divergence_top_k=rng.choice((0, 1, 4)),
        off_policy_mask_threshold=rng.choice((None, None, 0.3)),
        kl_coefficient=rng.choice((0.1, 1.0) if loss == "divergence" else (0.0, 0.1, 1.0)),
        kl_in_reward=loss == "divergence" and rng.random() < 0.5,
        kl_estimator=KL_ESTIMATORS[seed % len(KL_ESTIMATORS)],
        mask_truncated=rng.random() < 0.3,
        top_entropy_quantile=rng.choice((1.0, 1.0, 0.5)),
        entropy_coefficient=rng.choice((0.0, 0.0, 0.3)),
        observation_coefficient=rng.choice((0.0, 0.0, 0.5)),
        rule=rng.choice(RULES) if recompute else CorrectionRule(),
        recompute_old=recompute,
        stale_samples=True,
        epochs=rng.choice((1, 2)),
        max_new_tokens=9,
        temperature=rng.choice((1.0, 0.7)),
    )
    return settings, rng.choice((1, 6, 12)), rng


def recorded(model: Model, settings: ResolvedObjective, rng: random.Random) -> list[Sample]:
    """Completions of random tokens, whose rollout is by less or more far from the policy."""
    spread = rng.choice((1e-7, 0.05, 1.0))
    found = []
    for number in range(rng.randint(2, 7)):
        case = rng.choice(CASES)
        sample, size = episode(number, case), model.config.vocab_size
        prompt, ids = (
            tuple(i % size for i in x) for x in (sample.prompt_ids, sample.completion_ids)
        )
        sample = replace(sample, prompt_ids=prompt, completion_ids=ids)
        packed = pack([sample])
        with torch.no_grad():
            own = forward_compared(model, packed, settings.temperature, None, None, False, None)[
                0
            ].tolist()
        far = [rng.gauss(0, spread) + (rng.random() < 0.04) * rng.choice((-22, 19)) for _ in own]
        if settings.estimator == "k3-unbiased" and settings.ratio != "token":
            far = [min(max(x, -3.0), 3.0) for x in far]
        values = iter([min(a + b, 0.0) for a, b in zip(own, far)])
        mask = sample.completion_mask or ()
        logprobs = torch.tensor([next(values) if one else 0.0 for one in mask]).tolist()
        found.append(
            replace(
                sample, rollout_logprobs=tuple(logprobs), truncated=rng.random() < 0.3,
                weights_version=model.weights_version - rng.randint(0, 1),
            )
        )  # fmt: skip
    return found


def held(seed: int, change: Callable[[ResolvedObjective], ResolvedObjective] = lambda o: o) -> None:
    """The gradient of each optimizer step of a batch against that of the oracle. `change`: what the
    learner has in the place of the objective."""
    settings, scale, rng = drawn(seed)
    model = tiny_model("float32", seed=seed, scale=scale, tie_embeddings=False)
    if settings.estimator == "k3-unbiased" and settings.ratio != "token":
        scale = 1
    other = tiny_model("float32", seed=seed + 1, scale=scale, tie_embeddings=False)
    samples = recorded(model, settings, rng)
    advantages: list[object] = [
        rng.choice((1.0, -0.5, 0.0, rng.gauss(0, 1)))
        if rng.random() < 0.7
        else tuple(rng.gauss(0, 1) for _ in range(s.num_trained))
        for s in samples
    ]
    learner = make_learner(
        model, settings, rate=3e-3, reference=other if settings.kl_coefficient else None,
        micro_batch_tokens=rng.choice((16, 40, 1000)),
    )  # fmt: skip
    oracle = Oracle(learner, samples, advantages)
    learner.objective, took, steps = change(learner.objective), learner.optimizer.step, 0
    holders = learner.optimizer.holders

    def taken(clear: bool) -> dict[str, Tensor]:
        found = {n: p.grad.clone() for n, p in holders.items() if p.grad is not None}
        for holder in holders.values():
            holder.grad = None if clear else holder.grad
        return found

    def step(rate: float, norm: float) -> None:
        nonlocal steps
        steps += 1
        mine = taken(clear=True)
        oracle.loss().backward()  # type: ignore[no-untyped-call]
        wanted = taken(clear=True)
        largest = max(float(x.abs().max()) for x in wanted.values())
        if largest > 1e-12:
            missing = {n: torch.zeros_like(x) for n, x in wanted.items() if n not in mine}
            assert distance(mine | missing, wanted) < TOLERANCE
        for name, gradient in mine.items():
            holders[name].grad = gradient
        took(rate, norm)

    learner.optimizer.step = step  # type: ignore[method-assign]
    learner.learn(samples, advantages, 0)  # type: ignore[arg-type]
    assert steps or learner.bad_steps_in_a_row == 0


@pytest.mark.parametrize("seed", range(QUICK))
def test_a_step_is_its_formula_in_float64(seed: int) -> None:
    held(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK, ALL, 28))
def test_many_more_steps_are(first: int) -> None:
    for seed in range(first, first + 28):
        held(seed)


def test_the_step_of_another_average_is_not() -> None:
    """The control: the same samples, averaged otherwise."""

    def other(objective: ResolvedObjective) -> ResolvedObjective:
        place = AGGREGATIONS.index(objective.loss_aggregation) + 1
        average = AGGREGATIONS[place % len(AGGREGATIONS)]
        return replace(objective, loss_aggregation=average, max_new_tokens=7)

    for seed in range(9):
        with pytest.raises(AssertionError, match="distance"):
            held(seed, other)
