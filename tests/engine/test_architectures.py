"""Rollout log-probabilities are the learner's, bit for bit, also where layers have windows or no
rotary embedding. Each architecture has a control: a learner whose layers are a little different."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.model import Experts, Model, ModelConfig, Tokenizer
from isobit.model.families.rope import PROPORTIONAL, Rope
from isobit.model.hub.latent import Latent
from isobit.model.hub.layer_heads import LayerHeads
from isobit.model.hub.layer_inputs import LayerInputs
from isobit.model.hub.linear_attention import LinearAttention
from isobit.model.hub.multipliers import Multipliers
from tests.models import (
    ALPHABET,
    LATENT_EXPERTS,
    ONE_PART,
    SCORED,
    latent_values,
    level,
    one_part_values,
    require,
    scored_of,
    slow_where,
)

from .helpers import CONFIG, differing
from .test_invariance import PROMPT_IDS, PROMPTS

_HALF = Rope(300.0, "default", (("partial_rotary_factor", 0.5),))
_GROWN = Rope(
    300.0,
    "yarn",
    (("factor", 2.0), ("llama_4_scaling_beta", 0.5), ("original_max_position_embeddings", 8)),
)
_LONG = Rope(
    300.0,
    "longrope",
    (
        ("long_factor", tuple(1.0 + step for step in range(18))),
        ("original_max_position_embeddings", 20),
        ("short_factor", (1.1,) * 18),
    ),
)
ARCHITECTURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mistral": ({"windows": (7, 7, 7)}, {"windows": (7, 8, 7)}),
    "qwen3": ({"windows": (None, 5, None), "qk_norm": True}, {"windows": (None, 6, None)}),
    "olmo2": ({"qk_norm": True}, {"rms_eps": 1e-2}),
    "olmo3": (
        {"qk_norm": True, "windows": (5, None, 9), "sliding_rope": Rope(300.0)},
        {"windows": (None, 5, 9)},
    ),
    "gemma3_text": (
        {"qk_norm": True, "windows": (5, None, 9), "sliding_rope": Rope(300.0), "query_scalar": 5},
        {"query_scalar": 6},
    ),
    "gemma4_text": (
        {
            "qk_norm": True,
            "windows": (5, None, None),
            "sliding_rope": Rope(300.0),
            "rope": Rope(900.0, PROPORTIONAL, (("partial_rotary_factor", 0.5),)),
            "global_heads": LayerHeads(1, 52, joint=True),
            "logit_cap": 4.0,
        },
        {"logit_cap": 4.5},
    ),
    "gemma4_text-experts": (
        {
            "qk_norm": True,
            "windows": (5, None, None),
            "global_heads": LayerHeads(1, 52, joint=True),
            "experts": Experts(5, 2, 24, shared=208),
        },
        {"rms_eps": 1e-2},
    ),
    "gemma4_text-small": (
        {
            "qk_norm": True,
            "num_layers": 4,
            "windows": (5, None, 5, None),
            "global_heads": LayerHeads(2, 52),
            "inputs": LayerInputs(20, 2, wide=True),
        },
        {"windows": (5, None, 4, None)},
    ),
    "gemma4_unified_text": (
        {
            "qk_norm": True,
            "windows": (None, 5, None),
            "global_heads": LayerHeads(2, 20),
            "logit_cap": 4.0,
        },
        {"rms_eps": 1e-2},
    ),
    "glm4": ({"qkv_bias": True, "rope": _HALF}, {"rms_eps": 1e-2}),
    "phi3": ({"windows": (5, 5, 5), "rope": _LONG}, {"windows": (6, 6, 6)}),
    "granite": (
        {"multipliers": Multipliers(2.0, 0.3, 0.6, 1.5)},
        {"multipliers": Multipliers(2.0, 0.3, 0.5, 1.5)},
    ),
    "ministral3": ({"rope": _GROWN}, {"rms_eps": 1e-2}),
    "gpt_oss": (
        {"windows": (5, None, 9), "qkv_bias": True, "o_bias": True, "experts": Experts(5, 2, 208)},
        {"windows": (5, None, 8)},
    ),
    "qwen3_5_text": (
        {"qk_norm": True, "linear": LinearAttention((0, 2), 2, 4, 20, 12), "rope": _HALF},
        {"rms_eps": 1e-2},
    ),
    "qwen3_5_moe_text": (
        {
            "qk_norm": True,
            "linear": LinearAttention((0, 2), 2, 4, 20, 12),
            "rope": _HALF,
            "experts": Experts(5, 2, 24, shared=40),
        },
        {"rms_eps": 1e-2},
    ),
    "qwen3_next": (
        {
            "qk_norm": True,
            "linear": LinearAttention((0, 2), 2, 4, 20, 12, by_head=True),
            "rope": _HALF,
            "experts": Experts(5, 2, 24, dense_layers=(1,), shared=40),
        },
        {"rms_eps": 1e-2},
    ),
    "glm4_moe": (
        {"qk_norm": True, "rope": _HALF, "experts": SCORED},
        {"rms_eps": 1e-2},
    ),
    "minimax_m2": (
        {"qk_norm": True, "rope": _HALF, "experts": scored_of(208)},
        {"rms_eps": 1e-2},
    ),
    "deepseek_v3": (latent_values(Latent(20, 12, 8, 14, 28), 4, Rope(300.0)), {"rms_eps": 1e-2}),
    "nemotron_h": (
        one_part_values(("linear_attention", "mlp", "moe", "linear_attention", "full_attention")),
        {"rms_eps": 1e-2},
    ),
    "nemotron_h-latent": (
        one_part_values(ONE_PART) | {"experts": LATENT_EXPERTS},
        {"rms_eps": 1e-2},
    ),
    "smollm3": ({"windows": (None, 5, None), "unrotated": (1,)}, {"unrotated": ()}),
}
"""Family to what differs from `CONFIG`, and what the control changes."""


def random_model(family: str, preset: str, backend: str) -> Model:
    require(backend)
    known = family.partition("-")[0]
    config: ModelConfig = replace(CONFIG, family=known, **ARCHITECTURES[family][0])
    model = Model.init(config, Tokenizer.characters(ALPHABET), preset, 3, backend, level(backend))
    with torch.no_grad():
        for name, parameter in model.named_parameters().items():
            if parameter.ndim == 2:
                parameter.mul_(8 if name == "head" else 4)  # a distribution with some shape to it
            else:
                parameter.add_(
                    0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
                )
    model.sync()
    return model


BY_REFERENCE = ("mistral", "gemma4_text", "gpt_oss", "deepseek_v3")
"""What `make test` has of the reference operators, which take ten times as long: windows, heads by
layer and capped logits, sinks and experts, latent attention."""


@pytest.mark.parametrize(
    ("preset", "backend", "family"),
    slow_where(
        [
            (preset, backend, family)
            for preset, backend in (("fp8", "native"), ("bf16", "native"), ("fp8", "reference"))
            for family in ARCHITECTURES
        ],
        lambda preset, backend, family: backend == "reference" and family not in BY_REFERENCE,
    ),
)
def test_zero_bits_differ(
    family: str, preset: str, backend: str, make_engine: Callable[..., Engine]
) -> None:
    """Chunks, preemption and shared pages, with prompts and completions of several lengths."""
    model = random_model(family, preset, backend)
    engine = make_engine(model, kv_pages=24, page_size=4, max_batch_tokens=23, max_sequences=9)
    groups = engine.generate(PROMPTS, Sampling(n=3, max_new_tokens=14, seed=3), PROMPT_IDS)
    assert engine.stats.shared_pages > 0
    count, total = differing(model, groups)
    assert count == 0
    assert total > 150
    model.transformer.config = replace(model.config, **ARCHITECTURES[family][1])
    assert differing(model, groups)[0] > total // 4
