"""A Mamba-2 layer (Dao and Gu 2024, arXiv 2405.21060), as Nemotron-H has it.

Of a layer's rows, normed: (z, x, B, C, dt) = rows · in_proj; x, B and C go through a short
convolution over their last tokens and SiLU; the recurrence gives, head by head, what its state
recalls, and D · x; that times silu(z) is normed, the values of a group of heads together, and
projected. Both operators are those of the gated delta rule (`delta.py`), and go on from what a
store has of earlier rows.
"""

import torch
from torch import Tensor

from isobit.kernels import Ops
from isobit.model.forward import autograd
from isobit.model.forward.delta import Recurrent, convolved, recurrence
from isobit.model.forward.gate import gated, times
from isobit.model.hub.mamba import Mamba
from isobit.model.weights.layout import Delta


def mamba(rows: Tensor, layer: Delta, sizes: Mamba, given: Recurrent, ops: Ops) -> Tensor:
    """Rows [T, values + channels + heads] of the first projection to [T, hidden]."""
    assert layer.skip is not None
    z, mixed, steps = rows.split((sizes.values, sizes.channels, sizes.value_heads), dim=1)
    mixed = convolved(mixed.contiguous(), layer.conv, given, ops, layer.conv_bias)
    fading = layer.decay, layer.step_bias, layer.skip
    recalled = recurrence(mixed, steps.float().contiguous(), fading, given, ops)
    whole = gated("silu", torch.cat((z, recalled.flatten(1)), 1), ops)
    normed = autograd.unweighted_norm(whole, sizes.group, given.eps, ops)
    return autograd.linear(times(normed, layer.state_norm), layer.o, ops)
