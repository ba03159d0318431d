"""Hugging Face directories: read and write weights (safetensors, single or sharded) and JSON files.

Reads float32, bfloat16 and float16 tensors, and E4M3 ones in blocks of 128x128 (`fp8_blocks.py`), into float32. Every
defect of a directory is one `IsobitError`. Left out: pickled weights, other quantized checkpoints, and making a write
atomic (`isobit.run.checkpoints`).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from isobit.errors import IsobitError, download_hint
from isobit.precision import E4M3
from isobit.precision.quantize import BLOCK, expand_scale

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 << 30
_SCALES = "_scale_inv"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def model_folder(path: str | Path, what: str = "model") -> Path:
    """The Hugging Face directory at a path. Raises IsobitError where there is none."""
    if not isinstance(path, (str, Path)):
        raise IsobitError(f"{what}: expected the path of a Hugging Face model directory, got {path!r}")
    folder = Path(path)
    if folder.is_file():
        raise IsobitError(f"{what} {folder}: a file; give the Hugging Face model directory that it is in")
    if not folder.is_dir():
        hint = download_hint(path) or "; expected a Hugging Face model directory"
        raise IsobitError(f"{what} {folder}: no such directory{hint}")
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; IsobitError if it is missing or malformed."""
    try:
        values = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise IsobitError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}") from None
    if not isinstance(values, dict):
        raise IsobitError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def read_text(path: Path) -> str:
    """A text file; IsobitError if it is missing or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise IsobitError(f"{path.parent}: {path.name} is missing; expected a Hugging Face model directory") from None
    except (OSError, UnicodeDecodeError) as error:
        raise IsobitError(f"{path}: cannot be read: {error}") from None


def read_weights(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory, float32, by their Hugging Face names. Raises IsobitError for a file that is missing
    or corrupt, and for a tensor that is not of numbers or not finite."""
    tensors: dict[str, Tensor] = {}
    for name in _weight_files(directory):
        path = directory / name
        if not path.is_file():
            raise IsobitError(f"{directory}: weight file {name} is missing")
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (a file handle, not a dict)
                    tensors[key] = _as_float(file.get_tensor(key), key, path)
        except (SafetensorError, OSError) as error:
            raise IsobitError(f"{path}: truncated or corrupt safetensors file ({error})") from None
    _dequantize_blocks(tensors, directory)
    return tensors


def _dequantize_blocks(tensors: dict[str, Tensor], directory: Path) -> None:
    """Replace FP8 codes and their scales by their values, in place; exact where scales are powers of two."""
    for name in [name for name, tensor in tensors.items() if tensor.dtype == E4M3.dtype]:
        codes, scale = tensors[name], tensors.pop(f"{name}{_SCALES}", None)
        grid = [-(-size // BLOCK) for size in codes.shape]
        if scale is None or list(scale.shape) != grid:
            found = "no scales" if scale is None else f"scales of shape {tuple(scale.shape)}"
            raise IsobitError(f"{directory}: FP8 tensor {name} has {found}; expected {name}{_SCALES} {tuple(grid)}")
        tensors[name] = codes.float() * expand_scale(scale, (BLOCK, BLOCK), (codes.shape[0], codes.shape[1]))


def _weight_files(directory: Path) -> list[str]:
    if (directory / WEIGHTS).is_file():
        return [WEIGHTS]
    if (directory / INDEX).is_file():
        mapping = read_json(directory / INDEX).get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise IsobitError(f"{directory / INDEX}: weight_map is missing or empty")
        names = sorted({str(name) for name in mapping.values()})
        if any(Path(name).name != name for name in names):
            raise IsobitError(f"{directory / INDEX}: weight_map names a file outside the directory")
        return names
    raise IsobitError(f"{directory}: no {WEIGHTS} and no {INDEX}; only safetensors checkpoints are read")


def _as_float(tensor: Tensor, name: str, path: Path) -> Tensor:
    blocks = tensor.dtype == E4M3.dtype and tensor.ndim == 2
    if tensor.dtype not in _FLOATS and not blocks:
        raise IsobitError(f"{path}: tensor {name} has dtype {tensor.dtype}; expected float32, bfloat16 or float16")
    values = tensor.float()
    if not bool(torch.isfinite(values).all()):
        raise IsobitError(f"{path}: tensor {name} holds NaN or infinity")
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
