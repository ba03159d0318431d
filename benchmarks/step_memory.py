"""The most that a step of GRPO takes on a CPU, by preset, `optimizer.activation_checkpointing`,
`masters` and `state`: counted tensors.

    python -m benchmarks step_memory

Every storage that PyTorch's operators return is counted while it lives (`isobit.training.plan.live_bytes`),
so the figures are those of any machine, and nothing is timed. One run of two steps for each case,
of a random model with hidden 512, 4 layers and a vocabulary of 4,096: 16 completions of 112 tokens,
learned from in one micro-batch. The parts are what a run holds, and what it takes at the most
besides.
"""

import tempfile
from pathlib import Path

import yaml

from benchmarks.common import Claim, Result
from benchmarks.models import save_model
from isobit.config import load_config
from isobit.training.loop import training_step
from isobit.training.plan.live_bytes import LiveBytes
from isobit.training.train import open_run

PRESETS = ("bf16", "fp8", "fp8-rollout", "fp8-e2e")
LEVELS = ("false", "mlp", "true")
OPTIMIZERS: dict[str, dict[str, str]] = {
    "8-bit moments": {"state": "8bit"},
    "BF16 masters": {"masters": "bf16"},
    "BF16 masters, 8-bit moments": {"masters": "bf16", "state": "8bit"},
}
"""Under `fp8`, without checkpointing."""


def run(rounds: int) -> Result:
    result = Result("step_memory")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model", 512, 4, 4096)
        for preset in PRESETS:
            for level in LEVELS:
                result.parts[f"{preset}, {level}"] = peak(folder, preset, level)
        for what, given in OPTIMIZERS.items():
            result.parts[f"fp8, {what}"] = peak(folder, "fp8", "false", **given)
    least = {
        level: _besides(result, "fp8", level) / _besides(result, "fp8", "false") for level in LEVELS
    }
    for level in LEVELS[1:]:
        what = (
            f"fp8, activation_checkpointing: {level}, over false: what a step takes besides "
            "what it holds"
        )
        result.claims.append(Claim(what, least[level], "<=", 0.85))
    plain, narrow = (
        result.parts[f"fp8, {what}8-bit moments"]["held"] for what in ("", "BF16 masters, ")
    )
    what = "fp8, 8-bit moments: what is held with BF16 masters over FP32"
    result.claims.append(Claim(what, narrow / plain, "<=", 0.85))
    return result


def peak(folder: Path, preset: str, level: str, **optimizer: str) -> dict[str, float]:
    """Bytes: what a run holds after its first step, and what the second takes besides."""
    path = folder / f"{'-'.join((preset, level, *optimizer))}.yaml"
    (folder / "reward.py").write_text(
        "def digits(prompts, completions, **columns):\n"
        "    return [float(sum(c in '56789' for c in text)) for text in completions]\n"
    )
    values = {
        "model": {"path": str(folder / "model")},
        "precision": preset,
        "task": {
            "name": "arithmetic",
            "held_out_size": 0,
            "options": {"digits": 1, "train_size": 60},
        },
        "prompts_per_step": 4,
        "sampling": {"group_size": 4, "max_new_tokens": 112, "ignore_eos": True},
        "optimizer": {
            "learning_rate": 1e-5,
            "micro_batch_tokens": 4096,
            "activation_checkpointing": yaml.safe_load(level),
            **optimizer,
        },
        "run": {"dir": str(folder / path.stem), "checkpoint_every": 0, "report": False},
        "rewards": {"functions": [{"function": f"{folder / 'reward.py'}:digits"}]},
        "steps": 2,
    }
    path.write_text(yaml.safe_dump(values))
    with LiveBytes() as live, open_run(load_config(path), quiet=True) as session:
        training_step(session)  # makes the moments
        live.take()
        held = live.live
        training_step(session)
        return {"held": float(held), "besides": float(live.take() - held)}


def _besides(result: Result, preset: str, level: str) -> float:
    return result.parts[f"{preset}, {level}"]["besides"]
