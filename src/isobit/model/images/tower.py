"""A frozen tower and its projector, by `transformers`' own classes: from a picture to the rows that
stand for it.

A tower's rows depend on how many images share a forward and on the number of threads, so each image
is computed alone, on one thread, in float32 on the CPU: then they are the image's alone, and are
made once. Left out: training it, and video.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from isobit.data.foreign import exists
from isobit.data.pictures import require_pillow
from isobit.errors import IsobitError
from isobit.model.hub.checkpoint import model_folder, read_json
from isobit.model.images.bank import Axes, Grid

if TYPE_CHECKING:
    from PIL import Image

_AXES = {
    "qwen2_5_vl": False,
    "qwen3_vl": True,
    "qwen3_vl_moe": True,
    "qwen3_5": True,
    "qwen3_5_moe": True,
}
"""Models whose images are read and whose positions have axes: whether these are interleaved."""
_PLAIN = ("llava",)
"""Models whose images are read, and whose positions have one axis."""


class Rows(NamedTuple):
    """The rows of a picture: its embeddings and what is added behind layers, each [R, H] float32,
    and its grid, where positions have axes."""

    rows: tuple[Tensor, ...]
    grid: Grid | None

    @property
    def digest(self) -> str:
        """The SHA-256 of the rows."""
        digest = hashlib.sha256(repr((self.grid, [list(row.shape) for row in self.rows])).encode())
        for row in self.rows:
            digest.update(row.contiguous().numpy().tobytes())
        return digest.hexdigest()


class Marks(NamedTuple):
    """The tokens of an image in a prompt: the `token` in its place, and those in front of it and
    behind it, which a text that no template writes must have."""

    token: int
    start: tuple[int, ...]
    end: tuple[int, ...]


class Tower:
    """The tower of a model's directory, with the settings of its processor."""

    def __init__(self, directory: str | Path) -> None:
        """Raises IsobitError where there is none, for a model whose images are not read, and
        without `transformers` and Pillow."""
        folder = model_folder(directory)
        self.values, where = read_json(folder / "config.json"), f"{folder / 'config.json'}"
        self.axes = _axes_of(self.values, where)
        self.marks = _marks_of(self.values, where)
        require_pillow()
        if find_spec("transformers") is None:
            raise IsobitError(
                "towers are those of transformers, which is not installed: pip install transformers pillow"
            )
        from transformers import AutoImageProcessor

        settings = folder / "preprocessor_config.json"
        if exists(settings) and "auto_map" in read_json(settings):
            raise IsobitError(
                f"{settings}: auto_map names code of the directory, and none of it is executed; "
                "expected a processor of transformers"
            )
        try:
            self._processor = AutoImageProcessor.from_pretrained(
                folder, backend="pil", local_files_only=True
            )
            self._model = _without_language_model(folder)
        except (OSError, ValueError, RuntimeError, KeyError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise IsobitError(f"{folder}: transformers cannot open its tower: {reason}") from None
        self.digest = self._digest()

    def _digest(self) -> str:
        """Return the SHA-256 of the weights and the processor's settings."""
        settings = json.dumps(self._processor.to_dict(), sort_keys=True, default=str)
        digest = hashlib.sha256(settings.encode())
        for name, tensor in sorted(self._model.state_dict().items()):
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def identity(self, picture: "Image.Image") -> str:
        """Return the SHA-256 of a picture in RGB for this tower: of equal ones rows are equal."""
        seen = hashlib.sha256(f"{self.digest} {picture.size}".encode())
        seen.update(picture.tobytes())
        return seen.hexdigest()

    @torch.no_grad()
    def rows(self, picture: "Image.Image", where: str = "the image") -> Rows:
        """Return the rows of a picture in RGB. Raises IsobitError for one that the processor does
        not take."""
        try:
            inputs = self._processor(picture, return_tensors="pt")
        except (ValueError, ZeroDivisionError) as error:
            reason = " ".join(str(error).split())[:120]
            raise IsobitError(f"{where}: its processor refuses it: {reason}") from None
        names = ("image_grid_thw", "image_sizes")
        more = {name: inputs[name] for name in names if name in inputs}
        with _one_thread():
            features = self._model.get_image_features(
                inputs["pixel_values"], return_dict=True, **more
            )
        made = (features.pooler_output, *(getattr(features, "deepstack_features", None) or ()))
        grid = None
        if self.axes is not None:
            merge = int(self.values["vision_config"].get("spatial_merge_size", 2))
            _, height, width = inputs["image_grid_thw"][0].tolist()
            grid = height // merge, width // merge
        return Rows(tuple(_one(rows) for rows in made), grid)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _one(rows: Any) -> Tensor:
    """Return the rows [R, H] of a list with one tensor, or of [1, R, H]."""
    only: Tensor = rows[0] if isinstance(rows, (list, tuple)) else rows
    return only.reshape(-1, only.shape[-1]).float().clone()


def _without_language_model(folder: Path) -> Any:
    """Open the model that has the tower, in float32, with no layer of its language model."""
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.utils import logging

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    text = config.text_config
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # of the layers' tensors, which are not read
    logging.disable_progress_bar()
    try:
        model = AutoModelForImageTextToText.from_pretrained(
            folder, config=config, dtype=torch.float32, local_files_only=True
        )
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
    inner = model.model
    del model.lm_head, inner.language_model
    return inner.eval().requires_grad_(False)


def _axes_of(values: Mapping[str, Any], where: str) -> Axes | None:
    name = values.get("model_type")
    if name not in _AXES:
        if name in _PLAIN:
            return None
        raise IsobitError(
            f"{where}: images of a {name!r:.80} are not read: those of "
            f"{', '.join((*_AXES, *_PLAIN))} are"
        )
    text = values.get("text_config", values)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections = rope.get("mrope_section")
    if not isinstance(sections, list) or len(sections) != 3:
        raise IsobitError(
            f"{where}: mrope_section is missing: the columns of each axis of positions"
        )
    return Axes(tuple(sections), _AXES[name])


def _marks_of(values: Mapping[str, Any], where: str) -> Marks:
    token = values.get("image_token_id", values.get("image_token_index"))
    if not isinstance(token, int):
        raise IsobitError(f"{where}: image_token_id is missing: the token in an image's place")
    edges = [values.get(f"vision_{edge}_token_id") for edge in ("start", "end")]
    start, end = ((edge,) if isinstance(edge, int) else () for edge in edges)
    return Marks(token, start, end)
