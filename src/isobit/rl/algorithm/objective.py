"""An objective as small parts: which advantage, which average, which clip; and the named
combinations of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from isobit.errors import IsobitError
from isobit.options.declare import FileName, NotAnOption, OneOf, Pattern, above, at_least, at_most
from isobit.rl.algorithm.correction_rule import CORRECTIONS, CorrectionRule
from isobit.tasks.workers.loading import split_reference

if TYPE_CHECKING:  # a precision brings torch, which nothing here needs
    from isobit.precision import Precision

ADVANTAGE_KINDS = (
    *("grpo", "grpo_batch", "dr_grpo", "rloo", "opo", "maxrl"),
    *("reinforce_pp", "reinforce_pp_baseline", "otb", "distillation"),
)
LOSS_KINDS = (
    *("clip", "cispo", "reinforce", "sapo", "gmpo", "dppo_tv", "dppo_kl", "vespo"),
    "divergence",
)
OWN_RATIO = ("gmpo", "dppo_tv", "dppo_kl", "vespo")
"""Losses that define their ratio: with them only `ratio: token` is allowed."""
RATIOS = ("token", "sequence", "sequence_sum")
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "constant")
KL_ESTIMATORS = ("k1", "k2", "k3", "k3-unbiased", "low_var_kl")
_DPPO = {
    "advantage": "dr_grpo",
    "loss_aggregation": "constant",
    "recompute_old_logprobs": "never",
}
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "dr_grpo", "loss_aggregation": "constant"},
    "rloo": {"advantage": "rloo", "ratio": "sequence_sum"},
    "dapo": {"loss_aggregation": "token_mean", "clip_high": 0.28, "dynamic_sampling": True},
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "luspo": {
        "ratio": "sequence",
        "loss_aggregation": "sequence_sum",
        "clip_low": 2e-3,
        "clip_high": 2.5e-3,
    },
    "cispo": {"loss": "cispo", "loss_aggregation": "token_mean", "clip_low": 1.0, "clip_high": 4.0},
    "sapo": {"loss": "sapo"},
    "gmpo": {"loss": "gmpo", "clip_low": 0.4, "clip_high": 0.4},
    "dppo_tv": {**_DPPO, "loss": "dppo_tv", "clip_low": 0.15, "clip_high": 0.15},
    "dppo_kl": {**_DPPO, "loss": "dppo_kl", "clip_low": 0.05, "clip_high": 0.05},
    "vespo": {
        "loss": "vespo",
        "loss_aggregation": "token_mean",
        "recompute_old_logprobs": "never",
    },
    "reinforce_pp": {"advantage": "reinforce_pp", "loss_aggregation": "token_mean"},
    "reinforce_pp_baseline": {
        "advantage": "reinforce_pp_baseline",
        "loss_aggregation": "token_mean",
    },
}
"""Named combinations, over the defaults: Shao et al. 2024; Liu et al. 2025; Ahmadian et al. 2024,
as TRL's RLOOTrainer clips it; Yu et al. 2025; Zheng et al. 2025; LUSPO 2026; MiniMax 2025, whose ratio has
no lower bound, with the upper one of Khatri et al. 2025; Gao et al. 2025; Zhao et al. 2025; Qi et al.
2026, as their own script has it: bounds around the policy that sampled; VESPO 2026, likewise; Hu et al. 2025, as verl
averages it."""


def _is_function(text: str) -> bool:
    """Return whether a text is meant as a function of a file. Raises IsobitError where it is and
    cannot be one."""
    return ":" in text and bool(split_reference(text, "function"))


Function = Annotated[
    str, Pattern("path/to/file.py:function", _is_function), FileName(functions=True)
]


@dataclass(frozen=True)
class Objective:
    """The objective. `preset` sets every key that is not given; the defaults are those of grpo.

    loss_aggregation: the mean over tokens, over sequences, over sequences of the sum over tokens,
    or that divided by `max_new_tokens` (constant). clip_low, clip_high: bounds of the ratio, 1 -
    clip_low and 1 + clip_high. correction: weights and rejection where the policy that sampled
    differs from the learner's (`correction_rule.py`); recompute_old_logprobs: whether the learner
    computes the log-probabilities of the weights that sampled, before it changes them, or the
    rollout's own serve. What `auto` becomes for these two depends on the model's precision
    (`for_precision`).
    """

    preset: Annotated[
        str, OneOf(PRESETS), "a published algorithm, which sets the keys below that are not given"
    ] = "grpo"
    advantage: Annotated[
        Annotated[str, OneOf(ADVANTAGE_KINDS)] | Function,
        "by name, or your own: path/to/file.py:function. grpo_batch: divided by the standard "
        "deviation of all rewards of the step. opo: less the group's mean weighted by length. "
        "maxrl: divided by the group's mean, for rewards of 0 and more. otb: less the baseline of "
        "least variance of each token's place, for one more forward. distillation: for each token, "
        "how much likelier the teacher (reference.path) finds it",
    ] = "grpo"
    discount: Annotated[
        float,
        above(0),
        at_most(1),
        "weight of later rewards in the return of a token; reinforce_pp only",
    ] = 1.0
    decoupled_rewards: Annotated[
        bool, "compute advantages for each reward function separately and add them by weight (GDPO)"
    ] = False
    loss: Annotated[
        Annotated[str, OneOf(LOSS_KINDS)] | Function,
        "by name, or your own: path/to/file.py:function. reinforce: advantage times "
        "log-probability, without a ratio. sapo: a soft gate in place of the clip. gmpo: the "
        "geometric mean of a sequence's clipped ratios. dppo_tv, dppo_kl: no gradient for "
        "tokens that leave a region around the old policy. vespo: a soft weight for a whole "
        "sequence. divergence: how far the policy is from a teacher's distribution over the "
        "vocabulary, in a distillation",
    ] = "clip"
    divergence_beta: Annotated[
        float,
        at_least(0),
        at_most(1),
        "for loss: divergence. 1: the reverse KL. 0: the forward KL. Between them: the "
        "generalized Jensen-Shannon divergence (GKD)",
    ] = 1.0
    divergence_top_k: Annotated[
        int,
        at_least(0),
        "for loss: divergence. Compares this many of the policy's likeliest tokens, and all "
        "others as if they were one more; 0: compares all",
    ] = 0
    ratio: Annotated[
        str,
        OneOf(RATIOS),
        "the importance ratio: of each token, or of a sequence, as the geometric mean of its "
        "tokens' ratios (GSPO) or as their product (sequence_sum, RLOO)",
    ] = "token"
    dual_clip: Annotated[
        float | None,
        above(1),
        "a token with a negative advantage A has at most this times |A| as its loss; default: "
        "no limit",
    ] = None
    sapo_temperatures: Annotated[
        tuple[Annotated[float, above(0)], Annotated[float, above(0)]],
        "for loss: sapo. How soon its gate closes as the ratio leaves 1, for tokens with a "
        "positive advantage and for the others",
    ] = (1.0, 1.05)
    vespo_k: Annotated[
        tuple[Annotated[float, at_least(0)], Annotated[float, at_least(0)]],
        "for loss: vespo. The power to which a sequence's ratio is raised in its weight, for "
        "tokens with an advantage of 0 and more and for the others",
    ] = (2.0, 3.0)
    vespo_lambda: Annotated[
        tuple[Annotated[float, above(0)], Annotated[float, above(0)]],
        "for loss: vespo. How soon the weight falls as the ratio grows, for the same two",
    ] = (3.0, 2.0)
    loss_aggregation: Annotated[
        str,
        OneOf(AGGREGATIONS),
        "token_mean: the mean over all tokens. sequence_mean: the mean over the tokens of each "
        "completion, and of these the mean. sequence_sum: the sum over the tokens of each "
        "completion, and of these the mean. constant: as sequence_sum, divided by "
        "max_new_tokens",
    ] = "sequence_mean"
    clip_low: Annotated[
        float,
        above(0),
        at_most(1),
        "the ratio is clipped below 1 minus this; under loss: gmpo, below exp of minus this; under "
        "dppo_tv and dppo_kl the largest divergence of a token that becomes less likely",
    ] = 0.2
    clip_high: Annotated[
        float,
        above(0),
        "the ratio is clipped above 1 plus this; under loss: gmpo, above exp of this; under "
        "dppo_tv and dppo_kl the largest divergence of a token that becomes more likely",
    ] = 0.2
    off_policy_mask_threshold: Annotated[
        float | None,
        above(0),
        "leaves out the tokens with a negative advantage of a sequence in which log rollout "
        "minus log policy is above this in the mean (DeepSeek-V3.2); works with every loss; "
        "default: leaves out none",
    ] = None
    dynamic_sampling: Annotated[
        bool, "sample other prompts in place of those whose completions all have the same reward"
    ] = False
    max_resamples: Annotated[
        int, at_least(1), "the most rounds of rollouts in one step, under dynamic sampling"
    ] = 10
    overlong_buffer: Annotated[
        int, at_least(0), "over this many tokens before the length limit the reward falls; 0: off"
    ] = 0
    overlong_penalty: Annotated[
        float, at_least(0), "how much lower the reward is at the length limit"
    ] = 1.0
    kl_coefficient: Annotated[
        float, at_least(0), "weight of the KL penalty against the reference; 0: none"
    ] = 0.0
    kl_estimator: Annotated[
        Annotated[str, OneOf(KL_ESTIMATORS)] | None,
        "how the KL is estimated; default: k3 in the loss, k1 in the reward. k3-unbiased: k3 times "
        "the ratio, as in TRL; low_var_kl: k3, at most 10",
    ] = None
    kl_in_reward: Annotated[
        bool, "subtract the KL from the reward of each token, and leave it out of the loss"
    ] = False
    correction: Annotated[
        Annotated[str, OneOf(("auto", *CORRECTIONS))] | CorrectionRule,
        "for the difference of rollout and learner: a name, or a custom rule. auto: token_tis "
        "where they are not unified (fp8-e2e: token_is), or samples are of older weights",
    ] = "auto"
    recompute_old_logprobs: Annotated[
        Literal["auto", "always", "never"],
        "whether the learner computes the old log-probabilities; auto: not under a unified "
        "precision, where those of the rollout are the same",
    ] = "auto"
    mask_truncated: Annotated[
        bool,
        "completions that ended at the length limit have no loss; their rewards still count in "
        "their group's advantages (DAPO's overlong filtering)",
    ] = False
    top_entropy_quantile: Annotated[
        float,
        above(0),
        at_most(1),
        "only this share of a step's tokens, those with the highest entropy, have a loss (a KL "
        "penalty is of all). Below 1 it takes one more forward. arXiv 2506.01939 takes 0.2",
    ] = 1.0
    entropy_coefficient: Annotated[
        float,
        at_least(0),
        "weight of an entropy bonus in the loss: the policy's entropy at each token, averaged as "
        "the loss is; 0: none",
    ] = 0.0
    entropy_target: Annotated[
        float | None,
        above(0),
        "adapts the coefficient so that the mean entropy, in nats per token, comes to this: it "
        "grows while the entropy is at or below the target, and shrinks above. The bonus "
        "counts only at or below. Default: a constant coefficient",
    ] = None
    entropy_coefficient_step: Annotated[
        float, above(0), "how much an optimizer step changes the coefficient, under entropy_target"
    ] = 0.005
    entropy_coefficient_max: Annotated[
        float, above(0), "the largest coefficient, under entropy_target"
    ] = 1.0
    observation_coefficient: Annotated[
        float,
        at_least(0),
        "weight in the loss of the cross-entropy of what an environment says behind the model's "
        "answers, its mean over these tokens of an optimizer step (ECHO, arXiv 2605.24517, which "
        "takes 0.05); the prompt is not among them. 0: none",
    ] = 0.0
    router_replay: Annotated[
        bool, "mixture of experts: the learner uses the experts that the rollout chose (R3)"
    ] = False
    router_aux_coefficient: Annotated[
        float,
        at_least(0),
        "mixture of experts: weight of the loss that balances their load in an optimizer batch",
    ] = 0.0
    updates_per_batch: Annotated[
        int, at_least(1), "optimizer steps in one pass over a batch of rollouts"
    ] = 1
    epochs: Annotated[int, at_least(1), "passes over a batch of rollouts"] = 1

    @property
    def pays_entropy(self) -> bool:
        """Whether the loss has an entropy bonus, or may come to have one."""
        return self.entropy_coefficient > 0 or self.entropy_target is not None

    @property
    def may_use_entropy(self) -> bool:
        """Whether the loss may have a gradient by the entropy: a loss of the user's own may use
        it."""
        return self.pays_entropy or self.loss not in LOSS_KINDS

    @property
    def weighs_places(self) -> bool:
        """Whether the advantage asks the learner for the norms of its tokens' gradients."""
        return self.advantage == "otb"

    @property
    def distills(self) -> bool:
        """Whether what is learned is a teacher's, and rewards have no part in it."""
        return self.advantage == "distillation"

    @property
    def estimator(self) -> str:
        """The `kl_estimator`, resolved."""
        return self.kl_estimator or ("k1" if self.kl_in_reward else "k3")

    def check(self, *, filtered: bool) -> None:
        """Raise IsobitError for parts without a meaning next to each other, or under a sampling
        that leaves tokens out (`filtered`)."""
        if filtered:
            if self.kl_coefficient:
                raise IsobitError(
                    "sampling.top_k, top_p, min_p and repetition_penalty cannot be used with a KL "
                    "penalty: it has its own support; set algorithm.kl_coefficient: 0, or top_k: 0, "
                    "top_p: 1, min_p: 0, repetition_penalty: 1"
                )
            if self.weighs_places:
                raise IsobitError(
                    "sampling.top_k, top_p, min_p and repetition_penalty cannot be used with "
                    "algorithm.advantage: otb, which is of the whole vocabulary: set top_k: 0, top_p: 1, "
                    "min_p: 0, repetition_penalty: 1, or another advantage"
                )
        self._check_kl()
        self._check_loss()
        if self.correction == CorrectionRule():
            raise IsobitError(
                "algorithm.correction: an empty correction: give a weight, a rejection or a veto, "
                "or write correction: none"
            )
        if self.recompute_old_logprobs == "never" and self.correction not in ("auto", "none"):
            raise IsobitError(
                "algorithm.correction weighs old against rollout log-probabilities, which "
                "recompute_old_logprobs: never makes equal"
            )

    def _check_kl(self) -> None:
        if self.kl_in_reward and not self.kl_coefficient:
            raise IsobitError("algorithm.kl_in_reward needs a kl_coefficient above 0")
        if self.estimator == "k1" and self.kl_coefficient and not self.kl_in_reward:
            raise IsobitError(
                "algorithm.kl_estimator k1 in the loss has a gradient of mean 0, which pulls nowhere: "
                "take k2 or k3, or charge it to the reward with kl_in_reward: true"
            )
        if self.estimator == "k3-unbiased" and self.kl_in_reward:
            raise IsobitError(
                "algorithm.kl_estimator k3-unbiased weighs the KL in the loss by the ratio, which a "
                "reward has not: take k1, k2 or k3, or leave kl_in_reward out"
            )

    def _check_loss(self) -> None:
        if self.dual_clip is not None and self.loss in {*LOSS_KINDS} - {"clip"}:
            raise IsobitError(
                f"algorithm.dual_clip bounds the clipped loss; {self.loss} has no such "
                "clip: leave one of them out"
            )
        if self.loss == "divergence" and not self.distills:
            raise IsobitError(
                "algorithm.loss: divergence is from a teacher: set algorithm.advantage: distillation, "
                "or take another loss"
            )
        if self.loss == "divergence" and self.ratio != "token":
            raise IsobitError(
                "algorithm.loss: divergence knows no ratio: leave algorithm.ratio out"
            )
        of_divergence = (self.divergence_beta, self.divergence_top_k) != (1, 0)
        if of_divergence and self.loss != "divergence":
            raise IsobitError(
                "algorithm.divergence_beta and divergence_top_k are of loss: divergence: set it, or "
                "leave them out"
            )
        if self.advantage == "maxrl" and (self.kl_in_reward or self.overlong_buffer):
            raise IsobitError(
                "algorithm.advantage: maxrl needs rewards of 0 and more, which kl_in_reward and "
                "overlong_buffer can make less: leave one of them out"
            )
        if self.loss in OWN_RATIO and self.ratio != "token":
            raise IsobitError(
                f"algorithm.ratio: {self.ratio} has no meaning under loss: {self.loss}, which "
                "defines its ratio: leave one of them out"
            )


