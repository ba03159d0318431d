"""What the tests of the operators share: comparison of bits, random matrices, threads, an
independent rounding."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn import functional

from isobit.kernels import Activation
from isobit.precision import E4M3, QuantSpec

ROW = QuantSpec(E4M3, "1x128", "ue8m0")
WEIGHT = QuantSpec(E4M3, "128x128", "ue8m0")


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's gate, as transformers has it."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


ACTIVATIONS: dict[Activation, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: functional.silu(gate) * up,
    "gelu_pytorch_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    "swiglu_clamped": clamped,
    "sigmoid": lambda gate, up: torch.sigmoid(gate) * up,
}
"""Of a gate and its up, as PyTorch has them."""


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    )


def computed(logprobs: Tensor) -> bool:
    """Whether log-probabilities are some: finite, negative, and not all alike. Those of kernels that
    do nothing are the same zeros in a rollout and in the learner."""
    low, high = (float(x) for x in logprobs.aminmax())
    return -float("inf") < low < 0 and high <= 0 and (low < high or logprobs.numel() == 1)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in type, shape and every bit."""
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def ordinals(x: Tensor) -> Tensor:
    """Integers in the order of the floats, one apart for neighbours."""
    lowest = {2: -(1 << 15), 4: -(1 << 31)}[x.element_size()]
    number = bits(x).long()
    return torch.where(number < 0, lowest - number, number)


def draw(
    seed: int | torch.Generator,
    *shape: int,
    dtype: torch.dtype = torch.bfloat16,
    spread: float = 0.0,
) -> Tensor:
    """Normal numbers; `spread` multiplies them by widely varying magnitudes."""
    random = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=random)
    return (x * torch.exp(spread * torch.randn(*shape, generator=random))).to(dtype)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return draw(seed, *shape, dtype=torch.float32)


def keys_of(count: int, seed: int = 7) -> Tensor:
    """Keys (seed, prompt, sample, position): eight samples a position of a prompt."""
    index = torch.arange(count)
    return torch.stack([torch.full((count,), seed), index // 64, index % 8, index // 8 % 8], 1)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rounded(value: Fraction, dtype: torch.dtype) -> float:
    """`value` rounded to nearest even in rational arithmetic, for finite results of float32 or
    bfloat16."""
    precision = {torch.bfloat16: 8, torch.float32: 24}[dtype]
    if value == 0:
        return 0.0
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - precision + 1)
    return float(round(value / unit) * unit)  # Python rounds a fraction to nearest, ties to even
