"""A BF16 shadow of the policy ratio: how much of π_θ/π_old is the noise of a low-precision flow.

After the updates of a batch the ratio is computed twice for every token: under the learner's flow, and in BF16 from the
same masters before and after. Noise matters by the sign of the advantage: it pushes tokens of negative advantage
below the lower bound of the clip, and tokens of positive advantage above the upper one, where BF16 would not clip, and
their gradient is lost. `calibrated_bounds` moves the bounds so that as many tokens are clipped as in BF16.

The effect on FP8 runs was reported in September 2026; the rule here is isobit's own. Pure functions of log-ratios.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def shadow_metrics(
    low_precision: Tensor, bf16: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> dict[str, float]:
    """Of [tokens] float32: log-ratios under the flow and in BF16, and advantages. A side without tokens is left out."""
    metrics: dict[str, float] = {}
    for name, side in (("positive", advantages > 0), ("negative", advantages < 0)):
        if not bool(side.any()):
            continue
        noisy, clean = low_precision[side].double(), bf16[side].double()
        metrics[f"shadow/ratio_error_{name}"] = float((noisy - clean).abs().mean())
        metrics[f"shadow/ratio_bias_{name}"] = float((noisy - clean).mean())
        clipped, would_be = (_outside(ratio, name, clip_low, clip_high) for ratio in (noisy, clean))
        metrics[f"shadow/clipped_by_noise_{name}"] = float((clipped & ~would_be).double().mean())
        metrics[f"shadow/clipped_in_bf16_{name}"] = float(would_be.double().mean())
    return metrics


def calibrated_bounds(
    low_precision: Tensor, bf16: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[float, float]:
    """(clip_low, clip_high) under which the flow clips the fraction that BF16 clips under the given ones.

    Each is never tighter than given, and a side without tokens keeps its own.
    """
    low, high = clip_low, clip_high
    negative, positive = advantages < 0, advantages > 0
    if bool(negative.any()):
        fraction = _outside(bf16[negative].double(), "negative", clip_low, clip_high).double().mean()
        low = max(low, 1 - float(torch.exp(torch.quantile(low_precision[negative].double(), float(fraction)))))
    if bool(positive.any()):
        fraction = _outside(bf16[positive].double(), "positive", clip_low, clip_high).double().mean()
        high = max(high, float(torch.exp(torch.quantile(low_precision[positive].double(), 1 - float(fraction)))) - 1)
    return low, high


def log_ratios(new: Sequence[Tensor], old: Sequence[Tensor]) -> Tensor:
    """Of the tokens of all sequences, one after the other."""
    return torch.cat(list(new)) - torch.cat(list(old))


def _outside(log_ratio: Tensor, side: str, clip_low: float, clip_high: float) -> Tensor:
    ratio = torch.exp(log_ratio)
    return ratio > 1 + clip_high if side == "positive" else ratio < 1 - clip_low
