"""Variants of `config.json`: the families by their keys, with what is to become of each
(`config_table.py`)."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .helpers import VOCABULARY

CONTEXT, ORIGINAL = 64, 16
"""max_position_embeddings, and the original length that rotary scalings name: both below the length
compared."""
_LEFT_OUT = object()

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN = {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}
BASES: dict[str, dict[str, Any]] = {
    "llama": _SIZES | {"attention_bias": False, "mlp_bias": False},
    "qwen2": _SIZES | _QWEN,
    "qwen3": _SIZES | _QWEN | {"attention_bias": False},
    "qwen3_moe": _SIZES
    | _QWEN
    | {
        "attention_bias": False,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    }
    | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "mixtral": _SIZES | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
    "mistral": _SIZES | {"sliding_window": None},
    "smollm3": _SIZES
    | {
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": 8,
        "no_rope_layers": [1, 0],
        "pad_token_id": 0,
    },
}
BASES["olmo2"] = _SIZES | {"attention_bias": False, "pad_token_id": 0}
BASES["olmo3"] = BASES["olmo2"] | {
    "rope_theta": 500000.0,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
BASES["gemma3_text"] = {
    key: value for key, value in BASES["olmo3"].items() if key != "hidden_act"
} | {
    "rope_theta": 900.0,
    "rope_local_base_freq": 70.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 5,
}
BASES["gemma4_text"] = {
    key: value for key, value in _SIZES.items() if key not in ("hidden_act", "rope_theta")
} | {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 5.0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "pad_token_id": 0,
}
BASES["gemma4_unified_text"] = BASES["gemma4_text"]
BASES["gemma4_text"] = BASES["gemma4_text"] | {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCABULARY,
    "enable_moe_block": False,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
BASES["glm4"] = _SIZES | {"attention_bias": False, "pad_token_id": 0}
BASES["phi3"] = _SIZES | {"sliding_window": None, "pad_token_id": 0}
BASES["granite"] = _SIZES | {
    "attention_bias": False,
    "mlp_bias": False,
    "pad_token_id": 0,
    "embedding_multiplier": 1.5,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.9,
}
BASES["granitemoehybrid"] = {
    key: value
    for key, value in BASES["granite"].items()
    if key not in ("mlp_bias", "intermediate_size")
} | {
    "layer_types": ["attention"] * 2,
    "num_local_experts": 0,
    "mamba_n_heads": 1,
    "shared_intermediate_size": 40,
    "position_embedding_type": "rope",
}
BASES["seed_oss"] = _SIZES | {"attention_bias": True, "mlp_bias": False, "pad_token_id": 0}
BASES["ministral3"] = {key: value for key, value in _SIZES.items() if key != "rope_theta"} | {
    "sliding_window": None,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "llama_4_scaling_beta": 0.4,
    },
}
BASES["gpt_oss"] = _SIZES | {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "pad_token_id": 0,
}
BASES["qwen3_5_text"] = _SIZES | {
    "attention_bias": False,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "pad_token_id": 0,
}
BASES["qwen3_5_moe_text"] = {
    key: value for key, value in BASES["qwen3_5_text"].items() if key != "intermediate_size"
} | {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 28,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "q_lora_rank": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "pad_token_id": 0,
}
for _family, _dense in (
    ("deepseek_v3", {"first_k_dense_replace": 1}),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse"]}),
):
    BASES[_family] = {key: value for key, value in _SIZES.items() if key != "head_dim"}
    BASES[_family] |= _LATENT | _dense
BASES["glm4_moe"] = _SIZES | {
    **{key: value for key, value in _LATENT.items() if "_dim" not in key and "lora" not in key},
    "num_key_value_heads": 2,
    "attention_bias": False,
    "use_qk_norm": True,
    "first_k_dense_replace": 1,
}
BASES["minimax_m2"] = _SIZES | {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "rotary_dim": 8,
    "pad_token_id": 0,
}
BASES["qwen3_next"] = (
    BASES["qwen3_5_text"]
    | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    | {key: BASES["qwen3_5_moe_text"][key] for key in ("num_experts", "num_experts_per_tok")}
    | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 28}
)
BASES["nemotron_h"] = {
    key: value
    for key, value in _SIZES.items()
    if key not in ("rms_norm_eps", "hidden_act", "rope_theta", "num_hidden_layers")
} | {
    "layer_norm_epsilon": 1e-5,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
    "n_groups": 2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "ssm_state_size": 8,
    "conv_kernel": 4,
    "time_step_min": 0.6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 20,
    "moe_latent_size": None,
    "n_group": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "pad_token_id": 0,
}
_LATER = BASES.keys() - {"llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"}
"""Families whose rotary scalings, and `_SHARED` keys, are read by the same lines as those of the
others, and not compared again."""
_SHARED = {
    *(
        "for training only",
        "dtype bfloat16",
        "other ids",
        "no hidden_act",
        "rms_norm_eps 0.1",
        "1 head of keys",
    ),
    *("tied, with the same head", "no num_key_value_heads, 8 heads", "hidden_size 50 of 4 heads"),
    *("sliding_window 256", "sliding_window 63", "use_sliding_window, 256", "window from layer 2"),
}

SHAPES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *(
        "num_key_value_heads",
        "head_dim",
        "attention_bias",
        "mlp_bias",
        "tie_word_embeddings",
        "num_experts",
    ),
    *("num_local_experts", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers"),
    "shared_expert_intermediate_size",
    *(
        "use_qk_norm",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "q_lora_rank",
    ),
    *("n_routed_experts", "n_shared_experts", "first_k_dense_replace", "mlp_layer_types"),
    *(
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
    ),
    *("layers_block_type", "hybrid_override_pattern", "mamba_num_heads", "mamba_head_dim"),
    *("ssm_state_size", "n_groups", "conv_kernel", "moe_shared_expert_intermediate_size"),
    "moe_latent_size",
    *("linear_conv_kernel_dim", "full_attention_interval", "layer_types"),
    *("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "per_layer_config"),
    *("hidden_size_per_layer_input", "vocab_size_per_layer_input", "num_kv_shared_layers"),
    *("use_double_wide_mlp", "enable_moe_block", "top_k_experts"),
)
"""The keys on which names and shapes of weights depend."""

_SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
        "original_max_position_embeddings": ORIGINAL,
    },
}


_ORIGINAL = "original_max_position_embeddings"
_CAP = "final_logit_softcapping"
_YARNS: dict[str, dict[str, Any]] = {
    "null factor": {"factor": None},
    "attention_factor": {"attention_factor": 1.7},
    "two mscales": {"mscale": 0.7, "mscale_all_dim": 1.2},
    "one mscale": {"mscale": 0.7},
    "other betas": {"beta_fast": 4.0, "beta_slow": 0.5},
    "beta 0": {"beta_fast": 0},
    "no truncation": {"truncate": False},
    "null truncation": {"truncate": None},
    "unknown keys": {"finetuned": True, "mrope_section": [1, 2]},
}


@dataclass(frozen=True)
class Variant:
    """One config.json: the family's base with `changes`; `says`, a part of the refusal, or "" if it
    is to be equal.

    `head`: what the checkpoint's own lm_head.weight is where the head is tied.
    """

    family: str
    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    says: str = ""
    head: str = ""

    def values(self) -> dict[str, Any]:
        merged = {"model_type": self.family, **BASES[self.family], **self.changes}
        return {key: value for key, value in merged.items() if value is not _LEFT_OUT}


def variants() -> list[Variant]:
    """The table."""
    rows = []
    for family in BASES:
        own = {
            "olmo3": _olmo3,
            "gemma3_text": _gemma3,
            "gemma4_text": _gemma4,
            "gemma4_unified_text": _gemma4,
            "gpt_oss": _gpt_oss,
            "qwen3_5_text": _qwen35,
            "qwen3_5_moe_text": _qwen35,
            "phi3": _phi3,
            "deepseek_v3": _latent,
            "glm4_moe_lite": _latent,
            "glm4_moe": _scored,
            "minimax_m2": _minimax,
            "qwen3_next": _qwen35,
            "granite": _granite,
            "granitemoehybrid": _granite_hybrid,
            "ministral3": _ministral3,
            "nemotron_h": _nemotron,
        }.get(family, _windows)
        makers = [_sizes, _flags, own, _experts, _unrotated]
        for make in makers if family in _LATER else [*makers, _rope_forms, _rope_details]:
            made = (Variant(family, *row) for row in make(family))
            rows += [row for row in made if family not in _LATER or row.name not in _SHARED]
    return rows


Row = tuple[str, dict[str, Any], str] | tuple[str, dict[str, Any], str, str]


def _sizes(family: str) -> Iterator[Row]:
    """Sizes: given, left out, null, impossible."""
    yield "base", {}, ""
    for key in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    ):
        if key in BASES[family]:
            yield f"no {key}", {key: _LEFT_OUT}, f"'{key}' is missing"
    yield "hidden_size 48.0", {"hidden_size": 48.0}, "hidden_size has the wrong type"
    latent = "kv_lora_rank" in BASES[family]
    yield "1 head of keys", {"num_key_value_heads": 1}, "as many keys" if latent else ""
    yield "4 heads of keys", {"num_key_value_heads": 4}, ""
    yield "3 heads of keys", {"num_key_value_heads": 3}, "cannot share"
    one_each = ("llama", "olmo2", "olmo3", "phi3", "granite", "granitemoehybrid")
    nullable = family in (*one_each, "deepseek_v3", "qwen2", "qwen3", "smollm3", "seed_oss")
    yield (
        "null heads of keys",
        {"num_key_value_heads": None},
        "" if nullable else "num_key_value_heads",
    )
    left_out = {"qwen2": 32, "qwen3": 32, "mixtral": 8, "mistral": 8, "gpt_oss": 8}.get(family, 4)
    others = {"ministral3": 8, "deepseek_v3": 128, "glm4_moe_lite": 20, "nemotron_h": 8}
    others |= {"seed_oss": 8, "glm4_moe": 8, "minimax_m2": 8, "qwen3_next": 2}
    left_out = others.get(family, left_out)
    for heads in (4, 8, 32):
        shared = heads % (heads if family in one_each else left_out) == 0
        change = {"num_key_value_heads": _LEFT_OUT, "num_attention_heads": heads, "hidden_size": 64}
        yield f"no num_key_value_heads, {heads} heads", change, "" if shared else "cannot share"
    yield "no head_dim", {"head_dim": _LEFT_OUT}, ""
    yield (
        "null head_dim",
        {"head_dim": None},
        "" if family in ("llama", "mixtral", "mistral", "seed_oss") else "head_dim",
    )
    yield (
        "head_dim 20",
        {"head_dim": 20},
        "an even part of a head"
        if family.startswith(("qwen3_5", "qwen3_next"))
        else "is not qk_rope_head_dim"
        if latent
        else "",
    )
    says = "is not qk_rope_head_dim" if latent else "even head_dim"
    says = "rotary_dim must be at most 7" if family == "minimax_m2" else says
    yield "head_dim 7", {"head_dim": 7}, says
    if family in (
        "llama",
        "qwen2",
        "qwen3",
        "mistral",
    ):  # the grouped products of transformers take multiples of 4 alone
        yield (
            "hidden_size 50 of 4 heads",
            {"hidden_size": 50},
            "no multiple" if family == "llama" else "",
        )
    yield "no max_position_embeddings", {"max_position_embeddings": _LEFT_OUT}, ""
    yield (
        "null max_position_embeddings",
        {"max_position_embeddings": None},
        "max_position_embeddings",
    )
    eps = "layer_norm_epsilon" if family == "nemotron_h" else "rms_norm_eps"
    yield f"no {eps}", {eps: _LEFT_OUT}, ""
    yield f"{eps} 0.1", {eps: 0.1}, ""
    yield f"{eps} as text", {eps: "1e-6"}, eps


def _flags(family: str) -> Iterator[Row]:
    """Biases, the head, the activation, and keys that change nothing."""
    never = ("qwen2", "mixtral", "minimax_m2", "mistral", "ministral3", "phi3")
    bare = family == "nemotron_h"  # of biases, and its head is never tied
    latent = "kv_lora_rank" in BASES[family]
    says = "attention_bias True" if latent or bare else ""
    yield "attention_bias", {"attention_bias": True}, says
    yield "no attention_bias", {"attention_bias": _LEFT_OUT}, ""
    yield (
        "attention_bias as text",
        {"attention_bias": "false"},
        "" if family in never else "attention_bias",
    )
    yield "mlp_bias", {"mlp_bias": True}, "mlp_bias True" if bare else ""
    yield "no mlp_bias", {"mlp_bias": _LEFT_OUT}, ""
    yield "tied", {"tie_word_embeddings": True}, "tie_word_embeddings True" if bare else ""
    yield "no tie_word_embeddings", {"tie_word_embeddings": _LEFT_OUT}, ""
    yield "null tie_word_embeddings", {"tie_word_embeddings": None}, "tie_word_embeddings"
    yield "tied, with the same head", {"tie_word_embeddings": True}, "", "same"
    if not bare:
        yield (
            "tied, with another head",
            {"tie_word_embeddings": True},
            "tie_word_embeddings false",
            "other",
        )
    yield "no hidden_act", {"hidden_act": _LEFT_OUT}, ""
    for other in ("gelu", "relu", None):
        says = "" if family.startswith(("gemma", "nemotron")) else "hidden_act"
        yield f"hidden_act {other}", {"hidden_act": other}, says
    yield "is_causal false", {"is_causal": False}, "is_causal"
    yield "per_layer_config", {"per_layer_config": {"1": {"rms_norm_eps": 0.5}}}, "per_layer_config"
    yield (
        "for training only",
        {"attention_dropout": 0.0, "initializer_range": 0.5, "use_cache": False},
        "",
    )
    yield "other ids", {"bos_token_id": None, "eos_token_id": [3, 4], "pad_token_id": 0}, ""
    yield "dtype bfloat16", {"torch_dtype": "bfloat16"}, ""


def _rope_forms(family: str) -> Iterator[Row]:
    """Every kind of scaling, under every name that it had."""
    for kind, parameters in _SCALINGS.items():
        refused = f"unsupported rope scaling '{kind}'" if kind == "dynamic" else ""
        inside = {"rope_type": kind, **parameters}
        yield f"rope_scaling {kind}", {"rope_scaling": inside}, refused
        yield f"rope_scaling, type {kind}", {"rope_scaling": {"type": kind, **parameters}}, refused
        new = {"rope_theta": _LEFT_OUT, "rope_parameters": {**inside, "rope_theta": 900.0}}
        yield f"rope_parameters {kind}", new, refused
        yield f"rope_parameters {kind}, theta outside", {"rope_parameters": inside}, refused
        yield f"rope_parameters {kind}, two thetas", {**new, "rope_theta": 70.0}, refused
        yield f"rope_parameters {kind}, no theta", {**new, "rope_parameters": inside}, refused


def _rope_details(family: str) -> Iterator[Row]:
    """Parameters of the scalings: left out, null, outside, or in two sections."""
    outside = {_ORIGINAL: 40}
    for value, says in (
        (_LEFT_OUT, ""),
        (300, ""),
        (None, "rope_theta"),
        (0, "rope_theta"),
        ("500", "rope_theta"),
    ):
        yield (
            f"rope_theta {'left out' if value is _LEFT_OUT else value}",
            {"rope_theta": value},
            says,
        )
    yield "null rope_scaling", {"rope_scaling": None}, ""
    yield "rope_scaling of no kind", {"rope_scaling": {"factor": 3.0}}, ""
    yield "rope_scaling of kind null", {"rope_scaling": {"rope_type": None}}, "rope scaling None"
    yield "rope_scaling as text", {"rope_scaling": "yarn"}, "rope_scaling has the wrong type"
    yield (
        "half of each head",
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5},
        "partial",
    )
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 9.0}}
    listed = {"layer_types": ["full_attention"] * 2}
    yield "rope_parameters by layer type", {"rope_parameters": nested, **listed}, "layer type"
    for kind in ("llama3", "yarn", "longrope"):
        inside = {"rope_type": kind, **_SCALINGS[kind]}
        short = {key: value for key, value in inside.items() if key not in outside}
        for spelled in ("rope_scaling", "rope_parameters"):
            yield f"{spelled} {kind}, original outside", {spelled: short, **outside}, ""
            yield f"{spelled} {kind}, two originals", {spelled: inside, **outside}, ""
            yield f"{spelled} {kind}, no original", {spelled: short}, ""
        unknown = {"rope_scaling": short, "max_position_embeddings": _LEFT_OUT}
        yield f"{kind}, no original and no context", unknown, ""
        yield f"{kind}, null original outside", {"rope_scaling": inside, _ORIGINAL: None}, _ORIGINAL
        yield (
            f"{kind}, factor as text",
            {"rope_scaling": {**inside, "factor": "4"}},
            "factor must be a number",
        )
        without = {key: value for key, value in inside.items() if key != "factor"}
        says = "" if kind == "longrope" else f"{kind} needs factor"
        yield f"{kind} without factor", {"rope_scaling": without}, says
    yield from _longropes()
    both = {"rope_scaling": {"rope_type": "yarn", **_SCALINGS["yarn"]}}
    yield "two sections that agree", {**both, "rope_parameters": both["rope_scaling"]}, ""
    linear = {"rope_type": "linear", "factor": 3.0, "rope_theta": 90.0}
    yield "two sections that differ", {**both, "rope_parameters": linear}, "say different things"
    for name, more in _YARNS.items():
        yield f"yarn, {name}", {"rope_scaling": {**both["rope_scaling"], **more}}, ""
    sharp = {
        "rope_scaling": {"rope_type": "llama3", **_SCALINGS["llama3"], "high_freq_factor": 1.0}
    }
    yield "llama3, no band between", sharp, "high_freq_factor"
    bare = {**both, "head_dim": _LEFT_OUT}
    yield "yarn, no head_dim", bare, "needs head_dim" if family == "mixtral" else ""
    says = "" if family == "llama" else "head_dim"
    yield "yarn, null head_dim", {**both, "head_dim": None}, says


def _longropes(more: dict[str, Any] | None = None, count: int = 8) -> Iterator[Row]:
    """longrope below and above the original length, its lists of `count` numbers, and what it
    multiplies by. The sequence that is compared is longer than `ORIGINAL` and shorter than 64."""
    long = [1.0 + step / 2 for step in range(count)]
    base = {"type": "longrope", "factor": 4.0, "short_factor": [1.1] * count, "long_factor": long}
    for name, change in (
        ("null factor", {"factor": None}),
        ("factor 1", {"factor": 1}),
        ("attention_factor", {"attention_factor": 1.7}),
        ("null attention_factor", {"attention_factor": None}),
        ("whole numbers", {"short_factor": [2] * count}),
    ):
        for context in (CONTEXT, 4 * CONTEXT):
            for original in (ORIGINAL, CONTEXT, 2 * CONTEXT):
                lengths = {"max_position_embeddings": context, _ORIGINAL: original}
                if context > original > ORIGINAL:  # transformers is short there: test_rope.py
                    continue
                given = {**(more or {}), "rope_scaling": {**base, **change}, **lengths}
                yield f"longrope, {name}, {original} of {context}", given, ""
    for key in ("short_factor", "long_factor"):
        for told, value, says in (
            ("left out", _LEFT_OUT, f"needs {key}, a list"),
            ("null", None, f"needs {key}, a list"),
            ("too short", [1.0] * (count - 1), f"{key} must have"),
            ("one number", [1.0], f"{key} must have"),
            ("text", ["1.0"] * count, f"{key} must be a number"),
            ("with a 0", [1.0] * (count - 1) + [0.0], f"numbers of {key} must be above 0"),
        ):
            section = {k: v for k, v in (base | {key: value}).items() if v is not _LEFT_OUT}
            yield f"{key} {told}", {**(more or {}), "rope_scaling": section}, says
    first = {**(more or {}), "rope_scaling": base, _ORIGINAL: 1}
    yield "original 1", first, "has no angles"


def _windows(family: str) -> Iterator[Row]:
    """Sliding windows: of all layers, of some, of none; and layer types that say something else."""
    flagged = family.startswith(("qwen", "smollm"))
    everywhere = family in ("qwen3_moe", "mixtral", "mistral", "ministral3", "phi3")
    never = family in ("llama", "olmo2", "glm4", "granite", "seed_oss")
    never = never or family in ("deepseek_v3", "glm4_moe_lite", "glm4_moe", "minimax_m2")
    for size in (8, CONTEXT - 1, CONTEXT, 4 * CONTEXT, None):
        change = {"sliding_window": size, "use_sliding_window": False}
        yield f"sliding_window {size}", change, ""
        yield f"use_sliding_window, {size}", {**change, "use_sliding_window": True}, ""
    yield (
        "sliding_window 0",
        {"sliding_window": 0, "use_sliding_window": flagged},
        "" if never else "sliding",
    )
    long = {"use_sliding_window": True, "sliding_window": _LEFT_OUT, "max_window_layers": 0}
    yield "window left out", long, ""
    yield "window left out, longer context", {**long, "max_position_embeddings": 8192}, ""
    first = {"use_sliding_window": True, "sliding_window": 8}
    for layer in (1, 2):
        yield f"window from layer {layer}", {**first, "max_window_layers": layer}, ""
    yield "window, layer left out", {**first, "max_window_layers": _LEFT_OUT}, ""
    full, mixed = ["full_attention"] * 2, ["full_attention", "sliding_attention"]
    mistral = family in ("mistral", "ministral3", "phi3")
    unlisted = "layer_types is not supported" if mistral else ""
    contradicts = unlisted or ("that of all layers" if everywhere else "")
    yield "all layers full", {"layer_types": full}, unlisted
    yield "all layers full, window", {**first, "layer_types": full}, contradicts
    yield "a sliding layer", {"layer_types": mixed}, unlisted or "no window is in use"
    yield (
        "a sliding layer, window",
        {**first, "layer_types": mixed},
        "no window is in use" if never else contradicts,
    )
    wide = {**first, "layer_types": mixed, "sliding_window": CONTEXT}
    yield "a sliding layer, wide window", wide, "no window is in use" if never else unlisted
    yield "a chunked layer", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"
    yield "too few layer_types", {"layer_types": ["full_attention"]}, "layer_types"
    if flagged:
        yield "use_sliding_window as text", {"use_sliding_window": "no"}, "use_sliding_window"


def _truncations(without: dict[str, Any]) -> Iterator[Row]:
    """YaRN's `truncate` where layer types have sections: transformers 5.24 reads it beside them,
    where it never is."""
    yarn = {"rope_type": "yarn", "rope_theta": 500.0, **_SCALINGS["yarn"]}
    plain = {"rope_type": "default", "rope_theta": 500.0}
    for value in (True, False, None):
        sections = {"full_attention": {**yarn, "truncate": value}, "sliding_attention": plain}
        says = "" if value else "truncate off is not supported"
        yield f"truncate {value} in a section", {**without, "rope_parameters": sections}, says


def _olmo3(family: str) -> Iterator[Row]:
    """Windows and rotary embeddings by kinds of layers."""
    for size in (1, 8, CONTEXT - 1, CONTEXT, 4 * CONTEXT, _LEFT_OUT):
        yield (
            f"sliding_window {size if size is not _LEFT_OUT else 'left out'}",
            {"sliding_window": size},
            "",
        )
    for size in (None, 0, 8.0):
        yield f"sliding_window {size!r}", {"sliding_window": size}, "sliding_window"
    yield "no layer_types", {"layer_types": _LEFT_OUT}, ""
    for kinds in (["full_attention"] * 2, ["sliding_attention"] * 2):
        yield f"all {kinds[0]}", {"layer_types": kinds}, ""
    yield "a chunked layer", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"
    yarn = {"rope_type": "yarn", **_SCALINGS["yarn"]}
    yield "rope_theta left out", {"rope_theta": _LEFT_OUT}, ""
    yield "another rope_theta", {"rope_theta": 500.0}, "rope_theta other than"
    for size in (8, CONTEXT):
        yield (
            f"rope_scaling yarn, window {size}",
            {"rope_scaling": yarn, "sliding_window": size},
            "",
        )
    new = {"rope_theta": _LEFT_OUT, "layer_types": ["full_attention", "sliding_attention"]}
    thetas = {
        "full_attention": {**yarn, "rope_theta": 300.0},
        "sliding_attention": {"rope_theta": 900.0},
    }
    yield "rope_parameters of both kinds", {**new, "rope_parameters": thetas}, ""
    plain = {kind: {"rope_type": "default"} for kind in thetas}
    yield "rope_parameters without thetas", {**new, "rope_parameters": plain}, ""
    yield (
        "rope_parameters, theta outside",
        {**new, "rope_parameters": plain, "rope_theta": 500.0},
        "keep the latter",
    )
    yield (
        "rope_parameters and rope_scaling",
        {**new, "rope_parameters": thetas, "rope_scaling": yarn},
        "keep the latter",
    )
    half = {"full_attention": thetas["full_attention"]}
    yield "rope_parameters of one kind", {**new, "rope_parameters": half}, "must have the sections"
    yield "rope_parameters of no kind", {**new, "rope_parameters": yarn}, "must have the sections"
    yield from _truncations({"rope_theta": _LEFT_OUT})


def _gemma3(family: str) -> Iterator[Row]:
    """Windows and rotary embeddings by kinds of layers, the scale of scores, the gate, and what is
    not supported."""
    for size in (8, CONTEXT, _LEFT_OUT):
        yield (
            f"sliding_window {size if size is not _LEFT_OUT else 'left out'}",
            {"sliding_window": size},
            "",
        )
    yield "null sliding_window", {"sliding_window": None}, "sliding_window"
    for pattern in (1, 2, _LEFT_OUT):
        change = {"layer_types": _LEFT_OUT, "sliding_window_pattern": pattern}
        yield (
            f"no layer_types, pattern {pattern if pattern is not _LEFT_OUT else 'left out'}",
            change,
            "",
        )
    yield "pattern 0", {"sliding_window_pattern": 0, "layer_types": None}, "sliding_window_pattern"
    both = {"rope_theta": _LEFT_OUT, "rope_local_base_freq": _LEFT_OUT}
    yield "thetas left out", both, ""
    for kind in ("linear", "yarn", "llama3"):
        yield f"rope_scaling {kind}", {"rope_scaling": {"rope_type": kind, **_SCALINGS[kind]}}, ""
    linear = {"rope_type": "linear", **_SCALINGS["linear"]}
    sections = {
        "full_attention": {**linear, "rope_theta": 300.0},
        "sliding_attention": {"rope_theta": 90.0},
    }
    yield "rope_parameters of both kinds", {**both, "rope_parameters": sections}, ""
    yield (
        "rope_parameters without thetas",
        {**both, "rope_parameters": {kind: {} for kind in sections}},
        "",
    )
    yield "rope_parameters and rope_theta", {"rope_parameters": sections}, "keep the latter"
    yield (
        "rope_parameters of no kind",
        {**both, "rope_parameters": linear},
        "must have the sections",
    )
    yield "no query_pre_attn_scalar", {"query_pre_attn_scalar": _LEFT_OUT}, ""
    yield "query_pre_attn_scalar 0", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"
    yield "no hidden_activation", {"hidden_activation": _LEFT_OUT}, ""
    yield "hidden_activation silu", {"hidden_activation": "silu"}, "supported is gelu_pytorch_tanh"
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        yield f"null {key}", {key: None}, ""
        yield f"{key} 30", {key: 30.0}, key
    yield "both directions", {"use_bidirectional_attention": True}, "use_bidirectional_attention"
    yield from _truncations(both)


def _gemma4(family: str) -> Iterator[Row]:
    """Windows, heads by layer, the cap of logits, and what is not read."""
    for size in (8, CONTEXT, _LEFT_OUT):
        yield (
            f"window {size if size is not _LEFT_OUT else 'left out'}",
            {"sliding_window": size},
            "",
        )
    yield "null window", {"sliding_window": None}, "sliding_window"
    yield "no layer_types", {"layer_types": _LEFT_OUT}, ""
    yield "null layer_types, 7 layers", {"layer_types": None, "num_hidden_layers": 7}, ""
    both = ["full_attention", "full_attention"]
    yield "no layer slides", {"layer_types": both}, ""
    yield "the last layer slides", {"layer_types": [*both[:1], "sliding_attention"]}, "must end"
    apart = {"attention_k_eq_v": False}
    yield "keys and values", apart, ""
    yield "keys and values, as many keys", {**apart, "num_global_key_value_heads": None}, ""
    yield "null global heads", {"num_global_key_value_heads": None}, ""
    yield "no global heads", {"num_global_key_value_heads": _LEFT_OUT}, ""
    yield "3 global heads", {"num_global_key_value_heads": 3}, "cannot share"
    yield "no global width", {"global_head_dim": _LEFT_OUT}, ""
    yield "the same width", {"global_head_dim": 16}, ""
    yield "an odd width", {"global_head_dim": 7}, "even head_dim"
    yield "width as text", {"global_head_dim": "24"}, "global_head_dim has the wrong type"
    own = {"global_head_dim": _LEFT_OUT, "num_global_key_value_heads": _LEFT_OUT}
    wide = {"head_dim": 20, "num_key_value_heads": 1}
    yield "by layer", {**own, "per_layer_config": {"1": wide}}, ""
    usual = {"head_dim": 16, "num_key_value_heads": 2}
    yield "by layer, all", {**own, "per_layer_config": {"0": usual, "1": wide}}, ""
    yield "by layer, none", {**own, "per_layer_config": {"1": {}}}, ""
    yield "by layer, empty", {**own, "per_layer_config": {}}, ""
    yield "by layer, empty over a width", {"per_layer_config": {}}, ""
    yield "by layer, null", {**own, "per_layer_config": None}, ""
    yield "by layer, a sliding one", {"per_layer_config": {"0": wide}}, "layers of one type"
    yield (
        "by layer, another key",
        {"per_layer_config": {"1": {"skip": ["mlp"]}}},
        "is not supported",
    )
    yield "by layer, too many", {"per_layer_config": {"2": wide}}, "is not supported"
    yield "fewer keys, apart", {**apart, "per_layer_config": {"1": wide}}, "attention_k_eq_v true"
    for cap in (None, 0.5, 30.0, _LEFT_OUT):
        yield f"cap {cap if cap is not _LEFT_OUT else 'left out'}", {_CAP: cap}, ""
    yield "cap 0", {_CAP: 0.0}, f"{_CAP} must be a number above 0"
    turned = {"rope_type": "proportional", "rope_theta": 500.0}
    plain = {"rope_type": "default", "rope_theta": 90.0}
    for name, more in (
        ("whole", {}),
        ("a half", {"partial_rotary_factor": 0.5}),
        ("a half by 2", {"partial_rotary_factor": 0.5, "factor": 2.0}),
    ):
        sections = {"full_attention": {**turned, **more}, "sliding_attention": plain}
        yield f"proportional, {name}", {"rope_parameters": sections}, ""
    for kind in ("linear", "yarn", "llama3"):
        scaled = {"rope_type": kind, "rope_theta": 90.0, **_SCALINGS[kind]}
        sections = {"full_attention": turned, "sliding_attention": scaled}
        yield f"sliding layers {kind}", {"rope_parameters": sections}, ""
    yield "one kind twice", {"rope_parameters": dict.fromkeys(sections, plain)}, ""
    yield "one section", {"rope_parameters": turned}, "must have the sections"
    yield "no theta", {"rope_parameters": {kind: {} for kind in sections}}, "with a rope_theta"
    yield "a theta", {"rope_theta": 500.0}, "rope_theta is not read"
    yield "no hidden_activation", {"hidden_activation": _LEFT_OUT}, ""
    yield "hidden_activation silu", {"hidden_activation": "silu"}, "supported is gelu_pytorch_tanh"
    for direction in (None, "vision"):
        yield f"direction {direction}", {"use_bidirectional_attention": direction}, ""
    yield "both directions", {"use_bidirectional_attention": "all"}, "sees later tokens"
    yield from _keys_of_others(
        {"hidden_size_per_layer_input": 8} if family == "gemma4_text" else {}
    )
    if family == "gemma4_text":
        yield from _embeddings_by_layer()
        yield from _experts_beside()
        return
    for key, value in (("hidden_size_per_layer_input", 8), ("enable_moe_block", True)):
        yield key, {key: value}, f"{key} {value} is not supported"


def _keys_of_others(needed: dict[str, Any]) -> Iterator[Row]:
    """Layers that read the keys and values of others, beside what transformers needs with them."""
    four = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    four |= needed
    shared = {**four, "num_kv_shared_layers": 2}
    yield "shared keys", shared, ""
    yield "shared keys, wider MLPs", {**shared, "use_double_wide_mlp": True}, ""
    yield "shared keys, apart, biases", {**shared, "attention_k_eq_v": False, **_BIASED}, ""
    yield "shared keys of one layer", {**four, "num_kv_shared_layers": 1}, ""
    yield "no wider MLPs", {"use_double_wide_mlp": True}, ""
    for count in (1, 2, 3):
        yield f"{count} shared, none of a kind", {"num_kv_shared_layers": count}, "of every kind"
    yield "shared keys as text", {"num_kv_shared_layers": "1"}, "has the wrong type"
    yield "wider MLPs as text", {**shared, "use_double_wide_mlp": "yes"}, "expected true or false"


_BIASED = {"attention_bias": True}


def _embeddings_by_layer() -> Iterator[Row]:
    """Layers with embeddings of their own."""
    width, vocabulary = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
    yield "embeddings by layer", {width: 8}, ""
    yield "embeddings by layer, left out", {width: _LEFT_OUT}, ""
    yield "embeddings of more tokens", {width: 8, vocabulary: 70}, "it must be vocab_size"
    yield "embeddings of most tokens", {width: 8, vocabulary: _LEFT_OUT}, "it must be vocab_size"
    yield "no embeddings, of most tokens", {vocabulary: _LEFT_OUT}, ""
    four = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    yield "shared keys, no embeddings", {**four, "num_kv_shared_layers": 2}, "does not compute it"
    yield "embeddings by layer, as text", {width: "8"}, "has the wrong type"


def _experts_beside() -> Iterator[Row]:
    """Experts beside an MLP."""
    switch = {"enable_moe_block": True}
    yield "experts", switch, ""
    yield "experts and embeddings", {**switch, "hidden_size_per_layer_input": 8}, ""
    yield "all experts", {**switch, "top_k_experts": 6}, ""
    yield "too many experts a token", {**switch, "top_k_experts": 7}, "7 experts per token"
    for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        yield f"experts, null {key}", {**switch, key: None}, f"{key} has the wrong type"
        yield f"experts, no {key}", {**switch, key: _LEFT_OUT}, f"key '{key}' is missing"
    yield "no experts, no sizes", dict.fromkeys(_EXPERTS_SIZES, None), ""
    yield "experts as text", {"enable_moe_block": "yes"}, "expected true or false"


_EXPERTS_SIZES = ("num_experts", "top_k_experts", "moe_intermediate_size")


def _gpt_oss(family: str) -> Iterator[Row]:
    """Windows, the default of rotary scaling, and the gate's numbers."""
    for size in (8, CONTEXT, _LEFT_OUT):
        yield (
            f"sliding_window {size if size is not _LEFT_OUT else 'left out'}",
            {"sliding_window": size},
            "",
        )
    yield "null sliding_window", {"sliding_window": None}, "sliding_window"
    yield "no layer_types", {"layer_types": _LEFT_OUT}, ""
    yield "all layers full", {"layer_types": ["full_attention"] * 2}, ""
    yield "rope_theta left out", {"rope_theta": _LEFT_OUT}, ""
    yarn = {"rope_type": "yarn", **_SCALINGS["yarn"]}
    for more in ({}, {"truncate": False}):
        yield f"rope_scaling yarn {more}", {"rope_scaling": {**yarn, **more}}, ""
        yield (
            f"rope_parameters yarn {more}",
            {"rope_parameters": {**yarn, **more, "rope_theta": 90.0}},
            "",
        )
    yield "rope_parameters default", {"rope_parameters": {"rope_type": "default"}}, ""
    for key, value in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        yield f"{key} {value}", {key: value}, ""
        yield f"another {key}", {key: 2.5}, f"unsupported {key} 2.5"
    yield "MXFP4 in name", {"quantization_config": {"quant_method": "fp8"}}, "or one in MXFP4"
    yield "initial_context_length", {"initial_context_length": 4096, "experts_per_token": 2}, ""


