"""Hugging Face directories: read and write weights (safetensors, single or sharded) and JSON files.

Reads float32, bfloat16 and float16 tensors, E4M3 ones in blocks of 128x128 (`fp8_blocks.py`), and
MXFP4 (`mxfp4_blocks.py`), into float32. Every defect of a directory is one `IsobitError`. Left out:
pickled weights, other quantized checkpoints, and making a write atomic (`isobit.run.checkpoints`).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from isobit.data.foreign import BadJson, check_readable, exists, parse_json, read_bytes, reason_of
from isobit.distributed import ALONE, Ranks
from isobit.distributed.files import FileTensor, Part, file_tensors, write_file
from isobit.errors import IsobitError, brief, download_hint
from isobit.model.hub import mxfp4_blocks as mxfp4
from isobit.model.hub.folders import from_hub_cache, instead, other_format
from isobit.precision import E4M3
from isobit.precision.quantize import BLOCK, expand_scale

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Shapes = Mapping[str, tuple[int, ...]]
SHARD_BYTES = 5 << 30
_MOST_TEXT_BYTES = 1 << 28  # a tokenizer.json of a vocabulary of 260,000 has 3e7
_LANGUAGE_MODEL = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}
"""What the names of a language model's tensors begin with inside another model, by transformers 5,
and by 4 before 4.52; and without it."""
_TOWER = "visual."
"""What names of a tower begin with in files whose language model's are those that it has alone."""
_EARLIER = "backbone."  # what NVIDIA's files have for model.
_SCALES = "_scale_inv"
_EXPECTED = {"adapter": "a PEFT folder, such as a checkpoint of a run that trained an adapter"}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def model_folder(path: str | Path, what: str = "model") -> Path:
    """Return the Hugging Face directory at a path, or of a name that the Hub's cache has. Raises
    IsobitError where there is none."""
    if not isinstance(path, (str, Path)):
        raise IsobitError(
            f"{what}: expected the path of a Hugging Face model directory, got {path!r:.80}"
        )
    folder = from_hub_cache(Path(path))
    if not exists(folder):
        hint = (
            download_hint(path)
            or f"; expected {_EXPECTED.get(what, 'a Hugging Face model directory')}"
        )
        raise IsobitError(f"{what} {folder}: no such directory{hint}")
    if not folder.is_dir():
        reason = other_format(folder)
        raise IsobitError(
            f"{what} {folder}: "
            + (reason or "a file; give the Hugging Face model directory that it is in")
        )
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file, within the limits of `isobit.data.foreign`. Raises
    IsobitError if it is missing or malformed."""
    try:
        values = parse_json(read_text(path))
    except BadJson as error:
        line = "" if error.line is None else f", line {error.line}"
        raise IsobitError(f"{path}{line}: not valid JSON: {error.reason}") from None
    if not isinstance(values, dict):
        raise IsobitError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def read_text(path: Path) -> str:
    """Read a text file of a model directory. Raises IsobitError if it cannot be read."""
    try:
        return read_bytes(path, _MOST_TEXT_BYTES).decode("utf-8")
    except FileNotFoundError:
        exists(path)  # raises for a link whose target is gone
        reason = instead(path.parent) if path.name == "config.json" else ""
        raise IsobitError(
            f"{path.parent}: {path.name} is "
            f"missing{reason or '; expected a Hugging Face model directory'}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise IsobitError(f"{path}: cannot be read: {reason_of(error)}") from None


class Weights:
    """The tensors of a directory whose files are open: their `shapes`, and their rows as float32,
    of which no more is read than is asked for. Scales of FP8 blocks belong to their tensors, and
    blocks and scales of MXFP4 are one. Of a model that reads images too these are its language
    model's, by the names that they have without it; `in_files`: those that they have in it, of
    any other model none; `outside`: the tensors beside them."""

    def __init__(self, directory: Path, tensors: Mapping[str, tuple[Path, FileTensor]]) -> None:
        tensors = {
            name.replace(_EARLIER, "model.", 1) if name.startswith(_EARLIER) else name: tensor
            for name, tensor in tensors.items()
        }
        self.in_files = _language_model(tensors)
        inside = {*self.in_files.values()}
        self._outside = {name: t for name, t in tensors.items() if inside and name not in inside}
        tensors = {new: tensors[old] for new, old in self.in_files.items()} or tensors
        self._directory, self._tensors = directory, tensors
        scales = [
            key for key in tensors if key.endswith(_SCALES) and key.removesuffix(_SCALES) in tensors
        ]
        self._packed = mxfp4.shapes_of(tensors, directory)
        scales += [
            name + suffix for name in self._packed for suffix in (mxfp4.BLOCKS, mxfp4.SCALES)
        ]
        shapes = {key: t.shape for key, (_, t) in tensors.items() if key not in set(scales)}
        self.shapes: Shapes = shapes | self._packed

    def check(self) -> None:
        """Raise IsobitError unless every tensor is of numbers that are read, and FP8 blocks have
        their scales."""
        packed = {name + suffix for name in self._packed for suffix in (mxfp4.BLOCKS, mxfp4.SCALES)}
        for name, (path, tensor) in self._tensors.items():
            if name in packed:
                continue
            blocks = tensor.dtype == E4M3.dtype and len(tensor.shape) == 2
            if tensor.dtype not in _FLOATS and not blocks:
                raise IsobitError(
                    f"{path}: tensor {brief(name)} has dtype {tensor.dtype}; expected float32, "
                    "bfloat16 or float16"
                )
            if not blocks:
                continue
            scale = self._tensors.get(f"{name}{_SCALES}")
            grid = tuple(-(-size // BLOCK) for size in tensor.shape)
            if scale is None or scale[1].shape != grid:
                problem = "no scales" if scale is None else f"scales of shape {scale[1].shape}"
                raise IsobitError(
                    f"{self._directory}: FP8 tensor {brief(name)} has {problem}; expected "
                    f"{brief(name)}{_SCALES} {grid}"
                )

    def renamed(self, names: Mapping[str, str]) -> "Weights":
        """Return tensors by other names."""
        return Weights(self._directory, {new: self._tensors[old] for old, new in names.items()})

    def outside(self) -> dict[str, Part]:
        """Return the tensors outside the language model, each to be read when it is written, as it
        is in its file; FP8 blocks as float32. Raises IsobitError for numbers that PyTorch has
        not."""
        others = Weights(self._directory, self._outside)
        parts: dict[str, Part] = {}
        for name, shape in others.shapes.items():
            path, tensor = others._tensors[name]
            if isinstance(tensor.dtype, str):
                raise IsobitError(
                    f"{path}: tensor {brief(name)} has dtype {tensor.dtype}, which cannot be saved"
                )
            blocks = f"{name}{_SCALES}" in others._tensors
            read = partial(others.rows, name) if blocks else partial(_whole, path, tensor)
            parts[name] = Part(torch.float32 if blocks else tensor.dtype, shape, read)
        return parts

    def rows(self, name: str, lo: int = 0, hi: int | None = None) -> Tensor:
        """Read rows `lo` to `hi` of a tensor, by default all, float32. Raises IsobitError if a
        number is not finite. Where scales are powers of two, the values of FP8 blocks are exact."""
        hi = next(iter(self.shapes[name]), 1) if hi is None else hi
        if name in self._packed:
            return self._unpacked(name, lo, hi)
        values = self._read(name, lo, hi)
        if self._tensors[name][1].dtype != E4M3.dtype:
            return values
        first = lo // BLOCK  # a rank's rows of a query, key or value may begin inside a block
        scale = self._read(f"{name}{_SCALES}", first, -(-hi // BLOCK))
        scales = expand_scale(scale, (BLOCK, BLOCK), (scale.shape[0] * BLOCK, values.shape[1]))
        return values * scales[lo - first * BLOCK : hi - first * BLOCK]

    def _unpacked(self, name: str, lo: int, hi: int) -> Tensor:
        tensors = []
        for suffix in (mxfp4.BLOCKS, mxfp4.SCALES):
            path, tensor = self._tensors[name + suffix]
            with _reading(path):
                tensors.append(tensor[lo:hi])
        return _finite(mxfp4.dequantized(*tensors), path, name)

    def _read(self, name: str, lo: int, hi: int) -> Tensor:
        path, tensor = self._tensors[name]
        with _reading(path):
            values = (tensor[lo:hi] if tensor.shape else tensor[...]).float()
        return _finite(values, path, name)


def _language_model(tensors: Iterable[str]) -> dict[str, str]:
    """Return the names of a language model's tensors, each with that which it has in files that
    hold it inside another model, without the layers that predict further tokens; none where files
    hold it alone."""
    prefixes, names = _LANGUAGE_MODEL, list(tensors)
    inside = tuple(prefix for prefix in prefixes if "language_model" in prefix)
    if not any(name.startswith(inside) for name in names):
        if not any(name.startswith(_TOWER) for name in names):
            return {}
        prefixes = {prefix: prefix for prefix in prefixes.values()}
    return {
        renamed + name.removeprefix(prefix): name
        for name in names
        for prefix, renamed in prefixes.items()
        if name.startswith(prefix)
    }


def _whole(path: Path, tensor: FileTensor) -> Tensor:
    with _reading(path):
        return tensor[...]


def _finite(values: Tensor, path: Path, name: str) -> Tensor:
    if not bool(torch.isfinite(values).all()):
        raise IsobitError(f"{path}: tensor {brief(name)} holds NaN or infinity")
    return values


@contextmanager
def open_weights(
    directory: Path, check: Callable[[Shapes], None] | None = None, name: str | None = None
) -> Iterator[Weights]:
    """Open the weights of a directory, or of the file of this `name` in it. `check` is called with
    their shapes before any is read, and raises for what the model cannot take. Raises IsobitError
    for a file that is missing or corrupt, and for headers and an index that contradict each
    other."""
    tensors: dict[str, tuple[Path, FileTensor]] = {}
    with ExitStack() as stack:
        files = _weight_files(directory) if name is None else {name: []}
        for name, wanted in files.items():
            path = directory / name
            for key, tensor in _opened(path, stack).items():
                if key in tensors:
                    raise IsobitError(
                        f"{directory}: tensor {brief(key)} is in both {tensors[key][0].name} and "
                        f"{name}; it must be in one of them"
                    )
                tensors[key] = path, tensor
            for key in wanted:
                if key not in tensors or tensors[key][0] != path:
                    raise IsobitError(
                        f"{directory / INDEX}: tensor {brief(key)} is not in {name}, where "
                        "weight_map says it is"
                    )
        weights = Weights(directory, tensors)
        if check is not None:
            check(weights.shapes)
        weights.check()
        yield weights


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Read all tensors of a directory, float32, by their Hugging Face names; raises as
    `open_weights` and `Weights.rows` do."""
    with open_weights(directory) as weights:
        return {name: weights.rows(name) for name in weights.shapes}


