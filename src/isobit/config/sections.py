"""The sections of a configuration: each key once, with its type, its range, its default and what it
means.

Left out: sections that are declared where they are used (`schema.py` names them all), and what
contradicts between sections (`schema.py` too).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from isobit.data.dataset import check_variables
from isobit.engine.types import LOWEST_TEMPERATURE, EngineSize, Sampling
from isobit.errors import IsobitError, printable
from isobit.evaluation.early_stop import StopConfig, check_metric
from isobit.options.consistency import Consistency
from isobit.options.declare import (
    Example,
    FileName,
    Formerly,
    OneOf,
    Preprocess,
    Suggested,
    above,
    at_least,
    at_most,
    below,
    text_as,
)
from isobit.options.precisions import PRECISIONS
from isobit.options.projections import ALL_LINEAR, PROJECTIONS
from isobit.options.reading import OptionError
from isobit.rl.algorithm.objective import Function, Objective
from isobit.rl.algorithm.shown import Shown
from isobit.tasks.rewards.spec import RewardSpec, reward_section

PrecisionValue = (
    Annotated[str, Suggested(PRECISIONS)]
    | Annotated[dict[str, Any], Example("{preset: fp8, wgrad: bf16}")]
)
PrecisionOption = Annotated[
    PrecisionValue,
    f"a preset: {', '.join(PRECISIONS)}; or {{preset: ..., and what differs}}, also "
    "written fp8[wgrad=bf16]",
]
ConsistencyOption = Annotated[
    Consistency,
    "whether the numbers of a token depend on what else is in its batch. bitwise: they do not, "
    "to the last bit. There are two orders in which a CPU may add; it takes the one that it is "
    "faster at. bitwise-tdp32, bitwise-vdp32: the same, in the order that is named, which "
    "every CPU can compute. exact: as bitwise, with sums in float64; on a CPU. fast: the "
    "products of PyTorch's libraries, whose bits may depend on the batch",
]
BackendOption = Annotated[
    Literal["auto", "triton", "native", "reference"],
    "what computes the operators. triton: NVIDIA GPUs from the A100 on. native: C++, from the "
    "wheel or compiled on first use. reference: PyTorch, slow. auto: triton where it passes a "
    "check on this GPU, else native",
]
DividedOption = Annotated[
    Annotated[int, at_least(1)] | Literal["auto"],
    "ranks that hold the working weights together, each some rows of every weight: a divisor of "
    "`ranks`. 1: each rank has them whole. auto: the fewest with which a GPU's memory suffices; 1 on "
    "a CPU. The bits do not depend on it",
]
ChatTemplate = Annotated[
    str | None,
    FileName(),
    "a Jinja file with a chat template, instead of the model's own; saved with its checkpoints",
]
TemplateVariables = Annotated[
    Mapping[str, Any],
    "variables of the chat template; a row may give its own in the column `chat_template_kwargs`",
    Example("{enable_thinking: false}"),
]
EPOCHS = (
    "passes over the training data, in place of steps: as many steps as that takes, rounded up; the "
    "run's config.yaml keeps their number"
)
ON_MISMATCH = (
    "what a run does when a token's log-probability differs in any bit between rollout and "
    "learner, although both have the same precision, and consistency is bitwise or exact, so "
    "that none should. stop: it ends before it learns from the batch. warn: it prints a "
    "warning, and learns from the batch. correct: it learns from the batch with token TIS"
)


@dataclass(frozen=True)
class ModelSource:
    """The source of the initial weights: `path`, or `sft`. `model: DIR` is `model.path`."""

    path: Annotated[
        str | None,
        FileName(),
        "a Hugging Face directory (config.json, safetensors, tokenizer.json)",
    ] = None
    sft: Annotated[
        str | None, FileName(), "a config of `isobit sft`; its model is trained once and cached"
    ] = None
    chat_template: ChatTemplate = None
    chat_template_kwargs: TemplateVariables = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_variables("chat_template_kwargs", self.chat_template_kwargs)
        if (self.path is None) == (self.sft is None):
            raise IsobitError(
                "give exactly one of path (a Hugging Face directory) and sft (a config of "
                "`isobit sft`)"
            )


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA: only factors of low rank next to the model's matrices are trained. Rollout and learner
    keep them unmerged; the model itself is frozen, and quantized once."""

    rank: Annotated[
        int, at_least(1), "rank of the factors A [rank, inputs] and B [outputs, rank]"
    ] = 32
    alpha: Annotated[float, above(0), "B·A is multiplied by alpha / rank"] = 64.0
    targets: Annotated[
        tuple[Annotated[str, OneOf((ALL_LINEAR, *PROJECTIONS))], ...],
        "matrices that get factors; all-linear: all of attention, MLP and experts",
    ] = (ALL_LINEAR,)
    rslora: Annotated[bool, "B·A is multiplied by alpha / √rank instead (rsLoRA)"] = False
    init: Annotated[
        str | None,
        FileName(),
        "a PEFT folder to start from; default: A is random by the seed, B is zero",
    ] = None

    def __post_init__(self) -> None:
        if not self.targets or (ALL_LINEAR in self.targets and len(self.targets) > 1):
            raise IsobitError(
                f"targets: give {ALL_LINEAR} alone, or some of {', '.join(PROJECTIONS)}"
            )
        if len(set(self.targets)) < len(self.targets):
            raise IsobitError("targets: one of them is there twice")


