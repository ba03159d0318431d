"""The operators: one table, a reference column in PyTorch and a native one in C++; same names, same signatures."""

from isobit.kernels.composed import Composed
from isobit.kernels.gpu import find_gpu, versions
from isobit.kernels.table import BACKENDS, CONSISTENCIES, get_ops, separate_ops
from isobit.kernels.types import KVStore, Layout, Operand, Ops, Stacked

__all__ = [
    "BACKENDS",
    "CONSISTENCIES",
    "Composed",
    "KVStore",
    "Layout",
    "Operand",
    "Ops",
    "Stacked",
    "find_gpu",
    "get_ops",
    "separate_ops",
    "versions",
]
