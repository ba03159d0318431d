"""Every key of a configuration, declared once: its type, its range, its default and what it means.

A value that contradicts another is refused here too. Left out: where the values come from (`load.py`), and whether
files exist and models fit, which is found where they are opened.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

Precision = str | dict[str, Any]
_PRECISION = (
    "a preset: float32, bf16, fp8-rollout, fp8-rollout-kv, fp8-e2e, fp8-unified, fp8, mxfp8-rollout, nvfp4-rollout, "
    "mxfp8, nvfp4; or {preset: ..., and what differs}, also written fp8[wgrad=bf16]"
)
_CONSISTENCY = "bitwise: a token's bits do not depend on its batch; fast: the machine's own products"
_BACKEND = "auto: native where a C++ compiler is found"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


class ModelConfig(_Section):
    """Where the initial weights come from: `path`, or `sft`."""

    path: str | None = Field(None, description="a Hugging Face directory (config.json, safetensors, tokenizer.json)")
    sft: str | None = Field(None, description="a config of `isobit sft`; its model is made once and kept in a cache")

    @model_validator(mode="after")
    def _one_source(self) -> "ModelConfig":
        if (self.path is None) == (self.sft is None):
            raise ValueError("give exactly one of path (a Hugging Face directory) and sft (a config of `isobit sft`)")
        return self


class TaskConfig(_Section):
    """What is asked and how it is scored: a built-in task by name, or a file of the user's own."""

    name: str = Field("file", description="arithmetic, countdown, gsm8k, or file (any JSONL)")
    path: str | None = Field(None, description="JSONL, one object a line; every column reaches the reward function")
    held_out_path: str | None = Field(None, description="JSONL of the held-out split; default: cut from path")
    held_out_size: int | None = Field(None, ge=0, description="examples kept out of training for evaluation")
    prompt_column: str | None = Field(None, description="column of the prompt: text, or chat messages")
    answer_column: str | None = Field(None, description="column handed to rewards as `answer`")
    prompt_template: str | None = Field(None, description="text with {prompt} in it, put around every prompt")
    options: dict[str, Any] = Field(default_factory=dict, description="options of a built-in task, such as digits")


class RewardConfig(_Section):
    """One reward function of the user's own, in TRL's signature."""

    function: str = Field(description="path/to/file.py:function or package.module:function")
    weight: float = 1.0
    name: str | None = Field(None, description="name in the metrics; default: the function's")


class RewardModelConfig(_Section):
    """A sequence-classification checkpoint with one label, whose logit is a reward."""

    path: str = Field(description="a Hugging Face directory, such as a LlamaForSequenceClassification")
    weight: float = 1.0
    name: str = Field("reward_model", description="name in the metrics")
    precision: Precision = Field("fp8", description="its own flow; it keeps working weights only")


class RewardsConfig(_Section):
    """How rewards are computed: functions in worker processes, with a deadline for each call, and reward models."""

    functions: tuple[RewardConfig, ...] = Field((), description="default: the task's own reward")
    models: tuple[RewardModelConfig, ...] = Field((), description="reward models, added to the functions by weight")
    deadline_s: float = Field(30.0, gt=0, description="seconds for one call; a worker that takes longer is killed")
    num_workers: int = Field(1, ge=1, le=64)
    on_error: Literal["stop", "skip"] = Field("stop", description="what a failing reward function does to the run")
    environment: tuple[str, ...] = Field((), description="variables that functions get besides PATH and the like")


class SamplingConfig(_Section):
    """How completions are sampled."""

    group_size: int = Field(8, ge=1, description="completions per prompt")
    max_new_tokens: int = Field(128, ge=1)
    temperature: float = Field(1.0, gt=0)
    top_k: int = Field(0, ge=0, description="refused in training when not 0: see the message")
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


class EngineConfig(_Section):
    """The rollout engine's memory and batch."""

    kv_pages: int | None = Field(None, ge=1, description="pages of the KV cache; default: what one step needs")
    page_size: int = Field(16, ge=1, le=1024, description="tokens per page")
    max_batch_tokens: int = Field(2048, ge=1, description="tokens of one forward (chunked prefill under this budget)")
    max_sequences: int = Field(512, ge=1, description="sequences that decode at the same time")


