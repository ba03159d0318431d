"""The operators (`ops.py`), a room for each kind: defined in PyTorch, and computed in C++ and in
Triton for NVIDIA GPUs. `backends` has a table for each of the three, from an operator's name to its
function; what a function computes is said once, at that name in `Ops`."""

from isobit.kernels.backends.composed import Composed
from isobit.kernels.experts.definition import grouped_input_gradient
from isobit.kernels.experts.scoring import Scoring, by_score, by_score_backward
from isobit.kernels.gpu import computed_by, versions
from isobit.kernels.layout import Copies, Keys, Layout
from isobit.kernels.low_rank.definition import Factors
from isobit.kernels.matrices import (
    Divided,
    Operand,
    Packed,
    Prepared,
    Stacked,
    StoredWeight,
    picked,
    plain,
    tensors_of,
    weight_of,
)
from isobit.kernels.ops import Activation, DeltaHeads, Heads, Ops
from isobit.kernels.product.definition import input_gradient
from isobit.kernels.stores import KVStore, NoStore, StateStore, Store
from isobit.kernels.table import BACKENDS, get_ops, inference_engine_ops
from isobit.kernels.watching import Watching, unwatched

__all__ = [
    "BACKENDS",
    "Activation",
    "Composed",
    "Copies",
    "DeltaHeads",
    "Divided",
    "Factors",
    "Heads",
    "KVStore",
    "Keys",
    "Layout",
    "NoStore",
    "Operand",
    "Ops",
    "Packed",
    "Prepared",
    "Scoring",
    "Stacked",
    "StateStore",
    "Store",
    "StoredWeight",
    "Watching",
    "by_score",
    "by_score_backward",
    "computed_by",
    "get_ops",
    "grouped_input_gradient",
    "inference_engine_ops",
    "input_gradient",
    "picked",
    "plain",
    "tensors_of",
    "unwatched",
    "versions",
    "weight_of",
]
