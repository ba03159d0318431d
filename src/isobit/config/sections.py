"""The sections of a configuration: each key once, with its type, its range, its default and what it means.

Left out: the objective (`algorithm.py`), and what contradicts across sections (`schema.py`).
"""

from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from isobit.tasks import TASKS

Precision = str | dict[str, Any]
PRECISION = (
    "a preset: float32, bf16, fp8-rollout, fp8-rollout-kv, fp8-e2e, fp8-unified, fp8, mxfp8-rollout, nvfp4-rollout, "
    "mxfp8, nvfp4; or {preset: ..., and what differs}, also written fp8[wgrad=bf16]"
)
CONSISTENCY = "bitwise: a token's bits do not depend on its batch; fast: the libraries' own products"
ON_MISMATCH = (
    "what a token does whose bits differ between rollout and learner, under one flow and consistency: bitwise; "
    "correct: such a batch is weighed by token TIS"
)
CHAT_TEMPLATE = "a Jinja file with a chat template, instead of the model's own; saved with its checkpoints"
BACKEND = "auto: triton on an H100 or H200, else native where a C++ compiler is found"


class Section(BaseModel):
    """A frozen mapping of known keys. One value is taken for a list of one, and text for the key `meant_by_text`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)
    meant_by_text: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, values: Any) -> Any:
        key = cls.key_of_text(values) if isinstance(values, str) else cls.meant_by_text
        if key is not None and (isinstance(values, str) or (isinstance(values, (list, tuple)) and cls._several(key))):
            values = {key: values}
        if not isinstance(values, dict):
            return values
        return {key: cls._meant(key, value) for key, value in values.items()}

    @classmethod
    def key_of_text(cls, text: str) -> str | None:
        """The key that this text, in the place of the whole section, is meant for."""
        return cls.meant_by_text

    @classmethod
    def _meant(cls, key: str, value: Any) -> Any:
        """A list of one where one value stands for a list; `true` as text, which is refused, where a number belongs."""
        if isinstance(value, bool) and cls._is_number(key):
            return str(value).lower()
        return value if value is None or isinstance(value, (list, tuple)) or not cls._several(key) else [value]

    @classmethod
    def _several(cls, key: str) -> bool:
        """Whether the key takes a list of any length."""
        annotation = cls.model_fields[key].annotation if key in cls.model_fields else None
        return get_origin(annotation) is tuple and get_args(annotation)[1:] == (Ellipsis,)

    @classmethod
    def _is_number(cls, key: str) -> bool:
        annotation = cls.model_fields[key].annotation if key in cls.model_fields else None
        kinds = get_args(annotation) or (annotation,)
        return bool not in kinds and (int in kinds or float in kinds)


class ModelConfig(Section):
    """Where the initial weights come from: `path`, or `sft`. `model: DIR` is `model.path`."""

    meant_by_text = "path"
    path: str | None = Field(None, description="a Hugging Face directory (config.json, safetensors, tokenizer.json)")
    sft: str | None = Field(None, description="a config of `isobit sft`; its model is trained once and cached")
    chat_template: str | None = Field(None, description=CHAT_TEMPLATE)

    @model_validator(mode="after")
    def _one_source(self) -> "ModelConfig":
        if (self.path is None) == (self.sft is None):
            raise ValueError("give exactly one of path (a Hugging Face directory) and sft (a config of `isobit sft`)")
        return self


class TaskConfig(Section):
    """The prompts: a built-in task, or your own data. Prompts outside the length limits stop the run before it starts,
    or are dropped and counted. `task: NAME` is `task.name`, `task: FILE` is `task.path`."""

    @classmethod
    def key_of_text(cls, text: str) -> str:
        return "name" if text in TASKS else "path"

    name: str = Field("file", description="arithmetic, countdown, gsm8k, or file (any data)")
    path: str | None = Field(
        None,
        description="JSONL, a JSON array, CSV (each also as .gz), Parquet, or a directory of them or of `datasets`; "
        "every column reaches the reward",
    )
    held_out_path: str | None = Field(None, description="held-out data; default: taken from path")
    held_out_size: int | None = Field(None, ge=0, description="examples kept out of training for evaluation")
    format: Literal["auto", "jsonl", "csv", "parquet", "dataset"] = Field(
        "auto", description="auto: by name and content"
    )
    split: str | None = Field(None, description="split of a directory with several; default: train")
    held_out_split: str | None = Field(None, description="split of held_out_path, or of path without it")
    columns: dict[str, str] = Field(
        default_factory=dict, description="role or new name: column of the data, such as {prompt: question}"
    )
    prompt_template: str | None = Field(
        None, description="text with {prompt} in it, put around every text prompt; gsm8k has its own default"
    )
    chat: bool = Field(False, description="a text prompt becomes a user's message in the model's chat template")
    system: str | None = Field(None, description="system message, put before every chat")
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="upper limit, besides the context minus max_new_tokens"
    )
    min_prompt_tokens: int = Field(0, ge=0, description="lower limit")
    too_long: Literal["stop", "drop"] = Field("stop", description="what to do with a prompt outside the length limits")
    shuffle: bool = Field(True, description="a new order in each epoch, by the seed; false: the order of the data")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="options of a built-in task, such as digits of arithmetic or instruction of gsm8k",
    )

    @model_validator(mode="after")
    def _limits(self) -> "TaskConfig":
        if self.max_prompt_tokens is not None and self.min_prompt_tokens > self.max_prompt_tokens:
            raise ValueError(f"min_prompt_tokens {self.min_prompt_tokens} exceeds max_prompt_tokens")
        return self


class RewardConfig(Section):
    """One reward function: a built-in one, or your own with TRL's signature."""

    meant_by_text = "function"
    function: str = Field(
        description="math, exact_match, fuzzy_match, format, length_penalty or code; or path/to/file.py:function or "
        "package.module:function"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="of a built-in reward: see how-to/rewards.md")
    weight: float = 1.0
    name: str | None = Field(None, description="name in the metrics; default: the function's")
    deadline_s: float | None = Field(None, gt=0, description="seconds for one call; default: rewards.deadline_s")


