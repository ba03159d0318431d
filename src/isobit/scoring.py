"""Rewards of a step: functions of the user's in their processes, and reward models here, added by weight.

A sample that a function could not score stays unscored, whatever the models say. Left out: how either computes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isobit.errors import IsobitError, RunFailed
from isobit.model.reward_model import RewardModel
from isobit.tasks.data import Prompt
from isobit.tasks.rewards import Reward, RewardPool


@dataclass(frozen=True, eq=False)
class WeightedModel:
    """A reward model, its weight in the sum and its name in the metrics."""

    model: RewardModel
    weight: float
    name: str


class Scorer:
    """Scores completions by all of them."""

    def __init__(self, pool: RewardPool, models: Sequence[WeightedModel], stop_on_error: bool) -> None:
        names = [spec.label for spec in pool.specs] + [model.name for model in models]
        if twice := [name for name in names if names.count(name) > 1]:
            raise IsobitError(f"two rewards are called {twice[0]!r}; tell them apart by name")
        if not names:
            raise IsobitError("no reward: give rewards.functions or rewards.models, or use a task that has its own")
        self.pool, self.models, self._stop = pool, tuple(models), stop_on_error

    @property
    def weights(self) -> tuple[tuple[str, float], ...]:
        """(name, weight) of each part of the sum."""
        functions = tuple((spec.label, spec.weight) for spec in self.pool.specs)
        return functions + tuple((model.name, model.weight) for model in self.models)

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        columns: Sequence[Mapping[str, Any]],
        completion_ids: Sequence[Sequence[int]] | None = None,
    ) -> list[Reward]:
        """The rewards of each completion. Raises RunFailed for the first failure, unless failures are skipped."""
        rewards = self.pool.score(prompts, completions, columns, completion_ids)
        for weighted in self.models:
            rewards = [
                _plus(reward, weighted, *found)
                for reward, found in zip(rewards, self._judge(weighted, prompts, completions))
            ]
        return rewards

    def _judge(
        self, weighted: WeightedModel, prompts: Sequence[Prompt], completions: Sequence[str]
    ) -> list[tuple[float | None, str | None]]:
        """(score, what went wrong) of each completion."""
        model = weighted.model
        limit = model.transformer.config.max_positions
        sequences = [model.encode(prompt, text) for prompt, text in zip(prompts, completions)]
        fits = [i for i, sequence in enumerate(sequences) if 0 < len(sequence) <= limit]
        scores = dict(zip(fits, model.score([sequences[i] for i in fits])))
        found: list[tuple[float | None, str | None]] = []
        for i, sequence in enumerate(sequences):
            problem = None
            if i not in scores:
                count = len(sequence)
                problem = f"reward model {weighted.name}, sample {i}: {count} tokens, its context takes 1 to {limit}"
                if self._stop:
                    raise RunFailed(problem)
            found.append((scores.get(i), problem))
        return found


def _plus(reward: Reward, weighted: WeightedModel, score: float | None, problem: str | None) -> Reward:
    by_function = {**reward.by_function, weighted.name: score}
    total = reward.total
    if weighted.weight:
        total = None if total is None or score is None else total + weighted.weight * score
    return replace(reward, total=total, by_function=by_function, error=reward.error or problem)
