"""Hugging Face directories: read and write weights (safetensors, single or sharded) and JSON files.

Reads float32, bfloat16 and float16 tensors, and E4M3 ones in blocks of 128x128 (`fp8_blocks.py`), into float32. Every
defect of a directory is one `IsobitError`. Left out: pickled weights, other quantized checkpoints, and making a write
atomic (`isobit.run.checkpoints`).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from isobit.data.foreign import BadJson, check_readable, exists, parse_json, read_bytes, reason_of
from isobit.errors import IsobitError, brief, download_hint
from isobit.precision import E4M3
from isobit.precision.quantize import BLOCK, expand_scale

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Shapes = Mapping[str, tuple[int, ...]]
SHARD_BYTES = 5 << 30
_MOST_TEXT_BYTES = 1 << 28  # a tokenizer.json of a vocabulary of 260,000 has 3e7
_SCALES = "_scale_inv"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def model_folder(path: str | Path, what: str = "model") -> Path:
    """The Hugging Face directory at a path. Raises IsobitError where there is none."""
    if not isinstance(path, (str, Path)):
        raise IsobitError(f"{what}: expected the path of a Hugging Face model directory, got {path!r:.80}")
    folder = Path(path)
    if not exists(folder):
        hint = download_hint(path) or "; expected a Hugging Face model directory"
        raise IsobitError(f"{what} {folder}: no such directory{hint}")
    if not folder.is_dir():
        raise IsobitError(f"{what} {folder}: a file; give the Hugging Face model directory that it is in")
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, within the limits of `isobit.data.foreign`; IsobitError if it is missing or
    malformed."""
    try:
        values = parse_json(read_text(path))
    except BadJson as error:
        line = "" if error.line is None else f", line {error.line}"
        raise IsobitError(f"{path}{line}: not valid JSON: {error.reason}") from None
    if not isinstance(values, dict):
        raise IsobitError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def read_text(path: Path) -> str:
    """A text file of a model directory; IsobitError if it is missing, not UTF-8 or far too long."""
    try:
        return read_bytes(path, _MOST_TEXT_BYTES).decode("utf-8")
    except FileNotFoundError:
        raise IsobitError(f"{path.parent}: {path.name} is missing; expected a Hugging Face model directory") from None
    except (OSError, UnicodeDecodeError) as error:
        raise IsobitError(f"{path}: cannot be read: {reason_of(error)}") from None


def _tensor_shapes(directory: Path) -> Shapes:
    """The shapes of all tensors of a directory, from the headers of its files. Raises IsobitError for a file that is
    missing or corrupt, for a tensor that is in two files, and for one that the index names and its file lacks."""
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, str] = {}
    for name, wanted in _weight_files(directory).items():
        with _opened(directory / name) as file:
            for key in file.keys():  # noqa: SIM118 (a file handle, not a dict)
                if key in places:
                    raise IsobitError(
                        f"{directory}: tensor {brief(key)} is in both {places[key]} and {name}; it must be in one of "
                        "them"
                    )
                places[key], shapes[key] = name, tuple(file.get_slice(key).get_shape())
        for key in wanted:
            if places.get(key) != name:
                raise IsobitError(
                    f"{directory / INDEX}: tensor {brief(key)} is not in {name}, where weight_map says it is"
                )
    scales = [key for key in shapes if key.endswith(_SCALES) and key.removesuffix(_SCALES) in shapes]
    return {key: shape for key, shape in shapes.items() if key not in scales}