class RejectionConfig(_Section):
    """Which tokens or sequences a correction leaves out: those whose value is outside [low, high]."""

    measure: Literal["ratio", "k1", "k2", "k3"] = Field("ratio", description="of log learner - log rollout")
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


class CorrectionConfig(_Section):
    """A correction put together by hand: a weight, a rejection, or both."""

    weight: Literal["none", "token", "sequence"] = "none"
    cap: float | None = Field(None, gt=0, description="largest weight; default: none")
    floor: float = Field(0.0, ge=0, description="smallest weight")
    normalize: bool = Field(False, description="divide weights by their mean over the batch")
    rejection: RejectionConfig | None = None
    veto: float = Field(0.0, ge=0, lt=1, description="a sequence is out if any token's ratio is below this; 0: off")

    @model_validator(mode="after")
    def _consistent(self) -> "CorrectionConfig":
        if self.cap is not None and self.floor > self.cap:
            raise ValueError(f"floor {self.floor} exceeds cap {self.cap}")
        if self.weight == "none" and (self.cap is not None or self.floor or self.normalize):
            raise ValueError("cap, floor and normalize need a weight: token or sequence")
        if self.weight == "none" and self.rejection is None and not self.veto:
            raise ValueError("an empty correction: give a weight, a rejection or a veto, or write correction: none")
        return self


CorrectionName = Literal[
    "auto", "none", "token_tis", "sequence_tis", "token_mis", "sequence_mis", "geometric_mask", "k3_mask"
]


Correction = Annotated[
    Annotated[CorrectionName, Tag("<name>")] | Annotated[CorrectionConfig, Tag("<rule>")],
    Discriminator(lambda value: "<rule>" if isinstance(value, (dict, CorrectionConfig)) else "<name>"),
]


