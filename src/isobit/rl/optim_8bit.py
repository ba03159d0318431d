"""AdamW with moments in 8 bits: torchao's quantized state, with isobit's update.

Blocks of 256 with an FP32 scale and a dynamic code book (Dettmers et al. 2022, arXiv 2110.02861), for parameters of
4,096 elements and more in whole blocks; the masters stay FP32, and the update is computed in FP32 from the moments as
they are before they are rounded. torchao's own step is compiled, which costs a minute at the start; this one is not,
and repeats its bits. Left out: stochastic rounding, 4-bit and FP8 moments.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.distributed.shards import MOMENT_BLOCK
from isobit.errors import IsobitError
from isobit.rl.schedule import OptimizerSettings

_BLOCK, _LEAST = MOMENT_BLOCK, 4096
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # name to whether it is signed


def quantizable(shape: Sequence[int]) -> bool:
    """Whether the moments of a parameter of this shape are kept in 8 bits."""
    count = math.prod(shape)
    return count >= _LEAST and count % _BLOCK == 0


class EightBitState:
    """First and second moments of some parameters, and their steps. Raises IsobitError where torchao is missing."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], settings: OptimizerSettings) -> None:
        self.parameters, self.settings = dict(parameters), settings
        self._zeros = _zeros_of_torchao()
        self._moments: dict[str, dict[str, Any]] = {}
        self.steps: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.parameters

    @property
    def nbytes(self) -> int:
        """Bytes of both moments of all parameters: codes and scales."""
        return sum(2 * (p.numel() + 4 * (p.numel() // _BLOCK)) for p in self.parameters.values())

    def update(self, names: Sequence[str], rate: float, weight_decay: float) -> None:
        """One AdamW step of these parameters from their gradients."""
        beta1, beta2 = self.settings.betas
        for name in names:
            parameter = self.parameters[name]
            assert parameter.grad is not None
            moments = self._moments.setdefault(name, self._fresh(parameter))
            step = self.steps[name] = self.steps.get(name, 0) + 1
            first = moments["exp_avg"].dequantize().lerp_(parameter.grad, 1 - beta1)
            second = moments["exp_avg_sq"].dequantize().lerp_(parameter.grad.square(), 1 - beta2)
            moments["exp_avg"].copy_(first)
            moments["exp_avg_sq"].copy_(second)
            parameter.mul_(1 - rate * weight_decay)
            denominator = second.sqrt_().div_(math.sqrt(1 - beta2**step)).add_(self.settings.eps)
            parameter.addcdiv_(first, denominator, value=-rate / (1 - beta1**step))

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """By parameter: `exp_avg.codes` uint8, `exp_avg.scale` float32, and the same of exp_avg_sq."""
        return {
            name: {f"{key}.{part}": getattr(m, part) for key, m in moments.items() for part in ("codes", "scale")}
            for name, moments in self._moments.items()
        }

    def load_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load `tensors`, and `step` with them; other parameters begin again."""
        self._moments, self.steps = {}, {}
        for name, given in state.items():
            self._moments[name] = self._fresh(self.parameters[name])
            self.steps[name] = int(given["step"])
            for key, moment in self._moments[name].items():
                moment.codes.copy_(given[f"{key}.codes"])
                moment.scale.copy_(given[f"{key}.scale"])

    def _fresh(self, parameter: Tensor) -> dict[str, Any]:
        return {key: self._zeros(parameter.shape, signed, _BLOCK, parameter.device) for key, signed in _MOMENTS.items()}


def _zeros_of_torchao() -> Any:
    """torchao's constructor of a quantized moment; imported here, since it takes a second and is optional."""
    for name in ("torchao", "torch.utils._pytree"):  # which report what they could not load, and what they deprecate
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError:
        raise IsobitError("optimizer.state: 8bit needs torchao: pip install 'isobit[optim]'") from None
    return OptimState8bit.zeros