def read_weights(directory: Path, check: Callable[[Shapes], None] | None = None) -> dict[str, Tensor]:
    """All tensors of a directory, float32, by their Hugging Face names. `check` gets their shapes before anything is
    allocated, and raises for what the model cannot take. Raises IsobitError for a file that is missing or corrupt,
    for headers and an index that contradict each other, and for a tensor that is not of numbers or not finite."""
    shapes = _tensor_shapes(directory)
    if check is not None:
        check(shapes)
    tensors: dict[str, Tensor] = {}
    for name in _weight_files(directory):
        with _opened(directory / name) as file:
            for key in file.keys():  # noqa: SIM118 (a file handle, not a dict)
                tensors[key] = _as_float(file.get_tensor(key), key, directory / name)
    _dequantize_blocks(tensors, directory)
    return tensors


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file. Raises IsobitError for one that is missing, cannot be read, or is damaged."""
    if not exists(path):
        raise IsobitError(f"{path.parent}: weight file {path.name} is missing")
    try:
        check_readable(path)
    except OSError as error:
        raise IsobitError(f"{path}: cannot be read: {reason_of(error)}") from None
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise IsobitError(
            f"{path}: truncated or corrupt safetensors file ({' '.join(str(error).split())[:300]})"
        ) from None


def _dequantize_blocks(tensors: dict[str, Tensor], directory: Path) -> None:
    """Replace FP8 codes and their scales by their values, in place; exact where scales are powers of two."""
    for name in [name for name, tensor in tensors.items() if tensor.dtype == E4M3.dtype]:
        codes, scale = tensors[name], tensors.pop(f"{name}{_SCALES}", None)
        grid = [-(-size // BLOCK) for size in codes.shape]
        if scale is None or list(scale.shape) != grid:
            found = "no scales" if scale is None else f"scales of shape {tuple(scale.shape)}"
            raise IsobitError(
                f"{directory}: FP8 tensor {brief(name)} has {found}; expected {brief(name)}{_SCALES} {tuple(grid)}"
            )
        tensors[name] = codes.float() * expand_scale(scale, (BLOCK, BLOCK), (codes.shape[0], codes.shape[1]))


def _weight_files(directory: Path) -> dict[str, list[str]]:
    """The files of the weights, and the tensors that the index says are in each."""
    if exists(directory / WEIGHTS):
        return {WEIGHTS: []}
    if exists(directory / INDEX):
        mapping = read_json(directory / INDEX).get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise IsobitError(f"{directory / INDEX}: weight_map is missing or empty")
        files: dict[str, list[str]] = {}
        for tensor, name in mapping.items():
            if not isinstance(name, str) or Path(name).name != name or "\0" in name:
                raise IsobitError(f"{directory / INDEX}: weight_map names a file outside the directory: {name!r:.80}")
            files.setdefault(name, []).append(tensor)
        return dict(sorted(files.items()))
    raise IsobitError(f"{directory}: no {WEIGHTS} and no {INDEX}; only safetensors checkpoints are read")


def _as_float(tensor: Tensor, name: str, path: Path) -> Tensor:
    blocks = tensor.dtype == E4M3.dtype and tensor.ndim == 2
    if tensor.dtype not in _FLOATS and not blocks:
        raise IsobitError(
            f"{path}: tensor {brief(name)} has dtype {tensor.dtype}; expected float32, bfloat16 or float16"
        )
    values = tensor.float()
    if not bool(torch.isfinite(values).all()):
        raise IsobitError(f"{path}: tensor {brief(name)} holds NaN or infinity")
    return tensor if blocks else values


def write_weights(directory: Path, tensors: Mapping[str, Tensor], shard_bytes: int = SHARD_BYTES) -> None:
    """Write `tensors`, of any device, as one safetensors file, or as shards of at most `shard_bytes` with an index.

    Weights that the directory already holds are replaced, whichever of the two forms they have.
    """
    written = _write_files(directory, tensors, shard_bytes)
    for pattern in (WEIGHTS, INDEX, "model-?????-of-?????.safetensors"):
        for path in directory.glob(pattern):
            if path.name not in written:
                path.unlink()


def _write_files(directory: Path, tensors: Mapping[str, Tensor], shard_bytes: int) -> set[str]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += nbytes
    if len(shards) == 1:
        save_tensors(shards[0], directory / WEIGHTS)
        return {WEIGHTS}
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_tensors(shard, directory / name)
        weight_map |= dict.fromkeys(shard, name)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return {INDEX, *weight_map.values()}


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file, with the mode that the umask says: the library's own is 0600 (safetensors 0.8)."""
    path.touch()
    mode = path.stat().st_mode & 0o777
    save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, path, metadata={"format": "pt"})
    path.chmod(mode)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON object, indented."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