@dataclass(frozen=True)
class RewardModelConfig:
    """A sequence-classification checkpoint with one label, whose logit is a reward."""

    path: Annotated[
        str, FileName(), "a Hugging Face directory, such as a LlamaForSequenceClassification"
    ]
    weight: Annotated[float, "what its reward is multiplied by in the sum of rewards"] = 1.0
    name: Annotated[str, "name in the metrics"] = "reward_model"
    precision: Annotated[PrecisionValue, "precision of the reward model"] = "fp8"


@dataclass(frozen=True)
class RewardsConfig:
    """The computation of rewards: functions in worker processes, with a deadline for each call, and
    reward models. `rewards: FUNCTION` is `rewards.functions`."""

    functions: Annotated[
        tuple[Annotated[RewardSpec, Preprocess(reward_section)], ...],
        "default: the task's own reward",
    ] = ()
    models: Annotated[
        tuple[Annotated[RewardModelConfig, text_as("path")], ...],
        "reward models, added to the functions by weight",
    ] = ()
    deadline_s: Annotated[
        float, above(0), "seconds for one call; a worker that takes longer is killed"
    ] = 30.0
    num_workers: Annotated[
        int, at_least(1), at_most(64), "worker processes; each loads all functions"
    ] = 1
    on_error: Annotated[
        Literal["stop", "skip"],
        "what to do when a reward function fails, when no completion of a step could be scored, "
        "and when the environment of the first row cannot begin. skip: what fails is unscored",
    ] = "stop"
    environment: Annotated[
        tuple[str, ...], "environment variables passed on, besides PATH and the like"
    ] = ()


@dataclass(frozen=True)
class SamplingConfig(Sampling):
    """The settings of sampling: those of the engine, and the size of a group."""

    group_size: Annotated[int, at_least(1), "completions per prompt"] = 8
    temperature: Annotated[
        float,
        at_least(LOWEST_TEMPERATURE),
        "how varied completions are; never 0, or all would be equal",
    ] = 1.0


@dataclass(frozen=True)
class EngineConfig(EngineSize):
    """The rollout engine's memory and batch."""

    sleep: Annotated[
        Literal["auto", "always", "never"],
        "whether the KV cache gives its memory back while the learner works. auto: on a GPU, "
        "unless cuda_graphs is on, since the graphs would have to be captured again",
    ] = "auto"


@dataclass(frozen=True)
class ServeConfig:
    """The policy over OpenAI's routes while it trains, on 127.0.0.1 (`pip install
    starlette uvicorn prometheus-client`). No bit of the run depends on it."""

    port: Annotated[
        int | None, at_least(0), at_most(65535), "where it listens; 0: any that is free"
    ] = None
    token: Annotated[
        str | None,
        FileName(),
        "a file with a token in each line, as of `isobit serve`; default: its file",
    ] = None
    share: Annotated[
        float,
        above(0),
        below(1),
        "the share of the run's time that requests may take, besides the time in which it "
        "waits for rewards; what their texts take in other threads is charged to it",
    ] = 0.2
    max_sequences: Annotated[
        int, at_least(1), "answers that are sampled at the same time, beside the rollout's"
    ] = 16


@dataclass(frozen=True)
class ReferenceSync:
    """Whether the reference follows the policy. It may move towards the policy every few steps
    (TR-DPO: Gorbatovski et al. 2024, arXiv 2404.09656), or a little in every step, as an EMA
    teacher does."""

    sync_every: Annotated[
        int, at_least(0), "steps after which the reference moves to the policy; 0: never"
    ] = 0
    sync_alpha: Annotated[
        float,
        above(0),
        at_most(1),
        "the share of the policy's weights that it then takes; the rest stays its own. 1: it "
        "becomes the policy",
    ] = 1.0

    @property
    def follows(self) -> bool:
        """Whether the reference moves at all."""
        return self.sync_every > 0

    def __post_init__(self) -> None:
        if self.sync_alpha != 1 and not self.follows:
            raise IsobitError("sync_alpha needs sync_every: the steps after which it counts")


