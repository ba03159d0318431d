"""The error of the learner's FP8 in activations and output gradients of a step: watched every few
steps, by tensor.

The operators that are watched return what they would return
(`tests/training/test_quantization.py`): the figures are computed in addition, from the tensor that
was quantized and its codes. Left out: weights (`statistics.py`), and WGrad's operands of experts,
which one operator quantizes and multiplies.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from isobit.kernels import Activation, Composed, Operand, Ops, Watching
from isobit.model import Model
from isobit.model.hub.names import layer_and_role
from isobit.precision import QTensor, QuantSpec, QuantTotals
from isobit.training.measuring.statistics import gathered, listed_by_tensor

_GRADIENT = "output gradient of "


class LearnerTotals:
    """The quantization totals of one step's forwards and backwards; empty until something was
    quantized while it was `watching`."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._masters = {parameter.data_ptr() for parameter in model.parameters()}
        self._parts: dict[tuple[int, str], QuantTotals] = {}

    @contextmanager
    def watching(self, due: bool) -> Iterator[None]:
        """Watch the learner's operators inside this context, if the step is `due`."""
        if not due:
            yield
            return
        with self._model.transformer.watched(lambda ops, layer: _Quantizing(ops, self)):
            yield
        self._parts = gathered(self._parts, self._model.ranks)

    @torch.no_grad()
    def see(self, name: str, x: Operand, quantized: QTensor, products: str = "") -> None:
        """Add the error of a quantized matrix; `name`: the quantizer's name for it; `products`: the
        product that the codes are for, if only one."""
        kind = "gradient" if name.startswith(_GRADIENT) else "input"
        name = name.removeprefix(_GRADIENT)
        if not name.startswith("layers.") or not quantized.data.numel():
            return  # queries
        if isinstance(x, Tensor) and x.data_ptr() in self._masters:
            return  # weights, whose sync comes between optimizer steps
        layer, role = layer_and_role(name)
        key = (layer, f"{role} {kind}{products}")
        self._parts.setdefault(key, QuantTotals()).add(self._model.ops.error_sums(x, quantized))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all activations together, then those of all output gradients."""
        whole: dict[str, QuantTotals] = {}
        for (_, role), totals in self._parts.items():
            kind = "gradient" if " gradient" in role else "activation"
            whole.setdefault(kind, QuantTotals()).merge(totals)
        stats_by_kind = {kind: totals.stats() for kind, totals in whole.items()}
        return {
            f"quant/{kind}_{name}": value
            for kind, stats in stats_by_kind.items()
            for name, value in (
                ("flushed_fraction", stats.flushed),
                ("saturated_fraction", stats.saturated),
                ("relative_error", stats.relative_error),
            )
        }

    def by_tensor(self) -> dict[str, dict[str, list[float | None]]]:
        """Return the figures as `WeightTotals.by_tensor`, for inputs and gradients (`qkv input`,
        `qkv gradient`), with a separate entry where codes serve WGrad alone."""
        return listed_by_tensor(self._parts, self._model.config.num_layers)


class _Quantizing(Watching):
    """Operators that add the error of every matrix they quantize to the totals."""

    quantize_both_ways = Composed.quantize_both_ways
    gate_mul_backward_quantized = Composed.gate_mul_backward_quantized
    attention_quantized = Composed.attention_quantized

    def __init__(self, ops: Ops, totals: LearnerTotals) -> None:
        super().__init__(ops)
        self._totals = totals

    def quantize(self, x: Tensor, spec: QuantSpec, name: str = "tensor") -> QTensor:
        quantized = self._ops.quantize(x, spec, name)
        self._totals.see(name, x, quantized)
        return quantized

    def quantize_along_tokens(self, x: Operand, spec: QuantSpec, name: str) -> QTensor:
        quantized = self._ops.quantize_along_tokens(x, spec, name)
        self._totals.see(name, x, quantized.transpose(), " (WGrad)")
        return quantized

    def rms_norm_quantized(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None,
        spec: QuantSpec,
        name: str,
    ) -> tuple[QTensor, Tensor, Tensor]:
        normed = self._ops.rms_norm_quantized(x, weight, eps, residual, spec, name)
        self._totals.see(name, self._ops.rms_norm(x, weight, eps, residual)[0], normed[0])
        return normed

    def gate_mul_quantized(
        self, activation: Activation, gate_up: Tensor, spec: QuantSpec, name: str
    ) -> QTensor:
        quantized = self._ops.gate_mul_quantized(activation, gate_up, spec, name)
        self._totals.see(name, self._ops.gate_mul(activation, gate_up), quantized)
        return quantized
