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
        wide = (_wide(each) for each in (a, b))
        return interpreter.TensorHandle(
            np.matmul(*wide).astype(np.float32) + d.data, d.dtype.scalar
        )

    return create_dot


def _wide(x: Any) -> np.ndarray:
    """Its values in float64; 8-bit codes by way of float16, which holds them all."""
    data = x.data
    if x.dtype.is_floating() and x.dtype.primitive_bitwidth == 8:
        float16 = interpreter.tl.float16
        data = interpreter._convert_float(data, x.dtype, float16, None).view(np.float16)
    return data.astype(np.float64)
