"""What layers take next to the hidden state, as the small Gemma 4 (E2B, E4B) have it, and its keys
in config.json.

Each layer has an embedding of every token; the last layers read the keys and values of an earlier
one of their kind, and their MLPs may be wider. Left out: the arithmetic (`forward/layer_inputs.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isobit.errors import IsobitError
from isobit.model.families import flag, whole

_WIDTH = "hidden_size_per_layer_input"
_VOCABULARY = "vocab_size_per_layer_input"
_READING = "num_kv_shared_layers"
_WIDE = "use_double_wide_mlp"


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of layers besides the hidden state. `embedded`: the width of a layer's embeddings,
    0 if layers have none. `reading`: how many layers, the last ones, read keys and values of
    another; with `wide` these have MLPs twice as wide as the others'."""

    embedded: int = 0
    reading: int = 0
    wide: bool = False

    @staticmethod
    def from_hf(
        values: Mapping[str, Any], where: str, slides: Sequence[bool], width: int, vocabulary: int
    ) -> "LayerInputs":
        """Read them from a config.json. `slides`: which layers have a window; `width` stands for
        the embeddings' where config.json does not say. IsobitError where layers read keys and none
        of their kind has any, or layers might have embeddings and have none, and for embeddings of
        another vocabulary."""
        embedded = whole(values, _WIDTH, where, width, least=0)
        if embedded and (own_vocabulary := whole(values, _VOCABULARY, where, 262144)) != vocabulary:
            raise IsobitError(
                f"{where}: {_VOCABULARY} {own_vocabulary:,} is not supported: it must be vocab_size, "
                f"{vocabulary:,}"
            )
        reading = whole(values, _READING, where, 0, least=0)
        if reading and {*slides[: max(len(slides) - reading, 0)]} != {*slides}:
            raise IsobitError(
                f"{where}: {_READING} {reading}: of the {len(slides)} layers the first ones, which "
                "have keys of their own, must be of every kind that the others are of"
            )
        if reading and width and not embedded:
            raise IsobitError(
                f"{where}: {_READING} {reading} with {_WIDTH} 0 is not supported: transformers 5.24 "
                "does not compute it"
            )
        return LayerInputs(embedded, reading, bool(reading) and flag(values, _WIDE, where))

    def to_hf(self, vocabulary: int) -> dict[str, Any]:
        """Return the keys of config.json."""
        return {
            _WIDTH: self.embedded,
            _VOCABULARY: vocabulary,
            _READING: self.reading,
            _WIDE: self.wide,
        }

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the masters in every layer, by name."""
        if not self.embedded:
            return {}
        return {
            "embedded_gate": (self.embedded, hidden),
            "embedded_out": (hidden, self.embedded),
            "embedded_out_norm": (hidden,),
        }

    def shapes_outside(
        self, vocabulary: int, hidden: int, layers: int
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the masters of all layers together, by name."""
        if not self.embedded:
            return {}
        return {
            "embed_layers": (vocabulary, layers * self.embedded),
            "project_layers": (layers * self.embedded, hidden),
            "project_layers_norm": (self.embedded,),
        }
