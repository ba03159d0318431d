"""`isobit export`: a Hugging Face checkpoint of a model or a run, in BF16, FP32, or FP8 blocks.

It is written under a temporary name and renamed into place, so that an existing directory is
complete. Left out: other formats (GGUF, MXFP8), and uploading.
"""

import shutil
from pathlib import Path
from typing import Any

import torch

from isobit.config import load_any_run_config
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.model.adapters.peft import is_adapter
from isobit.model.fp8_blocks import block_checkpoint
from isobit.model.hub.checkpoint import SHARD_BYTES, model_folder
from isobit.model.hub.folders import from_hub_cache
from isobit.model.merge import merged
from isobit.run import durable
from isobit.run.directory import CONFIG, model_directory

FORMATS = ("bf16", "fp32", "fp8")
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def export(
    source: Path,
    to: Path,
    form: str,
    precision: str | None,
    *,
    best: bool = False,
    merge: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> str:
    """Write the checkpoint `to`; returns what was written, as text.

    `source` is a Hugging Face directory or a run, whose newest checkpoint is taken, or its `best`
    model. `precision` is the flow whose weights are written as FP8 blocks, and by which the gap of
    a `merge` of an adapter is measured; default: the run's own, else fp8. Raises IsobitError for a
    format that does not exist, an adapter that is not to be merged, a model whose layers have no
    whole blocks, and a directory that is not empty or cannot be written.
    """
    if form not in FORMATS:
        raise IsobitError(f"--format {form!r}: choose from {', '.join(FORMATS)}")
    if precision is not None and form != "fp8" and not merge:
        raise IsobitError(
            f"--precision says which FP8 blocks are written; with --format {form} leave it out"
        )
    durable.check_new_folder(to, "--to")
    model_folder(source)
    if best and not (source / CONFIG).is_file():
        raise IsobitError(
            f"--best: {source} is no run, which would have a best model; leave it out"
        )
    model, summary = _open(
        source,
        from_hub_cache(model_directory(source, best)),
        precision or _own_precision(source, form, merge),
        merge,
    )
    partial = to.with_name(f".{to.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        lines = summary + _write(model, partial, form, shard_bytes)
        durable.put_in_place(partial, to)
    except OSError as error:
        raise IsobitError(f"cannot write {to}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    size = sum(path.stat().st_size for path in to.glob("*.safetensors"))
    return "\n".join([*lines, f"{to}: {size / 1e6:,.1f} MB of weights"])


def _open(
    source: Path, folder: Path, precision: str | dict[str, Any], merge: bool
) -> tuple[Model, list[str]]:
    """Return (the model in `folder`, lines to print about it). Raises IsobitError for an adapter
    without `merge`, and for `merge` of a whole model."""
    if not is_adapter(folder):
        if merge:
            raise IsobitError(
                f"--merge: {source} is a whole model, with no adapter to merge; leave --merge out"
            )
        return Model.load(folder, precision), []
    if not merge:
        raise IsobitError(
            f"{source} holds an adapter, and {folder} is its PEFT folder, for systems that take "
            "one; --merge writes the model with the adapter in its weights"
        )
    model, gap = merged(folder, precision)
    return model, [gap.text(model.precision.name)]


def _own_precision(source: Path, form: str, merge: bool) -> str | dict[str, Any]:
    if form != "fp8" and not merge:
        return "float32"  # no working weights are written: the cheapest to make
    return load_any_run_config(source).precision if (source / CONFIG).is_file() else "fp8"


def _write(model: Model, folder: Path, form: str, shard_bytes: int) -> list[str]:
    if form != "fp8":
        model.save(folder, _DTYPES[form], shard_bytes)
        return []
    checkpoint = block_checkpoint(model)
    keys = {"dtype": "bfloat16", "quantization_config": checkpoint.quantization_config}
    model.write(folder, checkpoint.tensors, keys, shard_bytes)
    quantized = sum(name.endswith("_scale_inv") for name in checkpoint.tensors)
    lines = [
        f"{quantized} matrices in FP8 blocks, as the rollout under {model.precision.name} "
        "multiplies them"
    ]
    for reason in dict.fromkeys(checkpoint.kept.values()):
        names = [name for name, why in checkpoint.kept.items() if why == reason]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"{names[0]}{more} in BF16: {reason}")
    return lines
