"""Held-out evaluation during training: the metrics of one evaluation, and the line that reports it.

It reads the weights and changes nothing that training depends on: sampling is counter-based, and
its keys have their own seed (tests/evaluation/test_best.py compares the weights of runs with and
without it, bit for bit). The seed is the same at every step, so that steps differ by their weights,
not by their luck.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isobit.data.dataset import Example
from isobit.distributed import ALONE, Ranks
from isobit.engine.dialogue import Dialogue
from isobit.engine.engine import Engine
from isobit.evaluation.measure import EvaluationPlan, Scorer, measure, tags_of
from isobit.evaluation.result import Question, Result
from isobit.evaluation.summary import ALL, summarize, unscored
from isobit.tasks.rewards.pool import Reward

SEED_OFFSET = 0x5EED_E7A1
"""Added to a run's seed: an evaluation draws other random numbers than the rollouts."""


@dataclass(frozen=True, eq=False)
class _During:
    """A scorer that gives reward functions the state of training, with its step."""

    scorer: Scorer
    trainer_state: Mapping[str, float] | None

    @property
    def wants_answers(self) -> bool:
        return self.scorer.wants_answers

    def score(self, *batch: Any, **more: Any) -> list[Reward]:
        """Return `Scorer.score` of the same arguments."""
        return self.scorer.score(*batch, **{"trainer_state": self.trainer_state, **more})


@dataclass(frozen=True, eq=False)
class PeriodicEvaluation:
    """The held-out prompts of a run and the way of asking them: each by one of the ranks."""

    engine: Engine
    examples: Sequence[Example]
    scorer: Scorer
    plan: EvaluationPlan
    ranks: Ranks = ALONE
    dialogue: Dialogue | None = None

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics that `evaluate` measures."""
        tags = sorted({tag for tag in tags_of(self.examples, self.plan.tag) if tag is not None})
        sampled = [f"{kind}_at_{k}" for k in self.plan.ks for kind in ("pass", "majority")]
        rest = [*sampled, *(f"tag/{tag}" for tag in tags)]
        return ["accuracy/held_out", "reward/held_out", *(f"accuracy/{name}" for name in rest)]

    def evaluate(
        self, trainer_state: Mapping[str, float] | None = None
    ) -> tuple[dict[str, float], str, tuple[Question, ...]]:
        """Evaluate the present weights and return (metrics, a line for the reader, the questions
        with their answers); `trainer_state`: for reward functions that ask for it."""
        scorer = _During(self.scorer, trainer_state)
        questions = measure(
            self.engine,
            self.examples,
            scorer,
            self.plan,
            ranks=self.ranks,
            dialogue=self.dialogue,
        )
        result = Result("", questions, self.plan.ks)
        summary = summarize(result)
        everything = {name: estimate.value for name, estimate in summary[ALL].items()}
        metrics = {
            "accuracy/held_out": everything["accuracy"],
            "reward/held_out": everything.get("reward", math.nan),
        }
        for k in self.plan.ks:
            metrics[f"accuracy/pass_at_{k}"] = everything[f"pass@{k}"]
            metrics[f"accuracy/majority_at_{k}"] = everything.get(
                f"maj@{k}", everything[f"pass@{k}"]
            )
        metrics |= {
            f"accuracy/tag/{tag}": row["accuracy"].value
            for tag, row in summary.items()
            if tag != ALL
        }
        sampled = "".join(f", pass@{k} {everything[f'pass@{k}']:.4f}" for k in self.plan.ks)
        line = f"held-out greedy accuracy {summary[ALL]['accuracy']}{sampled}"
        line = "; ".join([line, *unscored(result)])
        return metrics, line, questions
