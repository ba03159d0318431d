"""An objective as small parts: which advantage, which average, which clip; and the named combinations of them."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from isobit.rl.correction_rule import CORRECTIONS, CorrectionRule

if TYPE_CHECKING:  # a precision brings torch, which nothing here needs
    from isobit.precision import Precision


@dataclass(frozen=True)
class Objective:
    """What the learner minimizes.

    advantage: grpo | dr_grpo | rloo | reinforce_pp | reinforce_pp_baseline, with the `discount` of later rewards in
    those of tokens. decoupled_rewards: the advantages of each reward function are
    computed apart and added by `reward_weights`, pairs of (name, weight); else those of the weighted sum. ratio: token
    | sequence (the geometric mean of its tokens') | sequence_sum (their product). surrogate: clip | cispo | reinforce
    (no ratio). loss_aggregation: token_mean | sequence_mean | constant (over
    `max_new_tokens`). correction: see `rl/correction.py`. recompute_old: whether the learner computes the
    log-probabilities of the sampling weights before it changes them; otherwise the rollout's own serve. stale_samples:
    some are of older weights, by replay or because rollouts run ahead. router_replay: the learner routes tokens to the
    experts of the rollout. shadow_every: steps between BF16 shadow passes (`rl/shadow.py`), which may calibrate the
    clip. `temperature` is the sampling's.
    """

    advantage: str = "grpo"
    discount: float = 1.0
    decoupled_rewards: bool = False
    reward_weights: tuple[tuple[str, float], ...] = ()
    ratio: str = "token"
    surrogate: str = "clip"
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
    "cispo": Objective(surrogate="cispo", loss_aggregation="token_mean", clip_low=1.0, clip_high=4.0),
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
