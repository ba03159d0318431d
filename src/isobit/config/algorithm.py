"""The objective in a configuration: advantages, loss, correction, and their parts."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from isobit.config.sections import Section
from isobit.errors import IsobitError
from isobit.rewards.functions import split_reference


class RejectionConfig(Section):
    """Which tokens or sequences a correction leaves out: those whose value is outside [low, high]."""

    measure: Literal["ratio", "inverse_ratio", "k1", "k2", "k3", "binary_kl"] = Field(
        "ratio",
        description="of learner to rollout; inverse_ratio: of rollout to learner, as verl's k1 modes are bounded",
    )
    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = "token"
    low: float | None = None
    high: float | None = None

    @model_validator(mode="after")
    def _bounded(self) -> "RejectionConfig":
        if self.low is None and self.high is None:
            raise ValueError("give low, high, or both: bounds of what is kept")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")
        return self


class CorrectionConfig(Section):
    """A custom correction: a weight, a rejection, or both."""

    weight: Literal["none", "token", "sequence"] = "none"
    cap: float | None = Field(None, gt=0, description="largest weight; default: none")
    floor: float = Field(0.0, ge=0, description="smallest weight")
    normalize: bool = Field(False, description="divide weights by their mean over the batch, rejected ones included")
    rejection: RejectionConfig | None = None
    veto: float = Field(0.0, ge=0, lt=1, description="reject a sequence if any token's ratio is below this; 0: off")
    denominator: Literal["all", "kept"] = Field(
        "all", description="average the loss over all tokens, or over those that are kept, as verl does"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "CorrectionConfig":
        if self.cap is not None and self.floor > self.cap:
            raise ValueError(f"floor {self.floor} exceeds cap {self.cap}")
        if self.weight == "none" and (self.cap is not None or self.floor or self.normalize):
            raise ValueError("cap, floor and normalize need a weight: token or sequence")
        if self.weight == "none" and self.rejection is None and not self.veto:
            raise ValueError("an empty correction: give a weight, a rejection or a veto, or write correction: none")
        if self.denominator == "kept" and self.rejection is None and not self.veto:
            raise ValueError("denominator: kept needs a rejection or a veto, which leave something out")
        return self


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


Correction = Annotated[
    Annotated[CorrectionName, Tag("<name>")] | Annotated[CorrectionConfig, Tag("<rule>")],
    Discriminator(lambda value: "<rule>" if isinstance(value, (dict, CorrectionConfig)) else "<name>"),
]


def _reference(text: str) -> str:
    try:
        split_reference(text, "function")
    except IsobitError as error:
        raise ValueError(str(error)) from None
    return text


def _name_or_function(value: object) -> str:
    return "<function>" if isinstance(value, str) and ":" in value else "<name>"


AdvantageName = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"]
LossName = Literal["clip", "cispo", "reinforce"]
Function = Annotated[str, AfterValidator(_reference), Tag("<function>")]
AdvantageChoice = Annotated[Annotated[AdvantageName, Tag("<name>")] | Function, Discriminator(_name_or_function)]
LossChoice = Annotated[Annotated[LossName, Tag("<name>")] | Function, Discriminator(_name_or_function)]


class AlgorithmConfig(Section):
    """The objective. `preset` sets every key that is not given."""

    preset: Literal["grpo", "dr_grpo", "rloo", "dapo", "gspo", "cispo", "reinforce_pp", "reinforce_pp_baseline"] = (
        "grpo"
    )
    advantage: AdvantageChoice | None = Field(None, description="or your own: path/to/file.py:function")
    discount: float = Field(1.0, gt=0, le=1, description="of later rewards in a token's return; reinforce_pp only")
    decoupled_rewards: bool = Field(
        False, description="compute advantages for each reward function separately and add them by weight (GDPO)"
    )
    loss: LossChoice | None = Field(
        None,
        description="reinforce: advantage times log-probability, no ratio; or your own: path/to/file.py:function",
    )
    ratio: Literal["token", "sequence", "sequence_sum"] | None = Field(
        None,
        description="one per token; or per sequence, the geometric mean of its tokens' (GSPO) or their product (RLOO)",
    )
    dual_clip: float | None = Field(None, gt=1, description="bound of the loss over |A| where A < 0; default: none")
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] | None = None
    clip_low: float | None = Field(None, gt=0, le=1)
    clip_high: float | None = Field(None, gt=0)
    dynamic_sampling: bool | None = Field(None, description="replace groups whose rewards are all equal")
    max_resamples: int = Field(10, ge=1, description="rollout rounds per step, at most, under dynamic sampling")
    overlong_buffer: int = Field(
        0, ge=0, description="last tokens before the length limit, with a soft penalty; 0: off"
    )
    overlong_penalty: float = Field(1.0, ge=0)
    kl_coefficient: float = Field(0.0, ge=0)
    kl_estimator: Literal["k1", "k2", "k3", "low_var_kl"] | None = Field(
        None, description="default: k3 in the loss, k1 in the reward; low_var_kl: k3, at most 10"
    )
    kl_in_reward: bool = Field(False, description="take the KL from the reward, token by token; not in the loss")
    correction: Correction = Field("auto", description="auto: the precision preset's; a name; or a custom rule")
    recompute_old_logprobs: Literal["auto", "always", "never"] = Field(
        "auto", description="auto: never under a unified precision, whose rollout log-probabilities are the old ones"
    )
    router_replay: bool = Field(
        False, description="mixture of experts: the learner uses the experts that the rollout chose (R3)"
    )
    router_aux_coefficient: float = Field(
        0.0, ge=0, description="mixture of experts: weight of the load-balancing loss of an optimizer batch"
    )
    shadow_every: int = Field(
        0, ge=0, description="steps between BF16 shadow passes, which measure the noise in the ratio; 0: none"
    )
    shadow_calibrates_clip: bool = Field(False, description="widen the clip so that it clips what BF16 would clip")
    updates_per_batch: int = Field(1, ge=1, description="optimizer steps per pass over a rollout batch")
    epochs: int = Field(1, ge=1, description="passes over a rollout batch")

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, values: Any) -> Any:
        """`surrogate` is what isobit 0.1.0 called the loss, in the config.yaml of its runs."""
        if isinstance(values, dict) and "surrogate" in values:
            others = {key: value for key, value in values.items() if key != "surrogate"}
            return {"loss": values["surrogate"]} | others
        return values

    @model_validator(mode="after")
    def _pulls(self) -> "AlgorithmConfig":
        if self.kl_estimator == "k1" and self.kl_coefficient and not self.kl_in_reward:
            raise ValueError(
                "kl_estimator k1 in the loss has a gradient of mean 0, which pulls nowhere: "
                "take k2 or k3, or charge it to the reward with kl_in_reward: true"
            )
        return self
