"""What the C++ operators share: how they are compiled and loaded, and what crosses to Python."""

from isobit.kernels.native.build import available

__all__ = ["available"]
