"""Whole configurations: a training run, a comparison, supervised training.

What contradicts between sections is refused here, what does in one of them by its `check` or
`__post_init__`. Left out: where the values come from
(`load.py`), and whether files exist and models fit, which is checked where they are opened.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from isobit.config.architecture import ArchitectureConfig
from isobit.config.sections import (
    EPOCHS,
    ON_MISMATCH,
    AdapterConfig,
    BackendOption,
    ChatTemplate,
    ConsistencyOption,
    DividedOption,
    EngineConfig,
    EvaluationConfig,
    MismatchConfig,
    ModelSource,
    PrecisionOption,
    ReferenceConfig,
    ReferenceSync,
    RewardsConfig,
    RunConfig,
    SamplingConfig,
    ServeConfig,
    SftEvaluationConfig,
    SftRunConfig,
    TemplateVariables,
)
from isobit.data.curriculum import CurriculumConfig
from isobit.data.dataset import check_variables
from isobit.engine.fleet.settings import FleetSettings
from isobit.errors import IsobitError
from isobit.monitor.trackers.settings import TrackingConfig, without_credentials
from isobit.options.consistency import level
from isobit.options.declare import (
    FileName,
    OneOf,
    Preprocess,
    above,
    at_least,
    at_most,
    below,
    text_as,
)
from isobit.options.reading import OptionError
from isobit.rl.algorithm.objective import Objective, with_preset
from isobit.rl.algorithm.partial import PartialSettings
from isobit.rl.algorithm.replay import ReplaySettings
from isobit.rl.optim.schedule import OptimizerSettings
from isobit.run.rows import MOST_STEPS
from isobit.tasks.builtin import TASKS, TaskSettings
from isobit.tasks.environments.settings import EnvironmentConfig

MOST_OF_A_STEP = 1 << 22
"""Completions or examples of a step: more are a slip of the pen, which no machine would end."""
_OF_COMPARISONS = {"precision": "presets", "seed": "first_seed and seeds", "run.dir": "out"}


def _name_or_path(text: str) -> str:
    return "name" if text in TASKS else "path"


@dataclass(frozen=True)
class Config:
    """The config of a training run."""

    model: Annotated[ModelSource, text_as("path")]
    task: Annotated[TaskSettings, text_as(_name_or_path)] = TaskSettings()
    rewards: Annotated[RewardsConfig, text_as("functions")] = RewardsConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    precision: PrecisionOption = "fp8"
    consistency: ConsistencyOption = "bitwise"
    backend: BackendOption = "auto"
    on_mismatch: Annotated[Literal["stop", "warn", "correct"], ON_MISMATCH] = "stop"
    mismatch: MismatchConfig = MismatchConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    fleet: FleetSettings = FleetSettings()
    serve: ServeConfig = ServeConfig()
    algorithm: Annotated[Objective, Preprocess(with_preset)] = Objective()
    adapter: AdapterConfig | None = None
    optimizer: OptimizerSettings = OptimizerSettings()
    reference: ReferenceConfig = ReferenceConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    replay: ReplaySettings = ReplaySettings()
    partial: PartialSettings = PartialSettings()
    evaluation: EvaluationConfig = EvaluationConfig()
    run: RunConfig = RunConfig()
    tracking: Annotated[TrackingConfig, Preprocess(without_credentials)] = TrackingConfig()
    steps: Annotated[
        int, at_least(1), below(MOST_STEPS), "batches of rollouts; the run ends after the last"
    ] = 100
    epochs: Annotated[float | None, above(0), EPOCHS] = None
    rollouts_ahead: Annotated[
        int,
        at_least(0),
        at_most(64),
        "batches that are sampled before the learner needs them; 0: sample, then learn",
    ] = 0
    prompts_per_step: Annotated[
        int, at_least(1), "prompts of one step; each gets `sampling.group_size` completions"
    ] = 8
    ranks: Annotated[
        int,
        at_least(1),
        "processes that train together on this machine, each with a GPU or some of the CPU's "
        "cores. "
        "The bits do not depend on it. A launcher's number, such as torchrun's, takes precedence",
    ] = 1
    divided: DividedOption = "auto"
    seed: Annotated[
        int, at_least(0), below(2**63), "decides the order of the data, sampling and shuffling"
    ] = 0

    @property
    def shares_reference(self) -> bool:
        """Whether the frozen model of a KL penalty is the policy's own storage, with its adapter
        switched off; or the policy is its own teacher."""
        fixed = self.reference.path is None and not self.reference.follows
        return self.reference.weights == "policy" or (
            fixed
            and self.adapter is not None
            and self.reference.precision in (None, self.precision)
        )

    @property
    def needs_rewards(self) -> bool:
        """Whether learning depends on rewards: it does not where a teacher is learned from, unless
        the teacher is shown completions that have a reward."""
        shown = self.reference.shown
        return not self.algorithm.distills or (shown is not None and shown.success is not None)

    @property
    def keeps_weights(self) -> bool:
        """Whether the working weights that sample while the learner works are kept on the CPU while
        it learns, since the learner changes its own."""
        several = self.algorithm.updates_per_batch * self.algorithm.epochs > 1
        return (
            bool(self.fleet.engines and self.rollouts_ahead and self.mismatch.share_ahead)
            and several
        )

    @property
    def prompts_under_way(self) -> int:
        """The number of prompts that are answered at the same time."""
        return self.prompts_per_step + self.partial.extra(self.prompts_per_step)

    @property
    def most_sampled(self) -> int:
        """The most tokens of the model in a completion, in all turns."""
        if not self.environment.used:
            return self.sampling.max_new_tokens
        return min(self.sampling.max_new_tokens * self.environment.max_turns, self.most_tokens)

    @property
    def most_tokens(self) -> int:
        """The most tokens of a completion, those of tools included, as far as the model's context
        goes."""
        environment, turn = self.environment, self.sampling.max_new_tokens
        if not environment.used:
            return turn
        return environment.max_tokens or 2 * turn * environment.max_turns

    def __post_init__(self) -> None:
        sampling, algorithm = self.sampling, self.algorithm
        if self.adapter is not None and self.fleet.engines:
            raise IsobitError(
                "adapter: engines of a fleet take no adapters yet; set fleet.engines: 0"
            )
        self.optimizer.check(adapted=self.adapter is not None)
        if self.serve.port is not None:
            self._check_serve()
        if algorithm.distills:
            self._check_distillation()
        elif sampling.group_size < 2:
            raise IsobitError(
                "sampling.group_size must be at least 2: an advantage is relative to the group"
            )
        self.reference.check(algorithm, adapted=self.adapter is not None)
        algorithm.check(filtered=sampling.filtered)
        self._check_observations()
        self.curriculum.check(distills=algorithm.distills, engines=self.fleet.engines)
        if self.epochs is not None and (algorithm.dynamic_sampling or self.curriculum.chooses):
            why = "curriculum" if self.curriculum.chooses else "algorithm.dynamic_sampling"
            raise IsobitError(
                f"epochs: under {why} a step takes as many prompts as it needs, so no number of "
                "steps is an epoch: give steps"
            )
        self._check_step()
        if self.fleet.engines and self.ranks > 1 and algorithm.kl_in_reward:
            raise IsobitError(
                "algorithm.kl_in_reward is computed by all ranks, and with fleet.engines the "
                "first one scores beside "
                "the learner: set fleet.engines: 0, ranks: 1, or kl_in_reward: false"
            )
        if self.run.check_gradients_every and self.consistency == "fast":
            raise IsobitError(
                "run.check_gradients_every needs consistency: bitwise or exact; fast may not repeat"
            )
        self._check_partial()
        if self.rollouts_ahead > self.replay.max_staleness:
            raise IsobitError(
                f"rollouts_ahead {self.rollouts_ahead} exceeds replay.max_staleness "
                f"{self.replay.max_staleness}"
            )

    def _check_observations(self) -> None:
        """Raise IsobitError where what an environment says is to be learned, and none says anything
        between two turns."""
        environment = self.environment
        if self.algorithm.observation_coefficient and not (
            environment.used and environment.max_turns > 1
        ):
            why = (
                "ends with the first answer (max_turns: 1)" if environment.used else "is not there"
            )
            raise IsobitError(
                "algorithm.observation_coefficient learns what an environment says behind an "
                f"answer, and the environment {why}: set environment.tools, factory or mcp and "
                "max_turns, or leave it out"
            )

    def _check_step(self) -> None:
        """Raise IsobitError for more completions of a step than anybody means, fewer than it has
        updates, and for a buffer as long as they are."""
        prompts, group = self.prompts_per_step, self.sampling.group_size
        if prompts * group > MOST_OF_A_STEP:
            raise IsobitError(
                f"prompts_per_step {prompts:,} x sampling.group_size {group:,} are "
                f"{prompts * group:,} completions in a step; give at most {MOST_OF_A_STEP:,}"
            )
        if self.algorithm.overlong_buffer >= self.sampling.max_new_tokens:
            raise IsobitError("algorithm.overlong_buffer must be below sampling.max_new_tokens")
        if self.algorithm.updates_per_batch > prompts * group:
            raise IsobitError("algorithm.updates_per_batch exceeds the completions of a step")

    def _check_partial(self) -> None:
        """Raise IsobitError for options that completions across updates do not allow yet."""
        if self.partial.used and self.rollouts_ahead > self.partial.max_staleness:
            raise IsobitError(
                f"rollouts_ahead {self.rollouts_ahead} exceeds partial.max_staleness "
                f"{self.partial.max_staleness}: no token would be young enough to learn from"
            )
        replayed = self.algorithm.router_replay
        self.partial.check(
            [
                ("fleet.engines", self.fleet.engines > 0, "fleet.engines: 0"),
                ("environment", self.environment.used, "no tools and no environment"),
                ("replay", self.replay.groups_per_step > 0, "replay.groups_per_step: 0"),
                ("algorithm.router_replay", replayed, "algorithm.router_replay: false"),
                ("algorithm.advantage: otb", self.algorithm.weighs_places, "another advantage"),
            ]
        )

    def _check_distillation(self) -> None:
        """Raise IsobitError for options without a meaning where only a teacher is learned from."""
        algorithm, shown = self.algorithm, self.reference.shown
        if self.reference.path is None and shown is None:
            raise IsobitError(
                "algorithm.advantage: distillation learns from a teacher: give its directory as "
                "reference.path, or what the model itself is shown as reference.shown"
            )
        if shown is not None and self.environment.used:
            raise IsobitError(
                "reference.shown: conversations with an environment take none yet: what an "
                "environment says first is not in the data"
            )
        if shown is not None and shown.success is not None and self.sampling.group_size < 2:
            raise IsobitError(
                "reference.shown.success shows another completion of the group: set "
                "sampling.group_size to 2 or more"
            )
        if not algorithm.kl_in_reward or algorithm.estimator != "k1":
            raise IsobitError(
                "algorithm.advantage: distillation takes what the KL to the teacher costs each "
                "token: set algorithm.kl_coefficient: 1, kl_in_reward: true, and leave kl_estimator "
                "out"
            )
        if algorithm.dynamic_sampling or algorithm.decoupled_rewards or algorithm.overlong_buffer:
            raise IsobitError(
                "algorithm.advantage: distillation knows no rewards: leave dynamic_sampling, "
                "decoupled_rewards and overlong_buffer out"
            )

    def _check_serve(self) -> None:
        """Raise IsobitError where the policy of a run cannot be served."""
        if self.ranks > 1 or self.fleet.engines:
            raise IsobitError(
                "serve.port: only a run of one process serves its policy yet; set ranks: 1 and "
                "fleet.engines: 0, or leave serve.port out"
            )
        if level(self.consistency) == "fast":
            raise IsobitError(
                "serve.port needs consistency: bitwise or exact; under fast an answer depends on "
                "what else is sampled"
            )


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """A training config under several precision flows, each with several seeds."""

    train: Annotated[str, FileName(), "the training config that all runs share"]
    changes: Annotated[tuple[str, ...], "key.sub=value, for all runs"] = ()
    presets: Annotated[tuple[str, ...], "precision flows, such as fp8 or fp8[wgrad=bf16]"]
    seeds: Annotated[int, at_least(1), "runs per preset"] = 1
    first_seed: Annotated[int, at_least(0), "seeds are this one and the next"] = 0
    out: Annotated[str, "directory of all runs and comparison.html, .json"] = "runs/compare"

    def __post_init__(self) -> None:
        if not self.presets:
            raise OptionError(("presets",), "expected at least 1 of them")
        if len(set(self.presets)) < len(self.presets):
            raise OptionError(("presets",), "one of them is there twice")
        for change in self.changes:
            if (key := change.partition("=")[0]) in _OF_COMPARISONS:
                raise IsobitError(
                    f"changes: {key}: a comparison sets it for each run, by {_OF_COMPARISONS[key]}"
                )


@dataclass(frozen=True)
class SftModelConfig:
    """The start of supervised training: a checkpoint, or random weights. `model: DIR` is
    `model.path`."""

    path: Annotated[str | None, FileName(), "a Hugging Face directory, or a run"] = None
    init: ArchitectureConfig | None = None
    chat_template: ChatTemplate = None
    chat_template_kwargs: TemplateVariables = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_variables("chat_template_kwargs", self.chat_template_kwargs)
        if (self.path is None) == (self.init is None):
            raise IsobitError(
                "give exactly one of path (a Hugging Face directory) and init (an architecture)"
            )


@dataclass(frozen=True)
class SftConfig:
    """The config of a supervised run: on prompts and completions, conversations, texts, or pairs of
    which one answer is preferred. `out: DIR` is `run.dir`."""

    model: Annotated[SftModelConfig, text_as("path")]
    task: Annotated[TaskSettings, text_as(_name_or_path)] = TaskSettings()
    precision: PrecisionOption = "fp8"
    consistency: ConsistencyOption = "bitwise"
    backend: BackendOption = "auto"
    adapter: AdapterConfig | None = None
    optimizer: Annotated[
        OptimizerSettings, "as of `isobit train`, but for learning_rate, which is 0.001 by default"
    ] = OptimizerSettings(learning_rate=0.001)
    steps: Annotated[int, at_least(1), below(MOST_STEPS), "optimizer steps"] = 100
    epochs: Annotated[float | None, above(0), EPOCHS] = None
    batch_size: Annotated[
        int, at_least(1), at_most(MOST_OF_A_STEP), "examples per optimizer step"
    ] = 64
    loss: Annotated[
        str,
        OneOf(("cross_entropy", "dpo", "ipo", "kto")),
        "cross_entropy: of right answers. The others compare with the model that the run began "
        "with. dpo and ipo: pairs of answers, in the columns prompt, chosen and rejected. kto: "
        "answers that are desirable or not, in the columns prompt, completion and label (true "
        "or false)",
    ] = "cross_entropy"
    beta: Annotated[
        float, above(0), "for dpo, ipo and kto: a larger one keeps the model nearer to the first"
    ] = 0.1
    desirable_weight: Annotated[
        float, at_least(0), "for kto: weight of the loss of desirable answers"
    ] = 1.0
    undesirable_weight: Annotated[
        float, at_least(0), "for kto: weight of the loss of the others"
    ] = 1.0
    reference: ReferenceSync = ReferenceSync()
    turns: Annotated[
        Literal["last", "all"],
        "which of the assistant's turns in a conversation are learned, each up to the end that the "
        "chat template gives it",
    ] = "last"
    evaluation: SftEvaluationConfig = SftEvaluationConfig()
    max_new_tokens: Annotated[int, at_least(1), "length limit of completions in the evaluation"] = (
        64
    )
    run: SftRunConfig = SftRunConfig()
    tracking: Annotated[TrackingConfig, Preprocess(without_credentials)] = TrackingConfig()
    ranks: Annotated[
        int, at_least(1), "processes that train together on this machine, as of `isobit train`"
    ] = 1
    divided: DividedOption = "auto"
    seed: Annotated[
        int, at_least(0), below(2**63), "decides the order of the data, and weights from nothing"
    ] = 0

    @property
    def prompts_per_step(self) -> int:
        """The number of examples of an optimizer step, by the name of a run that samples."""
        return self.batch_size

    @property
    def of_pairs(self) -> bool:
        """Whether the loss is of two answers, of which one is preferred."""
        return self.loss in ("dpo", "ipo")

    @property
    def compares(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.loss != "cross_entropy"

    def __post_init__(self) -> None:
        if self.reference.follows and not self.compares:
            raise IsobitError(
                f"reference.sync_every: loss: {self.loss} is compared with no reference: leave one "
                "of them out"
            )
        if self.compares and self.model.path is None:
            raise IsobitError(
                f"loss: {self.loss} compares with the model that the run began with, and random "
                "weights (model.init) prefer nothing; give model.path"
            )
        if self.compares and self.turns == "all":
            raise IsobitError(f"turns: all has no meaning under loss: {self.loss}, of one answer")
        weights = self.desirable_weight, self.undesirable_weight
        if self.loss != "kto" and weights != (1, 1):
            raise IsobitError(
                "desirable_weight and undesirable_weight are of loss: kto, and loss is "
                f"{self.loss}: leave them out"
            )
        if self.loss == "kto" and (self.batch_size < 2 or not any(weights)):
            need = "batch_size of 2 or more: it estimates a KL from answers to other prompts"
            raise IsobitError(f"loss: kto needs a {need}, and a weight above 0")
        if self.adapter is not None and self.model.path is None:
            raise IsobitError(
                "adapter: random weights (model.init) are no model to adapt; give model.path"
            )
        self.optimizer.check(adapted=self.adapter is not None)
