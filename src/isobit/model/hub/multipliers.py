"""Numbers that a model multiplies by on its way, as Granite has them (muP: Yang et al. 2022, arXiv
2203.03466), and their keys in config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isobit.model.families import number


@dataclass(frozen=True)
class Multipliers:
    """The constant factors of a model: `embedding` of embeddings, `attention` of scores, `residual`
    of what attention and MLP add; logits are divided by `logits`."""

    embedding: float = 1.0
    attention: float = 1.0
    residual: float = 1.0
    logits: float = 1.0

    @staticmethod
    def from_hf(values: Mapping[str, Any], where: str) -> "Multipliers":
        """Read them from a config.json. Raises IsobitError for one that is not a number above 0."""
        return Multipliers(**{name: number(values, key, where, 1.0) for name, key in _KEYS.items()})

    def to_hf(self) -> dict[str, Any]:
        """Return the keys of config.json."""
        return {key: getattr(self, name) for name, key in _KEYS.items()}


_KEYS = {
    "embedding": "embedding_multiplier",
    "attention": "attention_multiplier",
    "residual": "residual_multiplier",
    "logits": "logits_scaling",
}
