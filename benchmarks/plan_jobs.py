"""Jobs for the planner on architectures of real models, for `published.py`, `exposed.py` and the tests."""

from dataclasses import replace

from benchmarks.gpu.shapes import SHAPES
from isobit.config import load_config
from isobit.model import ModelConfig
from isobit.plan import Device, Job, Lengths, device_named
from isobit.precision import precision_from

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
    "Qwen3-4B": replace(SHAPES["Qwen3-1.7B"], hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32),
    "Qwen3-14B": replace(SHAPES["Qwen3-8B"], hidden_size=5120, intermediate_size=17408, num_layers=40, num_heads=40),
    "Qwen3-32B": replace(SHAPES["Qwen3-8B"], hidden_size=5120, intermediate_size=25600, num_layers=64, num_heads=64),
    "Qwen3-30B-A3B": SHAPES["Qwen3-30B-A3B"],
    "Llama-3.1-8B": _LLAMA,
    "Llama-3.1-70B": replace(_LLAMA, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64),
}
"""By name, as their `config.json` has them."""


def job(
    name: str,
    *changes: str,
    ranks: int = 1,
    device: str | Device = "h200",
    prompts: int = 64,
    group: int = 16,
    lengths: Lengths | None = None,
    sum_group: int = 1,
) -> Job:
    """A step of so many prompts and completions each, with changed keys of the config. By default prompts have 512
    tokens and all completions sampling.max_new_tokens, 4,096; each computes its own, as in the systems that published
    numbers."""
    values = {
        "model": {"path": name},
        "prompts_per_step": prompts,
        "optimizer": {"share_prompts": False},
        "sampling": {"group_size": group, "max_new_tokens": 4096 if lengths is None else lengths.longest},
    }
    config, model = load_config(values, [*changes, f"optimizer.sum_group={sum_group}"]), MODELS[name]
    new_tokens = config.sampling.max_new_tokens
    return Job(
        config,
        model,
        precision_from(config.precision),
        lengths or Lengths(512, new_tokens, new_tokens),
        device_named(device) if isinstance(device, str) else device,
        ranks,
        reference=(model, precision_from(config.precision)) if config.algorithm.kl_coefficient else None,
    )
