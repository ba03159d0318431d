"""The native backend: C++ kernels behind the operators' table."""

from isobit.kernels.native.ops import NativeOps, available
from isobit.kernels.native.ordered import instruction_set
from isobit.kernels.native.separate import NativeSeparateOps

__all__ = ["NativeOps", "NativeSeparateOps", "available", "instruction_set"]
