"""The rewards of a step: those of functions in separate processes, of reward models in this
process, and environments, added by weight.

The functions start on a group when it is sampled, during the rollout of the other groups; the
models score afterwards. A sample whose scoring failed stays unscored, whatever the models say; a
sample to which no function applies has only the models' scores and the environment's. Left out: how
each of these rewards is computed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isobit.data.dataset import Example, Prompt
from isobit.distributed import ALONE, Ranks
from isobit.engine.dialogue import with_answers
from isobit.engine.types import Completion, asked_in, said_in
from isobit.errors import IsobitError, RunFailed
from isobit.model import Tokenizer
from isobit.model.reward_model import RewardModel
from isobit.tasks.rewards.pool import Reward, RewardPool, Said


@dataclass(frozen=True, eq=False)
class WeightedModel:
    """A reward model, its weight in the sum and its name in the metrics."""

    model: RewardModel
    weight: float
    name: str


class RewardScorer:
    """The scorer of completions, by reward functions, reward models and environments."""

    def __init__(
        self,
        pool: RewardPool,
        models: Sequence[WeightedModel],
        stop_on_error: bool,
        earned: Sequence[tuple[str, float]] = (),
        *,
        required: bool = True,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Take the sources of rewards. `earned`: (name, weight) of the rewards that environments
        give. Raises IsobitError for two rewards with one name, and, if a reward is `required`, for
        none at all; otherwise all completions have reward 0 then. `tokenizer`: reads what
        completions say without their thoughts."""
        names = [spec.label for spec in pool.specs] + [model.name for model in models]
        names += [name for name, _ in earned]
        if twice := [name for name in names if names.count(name) > 1]:
            raise IsobitError(
                f"two rewards are called {twice[0]!r}; rename one by rewards.models.name"
            )
        if not names and required:
            raise IsobitError(
                "no reward: give rewards.functions or rewards.models, or use a task that has "
                "its own"
            )
        self.pool, self.models, self.stop_on_error = pool, tuple(models), stop_on_error
        self._earned, self.tokenizer = tuple(earned), tokenizer

    @property
    def group(self) -> Ranks:
        """The ranks that must score together, since they hold reward models together."""
        return self.models[0].model.group if self.models else ALONE

    @property
    def without_models(self) -> "RewardScorer":
        """A scorer by functions and environments alone; the scorer itself where it has neither."""
        some = self.models and (self.pool.specs or self._earned)
        return RewardScorer(self.pool, (), self.stop_on_error, self._earned) if some else self

    @property
    def weights(self) -> tuple[tuple[str, float], ...]:
        """The (name, weight) of each part of the sum."""
        functions = tuple((spec.label, spec.weight) for spec in self.pool.specs)
        models = tuple((model.name, model.weight) for model in self.models)
        return functions + models + self._earned

    @property
    def wants_answers(self) -> bool:
        return self.pool.wants_answers

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Said],
        columns: Sequence[Mapping[str, Any]],
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: Mapping[str, float] | None = None,
    ) -> list[Reward]:
        """Return the reward of each completion. Raises RunFailed for the first failure, unless
        failures are skipped."""
        arguments = prompts, completions, columns, completion_ids, trainer_state
        rewards = self.group.run_on_all(lambda: self.pool.score(*arguments))
        return self.judged(rewards, prompts, completions)

    def begin(
        self, examples: Sequence[Example], per_prompt: int, trainer_state: Mapping[str, float]
    ) -> "RolloutScoring":
        """Begin to score a rollout of `per_prompt` completions for each example while it is
        sampled."""
        return RolloutScoring(self, examples, per_prompt, trainer_state)

    def judged(
        self, rewards: Sequence[Reward], prompts: Sequence[Prompt], completions: Sequence[Said]
    ) -> list[Reward]:
        """Return the functions' rewards with those of models and environments added. Raises
        RunFailed as `score` does."""
        rewards = list(rewards)
        for weighted in self.models:
            judged = self._judge(weighted, prompts, completions)
            rewards = [_plus(reward, weighted, *j) for reward, j in zip(rewards, judged)]
        if not self._earned:
            return rewards
        return [_earning(r, c, self._earned) for r, c in zip(rewards, completions, strict=True)]

    def _judge(
        self, weighted: WeightedModel, prompts: Sequence[Prompt], completions: Sequence[Said]
    ) -> list[tuple[float | None, str | None]]:
        """Return (score, problem) of each completion, each None where there is none; of an episode
        the conversation up to the model's last answer is scored. Raises RunFailed for the first
        problem if errors stop the run."""
        model = weighted.model
        limit = model.transformer.config.max_positions
        sequences, problems = dict[int, list[int]](), dict[int, str]()

        def encode() -> None:
            for i, (prompt, completion) in enumerate(zip(prompts, completions)):
                where = f"reward model {weighted.name}, sample {i}"
                try:
                    tokens = model.encode(
                        prompt, completion if isinstance(completion, str) else completion.said()
                    )
                except IsobitError as error:  # its template refuses a conversation with tools
                    problems[i] = f"{where}: {error}"
                    continue
                if 0 < len(tokens) <= limit:
                    sequences[i] = tokens
                else:
                    problems[i] = f"{where}: {len(tokens)} tokens, its context takes 1 to {limit}"
            if self.stop_on_error and problems:
                raise RunFailed(next(iter(problems.values())))

        self.group.run_on_all(encode)
        scores = dict(zip(sequences, model.score(list(sequences.values()))))
        return [(scores.get(i), problems.get(i)) for i in range(len(completions))]


