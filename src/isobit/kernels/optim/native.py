"""Sums of squares and stochastic rounding in C++ (`squares.cpp`, `stochastic.cpp`): the reference's
bits."""

import torch
from torch import Tensor

from isobit.kernels.native.base import NativeBase
from isobit.kernels.optim.definition import check_stochastic


def square_sums(ops: NativeBase, x: Tensor) -> Tensor:
    assert x.ndim == 2
    x = x.contiguous()
    sums = torch.empty(x.shape[0], dtype=torch.float64)
    ops.lib.isobit_square_sums(x.data_ptr(), *x.shape, sums.data_ptr(), torch.get_num_threads())
    return sums


def round_stochastically(ops: NativeBase, x: Tensor, seed: int, step: int, first: int) -> Tensor:
    check_stochastic(x, first)
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.bfloat16)
    ops.lib.isobit_round_stochastically(
        x.data_ptr(), out.data_ptr(), len(x), first, seed, step, torch.get_num_threads()
    )
    return out
