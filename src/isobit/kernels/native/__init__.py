"""The native backend: C++ kernels behind the operators' table."""

from isobit.kernels.native.ops import NativeOps, available

__all__ = ["NativeOps", "available"]
