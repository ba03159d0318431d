"""The architecture of a model, read from and written to a Hugging Face `config.json`.

Transformers with RMS norms before or after attention and MLP, rotary embedding, grouped-query
attention, in which a layer may have a sliding window, or linear attention in its place, and a gated
MLP, or several of which a router chooses. How families differ is in their tables (`families/`).
Left out: capped scores, and what else `unsupported.py` refuses with the reason; nothing in a model
directory is ever executed. What is accepted has the log-probabilities of `transformers`
(`tests/model/test_config_table.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from isobit.errors import IsobitError
from isobit.model.families import (
    FAMILIES,
    MOST_LAYERS,
    flag,
    number,
    optional_whole,
    real,
    whole,
    windows_of,
    windows_to_hf,
)
from isobit.model.families.family import RELU2, MlpActivation
from isobit.model.families.rope import Rope
from isobit.model.hub.experts import Experts
from isobit.model.hub.latent import Latent
from isobit.model.hub.layer_heads import LayerHeads
from isobit.model.hub.layer_inputs import LayerInputs
from isobit.model.hub.layer_kinds import FULL, LINEAR, kinds_from_hf, kinds_to_hf
from isobit.model.hub.linear_attention import LinearAttention
from isobit.model.hub.mamba import linear_sizes
from isobit.model.hub.multipliers import Multipliers
from isobit.model.hub.rotary import check_head_dim, ropes_of
from isobit.model.hub.token_ids import first_id, special_ids
from isobit.model.hub.unsupported import check_supported
from isobit.model.hub.wrapped import family_of, is_wrapped, text_of

_CAP = "final_logit_softcapping"
_OF_MLP = ("post_norm", "mlp_out_norm")


@dataclass(frozen=True)
class ModelConfig:
    """An architecture. Sizes are counts; `max_positions` is the context length in tokens.
    `windows`: of each layer the last tokens that a row sees, itself included, None where it sees
    all; () if it does in every layer. `unrotated`: the layers without rotary embedding.
    `sliding_rope`: that of layers with a window, None if it is `rope`. `query_scalar`: scores are
    divided by its root; head_dim where None. `linear`: which layers have linear attention, None if
    none has. `multipliers`: None in a family without them. `latent`: the sizes of multi-head latent
    attention, None where it is another. `global_heads`: those of layers without a window, None
    where they are as the others'. `logit_cap`: logits are cap · tanh(logits / cap), None: they are
    not capped. `inputs`: what layers take but the hidden state. `kinds`: of each layer its one
    part; () where layers have attention and MLP. `wrapped`: the class of the checkpoint that was
    read has the language model inside another model, and so in its modules' names."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    max_positions: int = 2048
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    experts: Experts | None = None
    windows: tuple[int | None, ...] = ()
    unrotated: tuple[int, ...] = ()
    sliding_rope: Rope | None = None
    query_scalar: int | None = None
    linear: LinearAttention | None = None
    multipliers: Multipliers | None = None
    latent: Latent | None = None
    global_heads: LayerHeads | None = None
    logit_cap: float | None = None
    inputs: LayerInputs = field(default_factory=LayerInputs)
    kinds: tuple[str, ...] = ()
    wrapped: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        for key in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
        ):
            if getattr(self, key) < 1:
                raise IsobitError(
                    f"config.json: {key} must be at least 1, got {getattr(self, key)}"
                )
        usual = LayerHeads(self.num_kv_heads, self.head_dim)
        for heads in (usual,) if self.global_heads is None else (usual, self.global_heads):
            if self.num_heads % heads.kv_heads:
                raise IsobitError(
                    f"config.json: {self.num_heads} attention heads cannot share "
                    f"{heads.kv_heads} key/value heads evenly"
                )
            if heads.dim < 2 or heads.dim % 2:
                raise IsobitError(
                    f"config.json: rotary embedding needs an even head_dim, got {heads.dim}"
                )
            self.rope.check(heads.dim)
        family = FAMILIES[self.family]
        assert self.global_heads is None or family.global_head_dim is not None
        assert self.logit_cap is None or family.capped_logits
        assert self.inputs == LayerInputs() or family.layer_embeddings is not None
        if family.mixtures is None or family.mixtures.switch is None:
            assert (self.experts is not None) == (family.mixtures is not None)
        if self.experts is not None and family.mixtures is not None:
            assert (self.experts.shared > 0) == (family.mixtures.shared > 0)
            assert self.experts.latent == 0 or family.mixtures.latent_key is not None
        assert not self.windows or (
            family.windows is not None and len(self.windows) == self.num_layers
        )
        assert (self.linear is not None) == bool(family.linear_attention)
        assert self.linear is None or self.linear.by_head == (family.linear_attention == "by head")
        assert not (self.tie_embeddings and "tie_word_embeddings" in family.off)
        assert len(self.kinds) == (self.num_layers if family.one_part else 0)
        assert (self.multipliers is not None) == family.multipliers
        assert (self.latent is not None) == (family.latent is not None)
        if self.latent is not None and self.num_kv_heads != self.num_heads:
            raise IsobitError(
                f"config.json: latent attention has as many keys as queries, not "
                f"{self.num_kv_heads} and {self.num_heads}"
            )
        assert self.query_scalar is None or family.query_scalar is not None
        assert self.sliding_rope is None or family.ropes is not None
        assert not self.unrotated or family.unrotated is not None
        switches = (self.qkv_bias, self.o_bias, self.mlp_bias, self.qk_norm)
        assert switches in family.variants, (
            f"a {self.family} of transformers has no such biases and norms: {switches}"
        )

    def heads_of(self, layer: int) -> LayerHeads:
        """Return the heads of a layer's attention."""
        if self.global_heads is not None and not self.slides(layer):
            return self.global_heads
        return LayerHeads(self.num_kv_heads, self.head_dim)

    def qkv_rows(self, layer: int) -> int:
        """Return the number of rows of a layer's projection: those of queries, their gates, keys,
        and values that are not the keys; of queries alone where the layer reads another's keys."""
        heads = self.heads_of(layer)
        queries = self.num_heads * heads.dim * (2 if self.gated_attention else 1)
        if layer >= self.num_stores:
            return queries
        return queries + (1 if heads.joint else 2) * heads.width

    @property
    def num_stores(self) -> int:
        """The number of layers, the first ones, that store their own keys and values or states."""
        return self.num_layers - self.inputs.reading

    @cached_property
    def _read(self) -> Mapping[int, int]:
        """The layer whose keys and values are read, by each layer that reads another's: the last
        one of its kind that has its own. It is needed in every layer of a forward, so it is found
        once."""
        last = {self.slides(layer): layer for layer in range(self.num_stores)}
        return {
            layer: last[self.slides(layer)] for layer in range(self.num_stores, self.num_layers)
        }

    def keys_of(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads: itself or another."""
        return self._read.get(layer, layer)

    def is_read(self, layer: int) -> bool:
        """Return whether another layer reads this one's keys and values."""
        return layer in self._read.values()

    def inner_of(self, layer: int) -> int:
        """Return the width of a layer's MLP."""
        wide = self.inputs.wide and layer >= self.num_stores
        return self.intermediate_size * (2 if wide else 1)

    @property
    def gated_attention(self) -> bool:
        """Whether each head has a gate."""
        return FAMILIES[self.family].gated_attention

    def norms_of(self, layer: int) -> tuple[str, ...]:
        """Return the norms of a layer: `Family.norms`, for the parts that it has."""
        names, mine = FAMILIES[self.family].norms, self.has_mlp(layer)
        return tuple(
            name for name in names if (mine if name in _OF_MLP else self.has_attention(layer))
        )

    @property
    def norms_all_heads(self) -> bool:
        """Whether all heads of a token share one norm of queries, and one of keys."""
        return FAMILIES[self.family].norms_all_heads

    @property
    def norms_values(self) -> bool:
        """Whether values are normed, each head by itself, without a weight."""
        return FAMILIES[self.family].norms_values

    @property
    def layer_scalars(self) -> bool:
        """Whether the sum of each layer is multiplied by a number of that layer."""
        return FAMILIES[self.family].layer_scalars

    @property
    def interleaved(self) -> bool:
        """Whether rotary embedding turns neighbours of a head with each other."""
        return FAMILIES[self.family].interleaved

    @property
    def activation(self) -> MlpActivation:
        """The activation of the gates, or of MLPs without a gate."""
        return FAMILIES[self.family].activation

    @property
    def gated(self) -> bool:
        """Whether MLPs have a gate in addition to their up projection."""
        return self.activation != RELU2

    @property
    def sinks(self) -> bool:
        """Whether each head has a sink in its attention."""
        return FAMILIES[self.family].sinks

    @property
    def experts_bias(self) -> bool:
        """Whether routers and experts have biases."""
        mixtures = FAMILIES[self.family].mixtures
        return mixtures is not None and mixtures.biases

    @property
    def shared_gate(self) -> bool:
        """Whether the MLP that is added to the experts has a gate."""
        mixtures = FAMILIES[self.family].mixtures
        return mixtures is not None and mixtures.shared_gate

    @property
    def norm_offset(self) -> float:
        """The number that norms add to their weights before they multiply."""
        return FAMILIES[self.family].norm_offset

    def offset_of(self, norm: str) -> float:
        """Return the `norm_offset` of a layer's norm; 0 for that of states."""
        return 0.0 if norm.endswith("state_norm") else self.norm_offset

    @property
    def attention_scale(self) -> float:
        """The factor of the attention scores."""
        if self.multipliers is not None:
            return self.multipliers.attention
        if (fixed := FAMILIES[self.family].score_scale) is not None:
            return fixed
        root = float((self.query_scalar or self.head_dim) ** -0.5)
        return root if self.latent is None else root * self.rope.score_factor

    @property
    def embedding_scale(self) -> float | None:
        """The factor of embeddings, in their type; None where there is none."""
        if self.multipliers is not None:
            return self.multipliers.embedding
        return float(self.hidden_size**0.5) if FAMILIES[self.family].scaled_embedding else None

    def window(self, layer: int) -> int | None:
        """Return the number of tokens that a row of the layer sees, itself included; None if it
        sees all before it."""
        window = self.windows[layer] if self.windows else None
        return None if window is None or window >= self.max_positions else window

    def slides(self, layer: int) -> bool:
        """Return whether the layer is one of those with a window."""
        return bool(self.windows) and self.windows[layer] is not None

    def rope_of(self, layer: int) -> Rope | None:
        """Return the rotary embedding of a layer, None if it has none."""
        if layer in self.unrotated or not FAMILIES[self.family].rotary:
            return None
        return (self.sliding_rope if self.slides(layer) else None) or self.rope

    def is_linear(self, layer: int) -> bool:
        """Return whether the layer has linear attention in place of attention."""
        return self.linear is not None and layer in self.linear.layers

    def has_attention(self, layer: int) -> bool:
        """Return whether the layer has attention, linear or not."""
        return not self.kinds or self.kinds[layer] in (LINEAR, FULL)

    def has_mlp(self, layer: int) -> bool:
        """Return whether the layer has an MLP, or experts."""
        return not self.kinds or not self.has_attention(layer)

    @property
    def experts_beside(self) -> bool:
        """Whether a layer has both experts and an MLP, each with separate norms."""
        mixtures = FAMILIES[self.family].mixtures
        return self.experts is not None and mixtures is not None and mixtures.switch is not None

    def is_mixture(self, layer: int) -> bool:
        """Return whether the layer has experts, in place of one MLP or in addition to it."""
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def routed(self) -> Experts | None:
        """The experts, if any layer has them: a mixture's config may make all layers dense."""
        return self.experts if self.num_mixtures else None

    @property
    def num_mixtures(self) -> int:
        """The number of layers with experts."""
        return sum(self.is_mixture(layer) for layer in range(self.num_layers))

    @staticmethod
    def from_hf(values: Mapping[str, Any], where: str = "config.json") -> "ModelConfig":
        """Read the config from the parsed config.json. Raises IsobitError for an unsupported
        architecture or feature."""
        outer, values = values, text_of(values, where)
        name = family_of(values, where)
        family = FAMILIES[name]
        check_supported(values, where, family)
        num_heads, hidden = (
            whole(values, key, where) for key in ("num_attention_heads", "hidden_size")
        )
        if family.whole_heads and hidden % num_heads:
            raise IsobitError(
                f"{where}: hidden_size {hidden} is no multiple of num_attention_heads {num_heads}"
            )
        kinds = kinds_from_hf(values, where) if family.one_part else ()
        layers = len(kinds) or whole(values, "num_hidden_layers", where, most=MOST_LAYERS)
        max_positions = whole(values, "max_position_embeddings", where, family.max_positions)
        rope, sliding = ropes_of(values, where, family, max_positions)
        latent = None if family.latent is None else Latent.from_hf(values, where, family.latent)
        if latent is None:
            head_dim = optional_whole(values, "head_dim", where, family.nullable, family.head_dim)
        else:
            head_dim, rope = latent.head_dim, rope.of_part(latent.rotated, latent.head_dim)
        kv_heads = optional_whole(
            values, "num_key_value_heads", where, family.nullable, family.kv_heads
        )
        check_head_dim(where, name, rope, head_dim, hidden // num_heads)
        mixtures = family.mixtures
        experts = None if mixtures is None else Experts.from_hf(values, where, mixtures, layers)
        bias = family.attention_bias and flag(values, "attention_bias", where, family.biased)
        vocabulary = whole(values, "vocab_size", where)
        ids = special_ids(values, where, vocabulary)
        config = ModelConfig(
            family=name,
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=whole(values, family.inner_key, where)
            if experts is None or family.dense_mlp
            else experts.intermediate_size,
            num_layers=layers,
            num_heads=num_heads,
            num_kv_heads=kv_heads or num_heads,
            head_dim=head_dim or hidden // num_heads,
            rms_eps=real(values, family.rms_key, where, family.rms_eps),
            rope=rope,
            qkv_bias=bias or family.qkv_bias,
            o_bias=bias and family.output_bias,
            mlp_bias=family.mlp_bias and flag(values, "mlp_bias", where),
            qk_norm=flag(values, key, where) if isinstance(key := family.qk_norm, str) else key,
            tie_embeddings=flag(values, "tie_word_embeddings", where, family.tied),
            max_positions=max_positions,
            bos_id=first_id(ids["bos"]),
            eos_ids=ids["eos"],
            pad_id=first_id(ids["pad"]),
            experts=experts,
            windows=()
            if family.linear_attention
            else windows_of(values, where, family.windows, layers, max_positions),
            sliding_rope=None if sliding == rope else sliding,
            query_scalar=None
            if family.query_scalar is None
            else whole(values, "query_pre_attn_scalar", where, family.query_scalar),
            linear=linear_sizes(values, where, kinds, layers, family),
            unrotated=() if family.unrotated is None else family.unrotated(values, where, layers),
            multipliers=Multipliers.from_hf(values, where) if family.multipliers else None,
            latent=latent,
            kinds=kinds,
            wrapped=is_wrapped(outer, FAMILIES[name]),
        )
        return _with_own_heads(config, values, where)

    def to_hf(self) -> dict[str, Any]:
        """Return a config.json that `transformers` reads, in the keys of its versions 4 and 5."""
        family = FAMILIES[self.family]
        values: dict[str, Any] = {
            "architectures": [family.architecture],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            **({family.inner_key: self.intermediate_size} if family.dense_mlp else {}),
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            family.activation_key: family.activation_name or family.activation,
            family.rms_key: self.rms_eps,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tie_embeddings,
            "bos_token_id": self.bos_id,
            "eos_token_id": self.eos_ids[0]
            if len(self.eos_ids) == 1
            else list(self.eos_ids) or None,
            "pad_token_id": self.pad_id,
            "dtype": "float32",
        }
        if family.ropes is None and family.rotary:
            rope = self.rope if self.latent is None else self.rope.whole
            values |= rope.to_hf(
                scaled=family.rope_section is not None, partial=family.partial_rotary
            )
        elif family.ropes is not None:
            values |= family.ropes.write(self.rope, self.sliding_rope or self.rope)
        if family.query_scalar is not None:
            values["query_pre_attn_scalar"] = self.query_scalar or self.head_dim
        if family.attention_bias:
            values["attention_bias"] = self.qkv_bias
        if family.mlp_bias:
            values["mlp_bias"] = self.mlp_bias
        if isinstance(family.qk_norm, str):
            values[family.qk_norm] = self.qk_norm
        if family.windows is not None:
            values |= windows_to_hf(self.windows, family.windows, self.num_layers)
        if family.unrotated is not None:
            values["no_rope_layers"] = [
                int(layer not in self.unrotated) for layer in range(self.num_layers)
            ]
        if self.linear is not None:
            values |= self.linear.to_hf(self.num_layers)
        if self.kinds:
            values |= kinds_to_hf(self.kinds)
        if family.mixtures is not None and self.experts is not None:
            values |= self.experts.to_hf(family.mixtures, self.num_layers)
        if self.multipliers is not None:
            values |= self.multipliers.to_hf()
        if self.latent is not None:
            del values["head_dim"]
            values |= self.latent.to_hf()
        if family.global_head_dim is not None:
            heads = self.global_heads or LayerHeads(self.num_kv_heads, self.head_dim)
            values |= heads.to_hf()
        if family.capped_logits:
            values[_CAP] = self.logit_cap
        if family.layer_embeddings is not None:
            values |= self.inputs.to_hf(self.vocab_size)
        return values if family.more_keys is None else values | family.more_keys(values)


def _with_own_heads(config: ModelConfig, values: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the config with the heads of layers without a window, the logits' cap, and the inputs
    of layers other than the hidden state, where the family has them."""
    family, heads, cap, inputs = FAMILIES[config.family], None, None, LayerInputs()
    slides = [config.slides(layer) for layer in range(config.num_layers)]
    if (width := family.layer_embeddings) is not None:
        inputs = LayerInputs.from_hf(values, where, slides, width, config.vocab_size)
    if family.global_head_dim is not None:
        usual = LayerHeads(config.num_kv_heads, config.head_dim)
        global_heads = LayerHeads.from_hf(values, where, usual, slides, family.global_head_dim)
        heads = None if global_heads == usual else global_heads
    if family.capped_logits and values.get(_CAP) is not None:
        cap = number(values, _CAP, where, 1.0)
    return replace(config, global_heads=heads, logit_cap=cap, inputs=inputs)
