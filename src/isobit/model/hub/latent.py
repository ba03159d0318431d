"""Sizes of multi-head latent attention (MLA: DeepSeek-V2, arXiv 2405.04434, section 2.1), and their
keys in config.json.

Left out: the arithmetic (`forward/latent.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isobit.errors import IsobitError
from isobit.model.families import optional_whole, whole

EPS = 1e-6
"""Of the norms of latents, in every family, whatever the model's own is."""


@dataclass(frozen=True)
class Latent:
    """The sizes of latent attention.

    The keys and values of all heads are a product of one vector of `kv_rank` for each token;
    `rotated` dimensions of the key, which all heads share, come from the hidden state directly. A
    head's query has `plain` and `rotated` dimensions, its value `value`. Queries are a product of a
    vector of `q_rank`, or with None of the hidden state.
    """

    kv_rank: int
    plain: int
    rotated: int
    value: int
    q_rank: int | None = None

    def __post_init__(self) -> None:
        if self.rotated % 2:
            raise IsobitError(
                f"config.json: rotary embedding needs an even qk_rope_head_dim, got {self.rotated}"
            )
        if self.value > self.head_dim:
            raise IsobitError(
                f"config.json: v_head_dim {self.value} above qk_nope_head_dim + qk_rope_head_dim, "
                f"{self.head_dim}, is not supported: values are stored as wide as keys"
            )

    @property
    def head_dim(self) -> int:
        """The dimension of queries and keys."""
        return self.plain + self.rotated

    def first_rows(self, heads: int) -> int:
        """Return how many rows of the first projection are the queries', or their latent
        vector's."""
        return self.q_rank or heads * self.head_dim

    def shapes(self, hidden: int, heads: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the masters in such a layer, by name, between those of its norms."""
        first = self.first_rows(heads)
        shapes: dict[str, tuple[int, ...]] = {
            "qkv_a": (first + self.kv_rank + self.rotated, hidden)
        }
        if self.q_rank is not None:
            shapes |= {"q_a_norm": (self.q_rank,), "q_b": (heads * self.head_dim, self.q_rank)}
        return shapes | {
            "kv_a_norm": (self.kv_rank,),
            "kv_b": (heads * (self.plain + self.value), self.kv_rank),
            "o": (hidden, heads * self.value),
        }

    @staticmethod
    def from_hf(values: Mapping[str, Any], where: str, defaults: Mapping[str, int]) -> "Latent":
        """Read it from a config.json; `defaults` are the family's. IsobitError for a value of a
        wrong type."""
        rotated = values.get("qk_rope_head_dim", defaults["qk_rope_head_dim"])
        if (
            values.get("head_dim", rotated) != rotated
        ):  # transformers would rotate so much of a head
            raise IsobitError(
                f"{where}: head_dim {values['head_dim']!r:.80} is not qk_rope_head_dim, "
                f"{rotated!r:.80}; leave it out"
            )
        sizes = {name: whole(values, key, where, defaults[key]) for name, key in _KEYS}
        q_rank = optional_whole(values, _Q_RANK, where, (_Q_RANK,), defaults[_Q_RANK])
        return Latent(**sizes, q_rank=q_rank)

    def to_hf(self) -> dict[str, Any]:
        """Return the keys of config.json."""
        return {key: getattr(self, name) for name, key in _KEYS} | {_Q_RANK: self.q_rank}


_Q_RANK = "q_lora_rank"
_KEYS = (
    ("kv_rank", "kv_lora_rank"),
    ("plain", "qk_nope_head_dim"),
    ("rotated", "qk_rope_head_dim"),
    ("value", "v_head_dim"),
)