@dataclass(frozen=True)
class ReferenceConfig(ReferenceSync):
    """The frozen model of the KL penalty, or the teacher of a distillation: another model, or the
    initial weights, with their own precision; with an adapter the model without it."""

    path: Annotated[
        str | None,
        FileName(),
        "a Hugging Face directory with the policy's tokenizer; default: the initial weights",
    ] = None
    precision: Annotated[
        PrecisionValue | None, "precision of the reference; default: the policy's"
    ] = None
    weights: Annotated[
        Literal["initial", "policy"],
        "where there is no path. initial: the weights that the run began with. policy: those "
        "of the policy as it is now, which take no more memory",
    ] = "initial"
    shown: Annotated[
        Shown | None,
        "what the teacher of a distillation reads beside the prompt: with it a model teaches itself",
    ] = None

    def check(self, objective: Objective, *, adapted: bool) -> None:
        """Raise IsobitError for a text to show to a teacher without a distillation, a policy that
        would be compared with itself, or a reference that cannot follow a policy, of which an
        adapter is all that is trained where it is `adapted`."""
        if self.shown is not None and not objective.distills:
            raise IsobitError(
                "reference.shown is for a teacher: set algorithm.advantage: distillation, or leave it out"
            )
        if self.weights == "policy" and self.shown is None:
            raise IsobitError(
                "reference.weights: policy has no distance to itself: say what it is shown as a teacher "
                "(reference.shown), or take the initial weights"
            )
        if self.weights == "policy" and (self.path or self.precision):
            raise IsobitError(
                "reference.weights: policy is the policy itself: leave reference.path and precision out"
            )
        if not self.follows:
            return
        if self.weights == "policy" or self.path is not None:
            key = "path: a model of its own" if self.path else "weights: policy"
            raise IsobitError(
                f"reference.{key} does not follow the policy: leave it or reference.sync_every out"
            )
        if not objective.kl_coefficient:
            raise IsobitError(
                "reference.sync_every: nothing is compared with a reference: set "
                "algorithm.kl_coefficient, or leave it out"
            )
        if adapted and self.precision is not None:
            raise IsobitError(
                "reference.precision: a reference that follows an adapter has the policy's own: leave "
                "it or reference.sync_every out"
            )


@dataclass(frozen=True)
class MismatchConfig:
    """Samples that the learner compares with the rollout, besides those that it learns from."""

    samples_of_zero_advantage: Annotated[
        int,
        Formerly("samples_of_idle_groups"),
        at_least(0),
        "the learner skips samples whose advantage is 0, for they teach nothing. In each step "
        "it still compares this many of them with the rollout",
    ] = 4
    share_ahead: Annotated[
        float,
        at_least(0),
        at_most(1),
        "with `rollouts_ahead` or `partial`, completions are learned from after the weights "
        "have changed. This share of them, rounded up, the learner compares before, while it "
        "still has the weights that sampled them; 0: none",
    ] = 1 / 16


@dataclass(frozen=True)
class SftEvaluationConfig(StopConfig):
    """Held-out evaluation after supervised training, and during it: the loss of the held-out
    answers, and where the task has a reward, greedy accuracy."""

    samples: Annotated[int, at_least(1), "held-out prompts"] = 256
    every: Annotated[
        int,
        at_least(0),
        "steps between evaluations, of which the first is before the first step; 0: only after the "
        "last step",
    ] = 0

    def __post_init__(self) -> None:
        self.check_stop(self.every)


