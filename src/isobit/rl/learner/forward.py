"""The learner's forward over a packed batch: log-probability and entropy of every trained token."""

from torch import Tensor

from isobit.kernels import Copies
from isobit.kernels.sampling.filtering import Truncation
from isobit.model import Model
from isobit.model.forward.gather_rows import copied
from isobit.model.forward.moe import RouteTape
from isobit.model.forward.recompute import Recompute
from isobit.rl.learner.packing import PackedBatch


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
    waits for a GPU, once per micro-batch. `tape` and `recompute` are those of `isobit.model.forward.layers.Pass`.
    Raises NonFiniteError for what an operator met there.
    """
    transformer, device = model.transformer, model.ops.device
    hidden = transformer.hidden(packed.tokens, packed.layout, use="learner", tape=tape, recompute=recompute)
    rows = copied(hidden, Copies.of(packed.rows, len(hidden)).to(device), model.ops)
    targets, context = packed.targets.to(device), packed.context.to(device)
    logprobs, entropy = transformer.head_logprobs(rows, targets, temperature, truncation=truncation, context=context)
    found = logprobs.cpu(), entropy.cpu()
    model.ops.raise_faults()
    return found
