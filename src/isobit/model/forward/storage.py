"""The store of a layer: keys and values of attention, or the states of linear attention."""

import torch
from torch import Tensor

from isobit.kernels import KVStore, NoStore, StateStore, Store
from isobit.model.hub.config import ModelConfig
from isobit.precision import Flow, QuantSpec


def new_store(
    config: ModelConfig,
    layer: int,
    flow: Flow,
    pages: int,
    page_size: int,
    device: torch.device | str,
    kv: QuantSpec | None,
    scales: Tensor | None = None,
) -> Store:
    """Return an empty one, of `pages`. `kv`: how keys and values are stored; with calibrated
    `scales` [2], if there are."""
    if not config.has_attention(layer):
        return NoStore()
    if config.linear is not None and config.is_linear(layer):
        inputs = config.linear.width - 1, config.linear.channels
        return StateStore.allocate(pages, inputs, config.linear.state, flow.compute, device)
    heads = config.heads_of(layer)
    shape = pages * page_size, heads.kv_heads, heads.dim
    return KVStore.allocate(*shape, kv, flow.compute, scales, device)
