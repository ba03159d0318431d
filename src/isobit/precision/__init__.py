"""Formats, scales, blocks, quantized tensors, and `Precision`: which tensor is in what format."""

from isobit.precision.changes import precision_from
from isobit.precision.errors import ErrorSums, QuantTotals, error_sums
from isobit.precision.flow import PRESETS, Calibration, Flow, Precision
from isobit.precision.formats import BF16, E2M1, E4M3, E5M2, FP32, INT8, Format
from isobit.precision.packed_fp4 import PackedFP4
from isobit.precision.quantize import (
    BLOCK,
    QTensor,
    QuantSpec,
    along_rows,
    expand_scale,
    nonfinite_message,
    quantize,
    quantize_with_scale,
    scales,
)

__all__ = [
    "BF16",
    "BLOCK",
    "E2M1",
    "E4M3",
    "E5M2",
    "FP32",
    "INT8",
    "PRESETS",
    "Calibration",
    "ErrorSums",
    "Flow",
    "Format",
    "PackedFP4",
    "Precision",
    "QTensor",
    "QuantSpec",
    "QuantTotals",
    "along_rows",
    "error_sums",
    "expand_scale",
    "nonfinite_message",
    "precision_from",
    "quantize",
    "quantize_with_scale",
    "scales",
]
