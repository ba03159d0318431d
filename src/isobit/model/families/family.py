"""What a family of models is: one table, whose values all other code reads.

Defaults are those of the configuration classes of transformers 5 (`configuration_llama.py` and its
siblings), which differ by family: a Mixtral without `rope_theta` has 1,000,000 and a Llama 10,000.
`tests/model/test_config_table.py` compares what is accepted with `transformers`, and what is left
out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from isobit.kernels import Activation
from isobit.model.families.rope import KINDS, Rope
from isobit.model.families.ropes import RopeKinds
from isobit.model.families.windows import Windows

RELU2: Literal["relu2"] = "relu2"
MlpActivation = Activation | Literal["relu2"]
"""Of an MLP: its gate's; or relu2, the square of ReLU, of one that has no gate, whose `gate_up` is
its up projection alone."""

AFTER_THE_LAST = "after the last"

Packing = Literal["columns", "halves", "rows"]
"""columns: of each expert the transposed matrix, gates and ups in turn; halves: the transposed
matrix, gates before ups; rows: the matrix, gates before ups."""

Modules = dict[str, tuple[str, ...]]
"""Of each master in a layer, the Hugging Face modules whose tensors are its rows; `{}` is an
expert's number, and `linear.` is before the masters of linear attention that are other modules in
other layers."""


def sizes(vocabulary: int, hidden: int, inner: int, layers: int, heads: int) -> dict[str, int]:
    """Return `Family.sizes` from these sizes, in this order."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


