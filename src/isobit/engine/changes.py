"""The changes that the requests of a step make in the logits of its rows, as tensors."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from isobit.kernels.sampling.filtering import penalize


@dataclass(frozen=True, eq=False)
class Changes:
    """The changes of the logits of R rows before they are filtered and drawn from, None: of no
    row. `rows` [R] bool: those that are changed. `seen` [R, V] bool, the tokens in front of each,
    and `penalty` [R] float32, 1 for rows without one. `tokens` and `amounts` [R, K]: what is added,
    filled up with -0.0, which changes no bit. `bits` [R, B] uint8: the tokens that may come."""

    rows: Tensor
    seen: Tensor | None = None
    penalty: Tensor | None = None
    tokens: Tensor | None = None
    amounts: Tensor | None = None
    bits: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> "Changes":
        """Return the same with each tensor changed."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{n: change(t) for n, t in tensors.items() if t is not None})

    def apply(self, logits: Tensor) -> Tensor:
        """Return the logits [R, V] float32, changed."""
        if self.penalty is not None and self.seen is not None:
            logits = penalize(logits, self.seen, self.penalty.unsqueeze(1))
        if self.tokens is not None and self.amounts is not None:
            logits = logits.scatter_add(1, self.tokens, self.amounts)
        if self.bits is not None:
            eight = torch.arange(8, dtype=torch.uint8, device=logits.device)
            mask = (self.bits.unsqueeze(-1) >> eight & 1).flatten(1)[:, : logits.shape[1]]
            logits = logits.masked_fill(mask == 0, -torch.inf)
        return logits
