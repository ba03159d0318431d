"""What layers take next to the hidden state, as the small Gemma 4 have it: their own embeddings,
and keys and values of another layer.

Of tokens t with embeddings x, for all layers at once, P the width of a layer's embeddings:
(norm(x · W / √H) + √P · table[t]) / √2. With its part e of that and h the sum of the stream behind
its MLP, a layer adds norm(out · (gelu(gate · h) ⊙ e)).

A layer that reads keys is given another's rows of keys and values as they leave the projection, and
that layer's norm of keys. It writes to that layer's store what is there already, bit for bit
(`tests/model/test_layer_inputs.py`), so no operator knows of it, and the gradients of all readers
are summed where those rows are. Which layer reads which is `ModelConfig.keys_of`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from isobit.kernels import Ops
from isobit.model.forward import autograd
from isobit.model.hub.config import ModelConfig
from isobit.model.weights.layout import Embedded, Layer, LayerEmbeddings
from isobit.model.weights.stored import Vector


class Keys(NamedTuple):
    """A layer's `rows` [T, 2 KV · D] of keys, neither normed nor rotated, and values; its norm of
    keys, and the layer itself."""

    rows: Tensor
    norm: Vector | None
    layer: Layer


def layer_embeddings(
    tokens: Tensor, x: Tensor, own: LayerEmbeddings, config: ModelConfig, ops: Ops
) -> dict[int, Tensor]:
    """Return each layer's embeddings [T, P] of tokens [T] whose embeddings are x [T, H]."""
    width = config.inputs.embedded
    found = autograd.embedding(tokens, own.table, width**0.5, ops)
    rows = autograd.linear(x, own.projection, ops) * config.hidden_size**-0.5
    normed = autograd.rms_norm(rows.view(-1, width), None, own.norm, config.rms_eps, ops)[0]
    both = (normed.view(found.shape) + found) * 2**-0.5
    return dict(enumerate(both.view(len(tokens), -1, width).unbind(1)))


def with_embedding(
    x: Tensor, residual: Tensor, embedded: Tensor, own: Embedded, config: ModelConfig, ops: Ops
) -> tuple[Tensor, Tensor]:
    """Return (what a layer's embeddings [T, P] add, the sum x + residual that it is added to), both
    [T, H]."""
    summed = x + residual
    pair = torch.cat((autograd.linear(summed, own.gate, ops), embedded), dim=1)
    out = autograd.gated_linear(pair, config.activation, own.out, ops)
    return autograd.rms_norm(out, None, own.out_norm, config.rms_eps, ops)[0], summed