@dataclass(frozen=True)
class ResolvedObjective(Objective):
    """An objective with what `auto` has become for a model's precision, what the sampling decides,
    and the rewards that a run has. A learner takes this one, and so do losses and advantages.

    `rule`: the correction. `recompute_old`: whether the learner computes the old log-probabilities.
    `stale_samples`: some samples are of older weights, by replay or because rollouts run ahead.
    `reward_weights`: (name, weight) of each reward function. `max_new_tokens`, `temperature` and
    `filtering` are the sampling's, the last one its top-k, top-p, min-p and repetition penalty, if
    any. `beta`, `answer_weights` and `kl_baseline`: of a loss of given answers (`given.py`), the
    last one of a step.
    """

    rule: NotAnOption[CorrectionRule] = CORRECTIONS["none"]
    recompute_old: NotAnOption[bool] = False
    stale_samples: NotAnOption[bool] = False
    reward_weights: NotAnOption[tuple[tuple[str, float], ...]] = ()
    max_new_tokens: NotAnOption[int] = 128
    temperature: NotAnOption[float] = 1.0
    filtering: NotAnOption[tuple[int, float, float, float] | None] = None
    beta: NotAnOption[float] = 0.1
    answer_weights: NotAnOption[tuple[float, float]] = (1.0, 1.0)
    kl_baseline: NotAnOption[float] = 0.0

    @staticmethod
    def of(objective: Objective, **values: Any) -> "ResolvedObjective":
        """Return an objective with these values, and what is resolved of it already."""
        return ResolvedObjective(**(vars(objective) | values))


