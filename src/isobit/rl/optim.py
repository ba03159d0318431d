"""AdamW on FP32 masters, learning-rate schedules, and clipping by the global norm.

Loshchilov and Hutter 2019, arXiv 1711.05101. Weight decay touches matrices only: no norms, no biases. The state is a
flat mapping of tensors, so that safetensors can hold it. Left out: 8-bit state.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.errors import IsobitError

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW's and the schedule's numbers; `total_steps` counts calls of the schedule."""

    learning_rate: float = 1e-6
    schedule: str = "constant"
    warmup_steps: int = 0
    final_fraction: float = 0.0
    total_steps: int = 1
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_grad_norm: float = 1.0


def learning_rate(step: int, settings: OptimizerSettings) -> float:
    """The rate of step 0, 1, ...: linear warmup, then constant, linear or cosine decay.

    Warmup reaches the peak in its last step; the decay begins at the peak and would reach `final_fraction` of it at
    step `total_steps`, one after the last.
    """
    peak, warmup = settings.learning_rate, settings.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if settings.schedule == "constant":
        return peak
    progress = min((step - warmup) / max(settings.total_steps - warmup, 1), 1.0)
    shape = 1 - progress if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (settings.final_fraction + (1 - settings.final_fraction) * shape)


class Optimizer:
    """AdamW over named FP32 parameters."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], settings: OptimizerSettings) -> None:
        self.parameters = dict(parameters)
        self.settings = settings
        decayed = [p for p in self.parameters.values() if p.ndim > 1]
        others = [p for p in self.parameters.values() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(
            groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=True
        )

    def zero_grad(self) -> None:
        self._adam.zero_grad(set_to_none=True)

    def gradient_norm(self) -> float:
        """The global L2 norm, before clipping; inf if any gradient is not finite."""
        squares = [float(p.grad.double().square().sum()) for p in self.parameters.values() if p.grad is not None]
        total = math.fsum(squares) if all(math.isfinite(s) for s in squares) else math.inf
        return math.sqrt(total)

    @torch.no_grad()
    def step(self, rate: float, norm: float) -> None:
        """One update at this rate, with gradients scaled so that their norm `norm` is at most `max_grad_norm`."""
        if norm > self.settings.max_grad_norm:
            factor = self.settings.max_grad_norm / norm
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts: `NAME.exp_avg`, `NAME.exp_avg_sq`, `NAME.step`; empty before the first update."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            for key, value in self._adam.state.get(parameter, {}).items():
                tensors[f"{name}.{key}"] = value.detach().clone()
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state`, bit for bit. Raises IsobitError if the tensors are not of these parameters."""
        for name, parameter in self.parameters.items():
            given = {k: tensors[f"{name}.{k}"] for k in ("step", *_MOMENTS) if f"{name}.{k}" in tensors}
            if not given:
                self._adam.state.pop(parameter, None)
                continue
            if len(given) != 3 or any(given[key].shape != parameter.shape for key in _MOMENTS):
                raise IsobitError(f"optimizer state of {name} does not fit the model")
            self._adam.state[parameter] = {key: value.clone() for key, value in given.items()}
        unknown = {key.rpartition(".")[0] for key in tensors} - set(self.parameters)
        if unknown:
            raise IsobitError(f"optimizer state has {min(unknown)!r}, which the model does not have")
