"""The reference backend: plain PyTorch, the definition of every operator and the oracle of every
other backend."""

from collections.abc import Callable

import torch
from torch import Tensor

from isobit.kernels.attention import definition as attention64
from isobit.kernels.attention import float32 as attention32
from isobit.kernels.backends.composed import Composed
from isobit.kernels.delta import definition as delta
from isobit.kernels.experts import definition as experts
from isobit.kernels.heads import definition as heads
from isobit.kernels.matrices import Operand, Prepared, by_rows, weight_of
from isobit.kernels.norms import definition as norms
from isobit.kernels.norms import float32 as norms32
from isobit.kernels.optim import definition as optim
from isobit.kernels.product import definition as products
from isobit.kernels.product import ordered
from isobit.kernels.sampling import definition as sampling
from isobit.options import consistency as orders
from isobit.precision import PackedFP4, quantize

_SINGLE: dict[str, Callable[..., object]] = {
    "rms_norm": norms32.rms_norm,
    "rms_norm_backward": norms32.rms_norm_backward,
    "gate_mul": norms32.gate_mul,
    "gate_mul_backward": norms32.gate_mul_backward,
    "attention": attention32.attention,
    "attention_backward": attention32.attention_backward,
}
"""The operators that are float32 within a row under `bitwise`, in place of those of the class."""


def order_of(consistency: str) -> str:
    """Return the order of products, and of sums within a row, on a CPU, as a run records it; of a
    resolved consistency."""
    sums = orders.order(consistency)
    if sums is not None:
        return f"{ordered.VERSIONS[sums]}+{norms32.ORDER}"
    return {"exact": "exact", "fast": "libraries"}[consistency]


class ReferenceOps(Composed):
    """`isobit.kernels.ops.Ops` in PyTorch, on the device that it is given: an operator computes
    where its inputs are."""

    backend = "reference"

    def __init__(
        self, consistency: str = "bitwise", why: str = "", device: torch.device | str = "cpu"
    ) -> None:
        self.consistency = orders.resolved(consistency)
        self.sums = orders.order(self.consistency)
        self.order = order_of(self.consistency)
        self.why = why
        self.device = torch.device(device)
        if self.sums is not None:
            vars(self).update(_SINGLE)

    def product(
        self, a: Operand, b: Prepared, bias: Tensor | None = None, out: torch.dtype = torch.bfloat16
    ) -> Tensor:
        if isinstance(b, PackedFP4):
            return by_rows(self.product, a, b, bias, out)
        b = weight_of(b)
        if self.consistency == "fast":
            return products.fast_product(a, b, bias, out)
        if self.sums is not None and ordered.computes(a, b):
            return ordered.product(a, b, bias, out, self.sums)
        return products.product(a, b, bias, out)

    def gradient_product(
        self, a: Operand, b: Operand, out: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        if self.consistency == "fast" or (self.sums is not None and ordered.computes(a, b)):
            return products.added_product(self, a, b, out, into)
        found = products.gradient_product(a, b, out)
        return found if into is None else into.add_(found)

    quantize = staticmethod(quantize)
    route = staticmethod(experts.route)
    rms_norm = staticmethod(norms.rms_norm)
    rms_norm_backward = staticmethod(norms.rms_norm_backward)
    gate_mul = staticmethod(norms.gate_mul)
    gate_mul_backward = staticmethod(norms.gate_mul_backward)
    rotary = staticmethod(heads.rotary)
    kv_write = staticmethod(heads.kv_write)
    attention = staticmethod(attention64.attention)
    attention_backward = staticmethod(attention64.attention_backward)
    short_convolution = staticmethod(delta.short_convolution)
    short_convolution_backward = staticmethod(delta.short_convolution_backward)
    delta_rule = staticmethod(delta.delta_rule)
    delta_rule_backward = staticmethod(delta.delta_rule_backward)
    round_stochastically = staticmethod(optim.round_stochastically)
    token_logprobs = staticmethod(sampling.token_logprobs)
    sample = staticmethod(sampling.sample)
