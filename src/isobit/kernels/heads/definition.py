"""Queries, keys and values before attention: rotary embedding, and the write into the cache; and
both after the norms, as `attention_inputs` has them. Elementwise, but for the largest magnitude of
a row that is quantized. Left out: the norms themselves (`norms/definition.py`).
"""

import torch
from torch import Tensor

from isobit.errors import NonFiniteError
from isobit.kernels.layout import Layout
from isobit.kernels.ops import Heads, Ops
from isobit.kernels.stores import KVStore
from isobit.precision import QuantSpec, nonfinite_message, quantize
from isobit.precision.quantize import quantize_with_scale


def rotary(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
    """Return (x1·cos - x2·sin, x2·cos + x1·sin) over the halves of the head (Su et al. 2021), in
    float32, rounded once."""
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    first, second = x.float().chunk(2, dim=-1)
    if inverse:
        s = -s
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)


def kv_write(store: KVStore, k: Tensor, v: Tensor, layout: Layout) -> None:
    """Store the rows' keys and values in their slots. Raises NonFiniteError if they are quantized
    and hold NaN or infinity."""
    for data, scale, rows in ((store.k, store.k_scale, k), (store.v, store.v_scale, v)):
        if store.kv is None or scale is None:
            data[layout.slots] = rows.to(data.dtype)
            continue
        if store.counts is not None:
            data[layout.slots] = _write_calibrated(rows, scale[:1, :1], store.kv, store.counts)
            continue
        quantized = quantize(rows.reshape(-1, rows.shape[-1]), store.kv, "keys and values")
        data[layout.slots] = quantized.data.view(data.dtype).view(rows.shape)
        scale[layout.slots] = quantized.scale.view(rows.shape[:2])


def _write_calibrated(rows: Tensor, scale: Tensor, spec: QuantSpec, counts: Tensor) -> Tensor:
    """Store the codes of rows under a calibrated scale, and count the elements that it clamps."""
    flat = rows.reshape(-1, rows.shape[-1])
    if not torch.isfinite(flat).all():
        raise NonFiniteError(nonfinite_message("keys and values", spec))
    # the largest magnitude of the calibration itself may exceed the limit by the rounding of its
    # scale
    counts[0] += (flat.float().abs() > spec.format.max * scale * (1 + 2**-20)).sum()
    counts[1] += flat.numel()
    return quantize_with_scale(flat, scale, spec).data.view(torch.uint8).view(rows.shape)


def attention_inputs(
    ops: Ops, qkv: Tensor, heads: Heads, store: KVStore, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `Ops.attention_inputs`: norms, rotation and the write in turn."""
    kv_heads, dim = store.k.shape[1:]
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if heads.norms is not None:
        pairs = zip((q, k), heads.norms)
        q, k = (ops.rms_norm(x.reshape(-1, dim), w, heads.eps)[0].view(x.shape) for x, w in pairs)
    q, k = (ops.rotary(x, *heads.tables, layout.rotated) for x in (q, k))
    ops.kv_write(store, k, v, layout)
    return q, k, v


def attention_inputs_backward(
    ops: Ops, gradients: tuple[Tensor, Tensor, Tensor], qkv: Tensor, heads: Heads, positions: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dq, dk, dv = gradients
    dq, dk = (
        ops.rotary(dx.contiguous(), *heads.tables, positions, inverse=True) for dx in (dq, dk)
    )
    if heads.norms is None:
        return torch.cat((dq, dk, dv), dim=1), None, None
    weight_gradients = []
    for dx, x, weight in zip(
        (dq, dk), qkv.split((dq.shape[1], dk.shape[1], dv.shape[1]), dim=1), heads.norms
    ):
        rows = x.reshape(-1, x.shape[-1])
        _, summed, rstd = ops.rms_norm(rows, weight, heads.eps)
        dx, dweight = ops.rms_norm_backward(dx.reshape(rows.shape), summed, weight, rstd)
        weight_gradients.append((dx.view(x.shape), dweight))
    (dq, dq_norm), (dk, dk_norm) = weight_gradients
    return torch.cat((dq, dk, dv), dim=1), dq_norm, dk_norm
