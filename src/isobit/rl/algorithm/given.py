"""Losses of answers that were given, not sampled, for supervised training. The learner takes them
as it takes a loss of `loss.py`; a run that samples cannot name them.

A loss of pairs is of both answers, which are sequences 2k and 2k + 1 of a micro-batch, the
preferred one first; the learner never cuts between them. A loss of single answers that are
desirable or not (`kto`) is of one answer, whose advantage is 1 or -1. Left out: where the answers
come from (`training/parts/given.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from isobit.rl.algorithm.advantages import AdvantageFunction, AdvantageInputs, Advantages
from isobit.rl.algorithm.loss import Loss, LossInputs, LossOutputs, PolicyLoss
from isobit.rl.algorithm.objective import ResolvedObjective
from isobit.rl.algorithm.samples import Sample

_NEAR_1 = 4.0  # where 1 - sigmoid is below 0.02
_AT_ONCE = 1 << 14  # too few for a second thread
GIVEN = "given"
"""The advantage of a given answer, by name."""


def given(inputs: AdvantageInputs) -> Advantages:
    """Return the rewards themselves as advantages: 1, or -1 for an undesirable answer. No answer is
    compared with another."""
    return list(inputs.rewards)


def cross_entropy(inputs: LossInputs) -> LossOutputs:
    """Compute -log policy of each trained token, without regard to its advantage."""
    return LossOutputs(-inputs.policy_logprobs)


def of_pairs(kind: str, log_ratios: Tensor, lengths: Tensor, beta: float) -> Tensor:
    """Return the loss of each pair [P]. `log_ratios` [P, 2]: for each answer the sum over its
    tokens of log policy - log reference; `lengths` [P, 2]: the number of its tokens.

    dpo: -log sigmoid(β·(r_chosen - r_rejected)), r the log ratio (Rafailov et al. 2023, arXiv
    2305.18290, eq. 7). ipo: (m_chosen - m_rejected - 1 / (2·β))², m the log ratio over the number
    of tokens, as TRL and the authors average it (Azar et al. 2023, arXiv 2310.12036, eq. 17).
    """
    if kind == "dpo":
        return -logsigmoid(beta * (log_ratios[:, 0] - log_ratios[:, 1]))
    assert kind == "ipo"
    means = log_ratios / lengths
    return (means[:, 0] - means[:, 1] - 1 / (2 * beta)) ** 2


def preference(kind: str, inputs: LossInputs) -> LossOutputs:
    """Compute the loss of direct (dpo) or identity preference optimization (ipo), by
    `settings.beta` (`of_pairs`). Each token has an equal share of its pair's loss, so that the sum
    over an answer is the loss of the pair, and an equal share of the pair's metrics: a reward is β
    times a log ratio."""
    assert inputs.reference_logprobs is not None
    beta, sequence = inputs.settings.beta, inputs.sequence
    lengths = torch.bincount(sequence)
    ratios = torch.zeros(len(lengths), dtype=inputs.policy_logprobs.dtype).index_add(
        0, sequence, inputs.policy_logprobs - inputs.reference_logprobs
    )
    pairs, counts = ratios.view(-1, 2), lengths.view(-1, 2)

    def shared_out(values: Tensor) -> Tensor:
        return values.index_select(0, sequence // 2) / lengths[sequence]

    rewards = beta * pairs.detach()
    margins = rewards[:, 0] - rewards[:, 1]
    metrics = {
        "chosen_reward": rewards[:, 0],
        "rejected_reward": rewards[:, 1],
        "margin": margins,
        "accuracy": (margins > 0).to(rewards.dtype),
    }
    loss = shared_out(of_pairs(kind, pairs, counts, beta))
    return LossOutputs(loss, metrics={name: shared_out(v) for name, v in metrics.items()})


def of_labels(
    log_ratios: Tensor, labels: Tensor, baseline: float, beta: float, weights: tuple[float, float]
) -> Tensor:
    """Return KTO's loss of each answer [A]. `log_ratios` [A] as in `of_pairs`; `labels` [A]: 1 for
    a desirable answer, else -1; `baseline`: the estimate of KL(policy ‖ reference); `weights`: of
    desirable and of undesirable answers.

    The loss is w·(1 - sigmoid(label·β·(r - baseline))) (Ethayarajh et al. 2024, arXiv 2402.01306,
    eq. 7, as TRL's KTOTrainer has it).
    """
    desirable, undesirable = (log_ratios.new_tensor(weight) for weight in weights)
    weight_of_each = torch.where(labels > 0, desirable, undesirable)
    z = labels * beta * (log_ratios - baseline)
    # some at a time: the bits of `sigmoid` at the ends of a thread's share are others
    return weight_of_each * torch.cat([_falling(some) for some in z.split(_AT_ONCE)])


def _falling(z: Tensor) -> Tensor:
    """Return 1 - sigmoid(z). Where s = sigmoid(z) is near 1, its gradient s·(1 - s) is 0 in
    float32, so sigmoid(-z) is used."""
    return torch.where(z > _NEAR_1, torch.sigmoid(-z), 1 - torch.sigmoid(z))


def kto(inputs: LossInputs) -> LossOutputs:
    """Compute the loss of Kahneman-Tversky optimization, by `settings.beta` and `answer_weights`
    (`of_labels`), against the step's `kl_baseline`. As in `preference` the tokens of an answer
    share its loss."""
    assert inputs.reference_logprobs is not None
    sequence, settings = inputs.sequence, inputs.settings
    lengths, labels = torch.bincount(sequence), inputs.advantages.sign()
    zeros = torch.zeros(len(lengths), dtype=inputs.policy_logprobs.dtype)
    log_ratios = inputs.policy_logprobs - inputs.reference_logprobs
    ratios = zeros.index_add(0, sequence, log_ratios).index_select(0, sequence)
    baseline, beta = settings.kl_baseline, settings.beta
    rewards, desirable = beta * ratios.detach(), (labels > 0).to(ratios.dtype)
    metrics = {
        "chosen_reward": rewards * desirable,
        "rejected_reward": rewards * (1 - desirable),
        "desirable": desirable,
        "kl_baseline": torch.full_like(ratios, baseline).detach(),
    }
    loss = of_labels(ratios, labels, baseline, beta, settings.answer_weights)
    shares = lengths[sequence]
    return LossOutputs(loss / shares, metrics={name: v / shares for name, v in metrics.items()})


def mismatched(samples: Sequence[Sample], most_tokens: int) -> list[Sample]:
    """Return each prompt with the answer of the sample before it, the first with the last answer,
    as TRL pairs them: KTO estimates its KL from these pairs. A pair of more than `most_tokens`
    tokens together is left out; one sample has no pair."""
    if len(samples) < 2:
        return []
    previous = (*samples[-1:], *samples[:-1])
    pairs = [replace(b, prompt_ids=a.prompt_ids) for a, b in zip(samples, previous, strict=True)]
    return [p for p in pairs if len(p.prompt_ids) + len(p.completion_ids) <= most_tokens]


def kl_of_mismatched(policy: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Return the mean over mismatched pairs of log policy - log reference, summed over all tokens
    of a pair, at least 0 (Ethayarajh et al. 2024, section 4.2). The sum is rounded once, so that it
    does not depend on the order."""
    rows = [(a.double() - b.double()).tolist() for a, b in zip(policy, reference, strict=True)]
    return max(math.fsum(value for row in rows for value in row) / max(len(rows), 1), 0.0)


PAIR_LOSSES: dict[str, PolicyLoss] = {
    kind: Loss(partial(preference, kind), ("reference", "pairs")) for kind in ("dpo", "ipo")
}
"""The losses that compare a preferred answer with another one."""
COMPARED_LOSSES: dict[str, PolicyLoss] = {
    **PAIR_LOSSES,
    "kto": Loss(kto, ("reference", "kl_baseline")),
}
"""The losses that compare with a reference; each is a mean over answers."""
GIVEN_LOSSES: dict[str, PolicyLoss] = {"cross_entropy": Loss(cross_entropy), **COMPARED_LOSSES}
GIVEN_ADVANTAGES: dict[str, AdvantageFunction] = {GIVEN: given}


def supervised_objective(
    loss: str = "cross_entropy", beta: float = 0.1, weights: tuple[float, float] = (1.0, 1.0)
) -> ResolvedObjective:
    """Return the objective of supervised training: the mean cross-entropy of all trained tokens of
    a step, or the mean loss of its pairs or of its answers, where `weights` are of desirable and
    undesirable answers. The answers were not sampled by weights of the run, so no rollout is
    compared with them."""
    return ResolvedObjective(
        advantage=GIVEN,
        loss=loss,
        loss_aggregation="sequence_sum" if loss in COMPARED_LOSSES else "token_mean",
        stale_samples=True,
        beta=beta,
        answer_weights=weights,
    )
