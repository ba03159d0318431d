"""The forward of a micro-batch whose targets are not all learned from: of those that are not,
prompts' say, log-probabilities are computed without what a backward needs, and once where several
data share a row and its target.

A row's bits do not depend on the rows next to it, so they are those of one forward
(tests/rl/test_stepwise.py). Left out: which targets teach (`losses.py`).
"""

import torch
from torch import Tensor

from isobit.kernels import Copies
from isobit.model import Model
from isobit.model.forward.gather_rows import copied
from isobit.model.forward.recompute import Recompute
from isobit.rl.learner.forward import forward
from isobit.rl.learner.packing import PackedBatch


def logprobs(
    model: Model, packed: PackedBatch, taught: Tensor, recompute: Recompute = False
) -> Tensor:
    """Return the log-probability of every target [C] float32, on the CPU, with a gradient of those
    that are `taught` [C] bool; of all where none is. Raises NonFiniteError as
    `isobit.rl.learner.forward`."""
    if not torch.is_grad_enabled():
        taught = torch.zeros_like(taught)
    elif bool(taught.all()) or not bool(taught.any()):
        return forward(model, packed, 1.0, recompute=recompute)[0]
    transformer, ops = model.transformer, model.ops
    hidden = transformer.hidden(packed.tokens, packed.layout, recompute=recompute)

    def of(rows: Tensor, targets: Tensor, hidden: Tensor) -> Tensor:
        copies = Copies.of(rows, len(hidden)).to(ops.device)
        taken = copied(hidden, copies, ops)
        return transformer.head_logprobs(taken, targets.to(ops.device))[0].cpu()

    found, size = torch.empty(len(taught)), model.config.vocab_size
    pairs = packed.rows * size + packed.targets
    distinct, place = torch.unique(pairs[~taught], return_inverse=True)
    with torch.no_grad():
        others = of(distinct // size, distinct % size, hidden.detach())[place]
    found = found.masked_scatter(~taught, others)
    if bool(taught.any()):
        learned = of(packed.rows[taught], packed.targets[taught], hidden)
        found = found.masked_scatter(taught, learned)
    ops.raise_faults()
    return found
