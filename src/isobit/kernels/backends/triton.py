"""The Triton backend: `isobit.kernels.ops.Ops` on an NVIDIA GPU, or in Triton's interpreter.

The definitions are the reference operators'. Quantization, cache writes and what is elementwise
return their bits; sums are float32 in a fixed order where the reference has float64, so products,
norms, attention and log-probabilities differ from the CPU's in the last places, and agree among
themselves: a row's bits depend on the row, the weights and the position (`tests/kernels/triton`).
Products of many rows may be a library's where it returns their bytes (`product/triton/library.py`).
Under `consistency: fast` all products are cuBLAS's, but those of several adapters at once.

An operator here never waits for the GPU, except to quantize weights to NVFP4, which PyTorch does,
at a sync, and to try a library at a size that is new. So NaN and infinity cannot be raised where
they are met: a flag is set, results become NaN, and `raise_faults` raises where results are read.

Left out: E5M2, MXFP8, NVFP4 but of weights against plain activations, and scales by tensor but
those of a calibrated cache; `check_precision` refuses them.
"""

import torch
from torch import Tensor

from isobit.errors import IsobitError
from isobit.kernels.attention import definition as attention_definition
from isobit.kernels.attention.triton import backward as attention_backward_kernels
from isobit.kernels.attention.triton import forward as attention_kernels
from isobit.kernels.backends.formats import refused
from isobit.kernels.delta.triton import backward as delta_backward
from isobit.kernels.delta.triton import convolution
from isobit.kernels.delta.triton import forward as delta
from isobit.kernels.experts.triton import grouped, routing
from isobit.kernels.head import definition as head_definition
from isobit.kernels.head import triton as head
from isobit.kernels.heads.triton import backward as heads_backward
from isobit.kernels.heads.triton import forward as heads
from isobit.kernels.heads.triton.forward import attention_inputs as head_inputs
from isobit.kernels.layout import Layout
from isobit.kernels.low_rank import definition as low_rank_definition
from isobit.kernels.low_rank import triton as low_rank
from isobit.kernels.matrices import Gradients, Operand, Prepared, by_rows, plain, weight_of
from isobit.kernels.norms.triton import gate, norm
from isobit.kernels.ops import Activation, Heads, Ops
from isobit.kernels.optim import triton as optim
from isobit.kernels.product import definition as product_definition
from isobit.kernels.product.triton import product as products
from isobit.kernels.product.triton.cublas import cublas_product
from isobit.kernels.product.triton.library import LibraryProducts
from isobit.kernels.quantize import definition as quantize_definition
from isobit.kernels.quantize import triton as quantize_kernels
from isobit.kernels.sampling import capped
from isobit.kernels.sampling import triton as sampling
from isobit.kernels.stores import KVStore
from isobit.kernels.triton.launch import Faults, target
from isobit.precision import E4M3, Format, PackedFP4, Precision, QTensor, QuantSpec
from isobit.precision import quantize as reference_quantize
from isobit.precision.packed_fp4 import NVFP4


