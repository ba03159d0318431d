"""The table of operators that follow from other operators: a fused kernel must return the same
bits.

A backend on a CPU inherits these and has others in the place of those that it computes in a single
kernel. A function whose first parameter is `ops` is given the backend; the others are static.
"""

import torch

from isobit.kernels.attention import definition as attention
from isobit.kernels.experts import definition as experts
from isobit.kernels.head import definition as head
from isobit.kernels.heads import definition as heads
from isobit.kernels.low_rank import definition as low_rank
from isobit.kernels.matrices import Operand, Prepared
from isobit.kernels.norms import definition as norms
from isobit.kernels.ops import Ops
from isobit.kernels.optim import definition as optim
from isobit.kernels.product import definition as product
from isobit.kernels.quantize import definition as quantize
from isobit.kernels.sampling import capped
from isobit.precision import Precision


class Composed(Ops):
    """The part of `isobit.kernels.ops.Ops` that follows from the rest, where errors are raised at
    once."""

    device = torch.device("cpu")
    fused_head = False

    def check_precision(self, precision: Precision) -> None:
        """Every flow can be computed."""

    def raise_faults(self) -> None:
        """Nothing to do: operators raise at once when they meet NaN or infinity."""

    def rounds_last(self, a: Operand, b: Prepared) -> bool:
        """Return False: it is not known."""
        return False

    quantize_along_tokens = quantize.quantize_along_tokens
    quantize_both_ways = quantize.quantize_both_ways
    error_sums = staticmethod(quantize.error_sums)
    prepare = staticmethod(product.prepare)
    gradient_product = product.added_product

    by_expert = staticmethod(experts.by_expert)
    grouped_product = experts.grouped_product
    prepare_factors = low_rank.prepare_factors
    adapted_product = low_rank.adapted_product
    add_low_rank = low_rank.add_low_rank
    grouped_weight_gradient = experts.grouped_weight_gradient
    grouped_bias_gradient = staticmethod(experts.grouped_bias_gradient)
    sum_of_rows = staticmethod(experts.sum_of_rows)
    sum_of_rows_backward = staticmethod(experts.sum_of_rows_backward)

    rms_norm_quantized = norms.rms_norm_quantized
    rms_norm_backward_added = norms.rms_norm_backward_added
    gate_mul_quantized = norms.gate_mul_quantized
    gate_mul_backward_quantized = norms.gate_mul_backward_quantized
    attention_inputs = heads.attention_inputs
    attention_inputs_backward = heads.attention_inputs_backward
    attention_quantized = attention.attention_quantized
    sinks_backward = staticmethod(attention.sinks_backward)

    embedding = staticmethod(head.embedding)
    embedding_backward = staticmethod(head.embedding_backward)
    cap_logits = staticmethod(capped.cap_logits)
    head_logprobs = head.head_logprobs
    head_backward = head.head_backward
    head_backward_kept = head.head_backward_kept
    head_sample = head.head_sample
    square_sums = staticmethod(optim.square_sums)
