"""One rounding from float64: to float32 directly, to bfloat16 without the double rounding of a cast
through float32."""

import torch
from torch import Tensor


def round_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 `x` to `dtype`, to nearest, ties to even, in one rounding.

    For bfloat16 the value goes through float32 rounded *to odd* (truncated, with the last bit set
    if anything was lost), after which the second rounding gives what one rounding would have given
    (Boldo and Melquiond 2008).
    """
    if dtype != torch.bfloat16:
        return x.to(dtype)
    single = x.float()
    back = single.double()
    bits = single.view(torch.int32)
    toward_zero = bits - (back.abs() > x.abs()).to(torch.int32)
    odd = torch.where(back == x, bits, toward_zero | 1)
    finite = torch.isfinite(single)
    return torch.where(finite, odd.view(torch.float32), single).to(torch.bfloat16)
