"""The sections of a configuration: each key once, with its type, its range, its default and what it means.

Left out: sections that are declared where they are used (`schema.py` names them all), and what contradicts across
sections (`schema.py` too).
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from isobit.engine.types import LOWEST_TEMPERATURE, EngineSize, Sampling
from isobit.errors import IsobitError, printable
from isobit.options.declare import Example, OneOf, Suggested, above, at_least, at_most, text_as
from isobit.options.precisions import PRECISIONS
from isobit.options.projections import ALL_LINEAR, PROJECTIONS
from isobit.options.reading import OptionError
from isobit.rewards.spec import RewardSpec

PrecisionValue = (
    Annotated[str, Suggested(PRECISIONS)] | Annotated[dict[str, Any], Example("{preset: fp8, wgrad: bf16}")]
)
PRECISION = f"a preset: {', '.join(PRECISIONS)}; or {{preset: ..., and what differs}}, also written fp8[wgrad=bf16]"
CONSISTENCY = (
    "bitwise: a token's bits do not depend on its batch; on a CPU in the order of sums that it is fastest in, of two "
    "that can be named and that every CPU computes; exact: the same, with float64 sums, on a CPU; fast: the libraries' "
    "own products"
)
ON_MISMATCH = (
    "what a token does whose bits differ between rollout and learner, under one flow and consistency: bitwise or "
    "exact; "
    "correct: such a batch is weighed by token TIS"
)
CHAT_TEMPLATE = "a Jinja file with a chat template, instead of the model's own; saved with its checkpoints"
BACKEND = (
    "auto: triton on an NVIDIA GPU from the A100 on, after a check there, else native: C++, from the wheel or compiled "
    "on first use"
)


@dataclass(frozen=True)
class ModelSource:
    """Where the initial weights come from: `path`, or `sft`. `model: DIR` is `model.path`."""

    path: Annotated[str | None, "a Hugging Face directory (config.json, safetensors, tokenizer.json)"] = None
    sft: Annotated[str | None, "a config of `isobit sft`; its model is trained once and cached"] = None
    chat_template: Annotated[str | None, CHAT_TEMPLATE] = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.sft is None):
            raise IsobitError("give exactly one of path (a Hugging Face directory) and sft (a config of `isobit sft`)")


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA: factors of low rank beside the model's matrices are trained, unmerged in rollout and learner; the model
    itself is frozen, and quantized once."""

    rank: Annotated[int, at_least(1), "of the factors A [rank, inputs] and B [outputs, rank]"] = 32
    alpha: Annotated[float, above(0), "B·A is multiplied by alpha / rank"] = 64.0
    targets: Annotated[
        tuple[Annotated[str, OneOf((ALL_LINEAR, *PROJECTIONS))], ...],
        "matrices with factors; all-linear: all of attention and MLP. Experts have none yet",
    ] = (ALL_LINEAR,)
    init: Annotated[str | None, "a PEFT folder to go on from; default: A random by the seed, B zero"] = None

    def __post_init__(self) -> None:
        if not self.targets or (ALL_LINEAR in self.targets and len(self.targets) > 1):
            raise IsobitError(f"targets: give {ALL_LINEAR} alone, or some of {', '.join(PROJECTIONS)}")
        if len(set(self.targets)) < len(self.targets):
            raise IsobitError("targets: one of them is there twice")


@dataclass(frozen=True)
class RewardModelConfig:
    """A sequence-classification checkpoint with one label, whose logit is a reward."""

    path: Annotated[str, "a Hugging Face directory, such as a LlamaForSequenceClassification"]
    weight: float = 1.0
    name: Annotated[str, "name in the metrics"] = "reward_model"
    precision: Annotated[PrecisionValue, "its own flow; it keeps working weights only"] = "fp8"


@dataclass(frozen=True)
class RewardsConfig:
    """How rewards are computed: functions in worker processes, with a deadline for each call, and reward models.
    `rewards: FUNCTION` is `rewards.functions`."""

    functions: Annotated[tuple[Annotated[RewardSpec, text_as("function")], ...], "default: the task's own reward"] = ()
    models: Annotated[
        tuple[Annotated[RewardModelConfig, text_as("path")], ...], "reward models, added to the functions by weight"
    ] = ()
    deadline_s: Annotated[float, above(0), "seconds for one call; a worker that takes longer is killed"] = 30.0
    num_workers: Annotated[int, at_least(1), at_most(64), "processes, each with all functions loaded"] = 1
    on_error: Annotated[Literal["stop", "skip"], "what to do when a reward function fails"] = "stop"
    environment: Annotated[tuple[str, ...], "environment variables passed on, besides PATH and the like"] = ()


@dataclass(frozen=True)
class SamplingConfig(Sampling):
    """How completions are sampled: the engine's settings, and the size of a group."""

    group_size: Annotated[int, at_least(1), "completions per prompt"] = 8
    temperature: Annotated[
        float, at_least(LOWEST_TEMPERATURE), "above 0: greedy completions of a prompt would all be the same"
    ] = 1.0


