"""A run directory of any size, as a run would leave it, written without training: material for the
report's tests. Its figures are random, and mean nothing."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from isobit.model import Tokenizer
from isobit.run.completions import COMPLETIONS, pack
from isobit.run.directory import CONFIG, METRICS, QUANTIZATION
from isobit.run.format import FORMAT, FORMAT_NOW

ALPHABET = "".join(chr(i) for i in range(32, 127)) + "\n"
_WORDS = (
    "so",
    "the",
    "sum",
    "of",
    "both",
    "is",
    "then",
    "we",
    "carry",
    "one",
    "add",
    "check",
    "12",
    "7",
    "40",
    "=",
    "+",
    "\n",
)
_LAYERS, _GROUP = 28, 8


def write_run(
    folder: Path,
    steps: int,
    completions: int = 64,
    tokens: int = 120,
    exact: bool = False,
    prompts: int = 400,
) -> Path:
    """`completions` a step (groups of 8), of about `tokens` characters, each a token; `exact`: the
    learner has the rollout's bits."""
    generator = np.random.Generator(np.random.Philox(key=0))
    folder.mkdir(parents=True)
    preset = "fp8" if exact else "fp8-rollout"
    (folder / FORMAT).write_text(f"{FORMAT_NOW}\n")
    (folder / CONFIG).write_text(
        f"model: {{path: some/model}}\nprecision: {preset}\ntask: {{name: sums}}\nseed: 0\n"
    )
    tokenizer = Tokenizer.characters(ALPHABET)
    checkpoint = folder / "checkpoints" / f"step-{steps:06}"
    checkpoint.mkdir(parents=True)
    tokenizer.save(checkpoint)
    _write(
        folder / METRICS, (_metrics(step, steps, exact, generator) for step in range(1, steps + 1))
    )
    recorded = [1, *range(10, steps + 1, 10)]
    _write(folder / QUANTIZATION, (_quantization(step, generator) for step in recorded))
    with (folder / COMPLETIONS).open("wb") as file:
        for step in range(1, steps + 1):
            file.write(
                pack(
                    _completions(
                        step, steps, completions, tokens, exact, prompts, tokenizer, generator
                    )
                )
            )
    return folder


def _write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _metrics(step: int, steps: int, exact: bool, generator: np.random.Generator) -> dict[str, Any]:
    learned, noise = 1 - math.exp(-3 * step / steps), generator.normal(size=8)
    gap = 0.0 if exact else 1e-3 * math.exp(0.4 * noise[0])
    row = {
        "step": float(step),
        "reward/mean": 0.15 + 0.6 * learned + 0.03 * noise[1],
        "reward/std": 0.4,
        "reward/function/correct": 0.15 + 0.6 * learned + 0.03 * noise[1],
        "reward/function/short": 0.5 + 0.02 * noise[2],
        "length/mean": 110 + 4 * noise[2] + 20 * learned,
        "length/truncated_fraction": max(0.0, 0.1 * (1 - learned) + 0.01 * noise[3]),
        "entropy": 0.7 - 0.4 * learned + 0.02 * noise[4],
        "grad_norm": 0.8 * math.exp(0.2 * noise[5]),
        "learning_rate": 1e-6,
        "clip_fraction": 0.002,
        "groups/zero_spread_fraction": min(1.0, max(0.0, 0.2 + 0.05 * noise[6])),
        "mismatch/kl_k3": gap,
        "mismatch/token_mult_prob_error": 1 + 10 * gap,
        **({} if exact else {f"mismatch/kl_k3_from_{2**n}": gap * (1 + n / 8) for n in range(8)}),
        "mismatch/max_abs_logprob_diff": 100 * gap,
        "mismatch/differing_tokens": 0.0 if exact else 7000.0,
        "mismatch/compared_tokens": 7680.0,
        "mismatch/ppl_ratio": 1 + gap,
        "quant/weight_relative_error": 0.0264 + 1e-5 * noise[7],
        "quant/weight_flushed_fraction": 1e-6 * math.exp(noise[7]) if step % 7 else 0.0,
        "quant/weight_saturated_fraction": 0.0,
        **{f"time/{phase}": s * math.exp(0.1 * noise[i]) for i, (phase, s) in enumerate(_PHASES)},
        "time/step": 9.0,
        "throughput/rollout_tokens_per_s": 1500 + 50 * noise[0],
        "throughput/learn_tokens_per_s": 2500 + 50 * noise[1],
        "memory/peak_rss_mib": 4000.0 + step,
        "memory/weights_mib": 900.0,
        "memory/kv_cache_mib": 600.0,
        "memory/optimizer_mib": 1200.0,
    }
    if step % 20 == 0 or step == 1:
        row |= {"accuracy/held_out": 0.2 + 0.5 * learned, "accuracy/pass_at_4": 0.4 + 0.5 * learned}
    return row


_PHASES = (("rollout", 5.0), ("learn", 3.0), ("score", 0.5), ("sync", 0.2))


def _quantization(step: int, generator: np.random.Generator) -> dict[str, Any]:
    tensors = {}
    for name in ("qkv", "o", "gate_up", "down"):
        noise = generator.normal(size=(2, _LAYERS))
        tensors[name] = {
            "saturated": [0.0] * _LAYERS,
            "flushed": [float(f"{1e-5 * math.exp(2 * x):.6g}") if x > 0 else 0.0 for x in noise[0]],
            "relative_error": [float(f"{0.0264 + 3e-4 * x:.6g}") for x in noise[1]],
        }
    return {"step": step, "tensors": tensors}


def _completions(
    step: int,
    steps: int,
    count: int,
    tokens: int,
    exact: bool,
    prompts: int,
    tokenizer: Tokenizer,
    generator: Any,
) -> Iterator[dict[str, Any]]:
    for i in range(count):
        group = (step - 1) * max(count // _GROUP, 1) + i // _GROUP
        number = group % prompts
        prompt = f"What is {number} + {number * 7 % 100}? Think step by step."
        words = generator.choice(_WORDS, size=max(1, tokens // 4))
        text = " ".join(words)[:tokens]
        ids = [*tokenizer.encode(text), *tokenizer.eos_ids]
        rollout = -np.exp(generator.normal(-2, 2, size=len(ids))).astype(np.float32)
        moved = (
            generator.normal(size=len(ids)) * 10 ** generator.uniform(-6, -1, size=len(ids))
        ).astype(np.float32)
        policy = rollout if exact else rollout + moved * (generator.random(len(ids)) > 0.2)
        reward = float(generator.random() < 0.1 + 0.8 * (number / prompts) * step / steps)
        yield {
            "step": step,
            "prompt": prompt,
            "prompt_index": group,
            "sample_index": i % _GROUP,
            "prompt_ids": tokenizer.encode(prompt),
            "completion_ids": ids,
            "rollout_logprobs": rollout.tolist(),
            "completion": text,
            "truncated": bool(i % 11 == 0),
            "weights_version": step,
            "reward": reward,
            "rewards": {"correct": reward, "short": 0.5},
            "reference_kl": None,
            "routes": None,
            "rollout_step": step - 1,
            "policy_logprobs": policy.tolist() if i % 2 == 0 else None,
        }