class AlgorithmConfig(_Section):
    """The objective. `preset` fills what is not given."""

    preset: Literal["grpo", "dr_grpo", "rloo", "dapo", "gspo", "cispo", "reinforce_pp"] = "grpo"
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"] | None = None
    decoupled_rewards: bool = Field(
        False, description="compute the advantages of each reward function apart and add them by weight (GDPO)"
    )
    ratio: Literal["token", "sequence"] | None = Field(None, description="one ratio per token, or per sequence (GSPO)")
    surrogate: Literal["clip", "cispo"] | None = None
    dual_clip: float | None = Field(None, gt=1, description="bound of the loss over |A| where A < 0; default: none")
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] | None = None
    clip_low: float | None = Field(None, gt=0, le=1)
    clip_high: float | None = Field(None, gt=0)
    dynamic_sampling: bool | None = Field(None, description="drop groups of equal rewards and sample others")
    max_resamples: int = Field(10, ge=1, description="rollout rounds a step may take under dynamic sampling")
    overlong_buffer: int = Field(0, ge=0, description="tokens before the limit, penalized softly; 0: off")
    overlong_penalty: float = Field(1.0, ge=0)
    kl_coefficient: float = Field(0.0, ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in_reward: bool = Field(
        False, description="take k1, summed over the completion, from the reward; not in the loss"
    )
    correction: Correction = Field("auto", description="auto: the precision preset's; a name; or a rule of your own")
    recompute_old_logprobs: Literal["auto", "always", "never"] = Field(
        "auto", description="auto: never under a unified precision, whose rollout log-probabilities are the old ones"
    )
    router_replay: bool = Field(
        False, description="mixture of experts: the learner takes the experts that the rollout chose (R3)"
    )
    router_aux_coefficient: float = Field(
        0.0, ge=0, description="mixture of experts: weight of the load-balancing loss, per micro-batch"
    )
    shadow_every: int = Field(
        0, ge=0, description="steps between BF16 shadow passes, which measure the noise in the ratio; 0: none"
    )
    shadow_calibrates_clip: bool = Field(False, description="widen the clip so that it clips what BF16 would clip")
    updates_per_batch: int = Field(1, ge=1, description="optimizer steps per pass over a rollout batch")
    epochs: int = Field(1, ge=1, description="passes over a rollout batch")


class OptimizerConfig(_Section):
    """AdamW on FP32 masters."""

    learning_rate: float = Field(1e-6, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    final_fraction: float = Field(0.0, ge=0, le=1, description="of the peak rate, at the last step of a schedule")
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
    state: Literal["fp32", "8bit"] = Field("fp32", description="AdamW's moments; 8bit needs torchao (isobit[optim])")
    micro_batch_tokens: int = Field(16384, ge=1, description="tokens of one forward and backward")
    max_bad_steps: int = Field(3, ge=1, description="skipped (non-finite) steps in a row that end the run")

    @field_validator("betas")
    @classmethod
    def _betas(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("each must be at least 0 and below 1")
        return betas


class ReferenceConfig(_Section):
    """The frozen model of the KL penalty: the initial weights, under a precision of their own."""

    precision: Precision | None = Field(None, description="default: the policy's")


class ReplayConfig(_Section):
    """Learning again from past groups, drawn by age and by the spread of their rewards."""

    capacity: int = Field(0, ge=0, description="groups kept; 0: no replay")
    groups_per_step: int = Field(0, ge=0, description="past groups in each step, beside prompts_per_step fresh ones")
    max_staleness: int = Field(8, ge=0, description="steps; older groups are forgotten")
    half_life: float = Field(2.0, gt=0, description="steps in which a group's chance to be drawn halves")

    @model_validator(mode="after")
    def _consistent(self) -> "ReplayConfig":
        if self.groups_per_step and not self.max_staleness:
            raise ValueError("max_staleness: 0 forgets every past group; give at least 1, or groups_per_step: 0")
        if self.groups_per_step > self.capacity:
            raise ValueError(f"groups_per_step {self.groups_per_step} exceeds capacity {self.capacity}")
        return self


class EvaluationConfig(_Section):
    """Held-out evaluation inside training: greedy accuracy."""

    every: int = Field(
        0, ge=0, description="steps between evaluations, and one before the first and after the last; 0: none"
    )
    samples: int = Field(256, ge=1, description="held-out prompts")


class RunConfig(_Section):
    """Where a run is kept."""

    dir: str = Field("runs/train", description="must not exist yet, or be empty")
    checkpoint_every: int = Field(20, ge=0, description="steps; the last step is always saved; 0: only the last")
    keep_last: int = Field(2, ge=1)
    report: bool = True


class Config(_Section):
    """One training run."""

    model: ModelConfig
    task: TaskConfig = TaskConfig()
    rewards: RewardsConfig = RewardsConfig()
    precision: Precision = Field("fp8", description=_PRECISION)
    consistency: Literal["bitwise", "fast"] = Field("bitwise", description=_CONSISTENCY)
    backend: Literal["auto", "native", "reference"] = Field("auto", description=_BACKEND)
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    reference: ReferenceConfig = ReferenceConfig()
    replay: ReplayConfig = ReplayConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    run: RunConfig = RunConfig()
    steps: int = Field(100, ge=1, description="rollout batches")
    rollouts_ahead: int = Field(
        0, ge=0, le=64, description="batches that are rolled out before they are learned from: asynchronous by so many"
    )
    prompts_per_step: int = Field(8, ge=1, description="groups of a rollout batch")
    seed: int = Field(0, ge=0, lt=2**63, description="of data order, sampling and shuffling")

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        sampling, algorithm = self.sampling, self.algorithm
        if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
            raise ValueError(
                "sampling.top_k, top_p and min_p cannot be used in training: the learner's log-probabilities are of "
                "the whole distribution, and the kept set is not replayed; set top_k: 0, top_p: 1, min_p: 0"
            )
        if sampling.group_size < 2:
            raise ValueError("sampling.group_size must be at least 2: an advantage is relative to the group")
        if algorithm.kl_in_reward and not algorithm.kl_coefficient:
            raise ValueError("algorithm.kl_in_reward needs a kl_coefficient above 0")
        if algorithm.dual_clip is not None and (algorithm.surrogate or algorithm.preset) == "cispo":
            raise ValueError("algorithm.dual_clip bounds the clipped surrogate; cispo has none: leave one of them out")
        if algorithm.overlong_buffer >= sampling.max_new_tokens:
            raise ValueError("algorithm.overlong_buffer must be below sampling.max_new_tokens")
        if algorithm.updates_per_batch > self.prompts_per_step * sampling.group_size:
            raise ValueError("algorithm.updates_per_batch exceeds the completions of a step")
        if algorithm.shadow_calibrates_clip and not algorithm.shadow_every:
            raise ValueError("algorithm.shadow_calibrates_clip needs shadow passes: set shadow_every, such as 20")
        if self.rollouts_ahead > self.replay.max_staleness:
            raise ValueError(
                f"rollouts_ahead {self.rollouts_ahead} exceeds replay.max_staleness {self.replay.max_staleness}"
            )
        if algorithm.recompute_old_logprobs == "never" and algorithm.correction not in ("auto", "none"):
            raise ValueError(
                "algorithm.correction weighs old against rollout log-probabilities, which "
                "recompute_old_logprobs: never makes equal"
            )
        return self


class CompareConfig(_Section):
    """One training config under several precision flows, each with several seeds."""

    train: str = Field(description="the training config that all runs share")
    changes: tuple[str, ...] = Field((), description="key.sub=value, for all runs")
    presets: tuple[str, ...] = Field(min_length=1, description="precision flows, such as fp8 or fp8[wgrad=bf16]")
    seeds: int = Field(1, ge=1, description="runs per preset: seeds 0, 1, ...")
    out: str = Field("runs/compare", description="a directory for all runs, comparison.html and comparison.json")


class ArchitectureConfig(_Section):
    """A model made from scratch, with a character tokenizer over the task's alphabet."""

    family: Literal["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"] = "qwen3"
    hidden_size: int = Field(128, ge=8)
    intermediate_size: int = Field(512, ge=8, description="of the MLP, or of each expert")
    num_experts: int | None = Field(None, ge=1, description="qwen3_moe, mixtral")
    experts_per_token: int | None = Field(None, ge=1, description="default: 2")
    num_layers: int = Field(4, ge=1)
    num_heads: int = Field(4, ge=1)
    num_kv_heads: int | None = Field(None, ge=1, description="default: num_heads")
    head_dim: int | None = Field(None, ge=2, description="default: hidden_size / num_heads")
    tie_embeddings: bool = True
    max_positions: int = Field(512, ge=1)
    rope_theta: float = Field(10000.0, gt=0)
    vocabulary: str | None = Field(None, description="characters of the tokenizer; default: the task's alphabet")

    @model_validator(mode="after")
    def _experts(self) -> "ArchitectureConfig":
        mixture = self.family in ("qwen3_moe", "mixtral")
        if mixture != (self.num_experts is not None):
            raise ValueError(
                f"{self.family} needs num_experts" if mixture else f"num_experts: {self.family} is dense; use qwen3_moe"
            )
        if self.num_experts is not None and (self.experts_per_token or 2) > self.num_experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} exceeds num_experts {self.num_experts}")
        if not mixture and self.experts_per_token is not None:
            raise ValueError(f"experts_per_token: {self.family} is dense; use qwen3_moe")
        return self


class SftModelConfig(_Section):
    """Where supervised training starts: a checkpoint, or random weights."""

    path: str | None = None
    init: ArchitectureConfig | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "SftModelConfig":
        if (self.path is None) == (self.init is None):
            raise ValueError("give exactly one of path (a Hugging Face directory) and init (an architecture)")
        return self


class SftConfig(_Section):
    """One supervised run on prompt/completion data."""

    model: SftModelConfig
    task: TaskConfig = TaskConfig()
    completion_column: str = Field("completion", description="column of the text to learn (file tasks)")
    precision: Precision = Field("fp8", description=_PRECISION)
    consistency: Literal["bitwise", "fast"] = Field("bitwise", description=_CONSISTENCY)
    backend: Literal["auto", "native", "reference"] = Field("auto", description=_BACKEND)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)
    steps: int = Field(100, ge=1)
    batch_size: int = Field(64, ge=1, description="examples per optimizer step")
    evaluation: EvaluationConfig = EvaluationConfig()
    max_new_tokens: int = Field(64, ge=1, description="limit of the completions sampled by the evaluation")
    out: str = Field("runs/sft", description="where the model is written; must not exist yet, or be empty")
    seed: int = Field(0, ge=0, lt=2**63)
