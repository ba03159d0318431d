"""Warnings of what a run will do although its config probably does not mean it: one line each, in a
dry run and at the start.

A config that cannot work is refused where it is read; the configs warned of here work, and would
otherwise run without a word.
"""

from collections.abc import Iterator

from isobit.config import Config
from isobit.config.sections import EvaluationConfig
from isobit.data.dataset import same_task
from isobit.engine.speculation import cannot_speculate
from isobit.model import Model
from isobit.model.described import Described
from isobit.model.hub.config import ModelConfig
from isobit.options.consistency import level
from isobit.precision import precision_from
from isobit.tasks.builtin import Task
from isobit.training.running.cautions import of_rate, without_effect
from isobit.training.running.machine import ranks_caution


def cautions(config: Config, task: Task, model: Model | Described) -> list[str]:
    """Return the warnings for a run, one line each."""
    found = [
        *_of_data(config, task),
        *_of_steps(config),
        *_of_precision(config, model.config.num_layers),
        *_of_speculation(config, model),
        *_of_longrope(config, model.config),
        *_of_divergence(config, model.config),
        *without_effect(config, task.train.examples[0]),
    ]
    ranks = ranks_caution(config.ranks)
    return [*(f"warning: {line}" for line in found), *([] if ranks is None else [ranks])]


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
    asked = task.held_out.examples[: config.evaluation.samples] if config.evaluation.every else ()
    if both := [example for example in asked if same_task(example, by_columns) in known]:
        what = "rows" if by_columns else "prompts"
        yield (
            f"{len(both):,} of {len(asked):,} held-out {what} are training {what} too, the first "
            f"{both[0].place}: accuracy on these does not say what the model makes of {what} that "
            "it was not trained on"
        )
    samples = config.evaluation.samples
    if config.evaluation.every and len(asked) < samples != EvaluationConfig.samples:
        yield f"evaluation.samples {samples}: there are {len(asked):,} held-out prompts, and all are asked"


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
    reward_weights = [each.weight for each in config.rewards.functions] + [
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
