"""Whole configurations: a training run, a comparison, supervised training.

Contradictions between values are refused here too. Left out: where the values come from (`load.py`), and whether
files exist and models fit, which is checked where they are opened.
"""

from typing import Literal

from pydantic import Field, model_validator

from isobit.config.algorithm import AlgorithmConfig
from isobit.config.sections import (
    BACKEND,
    CHAT_TEMPLATE,
    CONSISTENCY,
    ON_MISMATCH,
    PRECISION,
    EngineConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    Precision,
    ReferenceConfig,
    ReplayConfig,
    RewardsConfig,
    RunConfig,
    SamplingConfig,
    Section,
    SftEvaluationConfig,
    TaskConfig,
)
from isobit.config.tracking import TrackingConfig


class Config(Section):
    """One training run."""

    model: ModelConfig
    task: TaskConfig = TaskConfig()
    rewards: RewardsConfig = RewardsConfig()
    precision: Precision = Field("fp8", description=PRECISION)
    consistency: Literal["bitwise", "fast"] = Field("bitwise", description=CONSISTENCY)
    backend: Literal["auto", "triton", "native", "reference"] = Field("auto", description=BACKEND)
    on_mismatch: Literal["stop", "warn", "correct"] = Field("stop", description=ON_MISMATCH)
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    reference: ReferenceConfig = ReferenceConfig()
    replay: ReplayConfig = ReplayConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    run: RunConfig = RunConfig()
    tracking: TrackingConfig = TrackingConfig()
    steps: int = Field(100, ge=1, description="rollout batches")
    rollouts_ahead: int = Field(
        0, ge=0, le=64, description="how many batches the rollout is ahead of the learner; 0: synchronous"
    )
    prompts_per_step: int = Field(8, ge=1, description="prompts (groups) of a rollout batch")
    seed: int = Field(0, ge=0, lt=2**63, description="for data order, sampling and shuffling")

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
        loss = algorithm.loss or algorithm.preset
        if algorithm.dual_clip is not None and loss in ("cispo", "reinforce"):
            raise ValueError(
                f"algorithm.dual_clip bounds the clipped loss; {loss} has no such clip: leave one of them out"
            )
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


class CompareConfig(Section):
    """One training config under several precision flows, each with several seeds."""

    train: str = Field(description="the training config that all runs share")
    changes: tuple[str, ...] = Field((), description="key.sub=value, for all runs")
    presets: tuple[str, ...] = Field(min_length=1, description="precision flows, such as fp8 or fp8[wgrad=bf16]")
    seeds: int = Field(1, ge=1, description="runs per preset: seeds 0, 1, ...")
    out: str = Field("runs/compare", description="a directory for all runs, comparison.html and comparison.json")


class ArchitectureConfig(Section):
    """A model made from scratch, with a character tokenizer over the task's alphabet."""

    family: Literal["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"] = "qwen3"
    hidden_size: int = Field(128, ge=8)
    intermediate_size: int = Field(512, ge=8, description="width of the MLP, or of each expert")
    num_experts: int | None = Field(None, ge=1, description="qwen3_moe, mixtral")
    experts_per_token: int | None = Field(None, ge=1, description="default: 2")
    num_layers: int = Field(4, ge=1)
    num_heads: int = Field(4, ge=1)
    num_kv_heads: int | None = Field(None, ge=1, description="default: num_heads")
    head_dim: int | None = Field(None, ge=2, description="default: hidden_size / num_heads")
    tie_embeddings: bool = True
    max_positions: int = Field(512, ge=1)
    rope_theta: float = Field(10000.0, gt=0)
    vocabulary: str | None = Field(None, description="the tokenizer's characters; default: the task's alphabet")

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


class SftModelConfig(Section):
    """Where supervised training starts: a checkpoint, or random weights. `model: DIR` is `model.path`."""

    meant_by_text = "path"
    path: str | None = None
    init: ArchitectureConfig | None = None
    chat_template: str | None = Field(None, description=CHAT_TEMPLATE)

    @model_validator(mode="after")
    def _one_source(self) -> "SftModelConfig":
        if (self.path is None) == (self.init is None):
            raise ValueError("give exactly one of path (a Hugging Face directory) and init (an architecture)")
        return self


class SftConfig(Section):
    """One supervised run on prompt/completion data: columns `prompt` and `completion`, or `messages`."""

    model: SftModelConfig
    task: TaskConfig = TaskConfig()
    precision: Precision = Field("fp8", description=PRECISION)
    consistency: Literal["bitwise", "fast"] = Field("bitwise", description=CONSISTENCY)
    backend: Literal["auto", "triton", "native", "reference"] = Field("auto", description=BACKEND)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)
    steps: int = Field(100, ge=1)
    batch_size: int = Field(64, ge=1, description="examples per optimizer step")
    evaluation: SftEvaluationConfig = SftEvaluationConfig()
    max_new_tokens: int = Field(64, ge=1, description="length limit of completions in the evaluation")
    out: str = Field("runs/sft", description="where the model is written; must not exist yet, or be empty")
    seed: int = Field(0, ge=0, lt=2**63)
