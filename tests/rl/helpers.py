"""Rollouts of tiny models for the learner's tests."""

from collections.abc import Sequence

import torch
from torch import Tensor

from isobit.engine import Engine, Sampling
from isobit.model import Model
from isobit.rl import Objective, OptimizerSettings, Sample
from isobit.rl.learner import Learner
from isobit.rl.optim import Optimizer

PROMPTS = ["1+1=", "23*4=", "9-", "567+89=", "0"]


def roll_out(
    model: Model, group_size: int = 4, length: int = 5, temperature: float = 1.0, seed: int = 0
) -> list[Sample]:
    """Completions of `PROMPTS` by the engine, of mixed lengths, unscored."""
    engine = Engine(model, kv_pages=64, page_size=4)
    groups = engine.generate(PROMPTS, Sampling(n=group_size, max_new_tokens=length, temperature=temperature, seed=seed))
    return [
        Sample(
            prompt_index=c.prompt_id,
            sample_index=c.sample_index,
            prompt_ids=tuple(c.prompt_token_ids),
            completion_ids=tuple(c.token_ids[: 1 + (c.prompt_id + c.sample_index) % length]),
            rollout_logprobs=tuple(c.logprobs[: 1 + (c.prompt_id + c.sample_index) % length]),
            completion=c.text,
            truncated=c.finish_reason == "length",
            weights_version=c.weights_version,
        )
        for group in groups
        for c in group
    ]


def alternating(samples: Sequence[Sample]) -> list[float]:
    """Advantages of both signs and different sizes."""
    return [(-1.0) ** i * (0.5 + i % 3) for i in range(len(samples))]


def make_learner(model: Model, objective: Objective | None = None, rate: float = 1e-3, **options: object) -> Learner:
    settings = OptimizerSettings(learning_rate=rate, max_grad_norm=1e9, weight_decay=0.01)
    return Learner(model, Optimizer(model.named_parameters(), settings), objective or Objective(), **options)  # type: ignore[arg-type]


def snapshot(learner: Learner) -> dict[str, Tensor]:
    """Weights and optimizer state, copied."""
    weights = {name: p.detach().clone() for name, p in learner.model.named_parameters().items()}
    return weights | {f"optimizer/{name}": value for name, value in learner.optimizer.state().items()}


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    as_bits = {name: tensor.view(torch.int32) for name, tensor in right.items()}
    return left.keys() == right.keys() and all(torch.equal(t.view(torch.int32), as_bits[n]) for n, t in left.items())
