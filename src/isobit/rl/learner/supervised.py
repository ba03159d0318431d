"""One optimizer step of supervised training: cross-entropy on the trained tokens of completions."""

import math
from collections.abc import Sequence

from isobit.errors import NonFiniteError
from isobit.model import Model
from isobit.model.forward.recompute import Recompute
from isobit.rl.learner.forward import forward
from isobit.rl.learner.packing import Trainable, micro_batches, pack
from isobit.rl.optim.sharded import ShardedOptimizer


def supervised_update(
    model: Model,
    optimizer: ShardedOptimizer,
    samples: Sequence[Trainable],
    rate: float,
    micro_batch_tokens: int,
    recompute: Recompute = False,
) -> dict[str, float]:
    """One optimizer step of cross-entropy on trained tokens, averaged over all of them. Returns metrics.

    As in RL, a non-finite loss or gradient skips the step (`steps/skipped`).
    """
    optimizer.zero_grad()
    parts = [pack([samples[i] for i in span]) for span in micro_batches(samples, micro_batch_tokens)]
    count = max(sum(packed.num_targets for packed in parts), 1)
    loss = 0.0
    try:
        for packed in parts:
            if not packed.num_targets:
                continue
            logprobs, _ = forward(model, packed, 1.0, recompute=recompute)
            part = -logprobs.sum() / count
            part.backward()
            loss += float(part.detach())
        norm = optimizer.gradient_norm()
        model.ops.raise_faults()  # of the backwards
    except NonFiniteError:
        norm = float("inf")
    finite = math.isfinite(loss) and math.isfinite(norm)
    if finite:
        optimizer.step(rate, norm)
    optimizer.zero_grad()
    return {"loss/cross_entropy": loss, "grad_norm": norm, "learning_rate": rate, "steps/skipped": float(not finite)}
