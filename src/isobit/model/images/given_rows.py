"""Rows of a forward that are given, not computed: put in the place of others, or added to them.

Nothing is learned of what is given. Other rows keep their bits: zeros are not added to them, which
would turn -0 into +0.
"""

from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function


class GivenRows(NamedTuple):
    """The rows `at` [N] of a forward: their `embeddings` [N, H], and what is `added` to them behind
    the first layers, each [N, H]."""

    at: Tensor
    embeddings: Tensor
    added: tuple[Tensor, ...]


def with_embeddings(x: Tensor, given: GivenRows | None) -> Tensor:
    """Return x [T, H] with the given embeddings in their places, which pass no gradient on."""
    if given is None:
        return x
    replaced: Tensor = _Replaced.apply(x, given.at, given.embeddings.to(x.dtype), False)
    return replaced


def with_added(x: Tensor, given: GivenRows | None, layer: int) -> Tensor:
    """Return x [T, H], what a layer adds, with what is given behind that layer."""
    if given is None or layer >= len(given.added):
        return x
    rows = x.detach()[given.at] + given.added[layer].to(x.dtype)
    replaced: Tensor = _Replaced.apply(x, given.at, rows, True)
    return replaced


class _Replaced(Function):
    """x with other rows in some places, whose gradient is that of x where it `passes`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Tensor, rows: Tensor, passes: bool) -> Tensor:
        ctx.at, ctx.passes = at, passes
        return x.index_copy(0, at, rows)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (dy if ctx.passes else dy.index_fill(0, ctx.at, 0.0)), None, None, None