class RolloutScoring:
    """The scoring of one rollout, to which groups are added while others are sampled."""

    def __init__(
        self,
        scorer: RewardScorer,
        examples: Sequence[Example],
        per_prompt: int,
        trainer_state: Mapping[str, float],
    ) -> None:
        self._scorer, self._examples, self._per_prompt = scorer, examples, per_prompt
        self._added: dict[int, Sequence[Completion]] = {}
        self._batch = scorer.pool.begin(len(examples) * per_prompt, trainer_state)

    def add(self, index: int, completions: Sequence[Completion]) -> None:
        """Add the sampled group of example `index`, so that the functions may begin on it."""
        example, n = self._examples[index], len(completions)
        assert n == self._per_prompt
        self._added[index] = completions
        ids = [completion.token_ids for completion in completions]
        texts = [said_in(completion) for completion in completions]
        prompts = [asked_in(example.prompt, completion) for completion in completions]
        columns: list[Mapping[str, Any]] = [example.columns] * n
        if self._scorer.wants_answers and (tokenizer := self._scorer.tokenizer) is not None:
            columns = with_answers(columns, completions, tokenizer)
        self._batch.add(index * n, prompts, texts, columns, ids)

    def collect(self, meanwhile: Callable[[], None] | None = None) -> list[Reward]:
        """Return the rewards of all completions that were added, group by group; `meanwhile` is
        called over and over while the call waits for worker processes. Raises RunFailed as
        `RewardScorer.score` does."""
        rewards = self._scorer.group.run_on_all(lambda: self._batch.collect(meanwhile))
        added = sorted(self._added.items())
        prompts = [
            asked_in(self._examples[index].prompt, completion)
            for index, group in added
            for completion in group
        ]
        completions = [completion for _, group in added for completion in group]
        return self._scorer.judged(
            rewards, prompts, [said_in(completion) for completion in completions]
        )

    @property
    def notes(self) -> list[str]:
        """Lines worth reporting although every completion has its rewards."""
        return self._batch.notes

    @property
    def overlapped_s(self) -> float:
        """The seconds that functions worked before `collect` was called."""
        return self._batch.overlapped_s


def _earning(reward: Reward, completion: Said, weights: Sequence[tuple[str, float]]) -> Reward:
    """Return a reward with the rewards that an episode's environment gave added to it: None is
    unscored, and a missing reward does not apply."""
    earned: Mapping[str, float | None] = {} if isinstance(completion, str) else completion.rewards
    by_function = {**reward.by_function, **{name: earned.get(name) for name, _ in weights}}
    weighted_values = [
        weight * (earned[name] or 0.0) for name, weight in weights if weight and name in earned
    ]
    failed = any(weight and earned.get(name, 0.0) is None for name, weight in weights)
    failed = failed or (reward.total is None and reward.error is not None)
    total = reward.total if reward.by_function else None
    if failed:
        total = None
    elif weighted_values:
        total = sum(weighted_values, total or 0.0)
    problem = None if isinstance(completion, str) or total is not None else completion.problem
    return replace(reward, total=total, by_function=by_function, error=reward.error or problem)


def _plus(
    reward: Reward, weighted: WeightedModel, score: float | None, problem: str | None
) -> Reward:
    by_function = {**reward.by_function, weighted.name: score}
    total = reward.total
    if weighted.weight and (score is None or (total is None and reward.error is not None)):
        total = None
    elif weighted.weight and score is not None:
        total = (
            total or 0.0
        ) + weighted.weight * score  # None without an error: no function applies
    return replace(reward, total=total, by_function=by_function, error=reward.error or problem)
