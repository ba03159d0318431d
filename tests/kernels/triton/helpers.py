"""Where Triton kernels are tested: on the GPU where there is one, else in Triton's interpreter."""

import os
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from isobit.kernels import KVStore
from isobit.kernels.attention.triton import forward as attention
from isobit.kernels.matrices import Operand
from isobit.precision import QTensor

Matrix = TypeVar("Matrix", Tensor, QTensor, Operand)
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")

assert HAS_GPU or os.environ.get("TRITON_INTERPRET") == "1", (
    "tests/conftest.py sets it before Triton is imported"
)


def there(operand: Matrix) -> Matrix:
    """A copy on the device of the kernels, strides kept."""
    if isinstance(operand, QTensor):
        codes = there(operand.data.view(torch.uint8)).view(operand.data.dtype)
        return QTensor(codes, there(operand.scale), operand.spec)
    copy = torch.empty_strided(operand.shape, operand.stride(), dtype=operand.dtype, device=DEVICE)
    return copy.copy_(operand)


def moved(store: KVStore) -> KVStore:
    """A copy on the device of the kernels; calibrated scales stay views of one number."""

    def copied(scale: Tensor | None) -> Tensor | None:
        if scale is None or not store.calibrated:
            return None if scale is None else scale.clone().to(DEVICE)
        return scale[:1, :1].clone().to(DEVICE).expand(scale.shape)

    k, v = (each.clone().to(DEVICE) for each in (store.k, store.v))
    counts = None if store.counts is None else store.counts.clone().to(DEVICE)
    return KVStore(k, v, copied(store.k_scale), copied(store.v_scale), store.kv, counts)


def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in splits of 32 keys and blocks of 16, so that toy sequences have several; few rows
    and many in tiles of either kind, as they are. On a GPU 16 keys are no long side of its
    instruction, so there all tiles have them first."""
    own = attention.tiling
    monkeypatch.setattr(attention, "_KEYS_PER_SPLIT", 32)
    monkeypatch.setattr(
        attention,
        "tiling",
        lambda *given: own(*given)._replace(rows=min(own(*given).rows, 64), keys=16),
    )
    if HAS_GPU:
        monkeypatch.setattr(attention, "_FEW_ROWS", 64)
