"""Losses of answers that were given, not sampled: supervised training's. The learner takes them as it
takes a loss of `loss.py`; a run that samples cannot name them.

Of pairs each loss is of both answers, which are sequences 2k and 2k + 1 of a micro-batch, the
preferred one first; the learner never cuts between them. Left out: where the answers come from
(`training/sft/`).
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from isobit.rl.algorithm.advantages import AdvantageFunction, AdvantageInputs, Advantages
from isobit.rl.algorithm.loss import LossFunction, LossInputs, LossOutputs
from isobit.rl.algorithm.objective import ResolvedObjective

GIVEN = "given"
"""The advantage of a given answer, by name."""


def given(inputs: AdvantageInputs) -> Advantages:
    """The reward itself, which is 1: nothing is compared with it."""
    return list(inputs.rewards)


def cross_entropy(inputs: LossInputs) -> LossOutputs:
    """-log policy of each trained token, which knows no advantage."""
    return LossOutputs(-inputs.policy_logprobs)


def of_pairs(kind: str, log_ratios: Tensor, lengths: Tensor, beta: float) -> Tensor:
    """The loss of each pair [P]. `log_ratios` [P, 2]: of each answer the sum over its tokens of log
    policy - log reference; `lengths` [P, 2]: its tokens.

    dpo: -log sigmoid(β·(r_chosen - r_rejected)), r the log ratio (Rafailov et al. 2023, arXiv
    2305.18290, eq. 7). ipo: (m_chosen - m_rejected - 1 / (2·β))², m the log ratio over the number
    of tokens, as TRL and the authors average it (Azar et al. 2023, arXiv 2310.12036, eq. 17).
    """
    if kind == "dpo":
        return -logsigmoid(beta * (log_ratios[:, 0] - log_ratios[:, 1]))
    assert kind == "ipo"
    means = log_ratios / lengths
    return (means[:, 0] - means[:, 1] - 1 / (2 * beta)) ** 2


def dpo(inputs: LossInputs) -> LossOutputs:
    """Direct preference optimization, by `settings.beta` (`of_pairs`)."""
    return _preference("dpo", inputs)


def ipo(inputs: LossInputs) -> LossOutputs:
    """Identity preference optimization, likewise."""
    return _preference("ipo", inputs)


def _preference(kind: str, inputs: LossInputs) -> LossOutputs:
    """Each token carries an equal share of its pair's loss, so that the sum over an answer is the
    loss of the pair. The metrics are shared out alike: a reward is β times a log ratio."""
    assert inputs.reference_logprobs is not None
    beta, sequence = inputs.settings.beta, inputs.sequence
    lengths = torch.bincount(sequence)
    ratios = torch.zeros(len(lengths), dtype=inputs.policy_logprobs.dtype).index_add(
        0, sequence, inputs.policy_logprobs - inputs.reference_logprobs
    )
    pairs, counts = ratios.view(-1, 2), lengths.view(-1, 2)

    def shared_out(values: Tensor) -> Tensor:
        return values[sequence // 2] / lengths[sequence]

    rewards = beta * pairs.detach()
    margins = rewards[:, 0] - rewards[:, 1]
    found = {
        "chosen_reward": rewards[:, 0],
        "rejected_reward": rewards[:, 1],
        "margin": margins,
        "accuracy": (margins > 0).to(rewards.dtype),
    }
    loss = shared_out(of_pairs(kind, pairs, counts, beta))
    return LossOutputs(loss, metrics={name: shared_out(v) for name, v in found.items()})


PAIR_LOSSES: dict[str, LossFunction] = {"dpo": dpo, "ipo": ipo}
"""Those of a preferred answer and another, which compare with a frozen reference."""
GIVEN_LOSSES: dict[str, LossFunction] = {"cross_entropy": cross_entropy, **PAIR_LOSSES}
GIVEN_ADVANTAGES: dict[str, AdvantageFunction] = {GIVEN: given}


def supervised_objective(loss: str = "cross_entropy", beta: float = 0.1) -> ResolvedObjective:
    """The mean cross-entropy of all trained tokens of a step, or the mean loss of its pairs. The
    answers are of no weights of the run, so nothing is compared with a rollout."""
    return ResolvedObjective(
        advantage=GIVEN,
        loss=loss,
        loss_aggregation="sequence_sum" if loss in PAIR_LOSSES else "token_mean",
        stale_samples=True,
        beta=beta,
    )
