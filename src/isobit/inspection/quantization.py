"""The effect of quantization on every tensor of a model: noise, clamped and flushed elements, outlier channels.

Weights are measured as they are; activations, keys and values during a forward over given sequences. A tensor's figures
cover all its elements in all forwards. Left out: gradients (`quant/*` metrics of a run).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.kernels import Composed, KVStore, Layout, Ops
from isobit.model import Model
from isobit.model.names import layer_and_role
from isobit.precision import QTensor, QuantSpec, QuantTotals


@dataclass(frozen=True)
class Health:
    """One tensor under its quantization.

    `snr_db`: 20 · log10(‖x‖ / ‖x - q‖). `saturated`, `flushed`: fractions of its elements clamped by their scale, and
    not zero but turned to zero. `outliers`: the largest magnitude of a channel (column) over that of the median one.
    `amax`: the largest magnitude.
    """

    layer: int
    role: str
    snr_db: float
    saturated: float
    flushed: float
    outliers: float
    amax: float


class _Sums:
    """What `Health` is computed from, summed over forwards."""

    def __init__(self) -> None:
        self.totals = QuantTotals()
        self.channels: Tensor | None = None

    def add(self, x: Tensor, q: QTensor) -> None:
        if not x.numel():
            return
        self.totals.add(x, q)
        peaks = x.detach().float().abs().amax(0)
        self.channels = peaks if self.channels is None else torch.maximum(self.channels, peaks)

    def health(self, layer: int, role: str) -> Health:
        assert self.channels is not None
        median = float(self.channels.median())
        peak = float(self.channels.max())
        found = self.totals.stats()
        snr = -20 * math.log10(max(found.relative_error, 1e-16))  # where there is no noise at all, that of float64
        outliers = peak / median if median > 0 else float(peak > 0) * 1e9
        return Health(layer, role, snr, found.saturated, found.flushed, outliers, peak)


class _Watching:
    """Operators that look at what is quantized on its way, and otherwise are those that they wrap."""

    # in turn, so that this sees what they quantize and store
    rms_norm_quantized = Composed.rms_norm_quantized
    silu_mul_quantized = Composed.silu_mul_quantized
    attention_inputs = Composed.attention_inputs

    def __init__(self, ops: Ops, sums: dict[tuple[int, str], _Sums], num_layers: int) -> None:
        self._ops, self._sums = ops, sums
        self._written, self._num_layers = 0, num_layers

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)

    def quantize(self, x: Tensor, spec: QuantSpec, name: str = "tensor") -> QTensor:
        quantized = self._ops.quantize(x, spec, name)
        if name.startswith("layers."):
            layer, role = layer_and_role(name)
            self._sums.setdefault((layer, f"{role} input"), _Sums()).add(x, quantized)
        return quantized

    def kv_write(self, store: KVStore, k: Tensor, v: Tensor, layout: Layout) -> None:
        self._ops.kv_write(store, k, v, layout)
        layer = self._written % self._num_layers  # every forward writes each layer once, in order
        self._written += 1
        if store.kv is None:
            return
        for role, x, scale in (("keys", k, store.k_scale), ("values", v, store.v_scale)):
            flat = x.reshape(-1, x.shape[-1])
            assert scale is not None
            data = (store.k if role == "keys" else store.v)[layout.slots].view(store.kv.format.dtype)
            scales = scale[:1, :1] if store.calibrated else scale[layout.slots].reshape(-1, 1)
            self._sums.setdefault((layer, role), _Sums()).add(flat, QTensor(data.view(flat.shape), scales, store.kv))


def weight_health(model: Model) -> list[Health]:
    """Of every quantized weight of the rollout, by layer; the experts of a layer together."""
    sums: dict[tuple[int, str], _Sums] = {}
    for weight in model.transformer.rollout_weights():
        if isinstance(weight.working, QTensor):
            sums.setdefault(layer_and_role(weight.name), _Sums()).add(weight.master, weight.working)
    return [found.health(*key) for key, found in sorted(sums.items())]


@torch.no_grad()
def activation_health(model: Model, sequences: Sequence[Sequence[int]]) -> list[Health]:
    """Of the inputs of every quantized product, and of keys and values, in the learner's forward."""
    transformer, sums = model.transformer, dict[tuple[int, str], _Sums]()
    inner = transformer.ops["learner"]
    transformer.ops["learner"] = _Watching(inner, sums, model.config.num_layers)  # type: ignore[assignment]
    try:
        model.logprobs(sequences)
    finally:
        transformer.ops["learner"] = inner
    return [found.health(*key) for key, found in sorted(sums.items())]
