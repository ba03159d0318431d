"""The architecture of a model, read from and written to a Hugging Face `config.json`.

Llama, Qwen2, Qwen3, Qwen3-MoE and Mixtral: pre-norm transformers with rotary embedding, grouped-query attention and a
gated SiLU MLP, or several of which a router chooses. They differ in biases, in QK-norm and in defaults. Left out:
sliding windows, shared experts, other activations; each is refused with the reason, and nothing in a model directory is
ever executed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from isobit.errors import IsobitError
from isobit.model.rope import Rope

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
# what transformers takes where config.json has none
_MAX_POSITIONS = {"llama": 2048, "qwen2": 32768, "qwen3": 32768, "qwen3_moe": 32768, "mixtral": 131072}


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: `count` MLPs of `intermediate_size`, of which `per_token` serve a token, with gates that
    sum to 1 if `normalize`; in all layers but `dense_layers`."""

    count: int
    per_token: int
    intermediate_size: int
    normalize: bool = True
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """One architecture. Sizes are counts; `max_positions` is the context length in tokens."""

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

    def __post_init__(self) -> None:
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, key) < 1:
                raise IsobitError(f"config.json: {key} must be at least 1, got {getattr(self, key)}")
        if self.num_heads % self.num_kv_heads:
            raise IsobitError(
                f"config.json: {self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads evenly"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise IsobitError(f"config.json: rotary embedding needs an even head_dim, got {self.head_dim}")
        assert (self.experts is not None) == (self.family in ("qwen3_moe", "mixtral"))
        if self.experts is not None and not 1 <= self.experts.per_token <= self.experts.count:
            raise IsobitError(
                f"config.json: {self.experts.per_token} experts per token, of {self.experts.count}: expected 1 to all"
            )
        given = (self.qkv_bias, self.o_bias, self.mlp_bias, self.qk_norm)
        assert given in _variants(self.family), f"a {self.family} of transformers has no such biases and norms: {given}"

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def is_mixture(self, layer: int) -> bool:
        """Whether the layer has experts in place of one MLP."""
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def num_mixtures(self) -> int:
        """Layers with experts."""
        return sum(self.is_mixture(layer) for layer in range(self.num_layers))

    @staticmethod
    def from_hf(values: Mapping[str, Any], where: str = "config.json") -> "ModelConfig":
        """From the parsed config.json. Raises IsobitError for an unsupported architecture or feature."""
        return _from_hf(values, where)

    def to_hf(self) -> dict[str, Any]:
        """A config.json that `transformers` reads, in the keys that its versions 4 and 5 both know."""
        values: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_eps,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tie_embeddings,
            "bos_token_id": self.bos_id,
            "eos_token_id": self.eos_ids[0] if len(self.eos_ids) == 1 else list(self.eos_ids) or None,
            "pad_token_id": self.pad_id,
            "dtype": "float32",
            **self.rope.to_hf(),
        }
        if self.family == "llama":
            values |= {"attention_bias": self.qkv_bias, "mlp_bias": self.mlp_bias}
        if self.family in ("qwen3", "qwen3_moe"):
            values |= {"attention_bias": self.qkv_bias}
        if self.family.startswith("qwen"):
            values |= {"use_sliding_window": False}
        return values if self.experts is None else values | _experts_to_hf(self.experts, self.family)


