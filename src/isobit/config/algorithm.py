"""The objective in a configuration: advantages, loss, correction, and their parts."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from isobit.errors import IsobitError
from isobit.options import Form, above, at_least, at_most, below
from isobit.rewards.functions import split_reference


@dataclass(frozen=True)
class RejectionConfig:
    """Which tokens or sequences a correction leaves out: those whose value is outside [low, high]."""

    measure: Annotated[
        Literal["ratio", "inverse_ratio", "k1", "k2", "k3", "binary_kl"],
        "of learner to rollout; inverse_ratio: of rollout to learner, as verl's k1 modes are bounded",
    ] = "ratio"
    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = "token"
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise IsobitError("give low, high, or both: bounds of what is kept")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise IsobitError(f"low {self.low} must be below high {self.high}")


@dataclass(frozen=True)
class CorrectionConfig:
    """A custom correction: a weight, a rejection, or both."""

    weight: Literal["none", "token", "sequence"] = "none"
    cap: Annotated[float | None, above(0), "largest weight; default: none"] = None
    floor: Annotated[float, at_least(0), "smallest weight"] = 0.0
    normalize: Annotated[bool, "divide weights by their mean over the batch, rejected ones included"] = False
    rejection: RejectionConfig | None = None
    veto: Annotated[float, at_least(0), below(1), "reject a sequence if any token's ratio is below this; 0: off"] = 0.0
    denominator: Annotated[
        Literal["all", "kept"], "average the loss over all tokens, or over those that are kept, as verl does"
    ] = "all"

    def __post_init__(self) -> None:
        if self.cap is not None and self.floor > self.cap:
            raise IsobitError(f"floor {self.floor} exceeds cap {self.cap}")
        if self.weight == "none" and (self.cap is not None or self.floor or self.normalize):
            raise IsobitError("cap, floor and normalize need a weight: token or sequence")
        if self.weight == "none" and self.rejection is None and not self.veto:
            raise IsobitError("an empty correction: give a weight, a rejection or a veto, or write correction: none")
        if self.denominator == "kept" and self.rejection is None and not self.veto:
            raise IsobitError("denominator: kept needs a rejection or a veto, which leave something out")


CorrectionName = Literal[
    "auto",
    "none",
    "token_tis",
    "sequence_tis",
    "token_mis",
    "sequence_mis",
    "geometric_mask",
    "k3_mask",
    "binary_kl_mask",
]


def _is_function(text: str) -> bool:
    """Whether it is meant as a function of a file. Raises IsobitError where it is and cannot be."""
    return ":" in text and bool(split_reference(text, "function"))


AdvantageName = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"]
LossName = Literal["clip", "cispo", "reinforce"]
Function = Annotated[str, Form("path/to/file.py:function", _is_function)]


def renamed(values: Any) -> Any:
    """What is given for `algorithm`; `surrogate` is what isobit 0.1.0 called the loss, in the config.yaml of its
    runs."""
    if isinstance(values, dict) and "surrogate" in values:
        others = {key: value for key, value in values.items() if key != "surrogate"}
        return {"loss": values["surrogate"]} | others
    return values


@dataclass(frozen=True)
class AlgorithmConfig:
    """The objective. `preset` sets every key that is not given."""

    preset: Literal["grpo", "dr_grpo", "rloo", "dapo", "gspo", "cispo", "reinforce_pp", "reinforce_pp_baseline"] = (
        "grpo"
    )
    advantage: Annotated[AdvantageName | Function | None, "or your own: path/to/file.py:function"] = None
    discount: Annotated[float, above(0), at_most(1), "of later rewards in a token's return; reinforce_pp only"] = 1.0
    decoupled_rewards: Annotated[
        bool, "compute advantages for each reward function separately and add them by weight (GDPO)"
    ] = False
    loss: Annotated[
        LossName | Function | None,
        "reinforce: advantage times log-probability, no ratio; or your own: path/to/file.py:function",
    ] = None
    ratio: Annotated[
        Literal["token", "sequence", "sequence_sum"] | None,
        "one per token; or per sequence, the geometric mean of its tokens' (GSPO) or their product (RLOO)",
    ] = None
    dual_clip: Annotated[float | None, above(1), "bound of the loss over |A| where A < 0; default: none"] = None
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] | None = None
    clip_low: Annotated[float | None, above(0), at_most(1)] = None
    clip_high: Annotated[float | None, above(0)] = None
    dynamic_sampling: Annotated[bool | None, "replace groups whose rewards are all equal"] = None
    max_resamples: Annotated[int, at_least(1), "rollout rounds per step, at most, under dynamic sampling"] = 10
    overlong_buffer: Annotated[int, at_least(0), "last tokens before the length limit, with a soft penalty; 0: off"] = 0
    overlong_penalty: Annotated[float, at_least(0)] = 1.0
    kl_coefficient: Annotated[float, at_least(0)] = 0.0
    kl_estimator: Annotated[
        Literal["k1", "k2", "k3", "low_var_kl"] | None,
        "default: k3 in the loss, k1 in the reward; low_var_kl: k3, at most 10",
    ] = None
    kl_in_reward: Annotated[bool, "take the KL from the reward, token by token; not in the loss"] = False
    correction: Annotated[
        CorrectionName | CorrectionConfig, "auto: the precision preset's; a name; or a custom rule"
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

    def __post_init__(self) -> None:
        if self.kl_estimator == "k1" and self.kl_coefficient and not self.kl_in_reward:
            raise IsobitError(
                "kl_estimator k1 in the loss has a gradient of mean 0, which pulls nowhere: "
                "take k2 or k3, or charge it to the reward with kl_in_reward: true"
            )
