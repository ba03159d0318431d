"""What a stepwise learner leaves in a folder, and takes from one: an adapter as a PEFT folder, of a
whole model a Hugging Face directory, and next to them AdamW's moments, if they are wanted.

All in safetensors, FP32. What is read is whole and checked before anything of the learner changes.
Left out: making the folder appear at once, which is for the code that names it.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from isobit.data.foreign import check_readable, exists, reason_of
from isobit.distributed.files import file_tensors, write_file
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.model.adapters.peft import read_peft, write_peft
from isobit.model.hub import names
from isobit.model.hub.checkpoint import model_folder, open_weights
from isobit.rl.optim.sharded import ShardedOptimizer

OPTIMIZER = "optimizer.safetensors"


def write(folder: Path, model: Model, optimizer: ShardedOptimizer | None) -> None:
    """Write the masters, and the moments of an optimizer. Raises IsobitError for a folder that
    cannot be written."""
    adapter = model.transformer.adapter
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / OPTIMIZER).unlink(missing_ok=True)
        if adapter is None:
            model.save(folder)
        else:
            write_peft(folder, adapter, model.named_parameters(), model.ranks)
        if optimizer is not None:
            write_file(folder / OPTIMIZER, optimizer.parts())
    except OSError as error:
        raise IsobitError(f"{folder}: cannot be written: {reason_of(error)}") from None


def read_masters(folder: Path, model: Model) -> dict[str, Tensor]:
    """Return the masters of a folder, by name. Raises IsobitError for one that is missing or
    damaged, and for a model or an adapter of another shape than this one's."""
    folder, config, adapter = model_folder(folder), model.config, model.transformer.adapter
    if adapter is None:
        dtype = model.transformer.masters.dtype
        with open_weights(folder, lambda s: names.check_shapes(s, config, str(folder))) as weights:
            return names.fuse(weights.rows, config, model.ranks, dtype)
    peft = read_peft(folder, config)
    same = (peft.rank, peft.alpha, peft.rslora, peft.projections)
    if same != (adapter.rank, adapter.alpha, adapter.rslora, adapter.projections):
        raise IsobitError(f"{folder}: {peft}, and this run trains an {adapter}")
    return dict(peft.tensors)


def read_moments(folder: Path) -> dict[str, Tensor]:
    """Return what `ShardedOptimizer.state` was. Raises IsobitError for a folder that was saved
    without it, or is damaged."""
    path = folder / OPTIMIZER
    if not exists(path):
        raise IsobitError(f"{folder}: no {OPTIMIZER} in it: it was saved without the optimizer")
    try:
        check_readable(path)
        with safe_open(path, framework="pt") as file:
            moments = {name: tensor[...] for name, tensor in file_tensors(file).items()}
    except (OSError, SafetensorError) as error:
        raise IsobitError(f"{path}: cannot be read: {error}") from None
    for name, tensor in moments.items():
        if tensor.dtype != torch.float32 or not bool(tensor.isfinite().all()):
            raise IsobitError(f"{path}: {name} is not of finite float32 numbers")
    return moments
