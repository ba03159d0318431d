"""AdamW with moments in 8 bits and a scale for each block of 256, for parameters of 4,096 elements and more in whole
blocks.

Dettmers et al. 2022, arXiv 2110.02861, section 2: a block is divided by its largest magnitude and each element rounded
to the nearest of 256 values, ties upwards. The values are the dynamic map of Dettmers 2016, arXiv 1511.04561: seven
decades, the middles of equal parts of each, twice as many parts in every larger one; for the first moment with a sign;
with 0 and 1. They are rounded once from exact fractions, so no library and no processor decides their bits.

The masters are updated in float32 (`optim_masters.py`) from the moments as they are before they are rounded. Blocks do
not see each other, so the bits are the same at any number of ranks. Left out: stochastic rounding of moments, 4 bits.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from isobit.distributed.shards import MOMENT_BLOCK
from isobit.rl.optim_masters import AT_ONCE, UpdatedMasters
from isobit.rl.schedule import OptimizerSettings

_BLOCK, _LEAST = MOMENT_BLOCK, 4096
_DECADES = 7
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # name to whether it is signed


def quantizable(shape: Sequence[int]) -> bool:
    """Whether the moments of a parameter of this shape are kept in 8 bits."""
    count = math.prod(shape)
    return count >= _LEAST and count % _BLOCK == 0


def code_book(signed: bool) -> list[Fraction]:
    """The 256 values in ascending order."""
    found = [Fraction(0), Fraction(1)]
    for decade in range(_DECADES):
        parts = 2**decade * (1 if signed else 2)
        size = Fraction(10) ** (decade - _DECADES + 1)
        middles = [size * (1 + 9 * Fraction(2 * part + 1, 2 * parts)) / 10 for part in range(parts)]
        found += [*middles, *(-middle for middle in middles)] if signed else middles
    return sorted(found)


@cache
def _tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """(values [256], the middles between neighbours [255]), float32."""
    values = code_book(signed)
    middles = [(low + high) / 2 for low, high in pairwise(values)]

    def rounded(given: list[Fraction]) -> Tensor:
        return torch.tensor([float(value) for value in given], dtype=torch.float32, device=device)

    return rounded(values), rounded(middles)


@dataclass(frozen=True, eq=False)
class Moment:
    """`codes` uint8 of a parameter's shape, and `scale` [blocks] float32: element i is value[code] · scale of block
    i // 256."""

    codes: Tensor
    scale: Tensor
    signed: bool

    @staticmethod
    def zeros(like: Tensor, signed: bool) -> "Moment":
        """All 0, where `like` is: every scale is 0."""
        scale = torch.zeros(like.numel() // _BLOCK, device=like.device)
        return Moment(torch.zeros(like.shape, dtype=torch.uint8, device=like.device), scale, signed)

    def read(self, part: slice) -> Tensor:
        """Elements of whole blocks, [elements] float32."""
        values, _ = _tables(self.signed, self.codes.device)
        found = values[self.codes.view(-1)[part].int()].view(-1, _BLOCK)
        return found.mul_(self._scales(part).unsqueeze(1)).view(-1)

    def write(self, part: slice, values: Tensor) -> None:
        """Quantize elements of whole blocks, [elements] float32."""
        blocks = values.view(-1, _BLOCK)
        scale = blocks.abs().amax(1).clamp_min_(torch.finfo(torch.float32).tiny)
        _, middles = _tables(self.signed, self.codes.device)
        codes = torch.bucketize(blocks / scale.unsqueeze(1), middles, out_int32=True, right=True)
        self.codes.view(-1)[part] = codes.view(-1).to(torch.uint8)
        self._scales(part).copy_(scale)

    def _scales(self, part: slice) -> Tensor:
        return self.scale[part.start // _BLOCK : part.stop // _BLOCK]


class EightBitState:
    """First and second moments of some parameters, and their steps."""

    def __init__(self, masters: UpdatedMasters, names: Sequence[str], settings: OptimizerSettings) -> None:
        self.parameters = {name: masters.parameters[name] for name in names}
        self._masters, self.settings = masters, settings
        self._moments: dict[str, dict[str, Moment]] = {}
        self.steps: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.parameters

    @property
    def nbytes(self) -> int:
        """Bytes of both moments of all parameters: codes and scales."""
        return sum(2 * (p.numel() + 4 * (p.numel() // _BLOCK)) for p in self.parameters.values())

    def update(self, names: Sequence[str], rate: float, weight_decay: float) -> None:
        """One AdamW step of these parameters from their gradients, each of which is freed when it was applied."""
        beta1, beta2 = self.settings.betas
        for name in names:
            parameter = self.parameters[name]
            moments = self._moments.setdefault(name, self._fresh(parameter))
            step = self.steps[name] = self.steps.get(name, 0) + 1
            for part in _parts(parameter.numel()):
                gradient, master = self._masters.gradient(name, part), self._masters.wide(name, part)
                first = moments["exp_avg"].read(part).lerp_(gradient, 1 - beta1)
                second = moments["exp_avg_sq"].read(part).lerp_(gradient.square(), 1 - beta2)
                moments["exp_avg"].write(part, first)
                moments["exp_avg_sq"].write(part, second)
                master.mul_(1 - rate * weight_decay)
                denominator = second.sqrt_().div_(math.sqrt(1 - beta2**step)).add_(self.settings.eps)
                master.addcdiv_(first, denominator, value=-rate / (1 - beta1**step))
                self._masters.put(name, part, master, step)
            self._masters.free_gradients([name])

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

    def _fresh(self, parameter: Tensor) -> dict[str, Moment]:
        return {key: Moment.zeros(parameter, signed) for key, signed in _MOMENTS.items()}


def _parts(count: int) -> Iterator[slice]:
    """Elements in parts of whole blocks."""
    return (slice(first, min(first + AT_ONCE, count)) for first in range(0, count, AT_ONCE))
