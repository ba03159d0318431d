"""Tiny random models for all tests, and where a real one stands beside the checkout."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.distributed import ALONE, Ranks
from isobit.errors import IsobitError
from isobit.kernels import Scoring, get_ops
from isobit.model import Experts, Model, ModelConfig, Tokenizer
from isobit.model.adapters.targets import NewAdapter
from isobit.model.families import FAMILIES
from isobit.model.families.rope import PROPORTIONAL, Rope
from isobit.model.hub.latent import Latent
from isobit.model.hub.layer_heads import LayerHeads
from isobit.model.hub.layer_inputs import LayerInputs
from isobit.model.hub.linear_attention import LinearAttention
from isobit.model.hub.mamba import Mamba
from isobit.model.hub.multipliers import Multipliers

SHARED = Path(__file__).resolve().parents[2] / "shared"
STORIES = SHARED / "models" / "stories260K"
ALPHABET = "abcdefghijklmnopqrstuvwxyz 0123456789+-=.,!?"


def require(backend: str) -> None:
    """Skip the test where the native operators cannot be built."""
    if backend == "native":
        try:
            get_ops("native")
        except IsobitError as error:
            pytest.skip(f"no native backend here: {error}")


def latent_values(latent: Latent, heads: int, rope: Rope) -> dict[str, Any]:
    """Of a config with multi-head latent attention: these, and its experts."""
    return {
        "latent": latent,
        "num_kv_heads": heads,
        "head_dim": latent.head_dim,
        "rope": rope.of_part(latent.rotated, latent.head_dim),
        "experts": Experts(6, 2, 24, shared=24, dense_layers=(0,), scoring=Scoring(2, 1, 1.7)),
    }


_NEMOTRON = {
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "head_dim": 128,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "mlp_hidden_act": "relu2",
    "layer_norm_epsilon": 1e-5,
}
NEMOTRON_8B = _NEMOTRON | {
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_key_value_heads": 8,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
}
NANO_3 = _NEMOTRON | {
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "num_key_value_heads": 2,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
}
SUPER_3 = _NEMOTRON | {
    "hidden_size": 4096,
    "intermediate_size": 2688,
    "num_hidden_layers": 88,
    "num_key_value_heads": 2,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*"
    "EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "moe_intermediate_size": 2688,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "routed_scaling_factor": 5.0,
}
"""Nemotron-H 8B, Nemotron 3 Nano 30B-A3B, and Nemotron 3 Super 120B-A12B."""

ONE_PART = ("moe", "linear_attention", "full_attention", "mlp")


def one_part_values(kinds: Sequence[str]) -> dict[str, Any]:
    """Of a config whose layers have one part each: these, with Mamba-2 and experts."""
    without = tuple(layer for layer, kind in enumerate(kinds) if kind != "moe")
    mamba = tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
    return {
        "kinds": tuple(kinds),
        "num_layers": len(kinds),
        "tie_embeddings": False,
        "linear": Mamba(mamba, 2, 4, 8, 12, 4, least_step=0.02),
        "experts": Experts(6, 2, 24, True, without, 40, Scoring(2, 1, 1.7)),
    }


LATENT_EXPERTS = Experts(6, 2, 24, True, (1, 2, 3), 40, Scoring(2, 1, 1.7), latent=20)
"""Of the layers of `ONE_PART`."""
SCORED = Experts(6, 2, 24, True, (0,), 48, Scoring(2, 1, 1.7))
"""Those of a GLM-4.5."""


def scored_of(inner: int) -> Experts:
    """Return the experts of a MiniMax-M2 of this intermediate_size."""
    return Experts(6, 2, inner, scoring=Scoring(1, 1, 1.0))


def tensor(value: object) -> Tensor:
    """What may be None or quantized, and here is a tensor: a gradient, a bias, a plain weight."""
    assert isinstance(value, Tensor)
    return value


def slow_where(rows: Sequence[Any], slow: Callable[..., bool]) -> list[Any]:
    """Rows of parameters, tuples or single values, of which some are left to the full suite: those
    whose claim quicker rows of the same test make too."""
    found = []
    for row in rows:
        values = row if isinstance(row, tuple) else (row,)
        found.append(pytest.param(*values, marks=pytest.mark.slow) if slow(*values) else row)
    return found


def level(backend: str) -> str:
    """A backend's consistency in tests of what is above it: ordered sums take the reference
    backend, which only defines it (tests/kernels/test_ordered.py), a hundred times as long."""
    return "exact" if backend == "reference" else "bitwise"


def variant_of(family: str, inner: int) -> tuple[str, dict[str, Any]]:
    """(the family, what of a config's sizes is another there) of a name such as
    gemma4_text-experts, for a form that not all models of a family have."""
    family, _, form = family.partition("-")
    if form == "experts":
        return family, {"experts": Experts(5, 2, 24, shared=inner)}
    if form == "latent":
        return family, {"experts": LATENT_EXPERTS}
    if form == "small":
        return family, {"num_layers": 4, "inputs": LayerInputs(12, 2, wide=True)}
    assert not form
    return family, {}


def tiny_model(
    precision: str = "fp8",
    family: str = "qwen3",
    seed: int = 0,
    alphabet: str = "0123456789+-*=",
    backend: str = "auto",
    scale: float = 1.0,
    ranks: Ranks = ALONE,
    masters: str = "fp32",
    **sizes: Any,
) -> Model:
    """A random model of a few thousand parameters over the digits, or another alphabet. Matrices
    are multiplied by `scale`: with some size to them, distributions are not flat."""
    tokenizer = Tokenizer.characters(alphabet)
    family, own = variant_of(family, sizes.get("intermediate_size", 48))
    sizes |= own
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_positions": 64,
        "tie_embeddings": True,
        "experts": {
            "qwen3_moe": Experts(5, 2, 24),
            "qwen3_5_moe_text": Experts(5, 2, 24, shared=40),
            "qwen3_next": Experts(5, 2, 24, shared=40),
            "gpt_oss": Experts(5, 2, sizes.get("intermediate_size", 48)),
            "glm4_moe": SCORED,
            "minimax_m2": scored_of(sizes.get("intermediate_size", 48)),
        }.get(family),
    }
    layers, table = range(sizes.get("num_layers", 2) - 1), FAMILIES[family]
    by_head = table.linear_attention == "by head"
    linear = LinearAttention(tuple(layers), 2, 4, 8, 12, by_head=by_head)
    linear = linear if table.linear_attention else None
    rope = Rope.of(10000.0, 1.0 if table.partial_rotary is None else 0.5)
    rope = rope if "default" in table.rope_kinds else table.fresh_rope(10000.0, 64)
    multipliers = Multipliers(3.0, 0.5, 0.4, 2.0) if table.multipliers else None
    if table.latent is not None:
        latent = sizes.get("latent", Latent(16, 8, 4, 6, 20))
        own = latent_values(latent, sizes.get("num_heads", 4), Rope())
        sizes = own | {key: value for key, value in sizes.items() if key != "head_dim"}
    if table.global_head_dim is not None:
        sizes = _heads_by_layer(sizes.get("num_layers", 2), sizes.get("head_dim", 8)) | sizes
    if table.one_part:
        sizes = one_part_values(ONE_PART[: sizes.get("num_layers", 4)]) | sizes
    config = ModelConfig(
        family=family,
        vocab_size=tokenizer.vocab_size,
        **{**shape, "linear": linear, "rope": rope, "multipliers": multipliers, **sizes},
        qkv_bias=family == "qwen2" or FAMILIES[family].biased,
        o_bias=table.biased and table.output_bias,
        qk_norm=bool(table.qk_norm),
        eos_ids=tokenizer.eos_ids,
    )
    model = Model.init(config, tokenizer, precision, seed, backend, level(backend), ranks, masters)
    if scale != 1.0:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(scale)
        model.sync()
    return model


def _heads_by_layer(layers: int, dim: int) -> dict[str, Any]:
    """Of a config whose layers without a window, every second one and the last, have heads of
    their own, and whose logits are capped."""
    slides = [layer % 2 == 0 and layer + 1 < layers for layer in range(layers)]
    return {
        "windows": tuple(5 if one else None for one in slides),
        "sliding_rope": Rope(300.0),
        "rope": Rope(10000.0, PROPORTIONAL, (("partial_rotary_factor", 0.5),)),
        "global_heads": LayerHeads(1, 2 * dim, joint=True),
        "logit_cap": 6.0,
    }


def trained_adapters(where: Path, adapters: Mapping[str, NewAdapter]) -> dict[str, Path]:
    """Folders of some adapters of the model at `where`/base, beside it, by name; as after an
    update: B is not 0."""
    for number, (name, given) in enumerate(adapters.items()):
        model = Model.load(where / "base", "bf16", adapter=given)
        random = torch.Generator().manual_seed(number)
        for key, parameter in model.named_parameters().items():
            if key.endswith("lora_B"):
                parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=random))
        model.save(where / name)
    return {name: where / name for name in adapters}
