"""An objective as small parts: which advantage, which average, which clip; and the named combinations of them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from isobit.options.declare import Form, Internal, OneOf, above, at_least, at_most
from isobit.rewards.functions import split_reference
from isobit.rl.algorithm.correction_rule import CORRECTIONS, CorrectionRule

if TYPE_CHECKING:  # a precision brings torch, which nothing here needs
    from isobit.precision import Precision

ADVANTAGE_KINDS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
LOSS_KINDS = ("clip", "cispo", "reinforce")
RATIOS = ("token", "sequence", "sequence_sum")
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
KL_ESTIMATORS = ("k1", "k2", "k3", "k3-unbiased", "low_var_kl")
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "dr_grpo", "loss_aggregation": "constant"},
    "rloo": {"advantage": "rloo", "ratio": "sequence_sum"},
    "dapo": {"loss_aggregation": "token_mean", "clip_high": 0.28, "dynamic_sampling": True},
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"loss": "cispo", "loss_aggregation": "token_mean", "clip_low": 1.0, "clip_high": 4.0},
    "reinforce_pp": {"advantage": "reinforce_pp", "loss_aggregation": "token_mean"},
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline", "loss_aggregation": "token_mean"},
}
"""Named combinations, over the defaults: Shao et al. 2024; Liu et al. 2025; Ahmadian et al. 2024, as TRL's RLOOTrainer
clips it; Yu et al. 2025; Zheng et al. 2025; MiniMax 2025, whose ratio has no lower bound, with the upper one of Khatri
et al. 2025; Hu et al. 2025, as verl averages it."""


def _is_function(text: str) -> bool:
    """Whether it is meant as a function of a file. Raises IsobitError where it is and cannot be."""
    return ":" in text and bool(split_reference(text, "function"))


Function = Annotated[str, Form("path/to/file.py:function", _is_function)]


@dataclass(frozen=True)
class Objective:
    """The objective. `preset` sets every key that is not given; the defaults are those of grpo.

    loss_aggregation: the mean over tokens, over sequences, or a sum over tokens divided by `max_new_tokens` (constant).
    clip_low, clip_high: bounds of the ratio, 1 - clip_low and 1 + clip_high. correction: weights and rejection where
    the policy that sampled differs from the learner's (`correction_rule.py`); recompute_old_logprobs: whether the
    learner computes the log-probabilities of the weights that sampled, before it changes them, or the rollout's own
    serve. What `auto` becomes for these two depends on the model's precision: `for_precision` sets `rule` and
    `recompute_old`.
    """

    preset: Annotated[str, OneOf(PRESETS)] = "grpo"
    advantage: Annotated[Annotated[str, OneOf(ADVANTAGE_KINDS)] | Function, "or your own: path/to/file.py:function"] = (
        "grpo"
    )
    discount: Annotated[float, above(0), at_most(1), "of later rewards in a token's return; reinforce_pp only"] = 1.0
    decoupled_rewards: Annotated[
        bool, "compute advantages for each reward function separately and add them by weight (GDPO)"
    ] = False
    loss: Annotated[
        Annotated[str, OneOf(LOSS_KINDS)] | Function,
        "reinforce: advantage times log-probability, no ratio; or your own: path/to/file.py:function",
    ] = "clip"
    ratio: Annotated[
        str,
        OneOf(RATIOS),
        "one per token; or per sequence, the geometric mean of its tokens' (GSPO) or their product (RLOO)",
    ] = "token"
    dual_clip: Annotated[float | None, above(1), "bound of the loss over |A| where A < 0; default: none"] = None
    loss_aggregation: Annotated[str, OneOf(AGGREGATIONS)] = "sequence_mean"
    clip_low: Annotated[float, above(0), at_most(1)] = 0.2
    clip_high: Annotated[float, above(0)] = 0.2
    dynamic_sampling: Annotated[bool, "replace groups whose rewards are all equal"] = False
    max_resamples: Annotated[int, at_least(1), "rollout rounds per step, at most, under dynamic sampling"] = 10
    overlong_buffer: Annotated[int, at_least(0), "last tokens before the length limit, with a soft penalty; 0: off"] = 0
    overlong_penalty: Annotated[float, at_least(0)] = 1.0
    kl_coefficient: Annotated[float, at_least(0)] = 0.0
    kl_estimator: Annotated[
        Annotated[str, OneOf(KL_ESTIMATORS)] | None,
        "default: k3 in the loss, k1 in the reward; k3-unbiased: times the ratio, TRL's; low_var_kl: k3, at most 10",
    ] = None
    kl_in_reward: Annotated[bool, "take the KL from the reward, token by token; not in the loss"] = False
    correction: Annotated[
        Annotated[str, OneOf(("auto", *CORRECTIONS))] | CorrectionRule,
        "auto: the precision preset's; a name; or a custom rule",
    ] = "auto"
    recompute_old_logprobs: Annotated[
        Literal["auto", "always", "never"],
        "auto: never under a unified precision, whose rollout log-probabilities are the old ones",
    ] = "auto"
    router_replay: Annotated[bool, "mixture of experts: the learner uses the experts that the rollout chose (R3)"] = (
        False
    )
    router_aux_coefficient: Annotated[
        float, at_least(0), "mixture of experts: weight of the load-balancing loss of an optimizer batch"
    ] = 0.0
    shadow_every: Annotated[
        int, at_least(0), "steps between BF16 shadow passes, which measure the noise in the ratio; 0: none"
    ] = 0
    shadow_calibrates_clip: Annotated[bool, "widen the clip so that it clips what BF16 would clip"] = False
    updates_per_batch: Annotated[int, at_least(1), "optimizer steps per pass over a rollout batch"] = 1
    epochs: Annotated[int, at_least(1), "passes over a rollout batch"] = 1
    rule: Internal[CorrectionRule] = CORRECTIONS["none"]
    """The correction, resolved."""
    recompute_old: Internal[bool] = False
    """`recompute_old_logprobs`, resolved."""
    stale_samples: Internal[bool] = False
    """Some samples are of older weights, by replay or because rollouts run ahead."""
    reward_weights: Internal[tuple[tuple[str, float], ...]] = ()
    """(name, weight) of each reward function."""
    max_new_tokens: Internal[int] = 128
    temperature: Internal[float] = 1.0
    truncation: Internal[tuple[int, float, float, float] | None] = None
    """Of the sampling, all three; `truncation` is its top-k, top-p, min-p and repetition penalty, if any."""

    @property
    def estimator(self) -> str:
        """`kl_estimator`, resolved."""
        return self.kl_estimator or ("k1" if self.kl_in_reward else "k3")


OBJECTIVES = {name: Objective(name, **parts) for name, parts in PRESETS.items()}


_PARTS = {key for parts in PRESETS.values() for key in parts}
"""What a preset may decide."""


def with_preset(values: Any) -> Any:
    """What is given for an objective, over the parts of its preset. A part that is null is not
    given."""
    if not isinstance(values, Mapping):
        return values
    given = {key: value for key, value in values.items() if value is not None or key not in _PARTS}
    preset = given.get("preset", "grpo")
    parts = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    return parts | given


def without_preset(values: Any) -> Any:
    """What is given for an objective, without its preset and what has the preset's own value: for another preset."""
    if not isinstance(values, Mapping):
        return values
    preset = values.get("preset", "grpo")
    defaults = vars(OBJECTIVES.get(str(preset), Objective()))
    return {
        key: value for key, value in values.items() if key != "preset" and (key not in _PARTS or value != defaults[key])
    }


