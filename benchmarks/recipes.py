"""What the recipes of the field cost beside a step: corrections and metrics, recalibration, weight sync, experts.

The step is that of `grpo_step`: 512 completions of 5 tokens, hidden 128, 4 layers. The mixture of experts has 8 experts
of half the dense model's width, of which 2 serve a token. Bytes are of a model of hidden 1024 and 8 layers.
"""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch

from benchmarks.common import Claim, Result, race
from benchmarks.models import save_model
from benchmarks.steps import GROUP, NEW, PROMPTS, open_step, run_name
from isobit import Model
from isobit.rl.algorithm.correction import correct, correction_metrics
from isobit.rl.algorithm.correction_rule import CORRECTIONS
from isobit.rl.algorithm.mismatch import mismatch_metrics, sequence_metrics
from isobit.run.directory import read_jsonl


def run(rounds: int) -> Result:
    result = Result("recipes")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        dense = save_model(folder / "dense", 128, 4, 64, 64)
        experts = save_model(folder / "experts", 128, 4, 64, 64, experts=8, per_token=2)
        steps = {
            "fp8-rollout step": open_step(folder, dense, "fp8-rollout", stack),
            "its corrections and metrics": _corrections(),
            "fp8-rollout-kv step": open_step(folder, dense, "fp8-rollout-kv", stack),
            "fp8 step": open_step(folder, dense, "fp8", stack),
            "fp8 step, 8 experts, top-2": open_step(folder, experts, "fp8", stack),
        }
        result.rows += race("512 completions x 5 tokens", steps, rounds, warmup=2, amount=512, unit="completions")
        calibrated = list(read_jsonl(folder / run_name(dense, "fp8-rollout-kv") / "metrics.jsonl"))[2:]
        sizes = {p: _sync_bytes(folder, p) for p in ("bf16[engines=separate]", "fp8-rollout")}
    times = {row.contestant: row.median_s for row in result.rows}
    share = median(line["time/calibrate"] / line["time/step"] for line in calibrated)
    costs = times["its corrections and metrics"] / times["fp8-rollout step"]
    both = (sizes["fp8-rollout"], sizes["bf16[engines=separate]"])
    result.claims += [
        Claim("corrections and metrics, part of a step", costs, "<=", 0.03),
        Claim("recalibration, part of a step", share, "<=", 0.03),
        Claim(f"weight sync, {both[0]:,} bytes over {both[1]:,}", both[0] / both[1], "<=", 0.53),
        Claim("8 experts, top-2, over dense", times["fp8 step, 8 experts, top-2"] / times["fp8 step"], "<=", 1.6),
    ]
    return result


def _corrections() -> Callable[[], object]:
    """All that a step computes of its log-probabilities besides the loss, on a batch of the same size."""
    generator = torch.Generator().manual_seed(0)
    rollout = [-torch.rand(NEW, generator=generator) for _ in range(PROMPTS * GROUP)]
    learner = [row + 0.05 * torch.randn(NEW, generator=generator) for row in rollout]
    lengths = [NEW] * len(rollout)

    def call() -> object:
        flat = torch.cat(learner), torch.cat(rollout)
        metrics = mismatch_metrics(*flat) | sequence_metrics(learner, rollout)
        return metrics | correction_metrics(correct(CORRECTIONS["token_tis"], *flat, lengths))

    return call


def _sync_bytes(folder: Path, precision: str) -> int:
    path = folder / "large"
    if not path.is_dir():
        save_model(path, 1024, 8, 4096)
    return Model.load(path, precision).transformer.sync_bytes
