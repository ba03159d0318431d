"""Static scales of an FP8 KV cache: one for K and one for V in each layer, and one for the queries
if these are calibrated too. Includes the recorder of the amax from which they are computed.

NeMo RL's rule: amax of K, V and Q after QK-norm and rotary embedding, per batch and layer; a
percentile over the batches; times a margin; over 448. Left out: the forwards that are recorded
(`engine/calibration.py`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobit.errors import IsobitError
from isobit.kernels import Ops, Watching
from isobit.precision import E4M3, Calibration


@dataclass(frozen=True, eq=False)
class KVScales:
    """The calibrated scales: `values` [layers, 2 or 3] float32, on the CPU, of K, of V, and of Q if
    queries are calibrated; `version` of the weights that they were computed with."""

    values: Tensor
    version: int

    def drift(self, before: "KVScales | None") -> float:
        """Largest relative change of a scale since `before`."""
        return 0.0 if before is None else float((self.values / before.values - 1).abs().max())


def scales_of(scales: KVScales | None) -> Tensor:
    """Return the values of calibrated scales. Raises IsobitError if there are none."""
    if scales is None:
        raise IsobitError("the KV cache needs calibrated scales: call Engine.calibrate(prompts)")
    return scales.values


class AmaxRecorder:
    """Recorder of the largest magnitudes of K and V, with `queries` of Q, per forward and layer; a
    `Watch`.

    They stay on their device until `amax` reads them, so that no forward waits.
    """

    def __init__(self, num_layers: int, queries: bool = False) -> None:
        self.num_layers, self.sides = num_layers, 3 if queries else 2
        self.batches: list[dict[tuple[int, int], Tensor]] = []

    def __call__(self, ops: Ops, layer: int | None) -> Any:
        """Return the recording operators of a layer; the call for those outside the layers comes
        first and begins a batch."""
        if layer is None:
            self.batches.append({})
            return ops
        return _Recording(ops, self.batches[-1], layer, self.sides)

    def amax(self, percentile: float) -> Tensor:
        """Return [layers, 2 or 3] on the CPU: the percentile over the forwards seen, interpolated
        linearly."""
        seen = torch.zeros(len(self.batches), self.num_layers, self.sides)
        places = [(batch, *place) for batch, found in enumerate(self.batches) for place in found]
        if places:
            found = torch.stack([peak for batch in self.batches for peak in batch.values()]).cpu()
            seen[torch.tensor(places).unbind(1)] = found
        return torch.quantile(seen, percentile / 100.0, dim=0)


class _Recording(Watching):
    def __init__(
        self, ops: Ops, found: dict[tuple[int, int], Tensor], layer: int, sides: int
    ) -> None:
        super().__init__(ops)
        self._found, self._layer, self._sides = found, layer, sides

    def attention_inputs(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._ops.attention_inputs(*given)
        for side, tensor in enumerate((k, v, q)[: self._sides]):
            if tensor.numel():
                self._found[self._layer, side] = tensor.detach().abs().max().float()
        return q, k, v


def scales_from(amax: Tensor, calibration: Calibration, version: int) -> KVScales:
    """Return amax · margin / 448, or 1 where only zeros were seen."""
    values = amax * torch.tensor(calibration.margins[: amax.shape[1]]) / E4M3.max
    return KVScales(torch.where(amax > 0, values, 1.0), version)
