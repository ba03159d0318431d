"""The optimizer's settings, and the learning rate of each step."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its learning rate. The ranges are those that the configuration accepts.

    `learning_rate` > 0: the peak. `schedule`: constant, linear or cosine decay. `warmup_steps` >= 0: linear warmup.
    `final_fraction` in [0, 1]: of the peak, left after `total_steps`. `weight_decay` >= 0: of matrices. `betas`, each
    in [0, 1), and `eps` > 0: AdamW's. `max_grad_norm` > 0: larger gradients are scaled down to it. `state`: fp32 or
    8bit, how the moments are stored. `total_steps` counts calls of `learning_rate`.
    """

    learning_rate: float = 1e-6
    schedule: str = "constant"
    warmup_steps: int = 0
    final_fraction: float = 0.0
    total_steps: int = 1
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    state: str = "fp32"


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
