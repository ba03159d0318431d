"""Mixture of experts: the router in FP32, top-k with a defined order on ties, experts summed in
slot order.

For a token: p = softmax(router logits) over all experts, rounded to float32; the k largest, ties to
the lower index; their gates are p, divided by their sum where the architecture says so
(`Ops.route`: no sum depends on the number of rows); or experts have their own scores
(`kernels/experts/scoring.py`). The token's rows go through the experts as through any MLP, and gate
times result is added in float32 in the order of the slots, the largest gate first, and rounded
once; what an MLP for every token gives is added to that. So a token's bits depend on the token and
the weights, whoever else an expert serves (`tests/model/test_moe.py`). How rows get to their
experts is in `experts.py`.

Where experts stand next to the MLP of a layer (Gemma 4), both sides have their own norms, and so
has the router's input; its logits are divided by the root of the width, and gates are multiplied by
a number of the expert.

Where experts work in a latent (Nemotron 3 Super), rows are projected into it and the experts' sum
out of it; the router and the MLP for every token have the rows as they are.

`RouteTape` records which experts a forward chose, or prescribes them (router replay, R3: Ma et al.
2025, arXiv 2510.11370), and collects the probabilities for the load-balancing loss. Left out:
experts over several processes, and capacity limits.
"""

import base64
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from isobit.kernels import Ops, by_score, by_score_backward, unwatched
from isobit.model.forward import autograd
from isobit.model.forward.experts import through_experts
from isobit.model.forward.gate import gated
from isobit.model.weights.layout import Beside, Mixture, Mlp
from isobit.model.weights.stored import Vector


class RouteTape:
    """A record of the routers in one forward over T rows, one entry per MoE layer.

    `chosen` holds [T, k] int64 per layer. With `given` [T, layers, k] the routers must use those
    experts, with gates from their own probabilities, and `chosen` holds the experts that they would
    have used. `probabilities` holds, per layer, each expert's probability summed over the rows, [E]
    float32, with gradient, for a load-balancing loss.
    """

    def __init__(self, given: Tensor | None = None) -> None:
        self.given = given
        self.chosen: list[Tensor] = []
        self.probabilities: list[Tensor] = []

    def next_given(self, device: torch.device) -> Tensor | None:
        """Return the experts [T, k] that the next layer must take, if any."""
        if self.given is None:
            return None
        self.given = self.given.to(device)
        return self.given[:, len(self.chosen)]

    def follow(self, probabilities: Tensor, chosen: Tensor) -> None:
        """Record a layer's choice."""
        self.chosen.append(chosen.detach())
        self.probabilities.append(probabilities.sum(0))

    def routes(self) -> Tensor:
        """Return all choices: [T, layers, k] int64."""
        return torch.stack(self.chosen, 1)


def encode_routes(routes: NDArray[np.int32]) -> str:
    """Choices [tokens, layers, k] as text: base64 of 16-bit numbers."""
    return base64.b64encode(routes.astype("<u2").tobytes()).decode("ascii")


def decode_routes(text: str, layers: int, per_token: int) -> Tensor:
    """Return the inverse of `encode_routes`: [tokens, layers, k] int64."""
    values = np.frombuffer(base64.b64decode(text), "<u2").astype(np.int64)
    return torch.from_numpy(values.reshape(-1, layers, per_token))


def mixture(
    x: Tensor,
    summed: Tensor,
    layer: Mixture,
    eps: float,
    ops: Ops,
    tape: RouteTape | None = None,
    again: bool = False,
) -> Tensor:
    """Return x [T, H], which is `summed` normed, through the experts that the router chooses: [T,
    H] in x's dtype. `again`: the backward computes the experts' forward again."""
    if layer.beside is not None:
        return _beside_mlp(x, summed, layer, layer.beside, eps, ops, tape, again)
    logits = autograd.linear(x, layer.router, ops, kept=True, dtype=torch.float32)
    if layer.latent is None:
        routed = _routed(x, logits, layer, ops, tape, again)
    else:
        into, out = layer.latent
        rows = autograd.linear(x, into, ops, kept=True)
        routed = autograd.linear(_routed(rows, logits, layer, ops, tape, again), out, ops)
    return routed if layer.shared is None else routed + _shared(x, layer.shared, layer, ops, again)


def _beside_mlp(
    x: Tensor,
    summed: Tensor,
    layer: Mixture,
    own: Beside,
    eps: float,
    ops: Ops,
    tape: RouteTape | None,
    again: bool,
) -> Tensor:
    """Return the MLP of x and the experts of `summed`, each with its own norms, and their sum."""

    def normed(rows: Tensor, norm: Vector) -> Tensor:
        return autograd.rms_norm(rows, None, norm, eps, ops)[0]

    assert layer.shared is not None
    dense = normed(_shared(x, layer.shared, layer, ops, again), own.shared_out_norm)
    rows = normed(summed, own.router_norm)
    logits = autograd.linear(rows, layer.router, ops, kept=True, dtype=torch.float32)
    logits = logits * x.shape[1] ** -0.5
    routed = _routed(normed(summed, own.experts_norm), logits, layer, ops, tape, again)
    return dense + normed(routed, own.experts_out_norm)