class TritonOps(Ops):
    """The operators on one device."""

    backend = "triton"
    order = "triton"
    fused_head = True

    def __init__(self, consistency: str, why: str, device: torch.device) -> None:
        self.consistency, self.why, self.device = consistency, why, device
        self._cublas = consistency == "fast" and device.type == "cuda"  # the interpreter has none
        self.libraries = LibraryProducts(None if device.type == "cuda" else {})
        self._faults = Faults(device)

    def check_precision(self, precision: Precision) -> None:
        if (line := refused(precision, target().fp8)) is not None:
            raise IsobitError(line)

    def raise_faults(self) -> None:
        self._faults.raise_first()

    def _flag_of(self, store: KVStore) -> Tensor:
        return self._faults.of("keys and values", E4M3 if store.kv is None else store.kv.format)

    def quantize(self, x: Tensor, spec: QuantSpec, name: str = "tensor") -> QTensor:
        if spec == NVFP4:  # of weights alone, at a sync
            return reference_quantize(x, spec, name)
        return quantize_kernels.quantize(x, spec, self._faults.of(name))

    def quantize_along_tokens(self, x: Operand, spec: QuantSpec, name: str) -> QTensor:
        return quantize_kernels.quantize_along_tokens(x, spec, self._faults.of(name))

    def quantize_both_ways(self, x: Tensor, spec: QuantSpec, name: str) -> tuple[QTensor, QTensor]:
        return quantize_kernels.quantize_both_ways(x, spec, self._faults.of(name))

    def product(
        self, a: Operand, b: Prepared, bias: Tensor | None = None, out: torch.dtype = torch.bfloat16
    ) -> Tensor:
        if not self._cublas:
            return self.libraries.product(a, b, bias, out)
        if isinstance(b, PackedFP4):
            return by_rows(self.product, a, b, bias, out)
        b = weight_of(b)
        return cublas_product(a, plain(b, a.dtype) if isinstance(a, Tensor) else b, bias, out)

    def grouped_weight_gradient(
        self,
        dy: Tensor,
        x: Operand,
        offsets: Tensor,
        gradient: QuantSpec | None,
        name: str,
        into: Gradients = (),
    ) -> list[Tensor | None]:
        flags = (self._faults.of(f"output gradient of {name}"), self._faults.of(name))
        return grouped.grouped_weight_gradient(dy, x, offsets, gradient, flags, into)

    def rms_norm_quantized(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None,
        spec: QuantSpec,
        name: str,
    ) -> tuple[QTensor, Tensor, Tensor]:
        return norm.rms_norm_quantized(x, weight, eps, residual, spec, self._faults.of(name))

    def attention_inputs(
        self, qkv: Tensor, heads: Heads, store: KVStore, layout: Layout
    ) -> tuple[Tensor, Tensor, Tensor]:
        return head_inputs(qkv, heads, store, layout, self._flag_of(store))

    def kv_write(self, store: KVStore, k: Tensor, v: Tensor, layout: Layout) -> None:
        heads.kv_write(store, k, v, layout, self._flag_of(store))

    def attention_quantized(
        self, q: Tensor, store: KVStore, layout: Layout, scale: float, window: int | None,
        sinks: Tensor | None, probabilities: Format | None, spec: QuantSpec, name: str, keep: bool,
    ) -> tuple[Tensor | None, QTensor, Tensor]:  # fmt: skip
        return attention_kernels.attention_quantized(
            q, store, layout, scale, window, sinks, probabilities, spec, self._faults.of(name), keep
        )

    def gate_mul_quantized(
        self, activation: Activation, gate_up: Tensor, spec: QuantSpec, name: str
    ) -> QTensor:
        return gate.gate_mul_quantized(activation, gate_up, spec, self._faults.of(name))

    def gate_mul_backward_quantized(
        self, activation: Activation, dh: Tensor, gate_up: Tensor, spec: QuantSpec, name: str
    ) -> tuple[QTensor, QTensor]:
        flag = self._faults.of(name)
        return gate.gate_mul_backward_quantized(activation, dh, gate_up, spec, flag)

    error_sums = staticmethod(quantize_definition.error_sums)
    prepare = staticmethod(product_definition.prepare)
    gradient_product = staticmethod(products.gradient_product)
    by_expert = staticmethod(routing.by_expert)
    route = staticmethod(routing.route)
    grouped_product = staticmethod(grouped.grouped_product)
    prepare_factors = low_rank.prepare_factors
    adapted_product = low_rank_definition.adapted_product
    add_low_rank = low_rank.add_low_rank

    def rounds_last(self, a: Operand, b: Prepared) -> bool:
        """Return False: what is launched may depend on the type of the result."""
        return False

    grouped_bias_gradient = staticmethod(grouped.grouped_bias_gradient)
    sum_of_rows = staticmethod(grouped.sum_of_rows)
    sum_of_rows_backward = staticmethod(grouped.sum_of_rows_backward)
    rms_norm = staticmethod(norm.rms_norm)
    rms_norm_backward = staticmethod(norm.rms_norm_backward)
    rms_norm_backward_added = staticmethod(norm.rms_norm_backward_added)
    gate_mul = staticmethod(gate.gate_mul)
    gate_mul_backward = staticmethod(gate.gate_mul_backward)
    rotary = staticmethod(heads.rotary)
    attention_inputs_backward = staticmethod(heads_backward.attention_inputs_backward)
    attention = staticmethod(attention_kernels.attention)
    attend = staticmethod(attention_kernels.attend)
    attention_backward = staticmethod(attention_backward_kernels.attention_backward)
    sinks_backward = staticmethod(attention_definition.sinks_backward)
    short_convolution = staticmethod(convolution.short_convolution)
    short_convolution_backward = staticmethod(convolution.short_convolution_backward)
    delta_rule = staticmethod(delta.delta_rule)
    delta_rule_backward = staticmethod(delta_backward.delta_rule_backward)
    embedding = staticmethod(head_definition.embedding)
    embedding_backward = staticmethod(head.embedding_backward)
    cap_logits = staticmethod(capped.cap_logits)
    head_logprobs = staticmethod(head.head_logprobs)
    head_backward = head.head_backward
    head_backward_kept = head_definition.head_backward_kept
    head_sample = staticmethod(head.head_sample)
    token_logprobs = staticmethod(sampling.token_logprobs)
    sample = staticmethod(sampling.sample)
    square_sums = staticmethod(optim.square_sums)
    round_stochastically = staticmethod(optim.round_stochastically)
