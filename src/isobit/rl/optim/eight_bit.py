"""AdamW with moments in 8 bits and a scale for each block of 256, for matrices of 4,096 elements
and more in whole blocks, but for the embedding and the head.

Dettmers et al. 2022, arXiv 2110.02861, section 2: a block is divided by its largest magnitude and
each element is one of 256 values. The values are the dynamic map of Dettmers 2016, arXiv
1511.04561: seven decades, the middles of equal parts of each, twice as many parts in every larger
one; for the first moment with a sign; with 0 and 1. They are rounded once from exact fractions, so
no library and no processor decides their bits. Embedding and head stay in 32 bits, as there
(section 2.3): their rows are touched when a token is.

What a block's largest magnitude leaves for small ones decides how far an element may move, since a
step divides by the root of the second moment. Rounded to the nearest value, as torchao and
bitsandbytes do it, a second moment far below its block's largest becomes 0 next to a first moment
that does not, or is held below what its gradients add to it, and the first moment of an element
whose gradient ended stays: steps of 25 to many thousands of the learning rate
(`tests/rl/test_step_sizes.py`). So

- moments are rounded stochastically, to the value below or above with the mean of the moment, by
  bits that repeat (`masters.py`);
- a second moment above 0 is never 0 (Li et al. 2023, arXiv 2309.01507, section 4.1);
- and at least what the first one says: by the inequality of Cauchy and Schwarz no gradients give
  Adam a smaller one, so no step is longer than the longest that AdamW in 32 bits can make
  (`smallest_second`).

The masters are updated in float32 (`masters.py`) from the moments as they are before they are
rounded. Blocks do not see each other, so the bits are the same at any number of ranks. Left out: 4
bits.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from typing import ClassVar

import torch
from torch import Tensor

from isobit.distributed.shards import MOMENT_BLOCK
from isobit.rl.optim.base import STEP, Form
from isobit.rl.optim.masters import UpdatedMasters, parts_of
from isobit.rl.optim.schedule import OptimizerSettings

_BLOCK, _LEAST = MOMENT_BLOCK, 4096
_DECADES = 7
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # name to whether it is signed
_IN_32_BITS = ("embed", "embed_layers", "head")  # masters of `isobit.model.hub.shapes`
Draw = Callable[[Tensor], Tensor]
"""Chances [n] float32 below 1 -> bool [n], true with that chance."""


def quantizable(name: str, shape: Sequence[int]) -> bool:
    """Return whether the moments of a parameter of this name and shape can be kept in 8 bits."""
    count = math.prod(shape)
    return name not in _IN_32_BITS and count >= _LEAST and count % _BLOCK == 0


def code_book(signed: bool) -> list[Fraction]:
    """Return the 256 values in ascending order."""
    codes = [Fraction(0), Fraction(1)]
    for decade in range(_DECADES):
        steps = 2**decade * (1 if signed else 2)
        size = Fraction(10) ** (decade - _DECADES + 1)
        middles = [size * (1 + 9 * Fraction(2 * i + 1, 2 * steps)) / 10 for i in range(steps)]
        codes += [*middles, *(-middle for middle in middles)] if signed else middles
    return sorted(codes)


@cache
def _values(signed: bool, device: torch.device) -> Tensor:
    """Return [256] float32, ascending."""
    return torch.tensor(
        [float(value) for value in code_book(signed)], dtype=torch.float32, device=device
    )


def smallest_second(first: Tensor, betas: tuple[float, float], step: int) -> Tensor | float:
    """Return the smallest second moment that any gradients of `step` updates give next to a first
    one, of each element. With decays a and b, and the gradient of j updates ago g[j], the square of
    the first, (1 - a) sum a^j g[j], is at most (1 - a)^2 sum (a^2 / b)^j times sum b^j g[j]^2,
    where the last is the second / (1 - b)."""
    a, b = betas
    if a * a >= b:
        return 0.0  # the sum grows without limit
    ratio = a * a / b
    return first.square().mul_((1 - b) * (1 - ratio) / ((1 - a) ** 2 * (1 - ratio**step)))


@dataclass(frozen=True, eq=False)
class Moment:
    """`codes` uint8 of a parameter's shape, and `scale` [blocks] float32: element i is value[code]
    · scale of block i // 256."""

    codes: Tensor
    scale: Tensor
    signed: bool

    @staticmethod
    def zeros(like: Tensor, signed: bool) -> "Moment":
        """Return all 0, where `like` is: every scale is 0."""
        scale = torch.zeros(like.numel() // _BLOCK, device=like.device)
        return Moment(torch.zeros(like.shape, dtype=torch.uint8, device=like.device), scale, signed)

    def read(self, part: slice) -> Tensor:
        """Return elements of whole blocks, [elements] float32."""
        values = _values(self.signed, self.codes.device)[self.codes.view(-1)[part].int()].view(
            -1, _BLOCK
        )
        return values.mul_(self._scales(part).unsqueeze(1)).view(-1)

    def write(self, part: slice, moments: Tensor, draw: Draw) -> None:
        """Round elements of whole blocks, [elements] float32, to the value below or above; what is
        above 0 and has no sign is not rounded to 0."""
        blocks, values = moments.view(-1, _BLOCK), _values(self.signed, self.codes.device)
        scale = blocks.abs().amax(1).clamp_min_(torch.finfo(torch.float32).tiny)
        ratios = (blocks / scale.unsqueeze(1)).view(-1)
        below = (
            torch.bucketize(ratios, values, out_int32=True, right=True)
            .sub_(1)
            .clamp_(0, len(values) - 2)
        )
        codes = below.add_(draw(_way_up(ratios, below, values)))
        if not self.signed:
            codes = torch.maximum(codes, moments > 0)
        self.codes.view(-1)[part] = codes.to(torch.uint8)
        self._scales(part).copy_(scale)

    def _scales(self, part: slice) -> Tensor:
        return self.scale[part.start // _BLOCK : part.stop // _BLOCK]


class AdamW8bit:
    """`isobit.rl.optim.base.Optimizer` for large matrices in whole blocks."""

    label: ClassVar[str] = "adamw, state 8bit"
    whole_matrices: ClassVar[bool] = False

    def __init__(
        self, masters: UpdatedMasters, names: Sequence[str], settings: OptimizerSettings
    ) -> None:
        self._masters, self.settings = masters, settings
        self._moments: dict[str, dict[str, Moment]] = {}
        self._steps: dict[str, int] = {}

    @staticmethod
    def takes(name: str, shape: Sequence[int], settings: OptimizerSettings) -> bool:
        eight_bit = settings.name == "adamw" and settings.state == "8bit"
        return eight_bit and quantizable(name, shape)

    @staticmethod
    def forms(shape: tuple[int, ...]) -> Mapping[str, Form]:
        codes = Form(torch.uint8, shape)
        scale = Form(torch.float32, (math.prod(shape) // _BLOCK,), _BLOCK)
        moments = {f"{key}.codes": codes for key in _MOMENTS} | {
            f"{key}.scale": scale for key in _MOMENTS
        }
        return {"step": STEP} | moments

    def update(self, names: Sequence[str], rate: float) -> None:
        for weight_decay, some in self._masters.by_decay(names, self.settings.weight_decay):
            for name in some:
                self._update(name, rate, weight_decay)
                self._masters.free_gradients([name])

    def _update(self, name: str, rate: float, weight_decay: float) -> None:
        beta1, beta2 = self.settings.betas
        parameter = self._masters.parameters[name]
        moments = self._moments.setdefault(name, _fresh(parameter))
        step = self._steps[name] = self._steps.get(name, 0) + 1
        for rows in parts_of(parameter.numel()):
            gradient, master = self._masters.gradient(name, rows), self._masters.wide(name, rows)
            first = moments["exp_avg"].read(rows).lerp_(gradient, 1 - beta1)
            second = moments["exp_avg_sq"].read(rows).lerp_(gradient.square(), 1 - beta2)
            second.clamp_min_(smallest_second(first, self.settings.betas, step))
            for key, values in (("exp_avg", first), ("exp_avg_sq", second)):
                draw = partial(self._masters.draw, f"{key} {name}", name, rows, step)
                moments[key].write(rows, values, draw)
            master.mul_(1 - rate * weight_decay)
            denominator = second.sqrt_().div_(math.sqrt(1 - beta2**step)).add_(self.settings.eps)
            master.addcdiv_(first, denominator, value=-rate / (1 - beta1**step))
            self._masters.put(name, rows, master, step)

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {
            name: {"step": torch.tensor(float(self._steps[name]))}
            | {f"{key}.codes": moment.codes for key, moment in moments.items()}
            | {f"{key}.scale": moment.scale for key, moment in moments.items()}
            for name, moments in self._moments.items()
        }

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._moments, self._steps = {}, {}
        for name, tensors in state.items():
            self._moments[name] = _fresh(self._masters.parameters[name])
            self._steps[name] = int(tensors["step"])
            for key, moment in self._moments[name].items():
                moment.codes.copy_(tensors[f"{key}.codes"])
                moment.scale.copy_(tensors[f"{key}.scale"])


def _fresh(parameter: Tensor) -> dict[str, Moment]:
    return {key: Moment.zeros(parameter, signed) for key, signed in _MOMENTS.items()}


def _way_up(elements: Tensor, below: Tensor, values: Tensor) -> Tensor:
    """Return how far each element, which is overwritten, lies on the way from the value below it to
    the next one: from 0 to just below 1."""
    low = values[below]
    way = elements.sub_(low).div_(values[1:][below].sub_(low))
    return way.clamp_(0, 1 - 2**-16)  # a book has no -1, and 1 as its last
