"""An objective as small parts: which advantage, which average, which clip; and the named combinations of them."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from isobit.rl.correction_rule import CORRECTIONS, CorrectionRule

if TYPE_CHECKING:  # a precision brings torch, which nothing here needs
    from isobit.precision import Precision


ADVANTAGE_KINDS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
LOSS_KINDS = ("clip", "cispo", "reinforce")
RATIOS = ("token", "sequence", "sequence_sum")
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
KL_ESTIMATORS = ("k1", "k2", "k3", "low_var_kl")


@dataclass(frozen=True)
class Objective:
    """What the learner minimizes.

    advantage: one of ADVANTAGE_KINDS, or `path/to/file.py:function`. discount, above 0 and at most 1: of later rewards
    in a token's return; reinforce_pp only. decoupled_rewards: advantages of each reward function, added by
    `reward_weights`, pairs of (name, weight), in place of the advantages of the weighted sum. loss: one of LOSS_KINDS,
    or `path/to/file.py:function`. ratio: one per token, or per sequence: the geometric mean of its tokens' ratios
    (sequence) or their product (sequence_sum). dual_clip, above 1: bound of the loss over |A| where A < 0.
    loss_aggregation: the mean over tokens, over sequences, or a sum over tokens divided by `max_new_tokens` (constant).
    clip_low in (0, 1], clip_high above 0: bounds of the ratio. dynamic_sampling: replace groups whose rewards are
    equal. overlong_buffer, at least 0: last tokens before the length limit, over which a penalty rises to
    `overlong_penalty`. kl_coefficient, at least 0, kl_estimator, one of KL_ESTIMATORS: the penalty for the distance to
    the reference, in the loss, or with kl_in_reward in the reward of each token. correction: weights and rejection
    where the policy that sampled differs from the learner's (`correction_rule.py`). recompute_old: the learner computes
    the log-probabilities of the weights that sampled, before it changes them; otherwise the rollout's own serve.
    stale_samples: some are of older weights, by replay or because rollouts run ahead. router_replay: the learner routes
    tokens to the experts of the rollout. router_aux_coefficient, at least 0: weight of the load-balancing loss.
    shadow_every, at least 0: steps between BF16 shadow passes (`shadow.py`); 0: none. shadow_calibrates_clip: they
    widen the clip. updates_per_batch, at least 1: optimizer steps per pass over a rollout batch. epochs, at least 1:
    passes. max_new_tokens, temperature: of the sampling.
    """

    advantage: str = "grpo"
    discount: float = 1.0
    decoupled_rewards: bool = False
    reward_weights: tuple[tuple[str, float], ...] = ()
    loss: str = "clip"
    ratio: str = "token"
    dual_clip: float = math.inf
    loss_aggregation: str = "sequence_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dynamic_sampling: bool = False
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"
    kl_in_reward: bool = False
    correction: CorrectionRule = CORRECTIONS["none"]
    recompute_old: bool = False
    stale_samples: bool = False
    router_replay: bool = False
    router_aux_coefficient: float = 0.0
    shadow_every: int = 0
    shadow_calibrates_clip: bool = False
    updates_per_batch: int = 1
    epochs: int = 1
    max_new_tokens: int = 128
    temperature: float = 1.0


OBJECTIVES: dict[str, Objective] = {
    "grpo": Objective(),
    "dr_grpo": Objective(advantage="dr_grpo", loss_aggregation="constant"),
    "rloo": Objective(advantage="rloo", ratio="sequence_sum"),
    "dapo": Objective(loss_aggregation="token_mean", clip_high=0.28, dynamic_sampling=True),
    "gspo": Objective(ratio="sequence", clip_low=3e-4, clip_high=4e-4),
    "cispo": Objective(loss="cispo", loss_aggregation="token_mean", clip_low=1.0, clip_high=4.0),
    "reinforce_pp": Objective(advantage="reinforce_pp", loss_aggregation="token_mean"),
    "reinforce_pp_baseline": Objective(advantage="reinforce_pp_baseline", loss_aggregation="token_mean"),
}
"""Named combinations: Shao et al. 2024; Liu et al. 2025; Ahmadian et al. 2024, as TRL's RLOOTrainer clips it; Yu et al.
2025; Zheng et al. 2025; MiniMax 2025, whose ratio has no lower bound, with the upper one of Khatri et al. 2025; Hu et
al. 2025, as verl averages it."""


def for_precision(
    objective: Objective,
    precision: "Precision",
    correction: str | CorrectionRule,
    recompute_old: str,
    *,
    stale: bool = False,
) -> Objective:
    """Resolve `auto`: the precision's default correction; no recomputation where rollout and learner are one flow.

    `correction` is a rule, the name of one, or auto. `stale`: samples may be of older weights, so that even under one
    flow there is something to recompute and, by token TIS, to correct.
    """
    recompute = recompute_old == "always" or (recompute_old == "auto" and (stale or not precision.unified))
    if isinstance(correction, str):
        default = "token_tis" if stale and precision.correction == "none" else precision.correction
        correction = CORRECTIONS[default if correction == "auto" else correction]
    if not recompute:
        correction = CorrectionRule()  # old log-probabilities are the rollout's own: every weight would be 1
    return replace(objective, correction=correction, recompute_old=recompute, stale_samples=stale)
