"""The rollout's working weights as bytes, for an engine in another process: one buffer a layer, and
one for the ends.

A buffer is the storage of its tensors one after the other, FP8 codes and scales as they are, in the
order of `Transformer.rollout_tensors`. So both sides know what is where from the model's config,
and nothing is rounded on the way. Left out: the transport, and the digests that it is checked by
(`isobit.engine.fleet`).
"""

from collections.abc import Mapping
from itertools import groupby

import torch
from torch import Tensor

from isobit.distributed.weights import as_bytes, part_of
from isobit.errors import RunFailed
from isobit.kernels import StoredWeight, tensors_of
from isobit.model.transformer import Transformer
from isobit.model.weights.sync import poison


def weight_bytes(transformer: Transformer) -> dict[str, Tensor]:
    """Copy the rollout's working weights to the CPU, as [bytes] uint8 by layer: `layers.0`,
    `layers.1`, ..., then embedding, last norm and head under their names."""
    return {
        block: torch.cat(
            [as_bytes(tensor) for operand in operands for tensor in tensors_of(operand)]
        ).cpu()
        for block, operands in _parts(transformer).items()
    }


def take_weights(transformer: Transformer, buffers: Mapping[str, Tensor], version: int) -> None:
    """Overwrite the rollout's working weights by those of a version, and compare each tensor with
    what was sent. Raises RunFailed, naming the buffer, for one of another size, or that is not in
    the storage afterwards."""
    blocks = _parts(transformer)
    if blocks.keys() != buffers.keys():
        raise RunFailed(
            f"weights of {len(buffers)} buffers arrived, where the model has {len(blocks)}"
        )
    for block, operands in blocks.items():
        stored = [as_bytes(tensor) for operand in operands for tensor in tensors_of(operand)]
        sizes = [len(tensor_bytes) for tensor_bytes in stored]
        if sum(sizes) != len(buffers[block]):
            raise RunFailed(
                f"{block} arrived with {len(buffers[block]):,} bytes, where the model has "
                f"{sum(sizes):,}"
            )
        for operand in operands:
            poison(operand)
        for into, sent in zip(stored, buffers[block].split(sizes)):
            into.copy_(sent)
            if not torch.equal(into, sent.to(into.device)):
                raise RunFailed(f"{block} is not in memory as it was written")
    transformer.received(version)


def _parts(transformer: Transformer) -> dict[str, list[StoredWeight]]:
    """Group the rollout's tensors into the blocks that are sent as one buffer: each layer; the
    embedding, the last norm and the head alone."""
    blocks: dict[str, list[StoredWeight]] = {}
    tensors = transformer.rollout_tensors()
    for block, group in groupby(tensors, lambda named: part_of(named[0])):
        blocks.setdefault(block, []).extend(operand for _, operand in group)
    return blocks
