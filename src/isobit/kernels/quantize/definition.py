"""What follows from `isobit.precision.quantize`, which defines quantization: along the tokens, and
the error."""

from torch import Tensor

from isobit.kernels.matrices import Operand, values
from isobit.kernels.ops import Ops
from isobit.precision import ErrorSums, QTensor, QuantSpec, along_rows
from isobit.precision import error_sums as error_sums_of_values


def quantize_along_tokens(ops: Ops, x: Operand, spec: QuantSpec, name: str) -> QTensor:
    """Compute `Ops.quantize_along_tokens`, of the values."""
    return ops.quantize(values(x), along_rows(spec), name).transpose()


def quantize_both_ways(ops: Ops, x: Tensor, spec: QuantSpec, name: str) -> tuple[QTensor, QTensor]:
    """Compute `Ops.quantize_both_ways`: the two operators in turn."""
    return ops.quantize(x, spec, name), ops.quantize_along_tokens(x, spec, name)


def error_sums(x: Operand, quantized: QTensor) -> ErrorSums:
    """Compute `Ops.error_sums`, of the values."""
    return error_sums_of_values(values(x), quantized)
