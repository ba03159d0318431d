"""Names and shapes of a model's masters, of its architecture alone."""

from isobit.model.hub.config import ModelConfig

_BESIDE = ("shared_out_norm", "experts_norm", "router_norm", "experts_out_norm")
"""The norms where experts stand beside an MLP."""


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every master by its name, in order.

    `embed` [V, C]; of layer i, with the prefix `layers.i.`: `input_norm`, `qkv` [(H + 2 KV) · D,
    C], or [(H + KV) · D, C] where keys are values, `q_norm` and `k_norm` [D], or [H · D] and [KV ·
    D], `sinks` [H], `o` [C, H · D], `attention_out_norm`, `post_norm`, then `gate_up` [2 I, C] and
    `down` [C, I], or `router` [E, C] and `experts.e.gate_up` and `experts.e.down` of each expert e,
    `shared.gate_up` and `shared.down` of an MLP next to them and `shared_gate` [1, C], and
    `mlp_out_norm`, and `layer_scalar` [1], which no gradient reaches; `final_norm`; `head` [V, C],
    unless it is the embedding. Norms are those of `ModelConfig.norms_of`. A bias has the name of its
    weight and `_bias`. A layer with linear attention has `LinearAttention.shapes` from `qkv` to
    `o`, one with latent attention `Latent.shapes`, and where attention has gates, those are rows of
    `qkv`. Of an MLP without a gate, `gate_up` is [I, C]. `balance` [E] is the bias by which experts
    are chosen that have scores. Experts behind a latent have L columns in place of C, and rows, and
    before and after them are `experts_in` [L, C] and `experts_out` [C, L].
    Where experts stand next to an MLP, `shared_out_norm` is behind that, `router_norm` and
    `experts_norm` are before the router and the experts and `experts_out_norm` behind these, and
    gates are multiplied by `expert_scale` [E]. A layer that reads keys has no `k_norm`, and only
    queries' rows in `qkv`. What embeddings of layers need is of `LayerInputs.shapes`, behind
    `mlp_out_norm`, and `LayerInputs.shapes_outside`, behind `embed`.
    """
    whole = config.vocab_size, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embed": whole}
    shapes |= config.inputs.shapes_outside(*whole, config.num_layers)
    for index in range(config.num_layers):
        inside = _attention_shapes(config, index) if config.has_attention(index) else {}
        inside |= _mlp_shapes(config, index) if config.has_mlp(index) else {}
        inside |= config.inputs.shapes(config.hidden_size)
        inside |= {"layer_scalar": (1,)} if config.layer_scalars else {}
        shapes |= {f"layers.{index}.{name}": shape for name, shape in inside.items()}
    shapes["final_norm"] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes["head"] = (config.vocab_size, config.hidden_size)
    return shapes


def _attention_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    if config.linear is not None and config.is_linear(layer):
        return _own_shapes(config, layer, config.linear.shapes(config.hidden_size))
    if config.latent is not None:
        latent = config.latent.shapes(config.hidden_size, config.num_heads)
        return _own_shapes(config, layer, latent)
    hidden, rows = config.hidden_size, config.qkv_rows(layer)
    kv_heads, dim, _ = config.heads_of(layer)
    heads, kv_heads = (config.num_heads, kv_heads) if config.norms_all_heads else (1, 1)
    shapes: dict[str, tuple[int, ...]] = {"input_norm": (hidden,), "qkv": (rows, hidden)}
    if config.qkv_bias:
        shapes["qkv_bias"] = (rows,)
    if config.qk_norm:
        shapes["q_norm"] = (heads * dim,)
        shapes |= {"k_norm": (kv_heads * dim,)} if config.keys_of(layer) == layer else {}
    if config.sinks:
        shapes["sinks"] = (config.num_heads,)
    shapes["o"] = (hidden, config.num_heads * dim)
    if config.o_bias:
        shapes["o_bias"] = (hidden,)
    shapes["attention_out_norm"] = (hidden,)
    return _with_norms_of(config, layer, shapes)


def _own_shapes(
    config: ModelConfig, layer: int, shapes_of_attention: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of another kind of attention, between its norms."""
    hidden = (config.hidden_size,)
    shapes = {"input_norm": hidden, **shapes_of_attention, "attention_out_norm": hidden}
    return _with_norms_of(config, layer, shapes)


def _mlp_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.inner_of(layer)
    halves = 2 if config.gated else 1
    shapes: dict[str, tuple[int, ...]] = {"post_norm": (hidden,)}
    if config.is_mixture(layer) and config.experts is not None:
        mlp: dict[str, tuple[int, ...]] = {"router": (config.experts.count, hidden)}
        width = config.experts.latent or hidden
        if config.experts.latent:
            shapes |= {"experts_in": (width, hidden), "experts_out": (hidden, width)}
        for number in range(config.experts.count):
            mlp[f"experts.{number}.gate_up"] = (halves * config.experts.intermediate_size, width)
            mlp[f"experts.{number}.down"] = (width, config.experts.intermediate_size)
        if config.experts.scoring is not None:
            shapes["balance"] = (config.experts.count,)
        shared = inner if config.experts_beside else config.experts.shared
        shapes |= _shared_shapes(config, shared)
        if config.experts_beside:
            shapes |= dict.fromkeys(_BESIDE, (hidden,)) | {"expert_scale": (config.experts.count,)}
        for name, shape in mlp.items():
            shapes |= {name: shape} | ({f"{name}_bias": shape[:1]} if config.experts_bias else {})
    else:
        shapes |= {"gate_up": (halves * inner, hidden), "down": (hidden, inner)}
        if config.mlp_bias:
            shapes |= {"gate_up_bias": (2 * inner,), "down_bias": (hidden,)}
    shapes["mlp_out_norm"] = (hidden,)
    return _with_norms_of(config, layer, shapes)


def _shared_shapes(config: ModelConfig, size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the MLP of this size that runs next to a layer's experts."""
    hidden = config.hidden_size
    if not size:
        return {}
    shapes: dict[str, tuple[int, ...]] = {"shared_gate": (1, hidden)} if config.shared_gate else {}
    first = (2 * size if config.gated else size, hidden)
    return shapes | {"shared.gate_up": first, "shared.down": (hidden, size)}


def _with_norms_of(
    config: ModelConfig, layer: int, shapes: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return shapes without those of the norms that the layer does not have."""
    norms = {
        "q_norm",
        "k_norm",
        "state_norm",
        "q_a_norm",
        "kv_a_norm",
        *_BESIDE,
        *config.norms_of(layer),
    }
    return {
        name: shape for name, shape in shapes.items() if not name.endswith("_norm") or name in norms
    }
