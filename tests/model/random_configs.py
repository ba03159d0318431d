"""Random values of `config.json`, of each family, that are accepted: for round trips through
`save`."""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from isobit.errors import IsobitError
from isobit.model import ModelConfig
from isobit.model.families import FAMILIES
from isobit.model.hub.layer_kinds import LETTERS, PATTERN

from .config_variants import BASES, ORIGINAL

_LEFT_OUT = object()
Pick = Callable[[random.Random], Any]


def _one_of(*values: Any) -> Pick:
    return lambda drawn: drawn.choice(values)


def _section(drawn: random.Random, theta: bool, more_keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """A rotary scaling, with parameters of its own."""
    kind = drawn.choice(("default", "default", "linear", "llama3", "yarn", "longrope"))
    more: dict[str, Any] = {"rope_type": kind}
    if theta:
        more["rope_theta"] = drawn.choice((70.0, 500.0, 10000.0, 1e6))
    if kind != "default":
        more["factor"] = drawn.choice((1.5, 2.0, 4.0))
    if kind == "llama3":
        more |= {"low_freq_factor": 1.0, "high_freq_factor": drawn.choice((2.0, 4.0))}
    if kind == "longrope":  # a sequence of the tests is longer than the one, not than the other
        more["original_max_position_embeddings"] = drawn.choice((ORIGINAL, 10**6))
        if drawn.random() < 0.5:
            more["attention_factor"] = drawn.choice((1.0, 1.3))
        elif drawn.random() < 0.5:
            del more["factor"]
    if kind in ("llama3", "yarn"):
        more["original_max_position_embeddings"] = ORIGINAL
    if kind == "yarn":
        for key, values in (
            ("attention_factor", (1.0, 1.3)),
            ("beta_fast", (4.0, 32.0)),
            ("beta_slow", (0.5, 1.0)),
            ("truncate", (True, False)),
        ):
            if drawn.random() < 0.4:
                more[key] = drawn.choice(values)
    return more | {key: drawn.choice((0.1, 0.7)) for key in more_keys}


def _ropes(drawn: random.Random, family: str) -> dict[str, Any]:
    """In the keys of transformers 4 or 5, or left out."""
    table, how = FAMILIES[family], drawn.choice(("none", "theta", "scaling", "parameters"))
    left_out = dict.fromkeys(
        ("rope_theta", "rope_local_base_freq", "rope_scaling", "rope_parameters"), _LEFT_OUT
    )
    if family.startswith("gemma4"):
        parts = {"partial_rotary_factor": drawn.choice((0.25, 0.5, 1.0))}
        kinds = ({"rope_type": "proportional", "rope_theta": 500.0, **parts}, _section(drawn, True))
        sections = dict(zip(("full_attention", "sliding_attention"), kinds))
        return left_out | ({"rope_parameters": sections} if how == "parameters" else {})
    if how == "none" or not table.rotary:
        return left_out
    if how == "theta":
        own = {"rope_theta": drawn.choice((500.0, 10000.0, 5e5))}
        return left_out | own | ({"rope_local_base_freq": 70.0} if family == "gemma3_text" else {})
    if table.ropes is not None and table.windows is not None and how == "parameters":
        kinds = ("full_attention", "sliding_attention")
        return left_out | {"rope_parameters": {kind: _section(drawn, theta=True) for kind in kinds}}
    section = _section(drawn, how == "parameters", table.rope_more)
    if table.partial_rotary is not None:
        section["partial_rotary_factor"] = drawn.choice((0.25, 0.5, 1.0))
    if how == "parameters":
        return left_out | {"rope_parameters": section}
    return left_out | {"rope_scaling": section, "rope_theta": drawn.choice((500.0, 10000.0, 1e6))}


def _with_factors(drawn: random.Random, family: str, values: dict[str, Any]) -> dict[str, Any]:
    """With the lists of longrope, which are as long as heads are wide."""
    for key in ("rope_scaling", "rope_parameters"):
        section = values.get(key)
        if not isinstance(section, dict) or section.get("rope_type") != "longrope":
            continue
        part = section.get("partial_rotary_factor", FAMILIES[family].partial_rotary or 1.0)
        count = int(values.get("head_dim", 0) * part) // 2
        lists = {
            name: [round(1 + 3 * drawn.random(), 2) for _ in range(count)]
            for name in ("short_factor", "long_factor")
        }
        values = values | {key: section | lists}
        if family == "phi3" and drawn.random() < 0.5:
            values["original_max_position_embeddings"] = ORIGINAL
    return values


def _kinds(drawn: random.Random, family: str, layers: int) -> dict[str, Any]:
    """Which layers slide, are linear, are dense or have no rotary embedding."""
    table, found = FAMILIES[family], dict[str, Any]()
    names = (
        ("linear_attention", "full_attention")
        if table.linear_attention
        else ("sliding_attention", "full_attention")
    )
    if table.windows is not None:
        found["sliding_window"] = drawn.choice((5, 9, 200, _LEFT_OUT))
        if table.windows.flag:
            found["use_sliding_window"] = drawn.random() < 0.5
    if table.one_part:
        pattern = "".join(drawn.choice("M*-E") for _ in range(layers))
        listed = drawn.random() < 0.5
        kinds = [LETTERS[letter] for letter in pattern] if listed else _LEFT_OUT
        found |= {"layers_block_type": kinds, PATTERN: _LEFT_OUT if listed else pattern}
    by_name = (not table.one_part and table.linear_attention) or (
        table.windows is not None and not table.windows.nullable
    )
    found["layer_types"] = [drawn.choice(names) for _ in range(layers)] if by_name else _LEFT_OUT
    if table.global_head_dim is not None:
        found["layer_types"][-1] = "full_attention"
    if family in ("qwen2", "qwen3"):
        found["max_window_layers"] = drawn.choice((0, 1, layers))
    if "mlp_layer_types" in BASES[family]:
        found["mlp_layer_types"] = [drawn.choice(("dense", "sparse")) for _ in range(layers)]
    if table.unrotated is not None:
        found["no_rope_layers"] = [drawn.randint(0, 1) for _ in range(layers)]
    if family == "granitemoehybrid":
        found["layer_types"] = ["attention"] * layers
        found["num_local_experts"] = 0
        found["position_embedding_type"] = drawn.choice(("rope", None, _LEFT_OUT))
    if family in ("qwen3_moe", "qwen3_next"):
        found["mlp_only_layers"] = [layer for layer in range(layers) if drawn.random() < 0.4]
        found["decoder_sparse_step"] = drawn.choice((1, 2, _LEFT_OUT))
    return found


_SIZES: Mapping[str, Pick] = {
    "hidden_size": _one_of(32, 48),
    "intermediate_size": _one_of(24, 40),
    "num_attention_heads": _one_of(4, 8),
    "num_key_value_heads": _one_of(1, 2, 4),
    "head_dim": _one_of(8, 16, 24),
    "rms_norm_eps": _one_of(1e-6, 1e-5, 1e-3, 1.0),
    "max_position_embeddings": _one_of(64, 128, _LEFT_OUT),
    "tie_word_embeddings": _one_of(True, False, _LEFT_OUT),
    "bos_token_id": _one_of(1, None),
    "eos_token_id": _one_of(2, [2, 3], None, [3]),
    "pad_token_id": _one_of(0, None),
}
_OWN: Mapping[str, Pick] = {
    "attention_bias": _one_of(True, False, _LEFT_OUT),
    "mlp_bias": _one_of(True, False, _LEFT_OUT),
    "num_experts": _one_of(3, 6),
    "num_local_experts": _one_of(3, 5),
    "num_experts_per_tok": _one_of(1, 2),
    "moe_intermediate_size": _one_of(16, 24),
    "shared_expert_intermediate_size": _one_of(16, 20),
    "norm_topk_prob": _one_of(True, False, _LEFT_OUT),
    "kv_lora_rank": _one_of(12, 20),
    "qk_nope_head_dim": _one_of(8, 12),
    "qk_rope_head_dim": _one_of(4, 8),
    "v_head_dim": _one_of(8, 12),
    "q_lora_rank": _one_of(16, None),
    "n_routed_experts": _one_of(4, 8),
    "n_shared_experts": _one_of(1, 2),
    "n_group": _one_of(1, 2),
    "routed_scaling_factor": _one_of(1.0, 2.5),
    "first_k_dense_replace": _one_of(0, 1),
    "embedding_multiplier": _one_of(1.5, 3, _LEFT_OUT),
    "attention_multiplier": _one_of(0.1, 0.3, _LEFT_OUT),
    "residual_multiplier": _one_of(0.4, 1.3),
    "logits_scaling": _one_of(0.7, 2, _LEFT_OUT),
    "query_pre_attn_scalar": _one_of(5, 16, _LEFT_OUT),
    "global_head_dim": _one_of(8, 20, _LEFT_OUT),
    "num_global_key_value_heads": _one_of(1, 2, None),
    "attention_k_eq_v": _one_of(True, False),
    "final_logit_softcapping": _one_of(3.0, 30.0, None),
    "hidden_size_per_layer_input": _one_of(0, 6),
    "num_kv_shared_layers": _one_of(0, 0, 1, 2),
    "use_double_wide_mlp": _one_of(True, False, _LEFT_OUT),
    "enable_moe_block": _one_of(True, False),
    "top_k_experts": _one_of(1, 2),
    "use_qk_norm": _one_of(True, False, _LEFT_OUT),
    "rotary_dim": _one_of(4, 8, _LEFT_OUT),
    "layer_norm_epsilon": _one_of(1e-6, 1e-5, 1e-3, 1.0, _LEFT_OUT),
    "mamba_num_heads": _one_of(2, 4),
    "mamba_head_dim": _one_of(8, 12),
    "ssm_state_size": _one_of(8, 16),
    "n_groups": _one_of(1, 2),
    "conv_kernel": _one_of(2, 4),
    "time_step_min": _one_of(0.001, 0.6, _LEFT_OUT),
    "moe_shared_expert_intermediate_size": _one_of(16, 20),
    "moe_latent_size": _one_of(12, 20, None, _LEFT_OUT),
    "linear_num_value_heads": _one_of(2, 4),
    "linear_key_head_dim": _one_of(8, 12),
    "linear_value_head_dim": _one_of(8, 20),
    "linear_conv_kernel_dim": _one_of(3, 4),
}


def random_values(family: str, seed: int) -> dict[str, Any]:
    """One config.json, accepted or not."""
    drawn, base = random.Random(f"{family} {seed}"), BASES[family]
    layers = drawn.choice((1, 2, 4))
    picked = {key: pick(drawn) for key, pick in _SIZES.items()}
    if "kv_lora_rank" in base:
        del picked["head_dim"]
        picked["num_key_value_heads"] = picked["num_attention_heads"]
    if "intermediate_size" not in base:
        del picked["intermediate_size"]
    picked |= {key: pick(drawn) for key, pick in _OWN.items() if key in base}
    values = {"model_type": family, **base, **picked, "num_hidden_layers": layers}
    values |= _ropes(drawn, family) | _kinds(drawn, family, layers)
    given = {key: value for key, value in values.items() if value is not _LEFT_OUT}
    return _with_factors(drawn, family, given)


def accepted(family: str, first: int) -> Iterator[tuple[int, dict[str, Any], ModelConfig]]:
    """(seed, values, config) of those that are not refused, from a seed on."""
    for seed in range(first, first + 100_000):
        values = random_values(family, seed)
        try:
            yield seed, values, ModelConfig.from_hf(values, f"{family} {seed}")
        except IsobitError:
            continue
