"""What the routers of a mixture of experts did in a learner's step: their load, and choices unlike the rollout's."""

import torch
from torch import Tensor

from isobit.model.moe import RouteTape


class RoutingTotals:
    """Sums over the forwards of one step."""

    def __init__(self) -> None:
        self.load: Tensor | None = None
        self.auxiliary: list[float] = []
        self.differing = 0
        self.compared = 0

    def see(self, tape: RouteTape, num_experts: int, recorded: Tensor | None = None) -> None:
        """Take a forward into account; `recorded` [T, layers, k] are the rollout's choices for the same weights."""
        chosen = tape.routes().cpu()
        counts = torch.stack([torch.bincount(layer.flatten(), minlength=num_experts) for layer in chosen.unbind(1)])
        self.load = counts if self.load is None else self.load + counts
        self.auxiliary.append(float(torch.stack(tape.auxiliary).detach().mean()))
        if recorded is not None:
            same = (chosen.sort(-1).values == recorded.sort(-1).values).all(-1)
            self.differing += int((~same).sum())
            self.compared += same.numel()

    def metrics(self) -> dict[str, float]:
        """Empty for a dense model."""
        if self.load is None:
            return {}
        load = self.load.double()
        found = {
            "router/load_max_over_mean": float((load.amax(1) / load.mean(1)).mean()),
            "router/idle_fraction": float((load == 0).double().mean()),
            "router/auxiliary_loss": sum(self.auxiliary) / len(self.auxiliary),
        }
        if self.compared:
            found["router/differing_choices"] = self.differing / self.compared
        return found
