"""Real shapes of models: what benchmarks on a GPU, the roofline and the table of kernels have in
common.

Weights are random, since speed and memory do not depend on them. Left out: tokenizers' real
vocabularies, of which only the size counts.
"""

from dataclasses import replace

from isobit.model import Experts, ModelConfig
from isobit.training.plan.memory import num_parameters

_QWEN3 = ModelConfig(
    family="qwen3",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    qk_norm=True,
    rms_eps=1e-6,
    tie_embeddings=True,
    max_positions=40960,
)

SHAPES: dict[str, ModelConfig] = {
    "Qwen3-0.6B": _QWEN3,
    "Qwen3-1.7B": replace(_QWEN3, hidden_size=2048, intermediate_size=6144),
    "Qwen3-8B": replace(
        _QWEN3,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        tie_embeddings=False,
    ),
    "Qwen3-30B-A3B": replace(
        _QWEN3,
        family="qwen3_moe",
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        tie_embeddings=False,
        experts=Experts(128, 8, 768),
    ),
}
"""By name, as their `config.json` has them (Qwen Team 2025, arXiv 2505.09388, tables 1 and 2)."""

GPT_OSS = replace(
    _QWEN3,
    family="gpt_oss",
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    num_layers=24,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    qkv_bias=True,
    o_bias=True,
    qk_norm=False,
    rms_eps=1e-5,
    tie_embeddings=False,
    max_positions=131072,
    windows=(128, None) * 12,
    experts=Experts(32, 4, 2880),
)
"""gpt-oss-20b: for the kernels that only its architecture runs."""


def shortened(config: ModelConfig, most_bytes: float, per_parameter: float) -> ModelConfig:
    """The same with as many layers as `most_bytes` hold, at so many bytes a parameter; one at
    least."""
    while config.num_layers > 1 and per_parameter * num_parameters(config) > most_bytes:
        config = replace(config, num_layers=config.num_layers - 1)
    return config
