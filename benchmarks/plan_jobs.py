"""Jobs for the planner on architectures of real models, for `fits.py` and the tests."""

from dataclasses import replace

from benchmarks.gpu.shapes import SHAPES
from isobit.config import load_config
from isobit.model import Experts, ModelConfig
from isobit.training.plan import Job, Machine, card_named
from isobit.training.plan.job import job_with

_LLAMA = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_positions=131072,
)
MODELS = {
    **{name: SHAPES[name] for name in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-8B")},
    "Qwen3-4B": replace(
        SHAPES["Qwen3-1.7B"], hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32
    ),
    "Qwen3-14B": replace(
        SHAPES["Qwen3-8B"], hidden_size=5120, intermediate_size=17408, num_layers=40, num_heads=40
    ),
    "Qwen3-32B": replace(
        SHAPES["Qwen3-8B"], hidden_size=5120, intermediate_size=25600, num_layers=64, num_heads=64
    ),
    "Qwen3-30B-A3B": SHAPES["Qwen3-30B-A3B"],
    "Qwen3-235B-A22B": replace(
        SHAPES["Qwen3-30B-A3B"],
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=94,
        num_heads=64,
        experts=Experts(128, 8, 1536),
    ),
    "Llama-3.1-8B": _LLAMA,
    "Llama-3.1-70B": replace(
        _LLAMA, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64
    ),
}
"""By name, as their `config.json` has them."""


def job(
    name: str, *changes: str, ranks: int = 1, card: str | Machine = "h200", prompt: int = 512
) -> Job:
    """64 prompts and 16 completions each of at most 4,096 tokens in a step, with changed keys of
    the config."""
    values = {
        "model": {"path": name},
        "prompts_per_step": 64,
        "sampling": {"group_size": 16, "max_new_tokens": 4096},
    }
    machine = card_named(card) if isinstance(card, str) else card
    return job_with(load_config(values, changes), MODELS[name], prompt, machine, ranks=ranks)