def _opened(path: Path, stack: ExitStack) -> dict[str, FileTensor]:
    """Open the tensors of a safetensors file. Raises IsobitError for a file that is missing, cannot
    be read, or is damaged."""
    if not exists(path):
        raise IsobitError(f"{path.parent}: weight file {path.name} is missing")
    try:
        check_readable(path)
    except OSError as error:
        raise IsobitError(f"{path}: cannot be read: {reason_of(error)}") from None
    with _reading(path):
        return file_tensors(stack.enter_context(safe_open(path, framework="pt")))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise IsobitError(
            f"{path}: truncated or corrupt safetensors file ({' '.join(str(error).split())[:300]})"
        ) from None


def _weight_files(directory: Path) -> dict[str, list[str]]:
    """Return the files of the weights, and the tensors that the index says are in each."""
    if exists(directory / WEIGHTS):
        return {WEIGHTS: []}
    if exists(directory / INDEX):
        mapping = read_json(directory / INDEX).get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise IsobitError(f"{directory / INDEX}: weight_map is missing or empty")
        files: dict[str, list[str]] = {}
        for tensor, name in mapping.items():
            if not isinstance(name, str) or Path(name).name != name or "\0" in name:
                raise IsobitError(
                    f"{directory / INDEX}: weight_map names a file outside the directory: "
                    f"{name!r:.80}"
                )
            files.setdefault(name, []).append(tensor)
        return dict(sorted(files.items()))
    raise IsobitError(
        f"{directory}: no {WEIGHTS} and no {INDEX}; only safetensors checkpoints are read"
    )


