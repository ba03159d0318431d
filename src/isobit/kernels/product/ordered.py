"""Matrix products C = A·Bᵀ in float32 in one of two fixed orders, the definition: `consistency:
bitwise` on a CPU.

Operands are BF16 numbers; FP8 and FP4 codes under power-of-two scales are BF16 numbers too, and
NVFP4 weights next to BF16 activations are rounded to such. K is padded with zeros to a multiple of
32.

`tdp32-v1`: for every 32 of K two chains of fused multiply-adds from zero, over even and odd places
of 16 pairs, then c += even + odd:

    even = fma(a[2i], b[2i], even),  odd = fma(a[2i + 1], b[2i + 1], odd),  i = 0 to 15

`vdp32-v1`: for every 128 of K one chain from zero over the pairs, then c += chain:

    chain = fma(a[2i], b[2i], fma(a[2i + 1], b[2i + 1], chain)),  i = 0 to 63

Subnormal operands and results are zeros of their sign (a result counts as subnormal as rounded to
24 bits with any exponent). These are the arithmetic of the instructions TDPBF16PS and VDPBF16PS
(Intel 64 manual, volume 2), so a processor with AMX computes the one in hardware, one with
AVX512-BF16 the other, and any processor both by fused multiply-adds. Codes under other scales: c
begins at zero for every 128 of K, and total = fma(c, scale_a · scale_b, total). Last the bias, in
float32, and the rounding to the result's type.

An element is one such sum whatever else is in the batch, so a row's bits do not depend on it. The
error of a sum before its rounding is at most γ(n) · Σ|a·b|, γ(n) = n·2^-24 / (1 - n·2^-24), with n
= 17 + ⌈K / 32⌉ or 128 + ⌈K / 128⌉, plus 2^-126 for each operation (Higham 2002, section 4.2). Held
by `tests/kernels/test_ordered.py`. This file emulates the operations in float64: slow, and plain.
Left out: operands that are not BF16 numbers (`computes`), whose products stay exact
(`definition.py`).
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from isobit.kernels.codes import decode
from isobit.kernels.matrices import Operand, StoredWeight, is_rounded
from isobit.options.consistency import TDP32, VDP32
from isobit.precision import BLOCK, PackedFP4, QTensor, expand_scale

VERSIONS = {TDP32: "tdp32-v1", VDP32: "vdp32-v1"}
_DEPTH = 32
_CHUNK = 1 << 16  # partial sums at a time
_SMALLEST = 2.0**-126
_LOST = (1 << 29) - 1  # the bits of a float64 that float32 lacks


def computes(a: Operand, b: StoredWeight) -> bool:
    """Return whether the product has a defined order: both are BF16 numbers, or codes with scales
    for blocks of 128, or b has NVFP4 weights, which are rounded to BF16 numbers next to such."""
    if not isinstance(b, Tensor) and is_rounded(a, b.spec):
        return True
    if isinstance(b, PackedFP4):
        return False
    return (_is_bf16(a) and _is_bf16(b)) or has_block_scales(a, b)


def rounded(weight: QTensor | PackedFP4) -> Tensor:
    """Return codes times scales, rounded to float32 and then to BF16, without subnormal numbers."""
    matrix = weight.part() if isinstance(weight, PackedFP4) else weight
    if matrix.scale.min() >= 2 * _SMALLEST:  # the smallest code is 0.5
        return matrix.dequantize().bfloat16()
    return flushed(replace(matrix, scale=flushed(matrix.scale)).dequantize()).bfloat16()


def has_block_scales(a: Operand, b: Operand) -> bool:
    """Return whether scales are applied to the sums of blocks, not to the operands."""
    if _is_bf16(a) and _is_bf16(b):
        return False
    return all(isinstance(x, QTensor) and x.block[1] in (BLOCK, x.shape[1]) for x in (a, b))


def _is_bf16(x: Operand) -> bool:
    return x.spec.scale == "ue8m0" if isinstance(x, QTensor) else x.dtype == torch.bfloat16


def product(a: Operand, b: Operand, bias: Tensor | None, out: torch.dtype, order: str) -> Tensor:
    """Return a [M, K] · b [N, K]ᵀ + bias [N] in `order`, one of VERSIONS, where `computes` it: [M,
    N]."""
    assert a.shape[1] == b.shape[1], f"operands of {a.shape[1]} and {b.shape[1]} columns"
    if isinstance(a, QTensor) and isinstance(b, QTensor) and has_block_scales(a, b):
        left, right = (decode(x.data, x.spec.format.dtype, torch.float64) for x in (a, b))
        total = left.new_zeros(a.shape[0], b.shape[0])
        for start in range(0, a.shape[1], BLOCK):
            block = slice(start, start + BLOCK)
            scale = flushed(_scale_of(a, start) * _scale_of(b, start).t())
            total = fused(
                ordered_sums(left[:, block], right[:, block], order) * scale.double(), total
            )
    else:
        weight = rounded(b) if isinstance(b, QTensor) and is_rounded(a, b.spec) else b
        total = ordered_sums(_values(a), _values(weight), order)
    if bias is not None:
        total = flushed((total + bias.double()).float()).double()
    return total.float().to(out)


def ordered_sums(left: Tensor, right: Tensor, order: str) -> Tensor:
    """Return the sums of left [M, K] · right [N, K]ᵀ: [M, N]; BF16 numbers and float32 results,
    held as float64."""
    if order == TDP32:  # chains side by side, and the places that one goes through
        size, chains, lanes = _DEPTH, 2, [[2 * i, 2 * i + 1] for i in range(16)]
    else:
        size, chains, lanes = (
            BLOCK,
            1,
            [[i ^ 1] for i in range(BLOCK)],
        )  # of each pair the second first
    groups = -(-left.shape[1] // size)
    missing = groups * size - left.shape[1]
    last = size - missing // _DEPTH * _DEPTH  # places of the last group
    operands = [
        functional.pad(x, (0, missing)).view(x.shape[0], groups, size).permute(2, 1, 0).contiguous()
        for x in (left, right)
    ]
    total = left.new_zeros(left.shape[0], right.shape[0])
    add = _add_narrow if _is_narrow(left, right) else _add
    step = max(1, _CHUNK // (chains * groups * right.shape[0] + 1))
    for start in range(0, left.shape[0], step):
        rows = total[start : start + step]
        sums_of = left.new_zeros(chains, groups, *rows.shape)
        for lane in lanes:
            x, y = operands[0][lane, :, start : start + step], operands[1][lane]
            have = groups - (max(lane) >= last)  # a zero more would turn a chain of -0 into 0
            sums_of[:, :have] = add(
                sums_of[:, :have], x.unsqueeze(3)[:, :have], y.unsqueeze(2)[:, :have]
            )
        sums = sums_of[0] if chains == 1 else sums_of[0] + sums_of[1]
        for chain in flushed(sums.float()).double():
            rows.copy_(flushed((rows + chain).float()))
    return total


def _is_narrow(left: Tensor, right: Tensor) -> bool:
    """Return whether all sums that occur are multiples of one normal power of two and have at most
    53 bits: float64 then adds exactly, and nothing is flushed."""
    unit, largest = 1.0, BLOCK + 1.0
    for x in (left, right):
        magnitudes = x.abs()
        nonzero = magnitudes[magnitudes > 0]
        if nonzero.numel() == 0:
            return True
        unit *= float(torch.frexp(nonzero.min()).exponent.double().sub(8).exp2())
        largest *= float(nonzero.max())
    return unit >= _SMALLEST and largest <= unit * 2.0**53


def _add_narrow(chains: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.addcmul(chains, x, y).float().double()


def _add(chains: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return fused(x * y, chains)


def fused(products: Tensor, addend: Tensor) -> Tensor:
    """Return float32(products + addend), rounded once, subnormal results flushed; the products are
    exact float64 numbers.

    float32(float64(sum)) is wrong only where float64 has rounded to a number halfway between two of
    float32: there the sum is moved by a bit towards the true one.
    """
    total = products + addend
    words = total.view(torch.int64)
    halfway = (words & _LOST) == (_LOST + 1) // 2
    if halfway.any():
        x, y, s = (t.expand_as(total)[halfway] for t in (products, addend, total))
        difference = s - x
        error = (x - (s - difference)) + (y - difference)  # of the sum in float64, exactly (Knuth)
        words[halfway] += torch.where(error == 0, 0, torch.where((error > 0) == (s > 0), 1, -1))
    single = total.float().double()
    tiny = total.abs() < _SMALLEST
    if tiny.any():
        survives = total.abs() >= _SMALLEST * (
            1 - 2.0**-25
        )  # rounds up to the smallest normal number
        single = torch.where(tiny, torch.where(survives, _SMALLEST, 0.0).copysign(total), single)
    return single


def flushed(x: Tensor) -> Tensor:
    """Return float32 numbers with zeros for subnormal ones."""
    return torch.where(x.abs() < _SMALLEST, torch.zeros_like(x).copysign(x), x)


def _values(x: Operand) -> Tensor:
    """Return BF16 numbers as float64, without subnormal ones."""
    return flushed(x.dequantize() if isinstance(x, QTensor) else x.float()).double()


def _scale_of(x: QTensor, column: int) -> Tensor:
    """Return the scale of every row for the block that `column` is in: float32 [rows, 1]."""
    column_scale = flushed(x.scale[:, column // x.block[1]].unsqueeze(1))
    return expand_scale(column_scale, (x.block[0], 1), (x.shape[0], 1))