def _from_hf(values: Mapping[str, Any], where: str) -> ModelConfig:
    family = values.get("model_type")
    if family not in ARCHITECTURES:
        named = family or ", ".join(values.get("architectures") or ["none"])
        raise IsobitError(f"{where}: unsupported architecture {named!r}: supported are {', '.join(ARCHITECTURES)}")
    _refuse_unsupported(values, where)
    try:
        num_heads = int(values["num_attention_heads"])
        hidden = int(values["hidden_size"])
        if num_heads < 1:
            raise IsobitError(f"{where}: num_attention_heads must be at least 1, got {num_heads}")
        kv_heads = values.get("num_key_value_heads")
        bias = bool(values.get("attention_bias", False))
        config = ModelConfig(
            family=family,
            vocab_size=int(values["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(values["intermediate_size"]),
            num_layers=int(values["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=num_heads if kv_heads is None else int(kv_heads),
            head_dim=int(values.get("head_dim") or (128 if family.startswith("qwen3") else hidden // num_heads)),
            rms_eps=float(values.get("rms_norm_eps", 1e-5 if family == "mixtral" else 1e-6)),
            rope=Rope.from_hf(values, where),
            qkv_bias=family == "qwen2" or (bias and family != "mixtral"),
            o_bias=bias and family not in ("qwen2", "mixtral"),
            mlp_bias=bool(values.get("mlp_bias", False)) if family == "llama" else False,
            qk_norm=family.startswith("qwen3"),
            tie_embeddings=bool(values.get("tie_word_embeddings", False)),
            max_positions=int(values.get("max_position_embeddings") or _MAX_POSITIONS[family]),
            bos_id=_first(token_ids(values.get("bos_token_id"))),
            eos_ids=token_ids(values.get("eos_token_id")),
            pad_id=_first(token_ids(values.get("pad_token_id"))),
            experts=_experts_from_hf(values) if family in ("qwen3_moe", "mixtral") else None,
        )
    except KeyError as missing:
        raise IsobitError(f"{where}: key {missing} is missing") from None
    except (TypeError, ValueError) as error:
        raise IsobitError(f"{where}: a value has the wrong type: {error}") from None
    return config


def _experts_from_hf(values: Mapping[str, Any]) -> Experts:
    """Mixtral calls the number of experts num_local_experts, Qwen3-MoE by its age num_experts or the same."""
    layers = int(values["num_hidden_layers"])
    if values["model_type"] == "mixtral":
        return Experts(
            int(values["num_local_experts"]), int(values["num_experts_per_tok"]), int(values["intermediate_size"])
        )
    count = values["num_experts"] if "num_experts" in values else values["num_local_experts"]
    step, dense = int(values.get("decoder_sparse_step", 1)), values.get("mlp_only_layers") or []
    return Experts(
        int(count),
        int(values["num_experts_per_tok"]),
        int(values["moe_intermediate_size"]),
        bool(values.get("norm_topk_prob", False)),
        tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % step),
    )


def _experts_to_hf(experts: Experts, family: str) -> dict[str, Any]:
    values: dict[str, Any] = {"num_local_experts": experts.count, "num_experts_per_tok": experts.per_token}
    if family == "mixtral":
        return values
    return values | {
        "num_experts": experts.count,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(experts.dense_layers),
    }


def token_ids(value: Any) -> tuple[int, ...]:
    """Token ids from a config value: one id, a list of them, or nothing. Raises ValueError for anything else."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ValueError(f"{token!r} is not a token id")
    return tuple(ids)


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None


def _variants(family: str) -> list[tuple[bool, bool, bool, bool]]:
    """The (qkv_bias, o_bias, mlp_bias, qk_norm) that a config.json of the family can express."""
    if family == "qwen2":
        return [(True, False, False, False)]
    if family == "mixtral":
        return [(False, False, False, False)]
    if family.startswith("qwen3"):
        return [(bias, bias, False, True) for bias in (False, True)]
    return [(bias, bias, mlp, False) for bias in (False, True) for mlp in (False, True)]


def _refuse_unsupported(values: Mapping[str, Any], where: str) -> None:
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise IsobitError(f"{where}: unsupported hidden_act {activation!r}: supported is silu")
    if _slides(values):
        raise IsobitError(f"{where}: sliding-window attention is not supported: every layer must see all positions")
    quantized = values.get("quantization_config")
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    if quantized and not (isinstance(quantized, dict) and blocks.items() <= quantized.items()):
        raise IsobitError(
            f"{where}: the checkpoint is already quantized; give the BF16 or FP32 one, or one in FP8 blocks of 128x128"
        )


def _slides(values: Mapping[str, Any]) -> bool:
    """Whether any layer has a sliding window: by `layer_types`, else by the older keys of Qwen."""
    layers = values.get("layer_types")
    if layers:
        return any(layer != "full_attention" for layer in layers)
    if not values.get("use_sliding_window") or values.get("sliding_window") is None:
        return False
    return int(values.get("max_window_layers", 0)) < int(values.get("num_hidden_layers", 1))
