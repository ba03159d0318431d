"""One optimizer step of supervised training: the learner's, on the cross-entropy of completions'
trained tokens."""

from collections.abc import Sequence

from isobit.model import Model
from isobit.model.forward.recompute import Recompute
from isobit.rl.algorithm.loss import cross_entropy
from isobit.rl.algorithm.objective import ResolvedObjective
from isobit.rl.algorithm.samples import Sample
from isobit.rl.learner.batch import training_batch
from isobit.rl.learner.forward import PolicyForward
from isobit.rl.learner.gradient import Differentiation
from isobit.rl.learner.packing import Trainable
from isobit.rl.learner.schedule import Cutting
from isobit.rl.optim.sharded import ShardedOptimizer

_OBJECTIVE = ResolvedObjective(loss_aggregation="token_mean")


def supervised_update(
    model: Model,
    optimizer: ShardedOptimizer,
    samples: Sequence[Trainable],
    rate: float,
    micro_batch_tokens: int,
    recompute: Recompute = False,
) -> dict[str, float]:
    """The cross-entropy is averaged over all trained tokens. Returns metrics.

    As in RL, a loss or gradient that is not finite skips the step (`steps/skipped`).
    """
    given = [_given(sample, index) for index, sample in enumerate(samples)]
    batch = training_batch(_OBJECTIVE, given, [1.0] * len(given), model.weights_version)
    (update,) = Cutting(micro_batch_tokens).schedule(given, batch.zero, 0).updates
    policy = PolicyForward(model, _OBJECTIVE, recompute=recompute, plain=True)
    differentiation = Differentiation(optimizer, model.transformer.masters.leaves, cross_entropy)
    one = batch.optimizer_batch(update)
    assert one is not None, "there is no correction"
    gradient = differentiation.gradient(one, policy)
    if gradient.finite:
        optimizer.step(rate, gradient.norm)
    optimizer.zero_grad()
    return {
        "loss/cross_entropy": gradient.totals.loss,
        "grad_norm": gradient.norm,
        "learning_rate": rate,
        "steps/skipped": float(not gradient.finite),
    }


def _given(sample: Trainable, index: int) -> Sample:
    """Its completion is not the policy's own."""
    return Sample(
        prompt_index=index,
        sample_index=0,
        prompt_ids=sample.prompt_ids,
        completion_ids=sample.completion_ids,
        rollout_logprobs=(0.0,) * len(sample.completion_ids),
        completion="",
        truncated=False,
        weights_version=-1,
        completion_mask=sample.completion_mask,
    )
