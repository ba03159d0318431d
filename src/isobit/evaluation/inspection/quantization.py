"""The effect of quantization on every tensor of a model: noise, clamped and flushed elements,
outlier channels.

Weights are measured as they are; activations, keys and values during a forward over given
sequences. A tensor's figures cover all its elements in all forwards. Left out: gradients (`quant/*`
metrics of a run).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.kernels import Composed, KVStore, Layout, Ops, Watching
from isobit.model import Model
from isobit.model.hub.names import layer_and_role
from isobit.precision import QTensor, QuantSpec, QuantTotals, error_sums


@dataclass(frozen=True)
class Health:
    """The statistics of a tensor under its quantization.

    `snr_db`: 20 · log10(‖x‖ / ‖x - q‖). `saturated`, `flushed`: fractions of its elements clamped
    by their scale, and not zero but turned to zero. `outliers`: the largest magnitude of a channel
    (column) over that of the median one. `amax`: the largest magnitude.
    """

    layer: int
    role: str
    snr_db: float
    saturated: float
    flushed: float
    outliers: float
    amax: float


class _Sums:
    """The sums from which `Health` is computed, over all forwards."""

    def __init__(self) -> None:
        self.totals = QuantTotals()
        self.channels: Tensor | None = None

    def add(self, x: Tensor, q: QTensor) -> None:
        if not x.numel():
            return
        self.totals.add(error_sums(x, q))
        peaks = x.detach().float().abs().amax(0)
        self.channels = peaks if self.channels is None else torch.maximum(self.channels, peaks)

    def health(self, layer: int, role: str) -> Health:
        assert self.channels is not None
        median = float(self.channels.median())
        peak = float(self.channels.max())
        stats = self.totals.stats()
        snr = -20 * math.log10(
            max(stats.relative_error, 1e-16)
        )  # without any noise, that of float64
        outliers = peak / median if median > 0 else float(peak > 0) * 1e9
        return Health(layer, role, snr, stats.saturated, stats.flushed, outliers, peak)


class _Measuring(Watching):
    """Measures what a layer quantizes and stores. Fused operators run as their parts, so that their
    inputs are seen."""

    rms_norm_quantized = Composed.rms_norm_quantized
    gate_mul_quantized = Composed.gate_mul_quantized
    quantize_both_ways = Composed.quantize_both_ways
    gate_mul_backward_quantized = Composed.gate_mul_backward_quantized
    attention_quantized = Composed.attention_quantized
    attention_inputs = Composed.attention_inputs

    def __init__(self, ops: Ops, sums: dict[tuple[int, str], _Sums], layer: int) -> None:
        super().__init__(ops)
        self._sums, self._layer = sums, layer

    def quantize(self, x: Tensor, spec: QuantSpec, name: str = "tensor") -> QTensor:
        quantized = self._ops.quantize(x, spec, name)
        if name.startswith("layers."):  # queries are not
            role = layer_and_role(name)[1]
            self._sums.setdefault((self._layer, f"{role} input"), _Sums()).add(x, quantized)
        return quantized

    def kv_write(self, store: KVStore, k: Tensor, v: Tensor, layout: Layout) -> None:
        self._ops.kv_write(store, k, v, layout)
        if store.kv is None:
            return
        for role, x, scale in (("keys", k, store.k_scale), ("values", v, store.v_scale)):
            flat = x.reshape(-1, x.shape[-1])
            assert scale is not None
            data = (store.k if role == "keys" else store.v)[layout.slots].view(
                store.kv.format.dtype
            )
            scales = scale[:1, :1] if store.calibrated else scale[layout.slots].reshape(-1, 1)
            stored = QTensor(data.view(flat.shape), scales, store.kv)
            self._sums.setdefault((self._layer, role), _Sums()).add(flat, stored)


def weight_health(model: Model) -> list[Health]:
    """Return the health of every quantized weight of the rollout, by layer; the experts of a layer
    together."""
    sums: dict[tuple[int, str], _Sums] = {}
    masters = model.named_parameters()
    for weight in model.transformer.rollout_weights():
        if isinstance(weight.working, QTensor):
            sums.setdefault(layer_and_role(weight.name), _Sums()).add(
                masters[weight.name], weight.working
            )
    return [tensor_sums.health(*key) for key, tensor_sums in sorted(sums.items())]


@torch.no_grad()
def activation_health(model: Model, sequences: Sequence[Sequence[int]]) -> list[Health]:
    """Return the health of the inputs of quantized products, keys and values in the learner's
    forward."""
    sums: dict[tuple[int, str], _Sums] = {}

    def watch(ops: Ops, layer: int | None) -> object:
        return ops if layer is None else _Measuring(ops, sums, layer)

    with model.transformer.watched(watch):
        model.logprobs(sequences)
    return [tensor_sums.health(*key) for key, tensor_sums in sorted(sums.items())]
