"""Columns of attention's projection in the order in which attention takes them.

Where attention has gates, each head's follows its query (Qwen3.5's q_proj). Where a part of each
head is rotated, the operators that rotate whole halves serve it too: they turn dimension i with i +
D / 2, and a model that rotates R of D turns i with i + R / 2, so queries and keys have their
dimensions in another order, in which the rotated ones are first in both halves; the others meet
angles of 0 (`Rope.tables`). A model that turns neighbours, i with i + 1, has the even ones first in
the same way. Scores are sums over the same products, and values keep their order.
"""

from dataclasses import replace

import torch
from torch import Tensor

from isobit.model.hub.config import ModelConfig
from isobit.model.hub.layer_heads import LayerHeads
from isobit.model.weights.stored import Vector


def arranged(
    qkv: Tensor, config: ModelConfig, heads_of_layer: LayerHeads, rotated: int
) -> tuple[Tensor, Tensor | None]:
    """Return (queries, keys and values [T, (H + 2 KV) · D], gates [T, H · D] or None) of the
    projection of a layer with these heads; `rotated`: the dimensions of a head that are rotated."""
    if rotated == heads_of_layer.dim and not config.gated_attention and not config.interleaved:
        return qkv, None
    heads, gate = qkv.unflatten(1, (-1, heads_of_layer.dim)), None
    if config.gated_attention:
        pairs, unrotated = heads.tensor_split((2 * config.num_heads,), dim=1)
        query, gate = pairs.unflatten(1, (-1, 2)).unbind(2)
        heads = torch.cat((query, unrotated), dim=1)
    turned, values = heads.tensor_split((config.num_heads + heads_of_layer.kv_heads,), dim=1)
    heads = torch.cat((in_halves(turned, rotated, config.interleaved), values), dim=1)
    return heads.flatten(1), None if gate is None else gate.flatten(1)


def arranged_norm(norm: Vector, config: ModelConfig, rotated: int) -> Vector:
    """Return a norm of queries or keys in the order of dimensions of `arranged`."""
    master, working = (
        in_halves(x, rotated, config.interleaved) for x in (norm.master, norm.working)
    )
    return norm if working is norm.working else replace(norm, master=master, working=working)


def in_halves(x: Tensor, rotated: int, interleaved: bool) -> Tensor:
    """Return x [..., D] whose first `rotated` dimensions are at the beginnings of the two halves,
    those that are turned with each other at the same place of both."""
    if rotated == (dim := x.shape[-1]) and not interleaved:
        return x
    first, middle = rotated // 2, rotated + (dim - rotated) // 2
    left, right = slice(0, first), slice(first, rotated)
    if interleaved:
        left, right = slice(0, rotated, 2), slice(1, rotated, 2)
    slices = (left, slice(rotated, middle), right, slice(middle, dim))
    return torch.cat([x[..., piece] for piece in slices], dim=-1)
