"""The number formats in which isobit stores tensors.

E4M3 and E5M2 are the 8-bit floats of Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv
2209.05433): E4M3 in its finite-only variant (`float8_e4m3fn`, no infinities, largest value 448),
E5M2 with infinities (largest finite value 57,344). E2M1 is the 4-bit float of the OCP Microscaling
specification (v1.0, section 5.3.3): 0, 0.5, 1, 1.5, 2, 3, 4, 6. It is stored in E4M3 codes, a byte
each, which hold all its values, but in frozen weights, which have two to a byte (`packed_fp4.py`).
INT8 is the whole numbers from -127 to 127: equal steps, symmetric, so -128 is not a code. BF16 holds
all of them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """A number format. `max` is the largest finite magnitude; `itemsize` is the stored size in
    bytes."""

    name: str
    dtype: torch.dtype
    max: float
    itemsize: int

    @property
    def is_quantized(self) -> bool:
        """Whether it takes a scale per block."""
        return self.itemsize == 1

    @property
    def stored(self) -> torch.dtype:
        """The type of codes that are indexed and copied: torch lacks most operations on FP8
        tensors."""
        return torch.uint8 if self.dtype.is_floating_point else self.dtype

    def __str__(self) -> str:
        return self.name


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0, 1)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0, 1)
E2M1 = Format("e2m1", torch.float8_e4m3fn, 6.0, 1)
INT8 = Format("int8", torch.int8, 127.0, 1)
BF16 = Format("bf16", torch.bfloat16, torch.finfo(torch.bfloat16).max, 2)
FP32 = Format("fp32", torch.float32, torch.finfo(torch.float32).max, 4)

FORMATS: dict[str, Format] = {form.name: form for form in (E4M3, E5M2, E2M1, INT8, BF16, FP32)}
