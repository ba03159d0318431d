"""Seconds of a GRPO step beside TRL's `GRPOTrainer` in float32: 64 prompts x 8 completions of 5
tokens, hidden 128, 4 layers.

A step is everything between two optimizer steps: rollout, rewards, advantages, forward, backward,
AdamW. isobit's steps run inside TRL's loop, between two of its steps, so that both see the same
machine. TRL needs `pip install trl==1.16.0`; without it, isobit's times stand alone and the claims
are left out.
"""

import contextlib
import io
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks import rewards
from benchmarks.common import Claim, Result, row
from benchmarks.models import save_model
from benchmarks.steps import GROUP, NEW, PROMPTS, open_step

WARMUP = 2
FLOWS = (("bf16", "fast"), ("bf16", "bitwise"), ("fp8", "bitwise"))


def run(rounds: int) -> Result:
    result = Result("grpo_step")
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        path = save_model(folder / "model", 128, 4, 64, 64)
        own = {f"isobit {p} {c}": open_step(folder, path, p, stack, c) for p, c in FLOWS}

        def own_steps() -> None:
            for contestant, step in own.items():
                began = time.perf_counter()
                step()
                times.setdefault(contestant, []).append(time.perf_counter() - began)

        peer = _trl(path, folder, rounds + WARMUP, own_steps)
    for contestant, samples in [*times.items(), *peer.items()]:
        result.rows.append(
            row("512 completions x 5 tokens", contestant, samples[WARMUP:], 512, "completions")
        )
    if peer:
        trl = result.median("TRL float32")
        result.claims.append(
            Claim("isobit bf16 fast over TRL", result.median("isobit bf16 fast") / trl, "<=", 1.0)
        )
        result.claims.append(
            Claim("isobit fp8 over TRL", result.median("isobit fp8 bitwise") / trl, "<=", 0.6)
        )
    return result


def _trl(
    model: Path, folder: Path, steps: int, between: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of TRL's steps; `between` runs after each. Without TRL: the same turns, and no
    times."""
    try:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer
    except ImportError:
        for _ in range(steps):
            between()
        return {}
    seconds: list[float] = []

    class Clock(TrainerCallback):
        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.began)
            between()

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.eos_token
    rows = [{"prompt": f"{100 + i % 900}+{999 - i % 900}="} for i in range(PROMPTS * (steps + 1))]
    logging.disable(logging.WARNING)
    settings = GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=NEW, generation_kwargs={"min_new_tokens": NEW}, learning_rate=1e-6,
        max_steps=steps,
        beta=0.0, loss_type="grpo", use_cpu=True, bf16=False, gradient_checkpointing=False,
        report_to=[],
        save_strategy="no", logging_steps=1_000_000, disable_tqdm=True,
    )  # fmt: skip
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            reward_funcs=rewards.digits,
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    logging.disable(logging.NOTSET)
    return {"TRL float32": seconds}
