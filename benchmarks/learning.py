"""Seconds of learning from a batch beside PyTorch's bf16 autocast: a model of Qwen3-0.6B's shape
with 4 of its 28 layers and the whole vocabulary, 16 completions of 128 tokens after 10.

Both learn from the same completions, prompts computed for each: REINFORCE with the same advantages,
in two micro-batches of 8, clipped, AdamW on float32 masters. `transformers` runs as TRL's trainers
run it with `bf16: true`: float32 parameters under autocast, logits of the completions alone,
PyTorch's fused AdamW. isobit's seconds include making the working weights again. Left out: rollouts
(`rollout.py`), and gradient checkpointing, which both can do.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Claim, Result, race
from benchmarks.models import tokenizer
from isobit import Model
from isobit.model import ModelConfig
from isobit.rl import OptimizerSettings, ResolvedObjective, Sample, for_precision
from isobit.rl.learner.learner import Learner
from isobit.rl.optim.sharded import ShardedOptimizer

LAYERS, VOCABULARY = 4, 151_936
PROMPT, NEW, SAMPLES, MICRO_BATCH = 10, 128, 16, 8
RATE = 1e-6
FLOWS = (("bf16", "bitwise"), ("fp8", "bitwise"))
PEER = "transformers bf16 autocast"


def run(rounds: int) -> Result:
    return compare(rounds, LAYERS, VOCABULARY)


def compare(rounds: int, layers: int, vocabulary: int) -> Result:
    """Of a model with so many layers and tokens."""
    result, samples = Result("learning"), _samples(vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        Model.init(_config(layers, vocabulary), tokenizer(), "float32", seed=0).save(path)
        contestants = {f"isobit {p} {c}": _own(path, samples, p, c) for p, c in FLOWS}
        contestants[PEER] = _transformers(path, samples)
        tokens = float(SAMPLES * (PROMPT + NEW))
        result.rows += race("learning", contestants, rounds, amount=tokens, unit="tokens")
    peer, fp8 = result.median(PEER), result.median("isobit fp8 bitwise")
    bf16 = result.median("isobit bf16 bitwise")
    result.claims.append(Claim(f"isobit fp8 bitwise over {PEER}", peer / fp8, ">=", 2.0))
    result.claims.append(Claim(f"isobit bf16 bitwise over {PEER}", peer / bf16, ">=", 2.0))
    return result


def _config(layers: int, vocabulary: int) -> ModelConfig:
    return ModelConfig(
        family="qwen3", vocab_size=vocabulary, hidden_size=1024, intermediate_size=3072,
        num_layers=layers, num_heads=16, num_kv_heads=8, head_dim=128, qk_norm=True,
        tie_embeddings=True, max_positions=512, eos_ids=tokenizer().eos_ids,
    )  # fmt: skip


def _samples(vocabulary: int) -> list[Sample]:
    """Each with a prompt of its own, of any tokens."""
    random = torch.Generator().manual_seed(1)
    rows = torch.randint(0, vocabulary, (SAMPLES, PROMPT + NEW), generator=random).tolist()
    return [
        Sample(i, 0, tuple(row[:PROMPT]), tuple(row[PROMPT:]), (-12.0,) * NEW, "", False, 0)
        for i, row in enumerate(rows)
    ]


def _advantages() -> list[float]:
    return [(-1.0) ** i for i in range(SAMPLES)]


def _own(
    path: Path, samples: list[Sample], precision: str, consistency: str
) -> Callable[[], object]:
    model = Model.load(path, precision, consistency=consistency)
    settings = OptimizerSettings(learning_rate=RATE, share_prompts=False)
    objective = for_precision(ResolvedObjective(max_new_tokens=NEW), model.precision)
    learner = Learner(
        model,
        ShardedOptimizer.of(model, settings),
        objective,
        micro_batch_tokens=MICRO_BATCH * (PROMPT + NEW),
    )

    def step() -> None:
        learner.learn(samples, _advantages(), 0)
        model.sync()

    return step


def _transformers(path: Path, samples: list[Sample]) -> Callable[[], object]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    ids = torch.tensor([[*s.prompt_ids, *s.completion_ids] for s in samples])
    advantages, old = torch.tensor(_advantages()), torch.full((SAMPLES, NEW), -12.0)

    def step() -> None:
        for first in range(0, SAMPLES, MICRO_BATCH):
            rows = slice(first, first + MICRO_BATCH)
            targets = ids[rows, PROMPT:]
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(ids[rows], logits_to_keep=NEW + 1, use_cache=False).logits[:, :-1]
            chosen = logits.float().log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
            ratio = torch.exp(chosen - old[rows]).clamp(0.0, 10.0)
            loss = -(ratio * advantages[rows].unsqueeze(1)).mean() * (MICRO_BATCH / SAMPLES)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
