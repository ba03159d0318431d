"""Rollouts of tiny models for the learner's tests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.kernels import Copies
from isobit.model import Model
from isobit.rl import Group, Objective, OptimizerSettings, ResolvedObjective, Sample
from isobit.rl.algorithm.advantages import AdvantageInputs
from isobit.rl.algorithm.functions import ADVANTAGES
from isobit.rl.algorithm.loss import LOSSES, LossInputs, ratios
from isobit.rl.learner.learner import Learner
from isobit.rl.learner.packing import PackedBatch
from isobit.rl.optim.sharded import ShardedOptimizer

PROMPTS = ["1+1=", "23*4=", "9-", "567+89=", "0"]


def roll_out(
    model: Model,
    group_size: int = 4,
    length: int = 5,
    temperature: float = 1.0,
    seed: int = 0,
    sampling: Sampling | None = None,
) -> list[Sample]:
    """Completions of `PROMPTS` by the engine, of mixed lengths, unscored. `sampling`: in place of
    what is before it."""
    engine = Engine(model, kv_pages=64, page_size=4)
    asked = sampling or Sampling(
        n=group_size, max_new_tokens=length, temperature=temperature, seed=seed
    )
    groups = engine.generate(PROMPTS, asked)
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


def seen_by_rows(packed: PackedBatch) -> list[list[int]]:
    """Of each row the tokens whose keys it sees, its own at the end."""
    layout, seen = packed.layout, list[list[int]]()
    starts = layout.row_start.tolist()
    for s, (start, stop) in enumerate(pairwise(starts)):
        for row in range(start, stop):
            position = torch.arange(int(layout.positions[row]) + 1)
            slots = layout.page_table[s, position // layout.page_size] * layout.page_size
            where = {int(slot): at for at, slot in enumerate(layout.slots)}
            keys = (slots + position % layout.page_size).tolist()
            seen.append([int(packed.tokens[where[key]]) for key in keys])
    return seen


def first_only(self: Copies, x: Tensor, ops: object) -> Tensor:
    """In the place of `Copies.added`: without the gradients of all copies but the first."""
    found = x.new_zeros(self.count, *x.shape[1:])
    found[self.taken] = x[self.first]
    return found


@dataclass(frozen=True)
class Lost:
    """Of each token: its loss, whether it is clipped, and its ratio."""

    loss: Tensor
    clipped: Tensor
    ratio: Tensor


def loss_inputs(
    policy: Tensor, old: Tensor, advantages: Tensor, objective: ResolvedObjective, **given: Tensor
) -> LossInputs:
    """Inputs of a loss; what is not `given` is one sequence without a correction."""
    ones = torch.ones_like(policy).detach()
    values = {
        "rollout_logprobs": old,
        "importance_weights": ones,
        "token_weights": ones,
        "entropy": ones,
        "sequence": torch.zeros(len(policy), dtype=torch.int64),
    }
    bounds = (objective.clip_low, objective.clip_high)
    return LossInputs(  # type: ignore[misc]
        policy,
        old,
        advantages=advantages,
        clip_low=bounds[0],
        clip_high=bounds[1],
        settings=objective,
        **values | given,
    )


def policy_loss(
    policy: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    sequence: Tensor | None = None,
    **objective: object,
) -> Lost:
    """The loss by name of each token, under an objective of these parts."""
    settings = replace(ResolvedObjective(), **objective)  # type: ignore[arg-type]
    inputs = loss_inputs(
        policy, old, advantages, settings, **({} if sequence is None else {"sequence": sequence})
    )
    found = LOSSES[settings.loss](inputs)
    clipped = torch.zeros_like(policy, dtype=torch.bool) if found.clipped is None else found.clipped
    return Lost(found.loss, clipped, ratios(inputs).detach())


def group_advantages(rewards: Sequence[float | None], kind: str) -> list[float | None]:
    """Advantages of one group, without penalties."""
    return list(
        ADVANTAGES[kind](
            AdvantageInputs([rewards], [[()] * len(rewards)], [], ResolvedObjective())
        )[0]
    )  # type: ignore[arg-type]


def alternating(samples: Sequence[Sample]) -> list[float]:
    """Advantages of both signs and different sizes."""
    return [(-1.0) ** i * (0.5 + i % 3) for i in range(len(samples))]


def make_learner(
    model: Model,
    objective: Objective | None = None,
    rate: float = 1e-3,
    share_prompts: bool = True,
    **options: object,
) -> Learner:
    settings = OptimizerSettings(
        learning_rate=rate, max_grad_norm=1e9, weight_decay=0.01, share_prompts=share_prompts
    )
    optimizer = ShardedOptimizer(model.named_parameters(), settings)
    resolved = ResolvedObjective.of(objective or Objective())
    return Learner(model, optimizer, resolved, **options)  # type: ignore[arg-type]


def snapshot(learner: Learner) -> dict[str, Tensor]:
    """Weights and optimizer state, copied."""
    weights = {name: p.detach().clone() for name, p in learner.model.named_parameters().items()}
    return weights | {
        f"optimizer/{name}": value for name, value in learner.optimizer.state().items()
    }


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    as_bits = {name: tensor.view(torch.int32) for name, tensor in right.items()}
    return left.keys() == right.keys() and all(
        torch.equal(t.view(torch.int32), as_bits[n]) for n, t in left.items()
    )


def gradients(
    learner: Learner, samples: list[Sample], advantages: list[float], step: int = 0
) -> dict[str, Tensor]:
    """Of the first optimizer step of a batch, in place of taking it."""
    taken: list[dict[str, Tensor]] = []

    def keep(rate: float, norm: float) -> None:
        taken.append(
            {n: p.grad.clone() for n, p in learner.optimizer.holders.items() if p.grad is not None}
        )

    learner.optimizer.step = keep  # type: ignore[method-assign]
    learner.learn(samples, advantages, step)
    return taken[0]


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Norm of the difference of two gradients, relative to the second."""
    assert left.keys() == right.keys()
    difference = sum(float((left[n].double() - right[n].double()).square().sum()) for n in right)
    return (difference / sum(float(right[n].double().square().sum()) for n in right)) ** 0.5


def group(index: int, *rewards: float | None, length: int = 3, step: int = 0) -> Group:
    """Samples of one prompt with completions of `length` tokens."""
    return [
        Sample(
            index, i, (1,), (2,) * length, (-1.0,) * length, "", False, 0, reward, rollout_step=step
        )
        for i, reward in enumerate(rewards)
    ]


def indices(groups: list[Group]) -> list[int]:
    return [samples[0].prompt_index for samples in groups]