OBJECTIVES = {name: Objective(name, **defaults) for name, defaults in PRESETS.items()}


_PARTS = {key for defaults in PRESETS.values() for key in defaults}
"""What a preset may decide."""


def with_preset(values: Any) -> Any:
    """Return what is given for an objective, over the parts of its preset. A part that is null is
    not given."""
    if not isinstance(values, Mapping):
        return values
    values = _without_shadow_passes(values)
    chosen = {key: value for key, value in values.items() if value is not None or key not in _PARTS}
    preset = chosen.get("preset", "grpo")
    defaults = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    return defaults | chosen


def _without_shadow_passes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the keys of options that no longer exist, where they do nothing. Raises IsobitError
    where they would do something."""
    left = ("shadow_every", "shadow_calibrates_clip")
    for key in left:
        if values.get(key):
            raise IsobitError(
                f"algorithm.{key}: shadow passes have left isobit (docs/decisions/learning.md): "
                "leave the key out"
            )
    return {key: value for key, value in values.items() if key not in left}


def without_preset(values: Any) -> Any:
    """Return what is given for an objective, without its preset and the parts that have the
    preset's value, so that another preset can be set."""
    if not isinstance(values, Mapping):
        return values
    preset = values.get("preset", "grpo")
    defaults = vars(OBJECTIVES.get(str(preset), Objective()))
    return {
        key: value
        for key, value in values.items()
        if key != "preset" and (key not in _PARTS or value != defaults[key])
    }


