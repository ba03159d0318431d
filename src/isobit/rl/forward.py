"""The learner's forward over a packed batch: log-probability and entropy of every trained token."""

import torch
from torch import Tensor

from isobit.kernels.truncation import Context, Truncation
from isobit.model import Model
from isobit.model.moe import RouteTape
from isobit.model.recompute import Recompute
from isobit.rl.packing import PackedBatch


def forward(
    model: Model,
    packed: PackedBatch,
    temperature: float,
    truncation: Truncation | None = None,
    tape: RouteTape | None = None,
    recompute: Recompute = False,
) -> tuple[Tensor, Tensor]:
    """(log-probability, entropy) of every trained token of a packed batch, [C] float32, by the learner's flow.

    Both are on the CPU, wherever the model is: what an algorithm does with single tokens happens there. Here a learner
    waits for a GPU, once per micro-batch. `tape` and `recompute` are those of `isobit.model.layers.Pass`. Raises
    NonFiniteError for what an operator met there.
    """
    transformer, device = model.transformer, model.ops.device
    hidden = transformer.hidden(packed.tokens, packed.layout, use="learner", tape=tape, recompute=recompute)
    rows, targets = packed.rows.to(device), packed.targets.to(device)
    starts = packed.layout.row_start
    first = starts[torch.searchsorted(starts, packed.rows, right=True) - 1]
    context = Context(packed.tokens.to(device), first.to(device), rows)
    logprobs, entropy = transformer.head_logprobs(
        hidden[rows], targets, temperature, truncation=truncation, context=context
    )
    found = logprobs.cpu(), entropy.cpu()
    model.ops.raise_faults()
    return found
