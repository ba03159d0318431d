"""Decode 8-bit codes through a table of their 256 values: the result of PyTorch's cast, several
times faster on a CPU.

Left out: encoding, which is the quantizer's (`isobit.precision.quantize`).
"""

from functools import lru_cache

import torch
from torch import Tensor


def decode(codes: Tensor, form: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Return values in `dtype` of `codes` (any shape): a tensor of the type `form` (FP8 or int8),
    or its uint8 view. Always exact (`tests/kernels/test_ops.py`)."""
    if codes.ndim == 2 and not codes.is_contiguous() and codes.t().is_contiguous():
        return decode(codes.t(), form, dtype).t()
    index = codes.view(torch.uint8).flatten().int()
    return _values(form, dtype, codes.device).index_select(0, index).view(codes.shape)


@lru_cache(maxsize=8)
def _values(form: torch.dtype, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(form).to(dtype).to(device)
