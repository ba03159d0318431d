"""Experts stored in MXFP4 (OCP Microscaling v1.0), as gpt-oss's checkpoints have them: read, not
written.

`<name>_blocks` [E, N, K / 32, 16] uint8 holds two E2M1 codes a byte, the low half first, and
`<name>_scales` [E, N, K / 32] uint8 the exponent of each block of 32: a value is code · 2^(scale -
127). A code has two significant bits, so a value is exact in BF16 and float32. They stand for
`<name>` [E, K, N], which is what transformers makes of them (tests/model/test_gpt_oss.py).
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from isobit.distributed.files import FileTensor
from isobit.errors import IsobitError, brief

BLOCKS, SCALES = "_blocks", "_scales"
_CODES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
_BIAS, _NAN = 127, 255


def shapes_of(
    tensors: Mapping[str, tuple[Path, FileTensor]], directory: Path
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that are stored in MXFP4, by name. Raises IsobitError for
    blocks without scales, scales without blocks, and either of another type or shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for key, (_, tensor) in tensors.items():
        if key.endswith(SCALES) and tensor.dtype == torch.uint8:
            partner = key.removesuffix(SCALES) + BLOCKS
            if partner not in tensors:
                raise IsobitError(
                    f"{directory}: MXFP4 scales {brief(key)} have no blocks; expected "
                    f"{brief(partner)}"
                )
        if not key.endswith(BLOCKS) or tensor.dtype != torch.uint8:
            continue
        name = key.removesuffix(BLOCKS)
        if len(tensor.shape) != 4 or tensor.shape[3] != 16:
            raise IsobitError(
                f"{directory}: MXFP4 tensor {brief(key)} has shape {tensor.shape}; expected "
                "(experts, rows, blocks, 16)"
            )
        scales = tensors.get(name + SCALES)
        wanted = tensor.shape[:3]
        if scales is None or scales[1].shape != wanted or scales[1].dtype != torch.uint8:
            had = (
                "no scales"
                if scales is None
                else f"scales of shape {scales[1].shape} and dtype {scales[1].dtype}"
            )
            raise IsobitError(
                f"{directory}: MXFP4 tensor {brief(key)} has {had}; expected "
                f"{brief(name + SCALES)} {wanted}, uint8"
            )
        if name in tensors:
            raise IsobitError(
                f"{directory}: tensor {brief(name)} is there twice, in MXFP4 too; keep one of them"
            )
        shapes[name] = (wanted[0], wanted[2] * 32, wanted[1])
    return shapes


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return values [E, K, N] float32 of blocks [E, N, K / 32, 16] and scales [E, N, K / 32]; NaN
    where a scale is."""
    signed = torch.cat((_CODES, -_CODES))
    codes = torch.stack((blocks & 0xF, blocks >> 4), -1).flatten(-2)
    factors = torch.exp2(torch.arange(256, dtype=torch.float64) - _BIAS)
    factors[_NAN] = torch.nan
    values = signed[codes.long()] * factors[scales.long()].unsqueeze(-1)
    return values.float().flatten(-2).transpose(-1, -2)
