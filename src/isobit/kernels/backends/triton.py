"""The Triton backend: `isobit.kernels.ops.Ops` on an NVIDIA GPU, or in Triton's interpreter.

The definitions are the reference operators'. Quantization, cache writes and what is elementwise return their bits; sums
are float32 in a fixed order where the reference has float64, so products, norms, attention and log-probabilities
differ from the CPU's in the last places, and agree among themselves: a row's bits depend on the row, the weights and
the position (`tests/kernels/triton`). Products of many rows may be a library's where it returns their bytes
(`product/triton/library.py`). Under `consistency: fast` all products are cuBLAS's.

An operator here never waits for the GPU, except to quantize weights to NVFP4, which PyTorch does, at a sync, and to try
a library at a size that is new. So NaN and infinity cannot be raised where they are met: a flag is set, results become
NaN, and `raise_faults` raises where results are read.

Left out: E5M2, MXFP8, NVFP4 but of weights against plain activations, and scales by tensor but those of a calibrated
cache; `check_precision` refuses them.
"""

import torch
from torch import Tensor

from isobit.errors import IsobitError
from isobit.kernels.attention.triton import backward as attention_backward
from isobit.kernels.attention.triton import forward as attention
from isobit.kernels.composed import sink_gradients
from isobit.kernels.delta.triton.forward import DeltaOperators
from isobit.kernels.experts.triton import grouped, routing
from isobit.kernels.head import triton as head
from isobit.kernels.heads.triton import backward as heads_backward
from isobit.kernels.heads.triton import forward as head_kernels
from isobit.kernels.matrices import Gradients, Operand, Prepared, Stacked, by_rows, plain, values, weight_of
from isobit.kernels.norms.triton import gate, norm
from isobit.kernels.ops import Activation, Heads, Layout, Temperature
from isobit.kernels.optim import triton as stochastic
from isobit.kernels.optim.definition import check_stochastic
from isobit.kernels.product.triton import product
from isobit.kernels.product.triton.cublas import cublas_product
from isobit.kernels.product.triton.library import LibraryProducts
from isobit.kernels.quantize import triton as quantize
from isobit.kernels.sampling import triton as sampling
from isobit.kernels.stores import KVStore
from isobit.kernels.triton.launch import Faults, target
from isobit.precision import E4M3, INT8, ErrorSums, Format, Nibbles, Precision, QTensor, QuantSpec, error_sums
from isobit.precision import quantize as reference_quantize
from isobit.precision.nibbles import NVFP4

_CACHED = (E4M3, INT8)
"""Formats of keys and values; of all else E4M3 alone."""
_ALLOWED = {
    "weights": ("128x128",),
    "activations": ("1x128",),
    "output gradients": ("1x128",),
    "keys and values": ("row", "tensor"),
    "queries": ("row",),
}
_BESIDES = {"weights": ", and nvfp4 under activation: bf16"}


