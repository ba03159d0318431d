"""Architectures of real models, and jobs on them."""

import json
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.shapes import SHAPES
from isobit.config import load_config
from isobit.model import ModelConfig
from isobit.plan import Job, device_named, job_of

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
    "Qwen3-8B": SHAPES["Qwen3-8B"],
    "Qwen3-32B": replace(SHAPES["Qwen3-8B"], hidden_size=5120, intermediate_size=25600, num_layers=64, num_heads=64),
    "Qwen3-30B-A3B": SHAPES["Qwen3-30B-A3B"],
    "Llama-3.1-8B": _LLAMA,
    "Llama-3.1-70B": replace(_LLAMA, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64),
}


def model_folder(folder: Path, config: ModelConfig) -> Path:
    """A directory with a config.json and nothing else."""
    path = folder / "model"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config.to_hf()))
    return path


def job(folder: Path, name: str, *changes: str, ranks: int = 1, device: str = "h200", sum_group: int = 1) -> Job:
    """A step of 64 prompts x 16 completions of 4,096 tokens, after prompts of 512, with changed keys."""
    values = {
        "model": {"path": str(model_folder(folder, MODELS[name]))},
        "prompts_per_step": 64,
        "sampling": {"group_size": 16, "max_new_tokens": 4096},
    }
    found = job_of(load_config(values, changes), device_named(device), 512, sum_group=sum_group)
    return found.under(found.precision, ranks)