@dataclass(frozen=True)
class EngineConfig(EngineSize):
    """The rollout engine's memory and batch."""

    sleep: Annotated[
        Literal["auto", "always", "never"],
        "free the KV cache's memory while learning; auto: on a GPU without cuda_graphs, which would need recapturing",
    ] = "auto"


@dataclass(frozen=True)
class ReferenceConfig:
    """The frozen model of the KL penalty: the initial weights, with their own precision; with an adapter the model
    without it."""

    precision: Annotated[PrecisionValue | None, "default: the policy's"] = None


@dataclass(frozen=True)
class MismatchConfig:
    """On what the mismatch of rollout and learner is measured, besides what the learner computes anyway."""

    samples_of_idle_groups: Annotated[
        int,
        at_least(0),
        "of a step's samples whose advantage is 0 and which the learner leaves out, how many it still compares",
    ] = 4
    share_ahead: Annotated[
        float,
        at_least(0),
        at_most(1),
        "of a batch that is sampled ahead of the learner (`rollouts_ahead`), the share of the completions that the "
        "learner compares under the weights that sampled them, rounded up; 0: none",
    ] = 1 / 16


@dataclass(frozen=True)
class SftEvaluationConfig:
    """Held-out evaluation after supervised training, and during it: greedy accuracy."""

    samples: Annotated[int, at_least(1), "held-out prompts"] = 256
    every: Annotated[int, at_least(0), "steps between evaluations; 0: only after the last"] = 0
    stop_at: Annotated[
        float | None, above(0), at_most(1), "accuracy at which training ends, as soon as an evaluation finds it"
    ] = None

    def __post_init__(self) -> None:
        if self.stop_at is not None and not self.every:
            raise IsobitError("evaluation.stop_at is looked at every evaluation.every steps; set that too")


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out evaluation during training: greedy accuracy, pass@k and majority@k of samples, the best model kept."""

    every: Annotated[
        int, at_least(0), "steps between evaluations, and one before the first and after the last; 0: none"
    ] = 0
    samples: Annotated[int, at_least(1), "held-out prompts"] = 256
    num_samples: Annotated[int, at_least(0), at_most(1000), "samples per prompt, for pass_at; 0: greedy only"] = 0
    pass_at: Annotated[tuple[int, ...], "values of k for pass@k and majority@k; default: 1 and num_samples"] = ()
    temperature: Annotated[
        float | None, at_least(LOWEST_TEMPERATURE), "for the samples; default: sampling.temperature"
    ] = None
    tag: Annotated[str | None, "column for whose values accuracy is also reported"] = None
    answer_pattern: Annotated[
        str | None, "regular expression for the answer that a majority votes on; default: the task's"
    ] = None
    keep_best: Annotated[bool, "keep the best model in best/ in the run directory; weights only"] = True
    best_by: Annotated[
        str,
        "metric that chooses the best model, larger is better; auto: accuracy/held_out, and for equal values "
        "reward/held_out, as where no reward reaches 1",
    ] = "auto"

    def __post_init__(self) -> None:
        if self.pass_at and not self.num_samples:
            raise IsobitError("pass_at needs samples: set num_samples, such as 8")
        for k in self.pass_at:
            if not 1 <= k <= self.num_samples:
                raise IsobitError(f"pass_at: {k} is not from 1 to num_samples, which is {self.num_samples}")


@dataclass(frozen=True)
class RunConfig:
    """Where a run is kept."""

    dir: Annotated[str, "must not exist yet, or be empty"] = "runs/train"
    checkpoint_every: Annotated[
        int, at_least(0), "steps between checkpoints; the last step is always saved; 0: only the last"
    ] = 20
    keep_last: Annotated[int, at_least(1)] = 2
    quantization_every: Annotated[
        int,
        at_least(0),
        "steps between records of quantization by layer, of weights and of the learner's activations and output "
        "gradients, from step 1; 0: none",
    ] = 10
    completions: Annotated[
        Literal["all", "sample", "none"],
        "what completions.jsonl.gz has of a step; sample: eight whole, of the others prompt and reward; only with "
        "all can the learning be repeated (--from-rollouts)",
    ] = "all"
    check_memory: Annotated[
        bool,
        "checksums of the masters, the optimizer's moments and the working weights: a bit that changes in memory ends "
        "the run before it is learned with or saved",
    ] = True
    check_gradients_every: Annotated[
        int,
        at_least(0),
        "steps between checks of the backward: the first micro-batch is differentiated twice, and gradients whose bits "
        "differ end the run; 0: none",
    ] = 0
    rank_timeout_s: Annotated[
        float, above(0), "how long a rank waits for the others; more than the longest rollout of one of them"
    ] = 1800.0
    on_change: Annotated[
        Literal["stop", "warn"],
        "what a resume does where data, rewards, templates or a model that it reads are not those the run began with",
    ] = "stop"
    report: bool = True

    def __post_init__(self) -> None:
        if not self.dir or printable(self.dir) != self.dir or set("\n\t") & set(self.dir):
            raise OptionError(("dir",), f"expected a path without control characters, got {self.dir!r:.80}")