class RewardModelConfig(Section):
    """A sequence-classification checkpoint with one label, whose logit is a reward."""

    meant_by_text = "path"
    path: str = Field(description="a Hugging Face directory, such as a LlamaForSequenceClassification")
    weight: float = 1.0
    name: str = Field("reward_model", description="name in the metrics")
    precision: Precision = Field("fp8", description="its own flow; it keeps working weights only")


class RewardsConfig(Section):
    """How rewards are computed: functions in worker processes, with a deadline for each call, and reward models.
    `rewards: FUNCTION` is `rewards.functions`."""

    meant_by_text = "functions"
    functions: tuple[RewardConfig, ...] = Field((), description="default: the task's own reward")
    models: tuple[RewardModelConfig, ...] = Field((), description="reward models, added to the functions by weight")
    deadline_s: float = Field(30.0, gt=0, description="seconds for one call; a worker that takes longer is killed")
    num_workers: int = Field(1, ge=1, le=64, description="processes, each with all functions loaded")
    on_error: Literal["stop", "skip"] = Field("stop", description="what to do when a reward function fails")
    environment: tuple[str, ...] = Field((), description="environment variables passed on, besides PATH and the like")


class SamplingConfig(Section):
    """How completions are sampled."""

    group_size: int = Field(8, ge=1, description="completions per prompt")
    max_new_tokens: int = Field(128, ge=1)
    temperature: float = Field(1.0, gt=0)
    top_k: int = Field(0, ge=0, description="refused in training when not 0: see the message")
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


class EngineConfig(Section):
    """The rollout engine's memory and batch."""

    kv_pages: int | None = Field(None, ge=1, description="pages of the KV cache; default: what one step needs")
    page_size: int = Field(16, ge=1, le=1024, description="tokens per page")
    max_batch_tokens: int = Field(2048, ge=1, description="tokens of one forward; longer prefills are chunked")
    max_sequences: int = Field(512, ge=1, description="sequences decoded at the same time")
    cuda_graphs: bool = Field(True, description="capture decode steps on a GPU; ignored on a CPU")
    sleep: Literal["auto", "always", "never"] = Field(
        "auto",
        description="free the KV cache's memory while learning; auto: on a GPU without cuda_graphs, which would need "
        "recapturing",
    )


