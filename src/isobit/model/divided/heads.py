"""The heads by which ranks divide each layer's attention, and the config of a rank that has some of
them.

Left out: which rows of a weight these are (`distributed/layout.py`).
"""

from collections.abc import Iterator
from dataclasses import replace

from isobit.distributed.layout import HeadRows, Layout
from isobit.errors import IsobitError
from isobit.model.hub.config import ModelConfig
from isobit.model.hub.latent import Latent
from isobit.model.hub.linear_attention import LinearAttention
from isobit.model.hub.mamba import Mamba


def heads_by_layer(config: ModelConfig) -> dict[str, HeadRows]:
    """Return the heads of each layer with attention, by its prefix. Raises IsobitError for an
    architecture whose attention ranks do not divide."""
    for reason in _undivided(config):
        raise IsobitError(f"{config.family}: ranks do not hold a model together that has {reason}")
    return {
        f"layers.{index}": _heads_of(config, index)
        for index in range(config.num_layers)
        if config.has_attention(index)
    }


def _undivided(config: ModelConfig) -> Iterator[str]:
    if isinstance(config.linear, Mamba):
        yield "Mamba-2 layers, the rows of whose steps are less than a block"
    if config.norms_all_heads:
        yield "a norm across all heads"
    if config.global_heads is not None:
        yield "heads that differ by layer"
    if config.inputs.embedded or config.inputs.reading:
        yield "embeddings of layers, or layers that read the keys of others"


def _heads_of(config: ModelConfig, layer: int) -> HeadRows:
    if config.is_linear(layer) and config.linear is not None:
        return _of_linear(config.linear)
    if config.latent is not None:
        return _of_latent(config.latent, config.num_heads)
    kv, dim, _ = config.heads_of(layer)
    heads = HeadRows.of(config.num_heads, kv, dim)
    if not config.gated_attention:
        return heads
    queries, *keys_and_values = heads.rows["qkv"]
    return replace(heads, rows={**heads.rows, "qkv": (2 * queries, *keys_and_values)})


def _of_latent(sizes: Latent, heads: int) -> HeadRows:
    queries = "qkv_a" if sizes.q_rank is None else "q_b"
    rows = {queries: (sizes.head_dim,), "kv_b": (sizes.plain + sizes.value,)}
    return HeadRows(heads, rows, sizes.value)


def _of_linear(sizes: LinearAttention) -> HeadRows:
    shared = sizes.value_heads // sizes.key_heads
    heights = tuple(height // sizes.key_heads for height in sizes.heights)
    keys, values = sizes.key_dim, shared * sizes.value_dim
    gates = (2 * shared,) if sizes.by_head else (shared, shared)
    rows = {"qkv": heights, "gates": gates, "conv": (keys, keys, values)}
    rows |= dict.fromkeys(("decay", "step_bias"), (shared,))
    return HeadRows(sizes.key_heads, rows, values)


def local_config(config: ModelConfig, layout: Layout, rank: int) -> ModelConfig:
    """Return the config of a rank: with the heads that it computes."""
    counts = {
        "conv" in heads.rows: len(layout.local_heads(prefix, rank))
        for prefix, heads in layout.heads.items()
    }
    if (linear := config.linear) is not None and (count := counts.get(True)) is not None:
        values = count * linear.value_heads // linear.key_heads
        config = replace(config, linear=replace(linear, key_heads=count, value_heads=values))
    if (count := counts.get(False)) is not None:
        queries = count * config.num_heads // config.num_kv_heads
        config = replace(config, num_heads=queries, num_kv_heads=count)
    return config