def shares_prompts(wanted: bool, objective: Objective, *, mixture: bool, recurrent: bool) -> bool:
    """Return whether the completions of a prompt share its rows, where `optimizer.share_prompts` is
    `wanted`: not in a mixture of experts that repeats each sample's own routes, or balances the
    load of all rows, nor where layers are recurrent, since their backward is of whole sequences."""
    of_all_rows = mixture and (objective.router_replay or objective.router_aux_coefficient > 0)
    return wanted and not recurrent and not of_all_rows


def for_precision(
    objective: Objective, precision: "Precision", *, stale: bool = False
) -> ResolvedObjective:
    """Resolve what is `auto` under a precision: the precision's default correction; no
    recomputation where rollout and learner share a flow.

    `stale`: samples may be of older weights, so that even under one flow there is something to
    recompute and, by token TIS, to correct.
    """
    wanted, correction = objective.recompute_old_logprobs, objective.correction
    recompute = wanted == "always" or (wanted == "auto" and (stale or not precision.unified))
    if isinstance(correction, str):
        default = precision.default_correction
        default = "token_tis" if stale and default == "none" else default
        correction = CORRECTIONS[default if correction == "auto" else correction]
    if not recompute:
        correction = (
            CorrectionRule()
        )  # old log-probabilities are the rollout's own: every weight would be 1
    return ResolvedObjective.of(
        objective, rule=correction, recompute_old=recompute, stale_samples=stale
    )
