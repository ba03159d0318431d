"""Columns of attention's projection in the order in which attention takes them.

Where attention has gates, each head's follows its query (Qwen3.5's q_proj). Where a part of each head is rotated, the
operators that rotate whole halves serve it too: they turn dimension i with i + D / 2, and a model that rotates R of D
turns i with i + R / 2, so queries and keys have their dimensions in another order, in which the rotated ones are first
in both halves; the others meet angles of 0 (`Rope.tables`). Scores are sums over the same products, and values keep
their order.
"""

from dataclasses import replace

import torch
from torch import Tensor

from isobit.model.hub.config import ModelConfig
from isobit.model.weights.stored import Vector


def arranged(qkv: Tensor, config: ModelConfig, rotated: int) -> tuple[Tensor, Tensor | None]:
    """(queries, keys and values [T, (H + 2 KV) · D], gates [T, H · D], if there are any) of the projection."""
    if rotated == config.head_dim and not config.gated_attention:
        return qkv, None
    heads, gate = qkv.unflatten(1, (-1, config.head_dim)), None
    if config.gated_attention:
        pairs, others = heads.tensor_split((2 * config.num_heads,), dim=1)
        query, gate = pairs.unflatten(1, (-1, 2)).unbind(2)
        heads = torch.cat((query, others), dim=1)
    turned, values = heads.tensor_split((config.num_heads + config.num_kv_heads,), dim=1)
    heads = torch.cat((_in_halves(turned, rotated), values), dim=1)
    return heads.flatten(1), None if gate is None else gate.flatten(1)


def arranged_norm(norm: Vector, rotated: int) -> Vector:
    """The norm of such queries or keys."""
    working = _in_halves(norm.working, rotated)
    return norm if working is norm.working else replace(norm, master=_in_halves(norm.master, rotated), working=working)


def _in_halves(x: Tensor, rotated: int) -> Tensor:
    """x [..., D] whose first `rotated` dimensions are at the beginnings of the two halves."""
    if rotated == (dim := x.shape[-1]):
        return x
    first, middle = rotated // 2, rotated + (dim - rotated) // 2
    parts = (slice(0, first), slice(rotated, middle), slice(first, rotated), slice(middle, dim))
    return torch.cat([x[..., part] for part in parts], dim=-1)
