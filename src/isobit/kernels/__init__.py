"""The operators: one table with a column in PyTorch, one in C++, and one in Triton for NVIDIA GPUs; same names, same
signatures."""

from isobit.kernels.composed import Composed, grouped_input_gradient, input_gradient
from isobit.kernels.copies import Copies
from isobit.kernels.gpu import computed_by, versions
from isobit.kernels.matrices import Kept, Operand, Packed, Prepared, Stacked, picked, plain, tensors_of, weight_of
from isobit.kernels.ops import Activation, DeltaHeads, Heads, Keys, Layout, Ops
from isobit.kernels.stores import KVStore, StateStore, Store
from isobit.kernels.table import BACKENDS, get_ops, separate_ops
from isobit.kernels.watching import Watching, unwatched

__all__ = [
    "BACKENDS",
    "Activation",
    "Composed",
    "Copies",
    "DeltaHeads",
    "Heads",
    "KVStore",
    "Kept",
    "Keys",
    "Layout",
    "Operand",
    "Ops",
    "Packed",
    "Prepared",
    "Stacked",
    "StateStore",
    "Store",
    "Watching",
    "computed_by",
    "get_ops",
    "grouped_input_gradient",
    "input_gradient",
    "picked",
    "plain",
    "separate_ops",
    "tensors_of",
    "unwatched",
    "versions",
    "weight_of",
]
