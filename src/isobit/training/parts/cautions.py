"""Warnings of what a run will do although its config probably does not mean it: one line each, in a
dry run and at the start. Among them are keys that are set, and that the run does not read.

A config that cannot work is refused where it is read (`config/schema.py`); the configs
warned of here work, and would otherwise run without a word. A key counts as set where its value is
not the default, or that of its preset.
"""

from collections.abc import Iterator
from typing import Any

from isobit.config import Config, SftConfig
from isobit.config.sections import EvaluationConfig
from isobit.data.dataset import Dataset, Example, same_task
from isobit.engine.speculation import cannot_speculate
from isobit.model import Model
from isobit.model.described import Described
from isobit.model.hub.config import ModelConfig
from isobit.options.consistency import level
from isobit.options.declare import options_of
from isobit.precision import precision_from
from isobit.rl.algorithm.objective import OBJECTIVES, Objective
from isobit.rl.optim.schedule import OptimizerSettings
from isobit.tasks.builtin import Task
from isobit.training.running.machine import ranks_caution

_SWITCHED = (
    ("overlong_penalty", "overlong_buffer"),
    ("max_resamples", "dynamic_sampling"),
    ("kl_estimator", "kl_coefficient"),
    ("entropy_coefficient_step", "entropy_target"),
    ("entropy_coefficient_max", "entropy_target"),
)
"""Of `algorithm`: a key, and the one without which nothing reads it."""
_LARGE_RATE = 0.1
_OF_LOSSES = (("sapo_temperatures", "sapo"), ("vespo_k", "vespo"), ("vespo_lambda", "vespo"))


def cautions(config: Config, task: Task, model: Model | Described) -> list[str]:
    """Return the warnings for a run, one line each."""
    lines = [
        *_of_data(config, task),
        *_of_steps(config),
        *_of_precision(config, model.config.num_layers),
        *_of_speculation(config, model),
        *_of_longrope(config, model.config),
        *_of_divergence(config, model.config),
        *without_effect(config, task.train.examples[0]),
    ]
    ranks = ranks_caution(config.ranks)
    return [*(f"warning: {line}" for line in lines), *([] if ranks is None else [ranks])]


def _of_data(config: Config, task: Task) -> Iterator[str]:
    prompts, wanted = len(task.train), config.prompts_per_step
    if prompts == 1:
        yield "there is one training prompt: every group of every step is of it"
    elif prompts < wanted:
        yield (
            f"{prompts} training prompts for prompts_per_step {wanted}: a step asks the same "
            "prompt up to "
            f"{-(-wanted // prompts)} times; with prompts_per_step={prompts} it would ask each once"
        )
    by_columns = config.environment.factory is not None
    known = {same_task(example, by_columns) for example in task.train.examples}
    if len(known) == 1 < prompts:
        yield (
            f"all {prompts:,} training prompts are the same, that of "
            f"{task.train.examples[0].place}: is another column the prompt (task.columns)?"
        )
    tested = task.held_out.examples[: config.evaluation.samples] if config.evaluation.every else ()
    if both := [example for example in tested if same_task(example, by_columns) in known]:
        noun = "rows" if by_columns else "prompts"
        yield (
            f"{len(both):,} of {len(tested):,} held-out {noun} are training {noun} too, the first "
            f"{both[0].place}: accuracy on these does not say what the model makes of {noun} that "
            "it was not trained on"
        )
    samples = config.evaluation.samples
    if config.evaluation.every and len(tested) < samples != EvaluationConfig.samples:
        yield f"evaluation.samples {samples}: there are {len(tested):,} held-out prompts, and all are asked"


def _of_longrope(config: Config, model: ModelConfig) -> Iterator[str]:
    rope, context, longest = model.rope, model.max_positions, config.sampling.max_new_tokens
    original = rope.original_positions
    if rope.is_long(context) and longest <= original:
        yield (
            f"rope scaling longrope: with a context of {context:,} tokens the model takes the long "
            f"factors, also for completions of at most {longest:,}; to take the short ones, give its "
            f"config.json max_position_embeddings {original:,}, and in rope_scaling factor "
            f"{rope.factor(context):g}"
        )


def _of_divergence(config: Config, model: ModelConfig) -> Iterator[str]:
    most, size = config.algorithm.divergence_top_k, model.vocab_size
    if config.algorithm.loss == "divergence" and most >= size:
        yield (
            f"algorithm.divergence_top_k {most:,}: the vocabulary has {size:,} tokens, so all of "
            "them are compared, as with 0"
        )


def _of_steps(config: Config) -> Iterator[str]:
    yield from of_rate(config)
    round_, most = config.partial.tokens_per_round, config.sampling.max_new_tokens
    if round_ >= most:
        yield (
            f"partial.tokens_per_round {round_} is not below sampling.max_new_tokens {most}: every "
            "completion is whole after one round, and none goes on after an update"
        )
    reward_weights = [function.weight for function in config.rewards.functions] + [
        m.weight for m in config.rewards.models
    ]
    if reward_weights and not any(reward_weights):
        yield "the weight of every reward is 0: all rewards are equal, and nothing is learned"


def _of_precision(config: Config, layers: int) -> Iterator[str]:
    precision = precision_from(config.precision)
    ends = [
        (f.bf16_first_layers, f.bf16_last_layers) for f in (precision.rollout, precision.learner)
    ]
    for first, last in dict.fromkeys(ends):
        if (first or last) and first + last >= layers:
            yield (
                f"precision.bf16_first_layers {first} and bf16_last_layers {last} of {layers} "
                "layers: every layer is in BF16, and nothing is quantized"
            )


