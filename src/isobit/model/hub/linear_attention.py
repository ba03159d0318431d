"""Sizes of linear attention by the gated delta rule, as Qwen3.5 and Qwen3-Next have it, and their keys in
config.json.

Left out: the arithmetic (`forward/delta.py`, and `isobit.kernels.delta.definition`, which defines
it).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isobit.errors import IsobitError
from isobit.model.families import whole

_KINDS = ("linear_attention", "full_attention")
_EVERY = 4
"""Where config.json does not say which layers are which, every fourth one has attention over all
tokens."""


@dataclass(frozen=True)
class LinearAttention:
    """The layers that have it, and the sizes of its heads: each of `key_heads` queries and keys
    serves value_heads / key_heads values. A short convolution over `width` tokens comes before.
    `by_head`: the rows of both projections go from one head of keys to the next."""

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int = 4
    by_head: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise IsobitError(
                f"config.json: {self.value_heads} value heads of linear attention cannot share "
                f"{self.key_heads} key heads evenly"
            )

    @property
    def values(self) -> int:
        """The number of elements of a token's values, in all heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The channels of the convolution: the elements of a token's queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def heights(self) -> tuple[int, ...]:
        """The rows of the matrices in the first projection: queries, keys, values, and what gates
        them; one matrix where they take turns."""
        rows = self.channels + self.values
        keys = self.key_heads * self.key_dim
        return (rows,) if self.by_head else (keys, keys, self.values, self.values)

    @property
    def state(self) -> tuple[int, int, int]:
        """The shape of a sequence's state."""
        return self.value_heads, self.key_dim, self.value_dim

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the masters in such a layer, by name, between those of its norms."""
        return {
            "qkv": (sum(self.heights), hidden),
            "gates": (2 * self.value_heads, hidden),
            "conv": (self.channels, self.width),
            "decay": (self.value_heads,),
            "step_bias": (self.value_heads,),
            "state_norm": (self.value_dim,),
            "o": (hidden, self.values),
        }

    @staticmethod
    def like(heads: int, dim: int, num_layers: int, by_head: bool) -> "LinearAttention":
        """Return the sizes for a model whose attention has these heads: linear attention in all
        layers but every fourth."""
        layers = tuple(n for n in range(num_layers) if (n + 1) % _EVERY)
        return LinearAttention(layers, heads, heads, dim, dim, by_head=by_head)

    @staticmethod
    def from_hf(
        values: Mapping[str, Any], where: str, num_layers: int, by_head: bool = False
    ) -> "LinearAttention":
        """Read the sizes from config.json. Raises IsobitError for a value of a wrong type, and for
        layers of another kind."""
        every = whole(values, "full_attention_interval", where, _EVERY)
        kinds = values.get("layer_types") or [
            _KINDS[(layer + 1) % every == 0] for layer in range(num_layers)
        ]
        if (
            not isinstance(kinds, list)
            or len(kinds) != num_layers
            or not all(kind in _KINDS for kind in kinds)
        ):
            raise IsobitError(
                f"{where}: layer_types must name {num_layers} layers, each "
                f"{' or '.join(_KINDS)}, got {kinds!r:.80}"
            )
        sizes = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "width": 4}
        numbers = {
            name: whole(values, _KEYS[name], where, default) for name, default in sizes.items()
        }
        return LinearAttention(
            tuple(layer for layer in range(num_layers) if kinds[layer] == _KINDS[0]),
            **numbers,
            by_head=by_head,
        )

    def to_hf(self, num_layers: int) -> dict[str, Any]:
        """Return the keys of config.json."""
        kinds = [_KINDS[layer not in self.layers] for layer in range(num_layers)]
        return {"layer_types": kinds} | {key: getattr(self, name) for name, key in _KEYS.items()}


def initial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
    """Draw random values of a master that linear attention alone has; None for another master: a
    convolution begins as PyTorch's, uniform in ±1 / sqrt(width); A uniform in 0 to 16, and a step
    of 0.001 to 0.1, uniform in its logarithm, as Mamba 2's (Dao and Gu 2024, arXiv 2405.21060), so
    that some heads forget within ten tokens and some keep hundreds."""
    uniform = (
        torch.rand(shape, generator=generator)
        if name.endswith((".conv", ".decay", ".step_bias"))
        else None
    )
    if uniform is None:
        return torch.ones(shape) if name.endswith(".skip") else None
    if name.endswith(".conv"):
        return (2 * uniform - 1) / math.sqrt(shape[-1])
    if name.endswith(".decay"):
        return torch.log(16 * uniform.clamp(min=1e-4))
    step = torch.exp(uniform * math.log(100.0) + math.log(0.001))
    return step + torch.log(-torch.expm1(-step))  # the inverse of softplus


_KEYS = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "width": "linear_conv_kernel_dim",
}