def _phi3(family: str) -> Iterator[Row]:
    """Windows as Mistral's, and rotary scalings, of which transformers takes longrope alone."""
    yield from _windows(family)
    for kind, parameters in _SCALINGS.items():
        refused = "" if kind == "default" else "unsupported rope scaling"
        if kind != "longrope":
            yield (
                f"rope_scaling {kind}",
                {"rope_scaling": {"rope_type": kind, **parameters}},
                refused,
            )
    heads = {"head_dim": _LEFT_OUT}
    lists = {"short_factor": [1.1] * 6, "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5]}
    for told, own in (("4096", {}), ("inside", {_ORIGINAL: ORIGINAL})):  # that of the class counts
        inside = {"rope_scaling": {"rope_type": "longrope", **lists, **own}}
        yield f"rope_scaling longrope, original {told}", {**heads, **inside}, ""
    wide = {"rope_scaling": {"type": "longrope", **_SCALINGS["longrope"]}, _ORIGINAL: ORIGINAL}
    yield "longrope, wide heads", wide, "longrope needs a head_dim of hidden_size"
    su = {"type": "su", **lists}
    yield "rope_scaling su", {"rope_scaling": su, **heads}, "su is the old name of longrope"
    yield from _longropes({_ORIGINAL: ORIGINAL, **heads}, 6)
    yield "dropout", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, _ORIGINAL: 16}, ""
    half = {"partial_rotary_factor": 0.5}
    yield "half of each head", half, ""
    three = {"short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 2.0, 3.0]}
    part = {**heads, **half, "rope_scaling": {"type": "longrope", **three}}
    yield "half of each head, longrope", {**part, _ORIGINAL: ORIGINAL}, ""
    yield "half of each head, longrope, short", part, ""
    part = {"rope_type": "default", "partial_rotary_factor": 0.5}
    yield "half of each head, inside", {"rope_scaling": part}, ""
    yield "too small a part", {"partial_rotary_factor": 0.1}, "an even part of a head"


def _latent(family: str) -> Iterator[Row]:
    """Sizes of latent attention, which layers are dense, and how experts are chosen."""
    yield from _windows(family)
    yield "no latent of queries", {"q_lora_rank": None}, ""
    yield "values as wide as keys", {"v_head_dim": 16}, ""
    yield "wider values", {"v_head_dim": 20}, "v_head_dim 20 above"
    yield "an odd part", {"qk_rope_head_dim": 7, "qk_nope_head_dim": 9}, "even qk_rope_head_dim"
    for key in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
        yield f"{key} as text", {key: "8"}, f"{key} has the wrong type"
    yield "halves", {"rope_interleave": False}, "unsupported rope_interleave False"
    yield "pairs", {"rope_interleave": True, "head_dim": 8}, ""
    yarn = {"rope_type": "yarn", **_SCALINGS["yarn"]}
    for name, more in _YARNS.items():
        yield f"yarn, {name}", {"rope_scaling": {**yarn, **more}}, ""
    for kind in ("linear", "llama3"):
        inside = {"rope_type": kind, **_SCALINGS[kind]}
        yield f"rope_scaling {kind}", {"rope_scaling": inside}, f"unsupported rope scaling '{kind}'"
    yield "scores of a softmax", {"scoring_func": "softmax"}, "unsupported scoring_func 'softmax'"
    yield from _scores(family)
    if family == "deepseek_v3":
        return
    yield "no dense layer", {"mlp_layer_types": ["sparse"] * 2}, ""
    yield "mlp_layer_types left out", {"mlp_layer_types": _LEFT_OUT}, ""
    yield "another kind", {"mlp_layer_types": ["dense", "odd"]}, "mlp_layer_types must name"


def _scores(family: str) -> Iterator[Row]:
    """How experts with scores are chosen, and which first layers are dense."""
    yield "one group", {"n_group": 1, "topk_group": 1}, ""
    yield "all groups", {"n_group": 4, "topk_group": 4}, ""
    yield "groups of one", {"n_group": 8}, "of two or more each"
    yield "3 groups", {"n_group": 3}, "8 experts do not stand in 3 groups"
    yield "too few in the groups", {"n_group": 4, "num_experts_per_tok": 3}, "expected no more"
    yield "gates not normalized", {"norm_topk_prob": False}, ""
    yield "no norm_topk_prob", {"norm_topk_prob": _LEFT_OUT}, ""
    yield "scale 2", {"routed_scaling_factor": 2.0}, ""
    yield "scale 0", {"routed_scaling_factor": 0.0}, "routed_scaling_factor must be a number above"
    yield "2 shared experts", {"n_shared_experts": 2}, ""
    yield "the other name", {"n_routed_experts": _LEFT_OUT, "num_local_experts": 6}, ""
    if family != "glm4_moe_lite":
        yield "no dense layer", {"first_k_dense_replace": 0}, ""
        yield "all dense", {"first_k_dense_replace": 2}, ""


def _scored(family: str) -> Iterator[Row]:
    """GLM-4.5: experts as DeepSeek-V3's next to attention with or without norms."""
    yield from _windows(family)
    yield from _scores(family)
    yield from _partial()
    yield "no norms", {"use_qk_norm": False}, ""
    yield "norms left out", {"use_qk_norm": _LEFT_OUT}, ""
    yield "norms as text", {"use_qk_norm": "true"}, "use_qk_norm has the wrong type"
    yield "first_k_dense_replace left out", {"first_k_dense_replace": _LEFT_OUT}, ""


def _partial() -> Iterator[Row]:
    """The part of a head that is rotated, alone and with a scaling."""
    for part in (0.25, 1.0):
        yield f"{part} of each head, outside", {"partial_rotary_factor": part}, ""
        inside = {"rope_type": "default", "rope_theta": 900.0, "partial_rotary_factor": part}
        yield f"{part} of each head", {"rope_theta": _LEFT_OUT, "rope_parameters": inside}, ""
    for kind in ("linear", "yarn", "llama3"):
        yield f"rope_scaling {kind}", {"rope_scaling": {"rope_type": kind, **_SCALINGS[kind]}}, ""


def _minimax(family: str) -> Iterator[Row]:
    """The part of a head that is rotated by its number of dimensions, and keys of published models."""
    yield from _windows(family)
    yield from _partial()
    yield "whole heads", {"rotary_dim": _LEFT_OUT}, ""
    yield "null rotary_dim", {"rotary_dim": None}, ""
    yield "rotary_dim 16", {"rotary_dim": 16}, ""
    yield "rotary_dim 24", {"rotary_dim": 24}, "rotary_dim must be at most 16"
    yield "rotary_dim as text", {"rotary_dim": "8"}, "rotary_dim has the wrong type"
    yield "rope_theta left out", {"rope_theta": _LEFT_OUT}, ""
    own = {"use_qk_norm": True, "qk_norm_type": "per_layer", "attn_type_list": [1, 1]}
    own |= {"scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0}
    yield "as published", {**own, "num_mtp_modules": 3, "use_mtp": True}, ""
    yield "linear attention", {"attn_type_list": [0, 1]}, "have softmax attention (1) are read"
    yield "a shared expert", {"shared_intermediate_size": 24}, "shared_intermediate_size 24 is not"
    yield "no norms", {"use_qk_norm": False}, "unsupported use_qk_norm False"
    yield "scores of a softmax", {"scoring_func": "softmax"}, "unsupported scoring_func 'softmax'"
    yield "1 expert", {"num_local_experts": 1, "num_experts_per_tok": 1}, "of two or more each"


def _granite(family: str) -> Iterator[Row]:
    """The numbers that it multiplies by."""
    yield from _windows(family)
    keys = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    for key in keys:
        yield f"no {key}", {key: _LEFT_OUT}, ""
        yield f"{key} 2", {key: 2}, ""
        yield f"{key} 0", {key: 0}, f"{key} must be a number above 0"
        yield f"{key} as text", {key: "2"}, f"{key} must be a number above 0"
        yield f"null {key}", {key: None}, f"{key} must be a number above 0"


def _granite_hybrid(family: str) -> Iterator[Row]:
    """Layers that have attention alone, and no experts; rotary embedding in all or in none."""
    for kind in ("full_attention", "attention"):
        yield f"layers {kind}", {"layer_types": [kind] * 2}, ""
    for kind in ("mamba", "linear_attention", "sliding_attention"):
        yield f"a layer {kind}", {"layer_types": ["attention", kind]}, "whose layers all have atten"
    yield "layer_types left out", {"layer_types": _LEFT_OUT}, "layer_types has 'mamba'"
    for count in (2, _LEFT_OUT):
        yield f"experts {count}", {"num_local_experts": count}, "models without experts are read"
    yield "unrotated", {"position_embedding_type": None}, ""
    yield "another rotation", {"position_embedding_type": "alibi"}, "must be rope or null"
    yield "another intermediate_size", {"intermediate_size": 44}, ""


def _ministral3(family: str) -> Iterator[Row]:
    """Windows as Mistral's, and how queries grow with the position."""
    yield from _windows(family)
    base = BASES[family]["rope_parameters"]
    yield "rope_parameters left out", {"rope_parameters": _LEFT_OUT}, ""
    yield "no rope_parameters, a theta", {"rope_parameters": _LEFT_OUT, "rope_theta": 500.0}, ""
    old = {"rope_parameters": _LEFT_OUT, "rope_scaling": base}
    yield "rope_scaling", old, ""
    for name, more in (*_YARNS.items(), ("another beta", {"llama_4_scaling_beta": 1})):
        yield f"yarn, {name}", {"rope_parameters": {**base, **more}}, ""
    for value in (None, "0.1"):
        section = {**base, "llama_4_scaling_beta": value}
        yield f"beta {value!r}", {"rope_parameters": section}, "llama_4_scaling_beta"
    without = {key: value for key, value in base.items() if key != "llama_4_scaling_beta"}
    yield "no beta", {"rope_parameters": without}, "needs llama_4_scaling_beta"
    plain = {**base, "rope_type": "default"}
    yield "no scaling", {"rope_parameters": plain}, "unsupported rope scaling 'default'"


def _qwen35(family: str) -> Iterator[Row]:
    """Which layers have linear attention, its sizes, and the part of a head that is rotated."""
    for kinds in (
        ["full_attention"] * 2,
        ["linear_attention"] * 2,
        ["full_attention", "linear_attention"],
    ):
        yield f"layers {kinds}", {"layer_types": kinds}, ""
    for every in (1, 2, _LEFT_OUT):
        change = {
            "layer_types": _LEFT_OUT,
            "num_hidden_layers": 4,
            "full_attention_interval": every,
        }
        yield f"attention in every layer {every if every in (1, 2) else 4}", change, ""
    yield "null layer_types", {"layer_types": None, "full_attention_interval": 2}, ""
    yield (
        "interval 0",
        {"layer_types": None, "full_attention_interval": 0},
        "full_attention_interval",
    )
    yield (
        "a sliding layer",
        {"layer_types": ["linear_attention", "sliding_attention"]},
        "layer_types",
    )
    yield "too few layer_types", {"layer_types": ["linear_attention"]}, "layer_types"
    for key, value in (
        ("num_key_heads", 4),
        ("num_key_heads", 1),
        ("key_head_dim", 7),
        ("value_head_dim", 20),
    ):
        yield f"{key} {value}", {f"linear_{key}": value}, ""
    yield "3 value heads", {"linear_num_value_heads": 3}, "cannot share"
    yield "value heads as text", {"linear_num_value_heads": "4"}, "linear_num_value_heads"
    yield "a convolution over 2", {"linear_conv_kernel_dim": 2}, ""
    for part in (0.5, 1.0):
        yield f"{part} of each head, outside", {"partial_rotary_factor": part}, ""
        inside = {"rope_type": "default", "rope_theta": 900.0, "partial_rotary_factor": part}
        yield f"{part} of each head", {"rope_theta": _LEFT_OUT, "rope_parameters": inside}, ""
    pictures = {
        "rope_type": "default",
        "rope_theta": 900.0,
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
    }
    yield "positions of pictures", {"rope_theta": _LEFT_OUT, "rope_parameters": pictures}, ""
    for part in (0.0, 1.5, "half", 0.2):
        yield f"part {part}", {"partial_rotary_factor": part}, "partial_rotary_factor"
    for kind in ("linear", "yarn", "llama3"):
        yield f"rope_scaling {kind}", {"rope_scaling": {"rope_type": kind, **_SCALINGS[kind]}}, ""


def _nemotron(family: str) -> Iterator[Row]:
    """Which part each layer has, sizes and least step of Mamba-2, and experts without a gate."""
    kinds = BASES[family]["layers_block_type"]
    pattern = {"layers_block_type": _LEFT_OUT, "hybrid_override_pattern": "M-*E"}
    yield "a pattern", pattern, ""
    yield "a pattern beside the list", {**pattern, "layers_block_type": kinds}, ""
    yield "earlier names", {"layers_block_type": ["mamba", "mlp", "attention", "moe"]}, ""
    yield "Mamba-2 alone", {"layers_block_type": kinds[:1] * 2}, ""
    yield "attention and experts", {"layers_block_type": kinds[2:]}, ""
    yield "no latent", {"moe_latent_size": _LEFT_OUT}, ""
    yield "no kinds", {"layers_block_type": _LEFT_OUT}, "'hybrid_override_pattern' is missing"
    yield "another kind", {"layers_block_type": ["rwkv"]}, "layers_block_type must list layers"
    yield "another letter", {**pattern, "hybrid_override_pattern": "MX"}, "a letter for each layer"
    yield "no layer", {"layers_block_type": []}, "must name 1 to"
    yield "as many layers", {"num_hidden_layers": 4}, ""
    yield "more layers", {"num_hidden_layers": 7}, "names 4 layers"
    for key, value in (
        *(("n_groups", 1), ("n_groups", 4), ("mamba_head_dim", 20), ("ssm_state_size", 7)),
        *(("conv_kernel", 2), ("mamba_num_heads", 6), ("time_step_min", 0.0)),
        *(("time_step_limit", [0.1, 0.2]), ("chunk_size", 16), ("expand", 3)),
        *(("moe_latent_size", 12), ("moe_latent_size", 48), ("num_nextn_predict_layers", 1)),
    ):
        yield f"{key} {value}", {key: value}, ""
    yield "time_step_min left out", {"time_step_min": _LEFT_OUT}, ""
    yield "time_step_min as text", {"time_step_min": "0.1"}, "time_step_min has the wrong type"
    yield "3 heads of Mamba-2", {"mamba_num_heads": 3}, "cannot share"
    for key, other in (
        *(("use_bias", True), ("mamba_proj_bias", True), ("moe_latent_size", 0)),
        *(("residual_in_fp32", True), ("sliding_window", 8)),
        *(("use_conv_bias", False), ("mamba_hidden_act", "gelu"), ("mlp_hidden_act", "silu")),
        ("n_shared_experts", 2),
    ):
        yield f"{key} {other}", {key: other}, key
    yield "the other name", {"n_routed_experts": _LEFT_OUT, "num_local_experts": 6}, ""
    yield "3 groups of experts", {"n_group": 3}, "8 experts do not stand in 3 groups"
    yield "gates not normalized", {"norm_topk_prob": False}, ""
    yield "scale 2", {"routed_scaling_factor": 2.0}, ""


def _unrotated(family: str) -> Iterator[Row]:
    """Layers without rotary embedding."""
    if family != "smollm3":
        return
    yield "all rotated", {"no_rope_layers": [1, 1]}, ""
    yield "more no_rope_layers than layers", {"no_rope_layers": [0, 1, 1]}, ""
    yield "too few no_rope_layers", {"no_rope_layers": [1]}, "no_rope_layers must say"
    yield "no_rope_layers as text", {"no_rope_layers": "10"}, "no_rope_layers must say"
    for given in (_LEFT_OUT, None):
        for interval in (1, 2, _LEFT_OUT):
            change = {"no_rope_layers": given, "no_rope_layer_interval": interval}
            yield (
                f"no_rope_layers {given is None}, interval {interval if interval in (1, 2) else 4}",
                change,
                "",
            )
    change = {"no_rope_layers": None, "no_rope_layer_interval": 0}
    yield "interval 0", change, "no_rope_layer_interval"
    slides = {"use_sliding_window": True, "no_rope_layers": None, "no_rope_layer_interval": 1}
    yield "all slide", slides, ""


def _experts(family: str) -> Iterator[Row]:
    """Mixtures of experts."""
    shared = family in ("qwen3_5_moe_text", "qwen3_next")
    if not shared and family not in ("qwen3_moe", "mixtral", "minimax_m2", "gpt_oss"):
        return
    own, other = "num_experts", "num_local_experts"
    if family in ("mixtral", "minimax_m2", "gpt_oss"):
        own, other = other, own
    yield "no number of experts", {own: _LEFT_OUT}, ""
    unknown = "is not part of this architecture" if shared else ""
    yield "the other name", {own: _LEFT_OUT, other: 7}, unknown
    yield "both names", {own: 7, other: 7}, ""
    yield "both names, two numbers", {own: 6, other: 7}, "keep one of them"
    yield "no num_experts_per_tok", {"num_experts_per_tok": _LEFT_OUT, own: 11}, ""
    yield "1 expert a token", {"num_experts_per_tok": 1}, ""
    yield "9 experts a token", {"num_experts_per_tok": 9}, "9 experts per token"
    yield "no experts", {own: 0}, "at least 1"
    yield "jitter", {"router_jitter_noise": 0.1, "router_aux_loss_coef": 0.2}, ""
    if shared:
        for key in ("moe_intermediate_size", "shared_expert_intermediate_size"):
            yield f"{key} left out", {key: _LEFT_OUT}, ""
            yield f"{key} 0", {key: 0}, f"{key} must be at least 1"
    if family in ("gpt_oss", "qwen3_5_moe_text"):
        return
    if family in ("mixtral", "minimax_m2"):
        yield "norm_topk_prob false", {"norm_topk_prob": False}, ""
        return
    yield "gates not normalized", {"norm_topk_prob": False}, ""
    yield "no norm_topk_prob", {"norm_topk_prob": _LEFT_OUT}, ""
    yield "norm_topk_prob 1", {"norm_topk_prob": 1}, "norm_topk_prob"
    yield "every other layer", {"decoder_sparse_step": 2}, ""
    yield "no decoder_sparse_step", {"decoder_sparse_step": _LEFT_OUT}, ""
    yield "decoder_sparse_step 0", {"decoder_sparse_step": 0}, "decoder_sparse_step"
    yield "a dense layer", {"mlp_only_layers": [0]}, ""
    yield "null mlp_only_layers", {"mlp_only_layers": None}, ""
    yield "no mlp_only_layers", {"mlp_only_layers": _LEFT_OUT}, ""
    yield "no moe_intermediate_size", {"moe_intermediate_size": _LEFT_OUT}, ""
