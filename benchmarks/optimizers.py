"""Seconds of one update: AdamW with moments in FP32 and in 8 bits, and Muon, on the same gradients,
in turns.

A Qwen3 of 11.5 million parameters in 6 layers of width 384. The claims are ratios: Muon's products,
5 iterations for each matrix, against AdamW's one pass over memory, and against forward and backward
of 2,048 tokens.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.common import Claim, Result, race
from benchmarks.models import save_model
from isobit import Model
from isobit.kernels import Layout
from isobit.rl import OptimizerSettings
from isobit.rl.optim.sharded import ShardedOptimizer

SETTINGS = {
    "AdamW": OptimizerSettings(),
    "AdamW, 8-bit moments": OptimizerSettings(state="8bit"),
    "Muon": OptimizerSettings(name="muon"),
}
TOKENS, LENGTH = 2048, 128


def run(rounds: int) -> Result:
    result = Result("optimizers")
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder) / "model", 384, 6, 64)
        steps: dict[str, Callable[[], None]] = {}
        for name, settings in SETTINGS.items():
            steps[name] = _step(
                ShardedOptimizer.of(Model.load(Path(folder) / "model", "fp8"), settings)
            )
        steps["forward and backward"] = _passes(Model.load(Path(folder) / "model", "fp8"))
        result.rows += race("update", steps, rounds)
    ratio = result.median("Muon") / result.median("AdamW")
    share = result.median("Muon") / result.median("forward and backward")
    result.claims.append(Claim("an update of Muon over one of AdamW", ratio, "<=", 100))
    result.claims.append(
        Claim(f"an update of Muon over forward and backward of {TOKENS:,} tokens", share, "<=", 1.5)
    )
    return result


def _step(optimizer: ShardedOptimizer) -> Callable[[], None]:
    """An update with the same gradients each time; making them counts for all alike."""
    generator = torch.Generator().manual_seed(0)
    given = {
        name: torch.randn(p.shape, generator=generator) for name, p in optimizer.parameters.items()
    }

    def step() -> None:
        for name, gradient in given.items():
            optimizer.holders[name].grad = gradient.clone()
        optimizer.step(1e-6, 0.0)

    return step


def _passes(model: Model) -> Callable[[], None]:
    tokens = torch.arange(TOKENS) % model.config.vocab_size
    layout = Layout.packed([LENGTH] * (TOKENS // LENGTH))

    def passes() -> None:
        transformer = model.transformer
        logprobs, _ = transformer.head_logprobs(transformer.hidden(tokens, layout), tokens.roll(-1))
        logprobs.sum().backward()
        for leaf in transformer.masters.leaves.values():
            leaf.grad = None

    return passes
