"""One step of supervised training, by the learner and the objective of `isobit sft`."""

from collections.abc import Sequence
from dataclasses import replace

from isobit.model import Model
from isobit.model.forward.recompute import Recompute
from isobit.rl.algorithm.given import supervised_objective
from isobit.rl.algorithm.samples import Sample
from isobit.rl.learner.learner import Learner
from isobit.rl.optim.sharded import ShardedOptimizer


def supervised_update(
    model: Model,
    optimizer: ShardedOptimizer,
    samples: Sequence[Sample],
    rate: float,
    micro_batch_tokens: int,
    recompute: Recompute = False,
) -> dict[str, float]:
    """The metrics of a step on the cross-entropy of all trained tokens."""
    optimizer.settings = replace(optimizer.settings, learning_rate=rate, share_prompts=False)
    learner = Learner(
        model,
        optimizer,
        supervised_objective(),
        micro_batch_tokens=micro_batch_tokens,
        recompute=recompute,
        expects_equal_bits=False,
    )
    given = [replace(sample, weights_version=-1) for sample in samples]
    found = learner.learn(given, [1.0] * len(given), 0).metrics
    return {**found, "loss/cross_entropy": found["loss/policy"]}
