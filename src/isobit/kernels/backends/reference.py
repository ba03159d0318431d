"""The reference backend: plain PyTorch, the definition of every operator and the oracle of every other backend."""

import torch
from torch import Tensor

from isobit.kernels.attention import definition as attention
from isobit.kernels.attention import float32 as attention32
from isobit.kernels.composed import Composed
from isobit.kernels.delta import definition as delta
from isobit.kernels.experts import definition as routing
from isobit.kernels.matrices import Operand, Prepared, by_rows, weight_of
from isobit.kernels.norms import definition as pointwise
from isobit.kernels.norms import float32 as rows32
from isobit.kernels.ops import Activation, DeltaHeads, Layout, Temperature
from isobit.kernels.optim import definition as stochastic
from isobit.kernels.product import definition as product
from isobit.kernels.product import ordered
from isobit.kernels.sampling import definition as sampling
from isobit.kernels.stores import KVStore, StateStore
from isobit.options import consistency as orders
from isobit.precision import Format, Nibbles, QTensor, QuantSpec, quantize


def order_of(consistency: str) -> str:
    """The order of products, and of sums within a row, on a CPU, as a run records it; of a resolved consistency."""
    sums = orders.order(consistency)
    if sums is not None:
        return f"{ordered.VERSIONS[sums]}+{rows32.ORDER}"
    return {"exact": "exact", "fast": "libraries"}[consistency]


class ReferenceOps(Composed):
    """`isobit.kernels.ops.Ops` in PyTorch, on the device that it is given: an operator computes where its inputs
    are."""

    backend = "reference"

    def __init__(self, consistency: str = "bitwise", why: str = "", device: torch.device | str = "cpu") -> None:
        self.consistency = orders.resolved(consistency)
        self.sums = orders.order(self.consistency)
        self.order = order_of(self.consistency)
        self.why = why
        self.device = torch.device(device)
        single = self.sums is not None
        self._rows = rows32 if single else pointwise
        self._attention = attention32 if single else attention

    def quantize(self, x: Tensor, spec: QuantSpec, name: str = "tensor") -> QTensor:
        return quantize(x, spec, name)

    def product(self, a: Operand, b: Prepared, bias: Tensor | None = None, out: torch.dtype = torch.bfloat16) -> Tensor:
        if isinstance(b, Nibbles):
            return by_rows(self.product, a, b, bias, out)
        b = weight_of(b)
        if self.consistency == "fast":
            return product.fast_product(a, b, bias, out)
        if self.sums is not None and ordered.computes(a, b):
            return ordered.product(a, b, bias, out, self.sums)
        return product.product(a, b, bias, out)

    def gradient_product(self, a: Operand, b: Operand, out: torch.dtype, into: Tensor | None = None) -> Tensor:
        if self.consistency == "fast" or (self.sums is not None and ordered.computes(a, b)):
            return super().gradient_product(a, b, out, into)
        found = product.gradient_product(a, b, out)
        return found if into is None else into.add_(found)

    def route(
        self, logits: Tensor, count: int, normalize: bool, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return routing.route(logits, count, normalize, given)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._rows.rms_norm(x, weight, eps, residual)

    def rms_norm_backward(self, dy: Tensor, summed: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        return self._rows.rms_norm_backward(dy, summed, weight, rstd)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
        return pointwise.rotary(x, cos, sin, positions, inverse)

    def kv_write(self, store: KVStore, k: Tensor, v: Tensor, layout: Layout) -> None:
        attention.kv_write(store, k, v, layout)

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
        return self._attention.attention(q, store, layout, scale, window, sinks, probabilities)

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
        return self._attention.attention_backward(dout, q, out, lse, store, layout, scale, window)

    def short_convolution(self, x: Tensor, weight: Tensor, store: StateStore | None, layout: Layout) -> Tensor:
        return delta.short_convolution(x, weight, store, layout)

    def short_convolution_backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        return delta.short_convolution_backward(dy, x, weight, layout)

    def delta_rule(
        self, qkv: Tensor, gates: Tensor, heads: DeltaHeads, store: StateStore | None, layout: Layout
    ) -> Tensor:
        return delta.delta_rule(qkv, gates, heads, store, layout)

    def delta_rule_backward(
        self, dout: Tensor, qkv: Tensor, gates: Tensor, heads: DeltaHeads, layout: Layout
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return delta.delta_rule_backward(dout, qkv, gates, heads, layout)

    def gate_mul(self, activation: Activation, gate_up: Tensor) -> Tensor:
        return self._rows.gate_mul(activation, gate_up)

    def gate_mul_backward(self, activation: Activation, dh: Tensor, gate_up: Tensor) -> Tensor:
        return self._rows.gate_mul_backward(activation, dh, gate_up)

    def round_stochastically(self, x: Tensor, seed: int, step: int, first: int) -> Tensor:
        return stochastic.round_stochastically(x, seed, step, first)

    def token_logprobs(self, logits: Tensor, tokens: Tensor, temperature: Temperature) -> tuple[Tensor, Tensor]:
        return sampling.token_logprobs(logits, tokens, temperature)

    def sample(self, logits: Tensor, keys: Tensor, temperature: Temperature) -> Tensor:
        return sampling.sample(logits, keys, temperature)