def write_weights(
    directory: Path,
    tensors: Mapping[str, Tensor | Part],
    shard_bytes: int = SHARD_BYTES,
    ranks: Ranks = ALONE,
) -> None:
    """Write `tensors`, of any device, as one safetensors file, or as shards of at most
    `shard_bytes` with an index. Of a `Part` each rank writes what it has.

    Weights that the directory already holds are replaced, whichever of the two forms they have.
    """
    tensors_by_name = {
        name: t if isinstance(t, Part) else Part.whole(t) for name, t in tensors.items()
    }
    shards = _shards(tensors_by_name, shard_bytes)
    names = [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    names = names if len(shards) > 1 else [WEIGHTS]
    for name, shard in zip(names, shards):
        write_file(directory / name, shard, ranks)

    def finish() -> None:
        written = {*names}
        if len(shards) > 1:
            total = sum(tensor.nbytes for tensor in tensors_by_name.values())
            weight_map = {key: name for name, shard in zip(names, shards) for key in shard}
            write_json(
                directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map}
            )
            written.add(INDEX)
        for pattern in (WEIGHTS, INDEX, "model-?????-of-?????.safetensors"):
            for path in directory.glob(pattern):
                if path.name not in written:
                    path.unlink()

    ranks.on_first(finish)


def _shards(named_tensors: Mapping[str, Part], shard_bytes: int) -> list[dict[str, Part]]:
    """Return the parts in order, in as few files as hold at most `shard_bytes`, or one part."""
    shards: list[dict[str, Part]] = [{}]
    size = 0
    for name, tensor in named_tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON object, indented."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