class TritonOps(DeltaOperators):
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
        specs: list[tuple[str, QuantSpec | None]] = []
        for flow in (precision.rollout, precision.learner):
            if flow.probabilities is not None:
                raise IsobitError(
                    f"backend: triton has no kernel for probabilities in {flow.probabilities} (preset "
                    f"{precision.name}); use backend: native, or leave precision.probabilities out"
                )
            decoded = flow.weight == NVFP4 and flow.activation is None and target().fp8
            specs += [("weights", None if decoded else flow.weight), ("activations", flow.activation)]
            specs += [("keys and values", flow.kv), ("queries", flow.query)]
        specs.append(("output gradients", precision.gradient))
        for role, spec in specs:
            if spec is None:
                continue
            forms = _CACHED if role == "keys and values" else (E4M3,)
            if not target().fp8 and spec.format is not INT8:
                raise IsobitError(
                    f"backend: triton has {role} in FP8 (preset {precision.name}) from sm_89 on, and this GPU is "
                    "older; use precision: bf16, or backend: native"
                )
            computed = spec.format in forms and spec.granularity in _ALLOWED[role] and spec.scale in ("fp32", "ue8m0")
            if not computed:
                names, allowed = " or ".join(form.name for form in forms), " or ".join(_ALLOWED[role])
                raise IsobitError(
                    f"backend: triton has no kernel for {role} in {spec} (preset {precision.name}): it takes "
                    f"{names}, {allowed}, with fp32 or ue8m0 scales{_BESIDES.get(role, '')}; use backend: native"
                )

    def raise_faults(self) -> None:
        self._faults.raise_first()

    def _flag_of(self, store: KVStore) -> Tensor:
        return self._faults.of("keys and values", E4M3 if store.kv is None else store.kv.format)

    def quantize(self, x: Tensor, spec: QuantSpec, name: str = "tensor") -> QTensor:
        if spec == NVFP4:  # of weights alone, at a sync
            return reference_quantize(x, spec, name)
        return quantize.quantize(x, spec, self._faults.of(name))

    def quantize_along_tokens(self, x: Operand, spec: QuantSpec, name: str) -> QTensor:
        return quantize.quantize_along_tokens(x, spec, self._faults.of(name))

    def error_sums(self, x: Operand, quantized: QTensor) -> ErrorSums:
        return error_sums(values(x), quantized)

    def prepare(self, weight: Operand, into: Prepared | None = None) -> Prepared:
        return weight

    def product(self, a: Operand, b: Prepared, bias: Tensor | None = None, out: torch.dtype = torch.bfloat16) -> Tensor:
        if not self._cublas:
            return self.libraries.product(a, b, bias, out)
        if isinstance(b, Nibbles):
            return by_rows(self.product, a, b, bias, out)
        b = weight_of(b)
        return cublas_product(a, plain(b, a.dtype) if isinstance(a, Tensor) else b, bias, out)

    def gradient_product(self, a: Operand, b: Operand, out: torch.dtype, into: Tensor | None = None) -> Tensor:
        return product.gradient_product(a, b, out, into)

    def by_expert(self, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        return routing.by_expert(chosen, count)

    def grouped_product(
        self, a: Operand, weights: Stacked, offsets: Tensor, out: torch.dtype, rows: Tensor | None = None
    ) -> Tensor:
        return grouped.grouped_product(a, weights, offsets, out, rows)

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

    def grouped_bias_gradient(self, dy: Tensor, offsets: Tensor) -> list[Tensor | None]:
        return grouped.grouped_bias_gradient(dy, offsets)

    def sum_of_rows(self, x: Tensor, place: Tensor, gates: Tensor | None) -> Tensor:
        return grouped.sum_of_rows(x, place, gates)

    def sum_of_rows_backward(self, dy: Tensor, x: Tensor, place: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        return grouped.sum_of_rows_backward(dy, x, place, gates)

    def route(
        self, logits: Tensor, count: int, normalize: bool, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return routing.route(logits, count, normalize, given)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return norm.rms_norm(x, weight, eps, residual)

    def rms_norm_quantized(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, spec: QuantSpec, name: str
    ) -> tuple[QTensor, Tensor, Tensor]:
        return norm.rms_norm_quantized(x, weight, eps, residual, spec, self._faults.of(name))

    def rms_norm_backward(self, dy: Tensor, summed: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        return norm.rms_norm_backward(dy, summed, weight, rstd)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
        return head_kernels.rotary(x, cos, sin, positions, inverse)

    def attention_inputs(
        self, qkv: Tensor, heads: Heads, store: KVStore, layout: Layout
    ) -> tuple[Tensor, Tensor, Tensor]:
        return head_kernels.attention_inputs(qkv, heads, store, layout, self._flag_of(store))

    def attention_inputs_backward(
        self, gradients: tuple[Tensor, Tensor, Tensor], qkv: Tensor, heads: Heads, positions: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return heads_backward.attention_inputs_backward(gradients, qkv, heads, positions)

    def kv_write(self, store: KVStore, k: Tensor, v: Tensor, layout: Layout) -> None:
        head_kernels.kv_write(store, k, v, layout, self._flag_of(store))

    def attention(
        self,
        q: Tensor,
        store: KVStore,
        layout: Layout,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
        probabilities: Format | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert probabilities is None, "`check_precision` refuses it"
        return attention.attention(q, store, layout, scale, window, sinks)

    def attention_backward(
        self,
        dout: Tensor,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        store: KVStore,
        layout: Layout,
        scale: float,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return attention_backward.attention_backward(dout, q, out, lse, store, layout, scale, window)

    def sinks_backward(self, dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
        return sink_gradients(dout, out, lse, sinks)

    def gate_mul(self, activation: Activation, gate_up: Tensor) -> Tensor:
        return gate.gate_mul(activation, gate_up)

    def gate_mul_quantized(self, activation: Activation, gate_up: Tensor, spec: QuantSpec, name: str) -> QTensor:
        return gate.gate_mul_quantized(activation, gate_up, spec, self._faults.of(name))

    def gate_mul_backward(self, activation: Activation, dh: Tensor, gate_up: Tensor) -> Tensor:
        return gate.gate_mul_backward(activation, dh, gate_up)

    def square_sums(self, x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dim=1, dtype=torch.float64).square_()

    def round_stochastically(self, x: Tensor, seed: int, step: int, first: int) -> Tensor:
        check_stochastic(x, first)
        return stochastic.round_stochastically(x.contiguous(), seed, step, first)

    def embedding_backward(self, dy: Tensor, tokens: Tensor, count: int) -> Tensor:
        gradient = torch.zeros(count, dy.shape[1], device=dy.device)
        # on a GPU index_add_ adds in any order; index_put_ sorts first, and so repeats
        return gradient.index_put_((tokens,), dy.float(), accumulate=True)

    def token_logprobs(self, logits: Tensor, tokens: Tensor, temperature: Temperature) -> tuple[Tensor, Tensor]:
        return sampling.token_logprobs(logits, tokens, temperature)

    def sample(self, logits: Tensor, keys: Tensor, temperature: Temperature) -> Tensor:
        return sampling.sample(logits, keys, temperature)

    def head_logprobs(
        self, hidden: Tensor, weight: Prepared, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        return head.head_logprobs(hidden, values(weight), tokens, temperature)

    def head_backward(
        self, dlogprobs: Tensor, hidden: Tensor, weight: Prepared, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        given = (dlogprobs, hidden, values(weight), tokens, temperature)
        return head.head_backward(*given, self.product, self.gradient_product)

    def head_sample(
        self, hidden: Tensor, weight: Prepared, keys: Tensor, temperature: Temperature, source: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return head.head_sample(hidden, values(weight), keys, temperature, source)
