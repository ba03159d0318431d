"""The held-out evaluation of a supervised run: the cross-entropy of the held-out answers, by the
learner's own forward, and greedy accuracy where the task has a reward.

The engine and the rewards' processes are opened once, when they are first needed.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from isobit.data.dataset import Example
from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.evaluation.measure import EvaluationPlan, measure
from isobit.evaluation.result import Question
from isobit.kernels.reference.sums import block_sum
from isobit.model import Model
from isobit.model.divided.by_rows import rollout_model
from isobit.monitor.report.intervals import proportion
from isobit.rl import Sample
from isobit.rl.algorithm.given import COMPARED_LOSSES, PAIR_LOSSES, of_labels, of_pairs
from isobit.rl.learner.learner import Learner
from isobit.tasks.rewards.pool import RewardPool
from isobit.tasks.rewards.spec import RewardSpec


@dataclass(frozen=True, eq=False)
class Asked:
    """Held-out examples, the samples of their right answers, and the rewards of other answers."""

    examples: Sequence[Example]
    samples: Sequence[Sample]
    rewards: Sequence[RewardSpec]
    max_new_tokens: int


class HeldOutAnswers:
    """The held-out evaluation of a supervised run."""

    def __init__(self, model: Model, learner: Learner, asked: Asked) -> None:
        self._model, self._learner, self._asked = model, learner, asked
        self._open = ExitStack()
        self._parts: tuple[Engine, RewardPool] | None = None

    def close(self) -> None:
        """End the processes of rewards. May be called again."""
        self._open.close()

    def evaluate(
        self, trainer_state: Mapping[str, float]
    ) -> tuple[dict[str, float], str, tuple[Question, ...]]:
        """Evaluate the present weights and return (metrics, a line for the reader, the questions
        with their answers)."""
        answered: tuple[Question, ...] = ()
        compares = self._learner.objective.loss in COMPARED_LOSSES
        metrics = self._preferences() if compares else {"loss/held_out": self.loss()}
        line = f"held-out loss {(loss := metrics['loss/held_out']):.4f}"
        if self._asked.rewards:
            answered = self.answers()
            accuracy = proportion(sum(q.greedy.correct for q in answered), len(answered))
            metrics["accuracy/held_out"] = accuracy.value
            line = f"held-out greedy accuracy {accuracy}, loss {loss:.4f}"
        return metrics, line, answered

    def loss(self) -> float:
        """Return the mean cross-entropy of all trained tokens, in nats; the sum is rounded only
        once, so that it does not depend on an order."""
        rows = self._learner.logprobs(self._asked.samples)
        values = [value for row in rows for value in row.tolist()]
        return -math.fsum(values) / len(values)

    def _preferences(self) -> dict[str, float]:
        """Return the mean loss of the held-out pairs, and the fraction in which the preferred
        answer gains more; or the mean loss of single answers, and the fraction that moves to the
        side of its label."""
        learner, samples = self._learner, self._asked.samples
        rows = zip(learner.logprobs(samples), learner.reference_logprobs(samples), strict=True)
        ratios = torch.stack([block_sum(mine.double() - theirs.double()) for mine, theirs in rows])
        objective = learner.objective
        if objective.loss in PAIR_LOSSES:
            lengths = torch.tensor([sample.num_trained for sample in samples])
            pairs = ratios.view(-1, 2)
            losses = of_pairs(objective.loss, pairs, lengths.view(-1, 2), objective.beta).tolist()
            preferred = (pairs[:, 0] > pairs[:, 1]).tolist()
        else:
            labels = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
            baseline = learner.kl_baseline(samples)
            arguments = labels, baseline, objective.beta, objective.answer_weights
            losses = of_labels(ratios, *arguments).tolist()
            preferred = (labels * (ratios - baseline) > 0).tolist()
        return {
            "loss/held_out": math.fsum(losses) / len(losses),
            "preference/held_out_accuracy": sum(preferred) / len(losses),
        }

    def answers(self) -> tuple[Question, ...]:
        """Sample a greedy answer for each held-out example, and return them with their rewards."""
        self._parts = engine, pool = self._parts or self._opened()
        plan = EvaluationPlan(Sampling(max_new_tokens=self._asked.max_new_tokens))
        return measure(engine, self._asked.examples, pool, plan, ranks=self._model.ranks)

    def _opened(self) -> tuple[Engine, RewardPool]:
        prompts = [example.prompt for example in self._asked.examples]
        model = rollout_model(self._model)
        engine = Engine.sized_for(model, prompts, len(prompts), self._asked.max_new_tokens)
        return engine, self._open.enter_context(RewardPool(self._asked.rewards))
