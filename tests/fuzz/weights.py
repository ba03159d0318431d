"""Weights whose statistics are unkind to sums and to rounding."""

from random import Random

import torch
from torch import Tensor

KINDS = ("normal", "heavy tails", "repeated rows", "few bits", "cancelling", "zero blocks", "mixed")


@torch.no_grad()
def fill(parameters: dict[str, torch.nn.Parameter], kind: str, seed: int) -> None:
    """Write random weights of a kind, of such sizes that hidden states and the distributions have
    some shape.

    normal; heavy tails: over many powers of two; repeated rows: few distinct ones, so that outputs
    are equal; few bits: two significant ones, so that sums lie between two numbers of BF16;
    cancelling: pairs of equal inputs meet large weights of both signs; zero blocks: rows and
    columns without anything; mixed: another kind for every tensor.
    """
    rng, generator = Random(seed), torch.Generator().manual_seed(seed)
    gain, head = rng.choice((1.0, 2.0, 4.0)), rng.choice((1.0, 2.0, 4.0))
    large = 2.0 ** rng.choice((4, 8, 20, 30, 40))
    for name, parameter in parameters.items():
        own = (
            rng.choice([k for k in KINDS if k not in ("mixed", "cancelling")])
            if kind == "mixed"
            else kind
        )
        if parameter.ndim == 1:
            parameter.copy_(_vector(name.endswith("norm"), parameter.numel(), own, generator))
            continue
        # a gate multiplies two inputs, and where their number is odd the third matrix does not
        # cancel: a norm's squares must not overflow
        most = 2.0**16 if any(part in name for part in ("gate", "up", "down", "experts")) else large
        values = _matrix(tuple(parameter.shape), own, min(large, most), generator)
        if name != "embed":
            values *= (head if name == "head" else gain) / parameter.shape[1] ** 0.5
        parameter.copy_(values)


def _vector(norm: bool, size: int, kind: str, generator: torch.Generator) -> Tensor:
    values = 0.2 * torch.randn(size, generator=generator) + (1.0 if norm else 0.0)
    if kind == "cancelling":
        return _in_pairs(values.unsqueeze(1)).squeeze(1)
    return _few_bits(values) if kind == "few bits" else values


def _matrix(shape: tuple[int, int], kind: str, large: float, generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator)
    if kind == "heavy tails":
        values *= torch.exp(1.5 * torch.randn(shape, generator=generator)).clamp(max=50.0)
        values /= values.pow(2).mean().sqrt()
    elif kind == "repeated rows":
        distinct = values[: max(1, shape[0] // 7)]
        values = distinct[torch.randint(distinct.shape[0], (shape[0],), generator=generator)]
    elif kind == "few bits":
        values = _few_bits(values)
    elif kind == "zero blocks":
        rows, columns = (torch.rand(size, generator=generator) < 0.6 for size in shape)
        values = values * rows.unsqueeze(1) * columns
        values[: shape[0] // 3, : shape[1] // 2] = 0
    elif kind == "cancelling":
        values = _in_pairs(values)  # so that the next matrix meets pairs of equal inputs
        half = shape[1] // 2
        peaks = (
            large
            * torch.randn(shape[0], half, generator=generator)
            * (torch.rand(half, generator=generator) < 0.3)
        )
        peaks = _in_pairs(peaks)
        values[:, 0 : 2 * half : 2] += peaks
        values[:, 1 : 2 * half : 2] -= peaks
    return values


def _few_bits(values: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp((mantissa * 4).round() / 4, exponent)


def _in_pairs(values: Tensor) -> Tensor:
    """Every second row equal to the one before it."""
    return values[torch.arange(values.shape[0]) // 2 * 2]
