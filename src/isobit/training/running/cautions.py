"""What a config asks of a run of either kind and probably does not mean: a line each. Among them are
keys that are set, and that the run does not read.

A key counts as set where its value is not the default, or that of its preset. Left out: what
contradicts (`config/schema.py`), which is refused, and what only a run that samples can
mean (`session/cautions.py`).
"""

from collections.abc import Iterator
from typing import Any

from isobit.config import Config, SftConfig
from isobit.data.dataset import Dataset, Example
from isobit.options.declare import options_of
from isobit.rl.algorithm.objective import OBJECTIVES, Objective
from isobit.rl.optim.schedule import OptimizerSettings

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


def without_effect(config: Config | SftConfig, example: Example) -> Iterator[str]:
    """Lines that begin with the key. `example`: one that is trained on."""
    optimizer, model = config.optimizer, config.model
    if optimizer.final_fraction and optimizer.schedule == "constant":
        yield "optimizer.final_fraction has no effect under optimizer.schedule: constant"
    turns = isinstance(config, Config) and config.environment.used
    rendered = turns or not isinstance(example.prompt, str)
    for key, given in (
        ("chat_template", model.chat_template),
        ("chat_template_kwargs", model.chat_template_kwargs),
    ):
        if given and not rendered:
            yield (
                f"model.{key} has no effect on prompts that are text, which no template renders; "
                "task.chat: true makes chats of them"
            )
    if isinstance(config, Config):
        yield from _of_sections(config)
        yield from _of_algorithm(config.algorithm)


def of_rate(config: Config | SftConfig) -> Iterator[str]:
    """Where the learning rate is far from what works, or never reaches its peak."""
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
    """Warnings of a supervised run."""
    found = [*of_rate(config), *without_effect(config, train.examples[0])]
    found += _of_answers(config, train)
    if len(train) < config.batch_size:
        found.append(
            f"{len(train)} training examples for batch_size {config.batch_size}: a step learns from "
            f"the same example up to {-(-config.batch_size // len(train))} times"
        )
    return [f"warning: {line}" for line in found]


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
    """Of sections that are switched off."""
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
    own = vars(algorithm)  # not by their names: what is only compared here has no effect
    preset = vars(OBJECTIVES[own["preset"]])
    changed = {key for key in preset if own[key] != preset[key]}
    for key, switch in _SWITCHED:
        if key in changed and not own[switch]:
            yield f"algorithm.{key} has no effect without algorithm.{switch}"
    for key, loss in _OF_LOSSES:
        if key in changed and algorithm.loss != loss and ":" not in algorithm.loss:
            yield f"algorithm.{key} has no effect under loss: {algorithm.loss}; it is of {loss}"


def _changed(section: Any) -> list[str]:
    """The keys of a section that have another value than the default."""
    kind: type = type(section)
    options = options_of(kind)
    own = vars(section)
    return [key for key, option in options.items() if own[key] != option.default]
