"""What the routers of a mixture of experts do in a learner's step: the load-balancing loss of an optimizer batch, their
load, and choices unlike the rollout's.

The loss is E · Σ_e f_e · P_e (Fedus et al. 2022, arXiv 2101.03961, eq. 4, with k choices a token), f_e the choices of
expert e per row and P_e its mean probability, both over all layers and all rows of the batch: transformers'
`load_balancing_loss_func` of the whole batch (tests/rl/test_router_loss.py). f carries no gradient, so that given f of
the whole batch the loss is a sum over micro-batches.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.model.moe import RouteTape


@dataclass(frozen=True, eq=False)
class BatchLoad:
    """Choices of each expert [E] int64 over layers and rows, and how many rows times layers there were."""

    choices: Tensor
    rows: int

    def __add__(self, other: "BatchLoad") -> "BatchLoad":
        return BatchLoad(self.choices + other.choices, self.rows + other.rows)

    def loss(self, probabilities: Tensor) -> Tensor:
        """The part of the load-balancing loss that a forward has whose `probabilities` [E] are sums over its rows and
        layers; on the CPU."""
        fractions = self.choices.float() / max(self.rows, 1)
        return len(fractions) * (fractions * probabilities.cpu()).sum() / max(self.rows, 1)


def load_of(tape: RouteTape, num_experts: int) -> BatchLoad:
    """Of one forward: what its routers would choose themselves."""
    chosen = tape.routes().cpu()
    return BatchLoad(torch.bincount(chosen.flatten(), minlength=num_experts), chosen.shape[0] * chosen.shape[1])


def summed(tape: RouteTape) -> Tensor:
    """Probabilities of each expert [E] over the rows and layers of a forward."""
    return torch.stack(tape.probabilities).sum(0)


class RoutingTotals:
    """Sums over the forwards of one step."""

    def __init__(self) -> None:
        self.load: Tensor | None = None
        self.probabilities = torch.zeros(())
        self.differing = 0
        self.compared = 0

    def see(self, tape: RouteTape, num_experts: int, recorded: Tensor | None = None) -> None:
        """Take a forward into account; `recorded` [T, layers, k] are the rollout's choices for the same weights."""
        chosen = tape.routes().cpu()
        counts = torch.stack([torch.bincount(layer.flatten(), minlength=num_experts) for layer in chosen.unbind(1)])
        self.load = counts if self.load is None else self.load + counts
        self.probabilities = self.probabilities + summed(tape).detach().cpu()
        if recorded is not None:
            same = (chosen.sort(-1).values == recorded.sort(-1).values).all(-1)
            self.differing += int((~same).sum())
            self.compared += same.numel()

    def metrics(self) -> dict[str, float]:
        """Empty for a dense model."""
        if self.load is None:
            return {}
        load = self.load.double()
        rows = round(float(self.probabilities.sum()))  # of all layers: a row's probabilities sum to 1
        found = {
            "router/load_max_over_mean": float((load.amax(1) / load.mean(1)).mean()),
            "router/idle_fraction": float((load == 0).double().mean()),
            "router/auxiliary_loss": float(BatchLoad(self.load.sum(0), rows).loss(self.probabilities)),
        }
        if self.compared:
            found["router/differing_choices"] = self.differing / self.compared
        return found