def _of_speculation(config: Config, model: Model | Described) -> Iterator[str]:
    wanted = config.engine.num_speculative_tokens
    reason = cannot_speculate(
        model.config, precision_from(config.precision), level(config.consistency)
    )
    if wanted and reason is not None:
        yield f"engine.num_speculative_tokens {wanted}: nothing is drafted, since {reason}"


def without_effect(config: Config | SftConfig, example: Example) -> Iterator[str]:
    """Yield a line, which begins with the key, for each option without effect. `example`: one that
    is trained on."""
    optimizer, model = config.optimizer, config.model
    if optimizer.final_fraction and optimizer.schedule == "constant":
        yield "optimizer.final_fraction has no effect under optimizer.schedule: constant"
    turns = isinstance(config, Config) and config.environment.used
    rendered = turns or not isinstance(example.prompt, str)
    for key, value in (
        ("chat_template", model.chat_template),
        ("chat_template_kwargs", model.chat_template_kwargs),
    ):
        if value and not rendered:
            yield (
                f"model.{key} has no effect on prompts that are text, which no template renders; "
                "task.chat: true makes chats of them"
            )
    if isinstance(config, Config):
        yield from _of_sections(config)
        yield from _of_algorithm(config.algorithm)


def of_rate(config: Config | SftConfig) -> Iterator[str]:
    """Yield a line where the learning rate is far from what works, or never reaches its peak."""
    rate = config.optimizer.learning_rate
    if rate >= _LARGE_RATE:
        yield (
            f"optimizer.learning_rate {rate:g} is large: in each step every weight may move by as "
            "much; 1e-6 to 1e-3 are usual"
        )
    if config.adapter is not None and rate <= OptimizerSettings.learning_rate:
        yield (
            f"optimizer.learning_rate {rate:g} is small for an adapter, whose factors begin at 0; "
            "about 1e-4 is usual"
        )
    if config.optimizer.warmup_steps >= config.steps:
        yield (
            f"optimizer.warmup_steps {config.optimizer.warmup_steps} of {config.steps} steps: the "
            "learning rate is below its peak until the last step"
        )


def supervised_cautions(config: SftConfig, train: Dataset) -> list[str]:
    """Return the warnings for a supervised run."""
    lines = [*of_rate(config), *without_effect(config, train.examples[0])]
    lines += _of_answers(config, train)
    if len(train) < config.batch_size:
        lines.append(
            f"{len(train)} training examples for batch_size {config.batch_size}: a step learns from "
            f"the same example up to {-(-config.batch_size // len(train))} times"
        )
    return [f"warning: {line}" for line in lines]


def _of_answers(config: SftConfig, train: Dataset) -> Iterator[str]:
    if not config.compares and config.beta != SftConfig.beta:
        yield f"beta has no effect under loss: {config.loss}"
    rows = [example.columns for example in train.examples]
    alike = [row.get("chosen") == row.get("rejected") for row in rows]
    if config.of_pairs and any(alike):
        yield (
            f"{sum(alike):,} of {len(rows):,} pairs have the same answer twice, the first "
            f"{train.examples[alike.index(True)].place}: nothing is learned from these"
        )
    labels = {row.get("label") for row in rows}
    if config.loss == "kto" and len(labels) == 1:
        yield f"the label of all {len(rows):,} training answers is {str(labels.pop()).lower()}"


def _of_sections(config: Config) -> Iterator[str]:
    """Yield a line for each section that is switched off and has settings."""
    compared = config.algorithm.kl_coefficient > 0 or config.algorithm.distills
    sections = (
        ("replay", config.replay.groups_per_step, "replay.groups_per_step", {"max_staleness"}),
        ("fleet", config.fleet.engines, "fleet.engines", ()),
        ("serve", config.serve.port is not None, "serve.port", ()),
        ("curriculum", config.curriculum.chooses, "curriculum.mode", ()),
        ("partial", config.partial.used, "partial.tokens_per_round", ()),
        ("environment", config.environment.used, "environment.tools, factory or mcp", ()),
        ("evaluation", config.evaluation.every, "evaluation.every in the run", {"keep_best"}),
        ("reference", compared, "algorithm.kl_coefficient", ()),
    )
    for name, used, switch, counted in sections:
        keys = [key for key in _changed(getattr(config, name)) if key not in counted]
        if keys and not used:
            have = "has" if len(keys) == 1 else "have"
            named = " and ".join(f"{name}.{key}" for key in keys)
            yield f"{named} {have} no effect without {switch}"


def _of_algorithm(algorithm: Objective) -> Iterator[str]:
    values = vars(algorithm)  # not by their names: what is only compared here has no effect
    preset = vars(OBJECTIVES[values["preset"]])
    changed = {key for key in preset if values[key] != preset[key]}
    for key, switch in _SWITCHED:
        if key in changed and not values[switch]:
            yield f"algorithm.{key} has no effect without algorithm.{switch}"
    for key, loss in _OF_LOSSES:
        if key in changed and algorithm.loss != loss and ":" not in algorithm.loss:
            yield f"algorithm.{key} has no effect under loss: {algorithm.loss}; it is of {loss}"


def _changed(section: Any) -> list[str]:
    """Return the keys of a section that have another value than the default."""
    kind: type = type(section)
    options = options_of(kind)
    values = vars(section)
    return [key for key, option in options.items() if values[key] != option.default]
