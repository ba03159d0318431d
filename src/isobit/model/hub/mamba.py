"""Sizes of Mamba-2 layers (Dao and Gu 2024, arXiv 2405.21060), as Nemotron-H has them, and their
keys in config.json.

They are linear attention of another form: what a state is read by and written at, C and B, are
queries and keys of `n_groups` heads, x are values, without a gate for each. Left out: the
arithmetic (`forward/mamba.py`, and `isobit.kernels.delta.definition`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isobit.errors import IsobitError
from isobit.model.families import Family, whole
from isobit.model.hub.layer_kinds import LINEAR
from isobit.model.hub.linear_attention import LinearAttention

_LEAST = "time_step_min"


@dataclass(frozen=True)
class Mamba(LinearAttention):
    """The sizes of a Mamba-2 layer. A step is at least `least_step`: transformers takes
    time_step_min for that in a whole sequence, and nothing when it decodes; here both are one
    operator."""

    least_step: float = 0.001

    @property
    def group(self) -> int:
        """The number of values that are normed together: those of one group of heads."""
        return self.values // self.key_heads

    @property
    def heights(self) -> tuple[int, ...]:
        """Rows of the matrices in the first projection: gates, values, what is read by and written
        at, and steps."""
        keys = self.key_heads * self.key_dim
        return self.values, self.values, keys, keys, self.value_heads

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the masters in such a layer, by name, between those of its norms."""
        return {
            "qkv": (sum(self.heights), hidden),
            "conv": (self.channels, self.width),
            "conv_bias": (self.channels,),
            "decay": (self.value_heads,),
            "step_bias": (self.value_heads,),
            "skip": (self.value_heads,),
            "state_norm": (self.values,),
            "o": (hidden, self.values),
        }

    @staticmethod
    def of_kinds(values: Mapping[str, Any], where: str, kinds: Sequence[str]) -> "Mamba":
        """Read the sizes from config.json, for layers of these kinds. Raises IsobitError for a
        value of a wrong type."""
        sizes = {"key_heads": 8, "value_heads": 128, "key_dim": 128, "value_dim": 64, "width": 4}
        numbers = {
            name: whole(values, _KEYS[name], where, default) for name, default in sizes.items()
        }
        least = values.get(_LEAST, 0.001)
        if not isinstance(least, float) or not 0 <= least < float("inf"):
            raise IsobitError(
                f"{where}: {_LEAST} has the wrong type: expected a number such as 0.001, got "
                f"{least!r:.80}"
            )
        layers = tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
        return Mamba(layers, **numbers, by_head=False, least_step=least)

    def to_hf(self, num_layers: int) -> dict[str, Any]:
        """Return the keys of config.json, without those of the kinds of layers."""
        return {key: getattr(self, name) for name, key in _KEYS.items()} | {_LEAST: self.least_step}


def linear_sizes(
    values: Mapping[str, Any], where: str, kinds: Sequence[str], layers: int, family: Family
) -> LinearAttention | None:
    """Read the sizes of linear attention: Mamba-2's, where layers have one part, else the gated
    delta rule's; None in a family without any."""
    if not family.linear_attention:
        return None
    if kinds:
        return Mamba.of_kinds(values, where, kinds)
    return LinearAttention.from_hf(values, where, layers, family.linear_attention == "by head")


_KEYS = {
    "key_heads": "n_groups",
    "value_heads": "mamba_num_heads",
    "key_dim": "ssm_state_size",
    "value_dim": "mamba_head_dim",
    "width": "conv_kernel",
}