def shares_prompts(wanted: bool, objective: Objective, *, mixture: bool, recurrent: bool) -> bool:
    """Whether the completions of a prompt share its rows, where `optimizer.share_prompts` is `wanted`: not in a mixture
    of experts that repeats each sample's own routes, or balances the load of all rows, nor where layers are recurrent,
    since their backward is of whole sequences."""
    of_all_rows = mixture and (objective.router_replay or objective.router_aux_coefficient > 0)
    return wanted and not recurrent and not of_all_rows


def for_precision(objective: Objective, precision: "Precision", *, stale: bool = False) -> Objective:
    """Resolve `auto`: the precision's default correction; no recomputation where rollout and learner are one flow.

    `stale`: samples may be of older weights, so that even under one flow there is something to recompute and, by token
    TIS, to correct.
    """
    wanted, correction = objective.recompute_old_logprobs, objective.correction
    recompute = wanted == "always" or (wanted == "auto" and (stale or not precision.unified))
    if isinstance(correction, str):
        default = "token_tis" if stale and precision.correction == "none" else precision.correction
        correction = CORRECTIONS[default if correction == "auto" else correction]
    if not recompute:
        correction = CorrectionRule()  # old log-probabilities are the rollout's own: every weight would be 1
    return replace(objective, rule=correction, recompute_old=recompute, stale_samples=stale)
