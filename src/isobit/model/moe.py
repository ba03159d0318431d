"""Mixture of experts: the router in FP32, top-k with a defined order on ties, experts summed in slot order.

For a token: p = softmax(router logits) over all experts, float64 inside and rounded to float32; the k largest, ties to
the lower index; their gates are p, divided by their sum where the architecture says so. The token's rows go through
the experts as through any MLP, and gate times result is added in float32 in the order of the slots, the largest gate
first, and rounded once. So a token's bits depend on the token and the weights, whoever else an expert serves
(`tests/model/test_moe.py`). How rows get to their experts is in `experts.py`.

`RouteTape` follows one forward: which experts were chosen, or which must be (router replay, R3: Ma et al. 2025, arXiv
2510.11370), and what the load-balancing loss is made of. Left out: experts over several processes, capacity limits,
shared experts.
"""

import base64

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isobit.kernels import Ops
from isobit.model import autograd
from isobit.model.experts import through_experts
from isobit.model.working import Mixture


class RouteTape:
    """What the routers of one forward over T rows do, MoE layer by MoE layer.

    `chosen` holds [T, k] int64 per layer. With `given` [T, layers, k] the routers take those experts instead, with
    gates from their own probabilities, and `chosen` is what they would have taken. `probabilities` holds, per layer,
    each expert's probability summed over the rows, [E] float32, with gradient: what a load-balancing loss is made of.
    """

    def __init__(self, given: Tensor | None = None) -> None:
        self.given = given
        self.chosen: list[Tensor] = []
        self.probabilities: list[Tensor] = []

    def follow(self, probabilities: Tensor, chosen: Tensor) -> Tensor:
        """Take a layer's choice down; returns the experts to use."""
        layer = len(self.chosen)
        self.chosen.append(chosen.detach())
        self.probabilities.append(probabilities.sum(0))
        if self.given is None:
            return chosen
        self.given = self.given.to(chosen.device)
        return self.given[:, layer]

    def routes(self) -> Tensor:
        """All choices: [T, layers, k] int64."""
        return torch.stack(self.chosen, 1)


def encode_routes(routes: NDArray[np.int32]) -> str:
    """Choices [tokens, layers, k] as text: base64 of 16-bit numbers."""
    return base64.b64encode(routes.astype("<u2").tobytes()).decode("ascii")


def decode_routes(text: str, layers: int, per_token: int) -> Tensor:
    """The inverse of `encode_routes`: [tokens, layers, k] int64."""
    values = np.frombuffer(base64.b64decode(text), "<u2").astype(np.int64)
    return torch.from_numpy(values.reshape(-1, layers, per_token))


def mixture(x: Tensor, layer: Mixture, ops: Ops, tape: RouteTape | None = None) -> Tensor:
    """x [T, H] through the experts that the router chooses: [T, H] in x's dtype."""
    probabilities = router_probabilities(autograd.linear(x.float(), layer.router, ops))
    chosen = top_experts(probabilities, layer.per_token)
    if tape is not None:
        chosen = tape.follow(probabilities, chosen)
    gates = probabilities.gather(1, chosen)
    if layer.normalize:
        gates = gates / gates.sum(1, keepdim=True)
    return through_experts(x, gates, chosen, layer, ops)


def router_probabilities(logits: Tensor) -> Tensor:
    """softmax over the experts [T, E] float32; written out, so that a row's bits do not depend on the number of
    rows."""
    wide = logits.double()
    weights = torch.exp(wide - wide.detach().amax(1, keepdim=True))
    return (weights / weights.sum(1, keepdim=True)).float()


def top_experts(probabilities: Tensor, count: int) -> Tensor:
    """The `count` most probable experts [T, count] int64, in descending order; ties go to the lower index."""
    return probabilities.detach().sort(dim=1, descending=True, stable=True).indices[:, :count]