def _routed(
    x: Tensor, logits: Tensor, layer: Mixture, ops: Ops, tape: RouteTape | None, again: bool
) -> Tensor:
    """Return x [T, H] through the experts that logits [T, E] choose."""
    given = None if tape is None else tape.next_given(x.device)
    if layer.scoring is None or layer.balance is None:
        probabilities, chosen, gates = route(logits, layer.per_token, layer.normalize, given, ops)
    else:
        scores, chosen, gates = _by_score(logits, layer.balance.working, given, layer)
        probabilities = scores / scores.sum(1, keepdim=True)
    if tape is not None:
        tape.follow(probabilities, chosen)
    experts = chosen if given is None else given
    if layer.beside is not None:
        gates = _scaled(gates, experts, layer.beside.expert_scale)
    return through_experts(x, gates, experts, layer, ops, again)


def _shared(x: Tensor, own: Mlp, layer: Mixture, ops: Ops, again: bool) -> Tensor:
    """Return the MLP that serves every token, times its gate if it has one: [T, H] in x's dtype."""

    def gate_up() -> tuple[Tensor, Tensor]:
        return autograd.linear(x.detach(), own.gate_up, unwatched(ops)), x

    first = autograd.linear(x, own.gate_up, ops, kept=True)
    out = autograd.gated_linear(first, own.activation, own.down, ops, gate_up if again else None)
    if layer.shared_gate is None:
        return out
    gate = autograd.linear(x, layer.shared_gate, ops, kept=True, dtype=torch.float32).to(x.dtype)
    return gated("sigmoid", torch.cat((gate.expand_as(out), out), 1), ops)


def _scaled(gates: Tensor, experts: Tensor, scale: Vector) -> Tensor:
    """Gates [T, k] of these experts [T, k], each times the number of its expert."""
    if torch.is_grad_enabled():
        return _Scaled.apply(gates, scale.master, experts, scale.working)
    return gates * scale.working.take(experts)


class _Scaled(Function):
    @staticmethod
    def forward(ctx: Any, gates: Tensor, master: Tensor, experts: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(gates, experts, scale)
        return gates * scale.take(experts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dscaled: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradient of the scale: summed over tokens in float64, in one order."""
        gates, experts, scale = ctx.saved_tensors
        dscale = None
        if ctx.needs_input_grad[1]:
            each = gates.new_zeros(len(gates), len(scale), dtype=torch.float64)
            each.scatter_add_(1, experts, dscaled.double() * gates)
            dscale = each.sum(0).float()
        return dscaled * scale.take(experts), dscale, None, None


def route(
    logits: Tensor, count: int, normalize: bool, given: Tensor | None, ops: Ops
) -> tuple[Tensor, Tensor, Tensor]:
    """`Ops.route`, with a gradient through probabilities and gates."""
    if torch.is_grad_enabled():
        return _Route.apply(logits, given, count, normalize, ops)
    return ops.route(logits, count, normalize, given)


def _by_score(
    logits: Tensor, balance: Tensor, given: Tensor | None, layer: Mixture
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `kernels.by_score`, with a gradient through scores and gates."""
    if torch.is_grad_enabled():
        return _Scored.apply(logits, balance, given, layer)
    assert layer.scoring is not None
    return by_score(logits, balance, layer.per_token, layer.normalize, layer.scoring, given)


class _Scored(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, balance: Tensor, given: Tensor | None, layer: Mixture
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert layer.scoring is not None
        scores, chosen, gates = by_score(
            logits, balance, layer.per_token, layer.normalize, layer.scoring, given
        )
        ctx.normalize, ctx.scoring = layer.normalize, layer.scoring
        ctx.save_for_backward(scores, chosen if given is None else given)
        ctx.mark_non_differentiable(chosen)
        return scores, chosen, gates

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dscores: Tensor, _: Tensor, dgates: Tensor) -> tuple[Tensor | None, ...]:
        scores, experts = ctx.saved_tensors
        found = by_score_backward(dscores, dgates, scores, experts, ctx.normalize, ctx.scoring)
        return found, None, None, None


class _Route(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, given: Tensor | None, count: int, normalize: bool, ops: Ops
    ) -> tuple[Tensor, Tensor, Tensor]:
        probabilities, chosen, gates = ops.route(logits, count, normalize, given)
        ctx.normalize = normalize
        ctx.save_for_backward(probabilities, chosen if given is None else given)
        ctx.mark_non_differentiable(chosen)
        return probabilities, chosen, gates

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dprobabilities: Tensor, _: Tensor, dgates: Tensor
    ) -> tuple[Tensor | None, ...]:
        """With gates g = p / s, s = Σ p: dp = (dg - Σ dg·g) / s; of the softmax d logits = p·(dp -
        Σ dp·p)."""
        probabilities, experts = ctx.saved_tensors
        p, dpicked = probabilities.double(), dgates.double()
        if ctx.normalize:
            picked = p.gather(1, experts)
            total = picked.sum(1, keepdim=True)
            dpicked = (dpicked - (dpicked * picked / total).sum(1, keepdim=True)) / total
        dp = dprobabilities.double().scatter_add(1, experts, dpicked)
        return (p * (dp - (dp * p).sum(1, keepdim=True))).float(), None, None, None, None