@dataclass(frozen=True)
class EvaluationConfig(StopConfig):
    """Held-out evaluation during training: greedy accuracy, pass@k and majority@k of samples, the
    best model kept."""

    every: Annotated[
        int,
        at_least(0),
        "steps between evaluations; there is also one before the first step and one after the "
        "last; 0: none",
    ] = 0
    samples: Annotated[int, at_least(1), "held-out prompts"] = 256
    num_samples: Annotated[
        int, at_least(0), at_most(1000), "samples per prompt, for pass_at; 0: greedy only"
    ] = 0
    pass_at: Annotated[
        tuple[int, ...], "values of k for pass@k and majority@k; default: 1 and num_samples"
    ] = ()
    temperature: Annotated[
        float | None, at_least(LOWEST_TEMPERATURE), "for the samples; default: sampling.temperature"
    ] = None
    top_p: Annotated[
        float | None, above(0), at_most(1), "for the samples; default: sampling.top_p"
    ] = None
    top_k: Annotated[
        int | None, at_least(0), below(2**31), "for the samples; default: sampling.top_k"
    ] = None
    tag: Annotated[
        str | None, "a column of the data; accuracy is also reported for each of its values"
    ] = None
    answer_pattern: Annotated[
        str | None, "regular expression that finds the answer, for majority@k; default: the task's"
    ] = None
    keep_best: Annotated[
        bool, "keep the best model in best/ in the run directory; weights only"
    ] = True
    best_by: Annotated[
        str,
        "metric that chooses the best model; larger is better. auto: accuracy/held_out, and "
        "reward/held_out where two models have the same accuracy",
    ] = "auto"

    def check_metrics(self, known: Sequence[str]) -> None:
        """Raise IsobitError unless `known` has the metric that ends the run and the metric that
        chooses the best model; `auto` chooses by two metrics."""
        check_metric("best_by", self.best_by, [*known, "auto"])
        super().check_metrics(known)

    def __post_init__(self) -> None:
        self.check_stop(self.every)
        for key in ("top_p", "top_k"):
            if getattr(self, key) is not None and not self.num_samples:
                raise IsobitError(f"{key} is for samples: set num_samples, such as 8")
        if self.pass_at and not self.num_samples:
            raise IsobitError("pass_at needs samples: set num_samples, such as 8")
        for k in self.pass_at:
            if not 1 <= k <= self.num_samples:
                raise IsobitError(
                    f"pass_at: {k} is not from 1 to num_samples, which is {self.num_samples}"
                )


@dataclass(frozen=True)
class RunFiles:
    """The directory of a run, and the files that it leaves there."""

    dir: Annotated[str, "directory of the run; must not exist yet, or be empty"] = "runs/train"
    checkpoint_every: Annotated[
        int,
        at_least(0),
        "steps between checkpoints; the last step is always saved; 0: only the last",
    ] = 20
    keep_last: Annotated[int, at_least(1), "checkpoints kept; older ones are removed"] = 2
    quantization_every: Annotated[
        int,
        at_least(0),
        "steps between records of how weights, activations and output gradients of each layer are "
        "quantized; the first is of step 1; 0: none",
    ] = 10
    check_memory: Annotated[
        bool,
        "checksums of the masters, the optimizer's moments and the working weights. If a bit "
        "changes in memory, the run ends before anything is learned with it or saved",
    ] = True
    check_gradients_every: Annotated[
        int,
        at_least(0),
        "steps between checks of the backward: the first micro-batch is differentiated twice, and "
        "the run ends if the bits of a gradient differ; 0: none",
    ] = 0
    rank_timeout_s: Annotated[
        float,
        above(0),
        "seconds that a rank waits for the others; give more than the longest rollout takes",
    ] = 1800.0
    on_change: Annotated[
        Literal["stop", "warn"],
        "what a resume does if the data, rewards, templates or models have changed since the "
        "run began",
    ] = "stop"
    report: Annotated[bool, "write report.html at the end of the run"] = True
    callbacks: Annotated[
        tuple[Function, ...],
        "each called as on_step(step, metrics) after every step, with its row of metrics.jsonl",
    ] = ()

    def __post_init__(self) -> None:
        if not self.dir or printable(self.dir) != self.dir or set("\n\t") & set(self.dir):
            raise OptionError(
                ("dir",), f"expected a path without control characters, got {self.dir!r:.80}"
            )
        if self.dir.startswith("~"):
            raise OptionError(
                ("dir",),
                f"{self.dir!r:.80}: ~ is not read as the home directory here: write the whole path",
            )


@dataclass(frozen=True)
class RunConfig(RunFiles):
    """The directory of a training run, and the files that it leaves there."""

    completions: Annotated[
        Literal["all", "sample", "none"],
        "what completions.jsonl.gz keeps of a step. all: every completion, so that the learning "
        "can be repeated (--from-rollouts). sample: eight of them, and the prompts and rewards of "
        "the others",
    ] = "all"


@dataclass(frozen=True)
class SftRunConfig(RunFiles):
    """The directory of a supervised run, and the files that it leaves there. `out: DIR` is
    `run.dir`."""

    dir: Annotated[str, "directory of the run; must not exist yet, or be empty"] = "runs/sft"