class OptimizerConfig(Section):
    """AdamW on FP32 masters."""

    learning_rate: float = Field(1e-6, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    final_fraction: float = Field(
        0.0, ge=0, le=1, description="fraction of the peak rate left at the last step of a schedule"
    )
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
    state: Literal["fp32", "8bit"] = Field("fp32", description="AdamW's moments; 8bit needs torchao (isobit[optim])")
    micro_batch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        16384,
        description="tokens of one forward and backward; auto: the most that fit into the memory, a number that the "
        "run's `config.yaml` keeps",
    )
    activation_checkpointing: bool = Field(
        False, description="keep only each layer's inputs for the backward, which recomputes the rest"
    )
    max_bad_steps: int = Field(3, ge=1, description="skipped (non-finite) steps in a row after which the run ends")

    @field_validator("betas")
    @classmethod
    def _betas(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("each must be at least 0 and below 1")
        return betas


class ReferenceConfig(Section):
    """The frozen model of the KL penalty: the initial weights, with their own precision."""

    precision: Precision | None = Field(None, description="default: the policy's")


class ReplayConfig(Section):
    """Training again on past groups, drawn by age and by the spread of their rewards."""

    capacity: int = Field(0, ge=0, description="groups kept; 0: no replay")
    groups_per_step: int = Field(0, ge=0, description="past groups in each step, besides prompts_per_step fresh ones")
    max_staleness: int = Field(8, ge=0, description="age limit in steps; older groups are dropped")
    half_life: float = Field(2.0, gt=0, description="steps after which a group's chance to be drawn halves")

    @model_validator(mode="after")
    def _consistent(self) -> "ReplayConfig":
        if self.groups_per_step and not self.max_staleness:
            raise ValueError("max_staleness: 0 forgets every past group; give at least 1, or groups_per_step: 0")
        if self.groups_per_step > self.capacity:
            raise ValueError(f"groups_per_step {self.groups_per_step} exceeds capacity {self.capacity}")
        return self


class SftEvaluationConfig(Section):
    """Held-out evaluation after supervised training: greedy accuracy."""

    samples: int = Field(256, ge=1, description="held-out prompts")


class EvaluationConfig(Section):
    """Held-out evaluation during training: greedy accuracy, pass@k and majority@k of samples, the best model kept."""

    every: int = Field(
        0, ge=0, description="steps between evaluations, and one before the first and after the last; 0: none"
    )
    samples: int = Field(256, ge=1, description="held-out prompts")
    num_samples: int = Field(0, ge=0, le=1000, description="samples per prompt, for pass_at; 0: greedy only")
    pass_at: tuple[int, ...] = Field(
        (), description="values of k for pass@k and majority@k; default: 1 and num_samples"
    )
    temperature: float | None = Field(None, gt=0, description="for the samples; default: sampling.temperature")
    tag: str | None = Field(None, description="column for whose values accuracy is also reported")
    answer_pattern: str | None = Field(
        None, description="regular expression for the answer that a majority votes on; default: the task's"
    )
    keep_best: bool = Field(True, description="keep the best model in best/ in the run directory; weights only")
    best_by: str = Field(
        "auto",
        description="metric that chooses the best model, larger is better; auto: accuracy/held_out, and for equal "
        "values reward/held_out, as where no reward reaches 1",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "EvaluationConfig":
        if self.pass_at and not self.num_samples:
            raise ValueError("pass_at needs samples: set num_samples, such as 8")
        for k in self.pass_at:
            if not 1 <= k <= self.num_samples:
                raise ValueError(f"pass_at: {k} is not from 1 to num_samples, which is {self.num_samples}")
        return self


class RunConfig(Section):
    """Where a run is kept."""

    dir: str = Field("runs/train", description="must not exist yet, or be empty")
    checkpoint_every: int = Field(
        20, ge=0, description="steps between checkpoints; the last step is always saved; 0: only the last"
    )
    keep_last: int = Field(2, ge=1)
    quantization_every: int = Field(
        10,
        ge=0,
        description="steps between records of quantization by layer, of weights and of the learner's activations "
        "and output gradients, from step 1; 0: none",
    )
    completions: Literal["all", "sample", "none"] = Field(
        "all",
        description="what completions.jsonl.gz has of a step; sample: eight whole, of the others prompt and reward; "
        "only with all can the learning be repeated (--from-rollouts)",
    )
    report: bool = True
