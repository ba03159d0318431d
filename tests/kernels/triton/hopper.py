"""Hopper's matrix instruction in Triton's interpreter: which terms are added together, and what is
cut off.

The interpreter's own product rounds a sum once (`isobit/kernels/triton/interpreter.py`), so every
order of a sum has nearly the same bits there, and a kernel that breaks its order passes. This one
is MMA-Sim's model of `wgmma` (Xie et al. 2025, "MMA-Sim: Bit-Accurate Reference Model of Tensor
Cores and Matrix Cores", arXiv 2511.10909; its code at c7851383, `nv_fused_dot_add` in
`mmasim/simulator/arithmetic.py` and `wgmma` in `mmasim/simulator/nv_ptx.py`), which its authors
compared with an H100 bit for bit. d = c + Σ a·b is a chain of instructions over ascending K, of 16
products each, 32 of E4M3. In each:

- A product is exact. Its exponent is the sum of its operands' exponents: floor(log2 |x|), at least
  that of the format's smallest normal number; of a zero -126.
- All products and c are aligned to the largest exponent e of them, and cut off towards zero behind
  `aligned` binary places: trunc(x · 2^(aligned - e)).
- Their sum is exact, and cut off towards zero to `kept` binary places of float32.

So the terms of one instruction have no order, and neither side of it is special; the chain has an
order. `Card` puts this into the interpreter, and also cards that no one has built: those whose
terms come in another order, or whose sides are not alike, as controls. Tiles with fewer than 64
rows run on the instruction of single warps, which has the same arithmetic for 16 bits and none for
E4M3: Triton converts codes to float16. Float32 operands run on no matrix unit, and stay with the
interpreter. Left out: shapes that do not compile, and whether a kernel's compiled chain is the one
of its source (`test_machine_code.py`).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter

from isobit.kernels.triton.interpreter import values_of

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Instruction:
    """Products that it adds at once, binary places that it aligns to and keeps, and the exponent of
    the smallest normal number of its operands."""

    inner: int
    aligned: int
    kept: int
    least: int


BF16 = Instruction(16, 25, 23, -126)
FP16 = Instruction(16, 25, 23, -14)
E4M3 = Instruction(32, 13, 13, -6)
_BY_TYPE = {"bf16": BF16, "fp16": FP16, "fp8e4nv": E4M3}
_LEAST_ROWS = 64  # of a tile on a warpgroup's instruction
_NAN = np.array(0x7FFFFFFF, np.uint32).view(np.float32)

Multiply = Callable[[Array, Array, Array, Instruction], Array]
"""(a [M, K], b [K, N], c [M, N], instruction) to [M, N] float32."""
Operands = Callable[[Array, Array], tuple[Array, Array]]


def multiply(a: Array, b: Array, c: Array, by: Instruction) -> Array:
    """c [M, N] + a [M, K] · b [K, N] as float32, by a chain of instructions over ascending K.

    Operands are values of the instruction's format, c is float32. NaN and infinity are those of the
    sum, NaN always 0x7fffffff.
    """
    a, b, total = (np.asarray(x, np.float64) for x in (a, b, c))
    with np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, a.shape[1], by.inner):
            left, right = a[:, first : first + by.inner], b[first : first + by.inner]
            plain = left @ right + total
            added = np.where(np.isfinite(plain), _added(left, right, total, by), plain)
            total = added.astype(np.float32).astype(np.float64)
        return np.where(np.isnan(total), _NAN, total.astype(np.float32))


def _added(a: Array, b: Array, c: Array, by: Instruction) -> Array:
    """One instruction of finite terms, in float64, which has every number on the way exactly."""
    highest = _power(c, BF16.least)
    a_power, b_power = _power(a, by.least), _power(b, by.least)
    for k in range(a.shape[1]):
        np.maximum(highest, a_power[:, k, None] * b_power[k], out=highest)
    unit = 2.0**-by.aligned * highest
    total = np.trunc(c / unit)
    for k in range(a.shape[1]):
        total += np.trunc(a[:, k, None] * b[k] / unit)
    total *= unit
    unit = 2.0**-by.kept * _power(total, BF16.least)
    return np.trunc(total / unit) * unit + 0.0  # no zero is negative


def _power(x: Array, least: int) -> Array:
    """2 to the exponent of a number; `least` is that of the smallest normal one."""
    exponent = np.frexp(x)[1] - 1
    return np.ldexp(1.0, np.where(x == 0, -126, np.maximum(exponent, least)))


def rounded_once(a: Array, b: Array, c: Array, by: Instruction) -> Array:
    """The interpreter's own product, in which orders do not show: what tests without a `Card`
    compute with."""
    return (a @ b).astype(np.float32) + c


def unlike_sides(a: Array, b: Array, c: Array, by: Instruction) -> Array:
    """A card that no one has built: of each product only a's part is aligned and cut off, and then
    multiplied. Exchanging the operands gives other bits, whatever the tile."""
    a, b, total = (np.asarray(x, np.float64) for x in (a, b, c))
    for first in range(0, a.shape[1], by.inner):
        step = slice(first, first + by.inner)
        left, right = a[:, step], b[step]
        powers = _power(left, by.least)[:, :, None] * _power(right, by.least)
        highest = np.maximum(powers.max(1), _power(total, BF16.least))
        places = 2.0**by.aligned / highest[:, None, :] * _power(right, by.least)
        terms = np.trunc(left[:, :, None] * places) / places * right
        total = (terms.sum(1) + total).astype(np.float32).astype(np.float64)
    return total.astype(np.float32)


def as_they_are(a: Array, b: Array) -> tuple[Array, Array]:
    """Operands in the order of their channels."""
    return a, b


def last_channels_first(a: Array, b: Array) -> tuple[Array, Array]:
    """A control: the chain goes over descending K."""
    return a[:, ::-1], b[::-1]


def alternating_channels(a: Array, b: Array) -> tuple[Array, Array]:
    """A control: even channels, then odd ones, so that an instruction adds other terms together."""
    order = np.concatenate([np.arange(0, a.shape[1], 2), np.arange(1, a.shape[1], 2)])
    return a[:, order], b[order]


def in_small_tiles(order: Operands, most: int = 32) -> Operands:
    """This order where the short side of a tile has at most so many rows, as in decoding."""
    return lambda a, b: order(a, b) if b.shape[1] <= most else (a, b)


@dataclass
class Card:
    """What computes the interpreter's products of 16 and 8 bits, and how often it was asked, by
    type and tile (M, N, K)."""

    multiply: Multiply = multiply
    order: Operands = as_they_are
    asked: Counter[tuple[str, int, int, int]] = field(default_factory=Counter)

    @contextmanager
    def computes(self) -> Iterator["Card"]:
        """Inside, `tl.dot` is computed by this card."""
        own = interpreter.InterpreterBuilder.create_dot

        def create_dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
            by = _BY_TYPE.get(a.dtype.name)
            if by is None:
                return own(builder, a, b, d, *options)
            left, right = values_of(a), values_of(b)
            tile = (a.dtype.name, *d.data.shape, len(right))
            self.asked[tile] += 1
            if by is E4M3 and len(left) < _LEAST_ROWS:
                by = FP16
            found = self.multiply(*self.order(left, right), d.data, by)
            return interpreter.TensorHandle(found, d.dtype.scalar)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
            yield self
