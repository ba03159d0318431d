"""Triton's interpreter with a product whose rows do not depend on their place in a tile, as a
matrix unit's do not.

The interpreter's own is NumPy's, and so some BLAS's: on some processors a row of a tile has other
bits in its first place than in its tenth, and what is claimed of a row alone and among others fails
there through no fault of a kernel. This one adds in float64 and rounds the sum once. Left out: the
interpreter's other faults, which `numbers.py` avoids.
"""

from typing import Any

import numpy as np
from triton.runtime import interpreter


def install() -> None:
    """Replace the interpreter's product of float32 sums."""
    interpreter.InterpreterBuilder.create_dot = _dot_in_place_of(
        interpreter.InterpreterBuilder.create_dot
    )


def _dot_in_place_of(own: Any) -> Any:
    def create_dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.data.dtype != np.float32:
            return own(builder, a, b, d, *options)
        product = np.matmul(values_of(a), values_of(b)).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    return create_dot


def values_of(x: Any) -> np.ndarray:
    """Return an operand's values in float64, of the bits that the interpreter keeps for BF16 and
    E4M3."""
    if x.dtype == interpreter.tl.bfloat16:
        return (x.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if x.dtype == interpreter.tl.float8e4nv:
        return _E4M3[x.data.view(np.uint8)]
    return x.data.astype(np.float64)


def _e4m3_values() -> np.ndarray:
    """Return the value of every code, NaN where a magnitude has all bits."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0)
    )
    return np.where(code & 127 == 127, np.nan, np.where(code < 128, magnitude, -magnitude))


_E4M3 = _e4m3_values()
