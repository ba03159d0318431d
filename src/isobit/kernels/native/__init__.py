"""The native backend: C++ kernels behind the operators' table."""

from isobit.kernels.native.ops import NativeOps, available
from isobit.kernels.native.ordered import instruction_set

__all__ = ["NativeOps", "available", "instruction_set"]
