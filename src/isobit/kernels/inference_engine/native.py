"""The operators of a second engine in C++: those of `kernels/inference_engine/definition.py`, which
define them.

FP8 products run in the learner's order over the columns in reverse, so they cost what the learner's
do on every instruction set, and their sums are others; blocks of 128 columns stay together, and
scales that are powers of two are folded into the codes. BF16 products and attention are those of
`fast`, with probabilities rounded to BF16. The norm and the gate are `inference_engine.cpp`'s.
Elementwise operators have the bits of the definition, sums differ by their order alone
(`tests/kernels/test_inference_engine.py`). Compute in float32, and formats whose products that
order does not have, are left to the definition."""

import torch
from torch import Tensor

from isobit.kernels.backends.composed import Composed
from isobit.kernels.backends.native import NativeOps
from isobit.kernels.inference_engine import definition
from isobit.kernels.inference_engine.definition import InferenceEngineOps
from isobit.kernels.matrices import Operand, Packed, Prepared, weight_of
from isobit.kernels.native.interface import ACTIVATIONS, PLAIN
from isobit.kernels.ops import Activation, Temperature
from isobit.kernels.product.ordered import computes
from isobit.kernels.product.ordered_native import OrderedProducts, is_packed
from isobit.options.consistency import TDP32, order
from isobit.precision import BLOCK, QTensor

_BF16 = torch.bfloat16


class NativeInferenceEngineOps(NativeOps):
    """`InferenceEngineOps` next to a native learner."""

    backend = "separate"
    rounds_probabilities, norms_heads = True, False
    rms_norm_quantized = Composed.rms_norm_quantized
    gate_mul_quantized = Composed.gate_mul_quantized
    token_logprobs = staticmethod(definition.token_logprobs)

    def __init__(self, learner: NativeOps) -> None:
        engine = InferenceEngineOps(learner)
        self._start(engine, engine)
        self._products = OrderedProducts(order(learner.consistency) or TDP32)

    def prepare(self, weight: Operand, into: Prepared | None = None) -> Prepared:
        if isinstance(weight, Tensor):
            return super().prepare(weight, into)
        if not (is_packed(weight) and _turns(weight)):
            return weight
        kept = into if isinstance(into, Packed) else None
        packed = self._products.prepare(_turned(weight), kept)
        return kept or Packed(weight, packed.panels)

    def product(
        self, a: Operand, b: Prepared, bias: Tensor | None = None, out: torch.dtype = _BF16
    ) -> Tensor:
        weight = weight_of(b)
        if isinstance(a, QTensor) and isinstance(weight, QTensor):
            if computes(a, weight) and _turns(a) and _turns(weight):
                packed = (
                    Packed(_with_turned_scale(weight), b.panels)
                    if isinstance(b, Packed)
                    else _turned(weight)
                )
                return self._products.product(_turned(a), packed, bias, out)
        elif (
            isinstance(a, Tensor)
            and isinstance(weight, Tensor)
            and a.dtype == weight.dtype == _BF16
        ):
            return super().product(a, b, bias, out)
        return definition.product(a, b, bias, out)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if (
            any(t is not None and t.dtype != _BF16 for t in (x, residual))
            or weight.dtype not in PLAIN
        ):
            return definition.rms_norm(x, weight, eps, residual)
        x, weight = x.contiguous(), weight.contiguous()
        residual = None if residual is None else residual.contiguous()
        y, rstd = torch.empty_like(x), torch.empty(x.shape[0])
        summed = x if residual is None else torch.empty_like(x)
        self.lib.isobit_separate_rms_norm(
            PLAIN[weight.dtype], x.data_ptr(), None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            *x.shape, eps, y.data_ptr(), summed.data_ptr(), rstd.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return y, summed, rstd

    def gate_mul(self, activation: Activation, gate_up: Tensor) -> Tensor:
        if gate_up.dtype != _BF16:
            return definition.gate_mul(activation, gate_up)
        gate_up = gate_up.contiguous()
        out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=_BF16)
        self.lib.isobit_separate_gate_mul(
            ACTIVATIONS[activation],
            gate_up.data_ptr(),
            *out.shape,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def head_sample(
        self,
        hidden: Tensor,
        weight: Prepared,
        keys: Tensor,
        temperature: Temperature,
        source: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        logits = self.product(hidden, weight, None, torch.float32)
        return definition.drawn(
            self, logits if source is None else logits.index_select(0, source), keys, temperature
        )


def _turns(x: QTensor) -> bool:
    """Return whether columns that share a scale stay together when the columns are turned round."""
    columns, block = x.shape[1], x.block[1]
    return block in (BLOCK, columns) or (BLOCK % block == 0 and columns % block == 0)


def _turned(x: QTensor) -> QTensor:
    """Return the columns in reverse: first all whole blocks of 128, then what is left."""
    codes = _reverse(x.data.view(torch.uint8), x.shape[1] // BLOCK * BLOCK)
    return QTensor(codes.view(x.data.dtype), _with_turned_scale(x).scale, x.spec)


def _with_turned_scale(x: QTensor) -> QTensor:
    """Return the same codes, and the scales of turned columns."""
    if x.block[1] == x.shape[1]:
        return x
    return QTensor(x.data, _reverse(x.scale, x.shape[1] // BLOCK * (BLOCK // x.block[1])), x.spec)


def _reverse(x: Tensor, first: int) -> Tensor:
    """Return the `first` columns in reverse, then the others in reverse."""
    if first in (0, x.shape[1]):
        return x.flip(1)
    return torch.cat((x[:, :first].flip(1), x[:, first:].flip(1)), 1)