LLAMA_MODULES: Modules = {
    "input_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "o": ("self_attn.o_proj",),
    "post_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True)
class Mixtures:
    """A family's mixtures of experts: what stands for keys that config.json leaves out. `own_keys`:
    sizes, gates and dense layers have their own keys; else all layers have experts of
    `intermediate_size`, whose gates sum to 1, and `scoring` is fixed. `size` is that of an expert
    then. `dense`: layers may
    have one MLP of `intermediate_size`, with first_k_dense_replace so many where config.json does
    not say; 0: all have experts, whose gates sum to 1. `dense_key`
    says which layers: `mlp_only_layers` and `decoder_sparse_step`, `first_k_dense_replace`,
    `mlp_layer_types` or, where layers have one part, `hybrid_override_pattern`. `normalize` stands
    for norm_topk_prob. `scoring`: experts have a score each, and these stand for n_group,
    topk_group and routed_scaling_factor. `shared`: the size of an MLP by the experts, for every
    token, 0 if there is none; with `scoring` n_shared_experts, or what `shared_key` names;
    `shared_gate`: it has a gate. `latent_key`: the key of the latent's size that experts work in,
    where a model may have one. `biases`: routers and experts have them. `together`: how files
    that are written hold a layer's experts in one tensor, if they do (`hub/packed_experts.py`).
    `adapters`: PEFT holds experts' in one tensor too, so (`adapters/peft_experts.py`); None: each
    by itself. `renamed`: PEFT 0.21 takes modules with the names of experts' projections for theirs.
    `switch`: the key that says whether a model has any; they stand next to the MLP of every
    layer then, both with separate norms, and `shared` stands for nothing: its size is
    intermediate_size."""

    count: int
    per_token: int
    own_keys: bool
    size: int = 768
    dense: int = 1
    dense_key: str = "mlp_only_layers"
    normalize: bool = False
    scoring: tuple[int, int, float] | None = None
    shared: int = 0
    shared_key: str | None = None
    shared_gate: bool = False
    latent_key: str | None = None
    biases: bool = False
    together: Packing | None = None
    adapters: Packing | None = None
    renamed: bool = False
    switch: str | None = None


class Inner(NamedTuple):
    """A language model inside another model, of a `model_type` of its own there: what stands for
    keys that its part of config.json leaves out, and values that it has whatever that part says."""

    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Family:
    """One `model_type`: the class of its checkpoints, what its layers have, and what stands for a
    key that config.json leaves out.

    `norms`: those of a layer, of input_norm and post_norm before attention and MLP, and
    attention_out_norm and mlp_out_norm after them. `qk_norm`: queries and keys are normed, each
    head by itself, or with `norms_all_heads` all heads of a token together; a text is the key of
    config.json that says whether they are. Norms multiply by their
    weight and `norm_offset`, with one in float32 and rounded once. `activation` is that of the
    gates, or of MLPs without, the only one that `activation_key` may name. `query_scalar`: what
    stands for query_pre_attn_scalar, whose root divides the scores, None if that is head_dim.
    `scaled_embedding`: embeddings are multiplied by the root of hidden_size. `off` are keys that
    must be null or false, and `fixed` those that must have these values, if they are there.
    `attention_bias` and `mlp_bias`: whether config.json says if there are any, and `biased` whether
    attention has them where it does not; `output_bias`: then its output projection has one too;
    `qkv_bias`: queries, keys and values always have them. `sinks`: heads have them. `windows`:
    which layers have a sliding window, None if none ever has. `unrotated`: the layers without
    rotary embedding, from config.json, its name and the number of layers; None if there are none.
    `linear_attention`: some layers have it in place of attention; "by head", the rows of its
    projections go from one head of keys to the next. `one_part`: a layer has one part
    alone (`hub/layer_kinds.py`), and linear attention is Mamba-2 (`hub/mamba.py`). `rotary`:
    attention has rotary embedding. `rms_key`: config.json's key of the norms' constant.
    `gated_attention`: q_proj gives each head a gate and its query. `partial_rotary`: the part of
    a head that is rotated where config.json does not say, None where that is always all of it;
    `interleaved`: its neighbours are rotated with each other, (0, 1), (2, 3), ..., not its halves.
    `kv_heads` None is one for each query head; `head_dim` None is hidden_size / heads. `nullable`
    are keys of which null means the same as None here. `latent`: attention is multi-head latent
    (`hub/latent.py`), with these sizes. `predicts_more`: files may have layers that predict
    further tokens and are not read: after the last one, or with names that begin so.
    `multipliers`: config.json has numbers that scores, sums and
    logits are multiplied by (`hub/multipliers.py`). `rope_kinds`: the scalings of
    rotary embeddings that transformers takes in the family; `original_positions`: what stands for
    original_max_position_embeddings next to them, and so counts more than the one inside;
    `rope_more`: their parameters that no other family has, all needed. `wrappers`: the model_types
    of models that wrap such a one, and whose language model is read; `opened_alone`: transformers
    has a class for the language model alone of such a model's checkpoint too; `sizes`: what stands for sizes
    that config.json leaves out in these; `inside`: the model_types that such a language model may have
    there but its own. `norms_values`: values are normed, each head by itself,
    without a weight. `score_scale`: what scores are multiplied by, whatever head_dim is.
    `layer_scalars`: a layer's sum is multiplied by its own number, which is not trained.
    `capped_logits`: config.json may have a cap of logits. `global_head_dim`: layers without a
    window have heads of another size (`hub/layer_heads.py`), and this stands for their width; None
    where all layers' are alike. `layer_embeddings`: layers may have
    their own embeddings, and read the keys of others (`hub/layer_inputs.py`), and this stands
    for the embeddings' width; None where they do neither. `checks` raise for a config.json, and its
    name, that has what is not here. `inner_key`: config.json's key of an MLP's width; `more_keys`
    are keys that it has beside those of all families, made of these.
    """

    architecture: str
    modules: Modules = field(default_factory=LLAMA_MODULES.copy)
    qkv_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool | str = False
    norms_all_heads: bool = False
    norm_offset: float = 0.0
    activation: MlpActivation = "silu"
    activation_key: str = "hidden_act"
    activation_name: str | None = None  # in config.json, where it is another there
    query_scalar: int | None = None
    scaled_embedding: bool = False
    off: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    biased: bool = False
    output_bias: bool = True
    sinks: bool = False
    norms: tuple[str, ...] = ("input_norm", "post_norm")
    windows: Windows | None = None
    unrotated: Callable[[Mapping[str, Any], str, int], tuple[int, ...]] | None = None
    linear_attention: bool | Literal["by head"] = False
    one_part: bool = False
    rotary: bool = True
    gated_attention: bool = False
    multipliers: bool = False
    latent: Mapping[str, int] | None = None
    predicts_more: str | None = None
    norms_values: bool = False
    score_scale: float | None = None
    layer_scalars: bool = False
    capped_logits: bool = False
    global_head_dim: int | None = None
    layer_embeddings: int | None = None
    checks: tuple[Callable[[Mapping[str, Any], str], None], ...] = ()
    inner_key: str = "intermediate_size"
    more_keys: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    wrappers: tuple[str, ...] = ()
    opened_alone: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    inside: Mapping[str, Inner] = field(default_factory=dict)
    whole_heads: bool = (
        False  # hidden_size must be a multiple of the heads, also where head_dim is given
    )
    yarn_needs_head_dim: bool = False
    max_positions: int = 32768
    rope_theta: float = 10000.0
    partial_rotary: float | None = None
    original_positions: int | None = None
    interleaved: bool = False
    ropes: RopeKinds | None = None
    rope_kinds: tuple[str, ...] = KINDS
    rope_more: tuple[str, ...] = ()
    rope_section: Mapping[str, Any] | None = (
        None  # that of a config.json without rope_scaling and rope_parameters
    )
    rms_key: str = "rms_norm_eps"
    rms_eps: float = 1e-6
    kv_heads: int | None = 32
    head_dim: int | None = None
    nullable: tuple[str, ...] = ("num_key_value_heads",)
    tied: bool = False
    mixtures: Mixtures | None = None

    @property
    def dense_mlp(self) -> bool:
        """Whether config.json has the size of a layer's one MLP."""
        return self.mixtures is None or self.mixtures.dense > 0

    def fresh_rope(self, theta: float, max_positions: int) -> Rope:
        """Return the rotary embedding of a model that is made, not read: without scaling, where the
        family has any without."""
        if "default" in self.rope_kinds:
            return Rope.of(theta, self.partial_rotary or 1.0)
        return Rope.from_hf(
            {"rope_scaling": {**(self.rope_section or {}), "rope_theta": theta}},
            "model.init",
            theta=theta,
            max_positions=max_positions,
            more=self.rope_more,
        )

    @property
    def variants(self) -> list[tuple[bool, bool, bool, bool]]:
        """The (qkv_bias, o_bias, mlp_bias, qk_norm) that a config.json of the family can
        express."""
        attention = (False, True) if self.attention_bias else (False,)
        mlp = (False, True) if self.mlp_bias else (False,)
        norms = (False, True) if isinstance(self.qk_norm, str) else (self.qk_norm,)
        return [
            (bias or self.qkv_bias, bias and self.output_bias, more, norm)
            for bias in attention
            for more in mlp
            for norm in norms
        ]
