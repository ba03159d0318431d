"""A model that wraps a language model, to read images, written as it was read: the config.json, the
processor's files, and the tensors outside the language model, byte for byte.

The tensors are read when they are written, one at a time. Left out: training them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from isobit.data.foreign import exists
from isobit.distributed import ALONE, Ranks
from isobit.distributed.files import Part
from isobit.model.hub.checkpoint import Shapes, Weights, read_json, read_text
from isobit.model.hub.wrapped import INNER

_PROCESSOR = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
_OF_WEIGHTS = ("dtype", "torch_dtype", "quantization_config")


@dataclass(frozen=True, eq=False)
class Whole:
    """Everything of a model around its language model, to be written back. `values`: its
    config.json; `texts`: its processor's files; `shapes`: the language model's tensors;
    `prefixes`: how their names begin alone, and in the files; `outside`: the other tensors."""

    values: Mapping[str, Any]
    texts: Mapping[str, str]
    shapes: Shapes
    prefixes: Mapping[str, str]
    outside: Mapping[str, Part]

    @staticmethod
    def read(directory: Path, weights: Weights) -> "Whole":
        """Read all but the tensors, which stay where the files of `weights` are. Raises IsobitError
        for a file that cannot be read, and a tensor that cannot be written."""
        texts = {
            name: read_text(directory / name) for name in _PROCESSOR if exists(directory / name)
        }
        prefixes = {}
        for name, in_file in weights.in_files.items():
            begin = f"{name.partition('.')[0]}."
            prefixes[begin] = in_file[: len(in_file) - len(name) + len(begin)]
        values = read_json(directory / "config.json")
        return Whole(values, texts, weights.shapes, prefixes, weights.outside())

    def name(self, name: str) -> str:
        """Return the name in the files of a tensor or module of the language model."""
        begin = f"{name.partition('.')[0]}."
        return self.prefixes.get(begin, begin) + name.removeprefix(begin)

    def modules(self) -> list[str]:
        """Return the modules outside the language model that have weights."""
        weights = (name for name in self.outside if name.endswith(".weight"))
        return [name.removesuffix(".weight") for name in weights]

    def config(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json with these keys in place of those that spoke of the files read."""
        values = {key: value for key, value in self.values.items() if key not in _OF_WEIGHTS}
        for inner in INNER:
            if isinstance(text := values.get(inner), dict):
                values[inner] = {k: v for k, v in text.items() if k not in _OF_WEIGHTS}
        return {**values, **keys}

    def tensors(
        self, tensors: Mapping[str, Tensor | Part], ranks: Ranks = ALONE
    ) -> dict[str, Tensor | Part]:
        """Return the language model's tensors by their names in the files, and all others, which
        the first rank writes."""
        outside = {
            name: piece if ranks.first else Part(piece.dtype, piece.shape)
            for name, piece in self.outside.items()
        }
        return {self.name(name): tensor for name, tensor in tensors.items()} | outside
