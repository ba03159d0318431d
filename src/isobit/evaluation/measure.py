"""Evaluate a model by an `EvaluationPlan`: greedy completions, samples, their rewards and answers.

Samples depend only on (seed, position of the prompt, index of the sample): the same plan uses the
same random numbers for every model and every step of a run. Left out: conclusions from the answers
(`summary.py`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from isobit.data.answers import ANSWERS, after_thoughts
from isobit.data.dataset import Example, Prompt
from isobit.distributed import ALONE, Ranks
from isobit.engine.dialogue import Dialogue, with_answers
from isobit.engine.engine import Engine
from isobit.engine.episodes import Episodes
from isobit.engine.types import Completion, Sampling, asked_in, said_in
from isobit.errors import IsobitError, brief, did_you_mean
from isobit.evaluation.answers import Extract, marked_answer
from isobit.evaluation.majority import LARGEST_GROUP
from isobit.evaluation.result import Graded, Question
from isobit.model import Tokenizer
from isobit.tasks.rewards.pool import Reward, Said

OnProgress = Callable[[str, int, int], None]
"""Called with (the work in progress, completions done, completions asked)."""
LARGEST_TAG = 100
"""The most values of a tag: a column with more is not a tag."""


class Scorer(Protocol):
    """The source of rewards of completions: functions, or functions and models."""

    @property
    def wants_answers(self) -> bool: ...

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Said],
        columns: Sequence[Mapping[str, Any]],
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: Mapping[str, float] | None = None,
    ) -> list[Reward]: ...


@dataclass(frozen=True)
class EvaluationPlan:
    """The completions that an evaluation asks of a model: a greedy one for each prompt, and
    `num_samples` samples (0: none) for pass@k and maj@k of every k in `ks`, sampled as `asked`
    says. `extract` takes the answer from a completion; `tag` is a column.

    Raises IsobitError for a k that the samples do not allow.
    """

    asked: Sampling
    num_samples: int = 0
    ks: tuple[int, ...] = ()
    tag: str | None = None
    extract: Extract = marked_answer

    def __post_init__(self) -> None:
        if not 0 <= self.num_samples <= LARGEST_GROUP:
            raise IsobitError(
                f"samples per prompt: expected 0 to {LARGEST_GROUP}, got {self.num_samples}"
            )
        for k in self.ks:
            if not 1 <= k <= self.num_samples:
                raise IsobitError(
                    f"pass@{k}: k must be from 1 to the {self.num_samples} samples per prompt"
                )

    @property
    def greedy(self) -> Sampling:
        return replace(self.asked, n=1, temperature=0.0)

    @property
    def sampling(self) -> Sampling:
        """The sampling of the samples; only for `num_samples` above 0."""
        return replace(self.asked, n=self.num_samples)


def default_ks(num_samples: int) -> tuple[int, ...]:
    """Return 1 and the number of samples, which are the ends of the curve; empty for 0 samples."""
    return tuple(sorted({1, num_samples})) if num_samples else ()


def measure(
    engine: Engine,
    examples: Sequence[Example],
    scorer: Scorer,
    plan: EvaluationPlan,
    progress: OnProgress | None = None,
    ranks: Ranks = ALONE,
    dialogue: Dialogue | None = None,
) -> tuple[Question, ...]:
    """Sample completions of the examples, score them, extract their answers, and return a question
    for each example; `progress` is called on the way. Every rank takes some of the prompts, and
    returns all questions. With a `dialogue` its environments answer between turns. Raises
    IsobitError as `tags_of` does."""
    return measure_each(engine, examples, scorer, plan, [None], progress, ranks, dialogue)[0]


def measure_each(
    engine: Engine,
    examples: Sequence[Example],
    scorer: Scorer,
    plan: EvaluationPlan,
    adapters: Sequence[str | None],
    progress: OnProgress | None = None,
    ranks: Ranks = ALONE,
    dialogue: Dialogue | None = None,
) -> list[tuple[Question, ...]]:
    """Measure each of several adapters that the engine's model serves as `measure` does, in one
    pass, and return their questions in order; None in `adapters` is the base model alone."""
    tags, size = tags_of(examples, plan.tag), 1 + plan.num_samples
    rows = [(name, position) for name in adapters for position in range(len(examples))]
    together = engine.model.transformer.group
    engines = ranks.size // together.size
    own_rows = rows[ranks.rank // together.size :: engines]
    mine = [examples[p] for _, p in own_rows]
    indices = [p for _, p in own_rows]
    named = [name for name, _ in own_rows]

    def ask(what: str, sampling: Sampling) -> list[list[Completion]]:
        total = len(mine) * sampling.n
        report = (
            None
            if progress is None
            else lambda tokens, completions: progress(what, completions, total)
        )
        if dialogue is not None:
            return Episodes(engine, dialogue).generate(mine, sampling, indices, report, named)
        return engine.generate(
            [e.prompt for e in mine], sampling, indices, progress=report, adapters=named
        )

    def grade() -> list[Graded]:
        if not mine:
            return []
        groups = ask("greedy", plan.greedy)
        if plan.num_samples:
            groups = [
                [*first, *more] for first, more in zip(groups, ask("sampling", plan.sampling))
            ]
        if not together.first:  # others meet it where reward models are divided, and score nothing
            groups = []
        repeated = [example for example, _ in zip(mine, groups) for _ in range(size)]
        completions = [completion for group in groups for completion in group]
        return _grade(repeated, completions, scorer, plan, engine.model.tokenizer)

    graded: list[Graded] = ranks.run_on_all(grade)
    outcomes: list[list[Graded]] = [[] for _ in rows]
    for rank, values in enumerate(ranks.all_gather_json([g.to_json() for g in graded])):
        for index, g in enumerate(values):
            outcomes[rank // together.size + index // size * engines].append(Graded(**g))
    questions = [
        Question(examples[p].prompt, tags[p], answers[0], tuple(answers[1:]), examples[p].columns)
        for (_, p), answers in zip(rows, outcomes)
    ]
    count = len(examples)
    return [
        tuple(questions[number * count : (number + 1) * count]) for number in range(len(adapters))
    ]


def grade_given(
    examples: Sequence[Example], completions: Sequence[str], scorer: Scorer, plan: EvaluationPlan
) -> tuple[Question, ...]:
    """Score given completions, one for each example, and return the questions."""
    tags = tags_of(examples, plan.tag)
    said = map(after_thoughts, completions)
    columns = [{**e.columns, ANSWERS: text} for e, text in zip(examples, said, strict=True)]
    rewards = scorer.score([e.prompt for e in examples], completions, columns)
    return tuple(
        Question(
            example.prompt,
            tag,
            Graded(text, reward.total, plan.extract(text), error=reward.error),
            columns=example.columns,
        )
        for example, tag, text, reward in zip(examples, tags, completions, rewards)
    )


def tags_of(examples: Sequence[Example], column: str | None) -> list[str | None]:
    """Return the value of the tag of each example, as text; None for each without a tag.

    Raises IsobitError for a column that is missing, or that is not a tag: its values are lists or
    objects, or it has too many different ones.
    """
    if column is None:
        return [None] * len(examples)
    values = []
    for i, example in enumerate(examples):
        if column not in example.columns:
            hint = (
                did_you_mean(column, list(example.columns))
                if example.columns
                else "there is none but the prompt"
            )
            raise IsobitError(f"tag {brief(column)!r}: example {i} has no such column; {hint}")
        value = example.columns[column]
        if isinstance(value, (list, dict)):
            kind = "a list" if isinstance(value, list) else "an object"
            raise IsobitError(
                f"tag {brief(column)!r}: expected text or a number, got {kind} in example {i}"
            )
        values.append(value if isinstance(value, str) else json.dumps(value))
    if len(set(values)) > LARGEST_TAG:
        raise IsobitError(
            f"tag {brief(column)!r} has {len(set(values))} different values; a tag has at most "
            f"{LARGEST_TAG}"
        )
    return list[str | None](values)


def _grade(
    examples: Sequence[Example],
    completions: Sequence[Completion],
    scorer: Scorer,
    plan: EvaluationPlan,
    tokenizer: Tokenizer,
) -> list[Graded]:
    texts = [said_in(completion) for completion in completions]
    ids = [completion.token_ids for completion in completions]
    prompts = [asked_in(e.prompt, c) for e, c in zip(examples, completions, strict=True)]
    columns: Sequence[Mapping[str, Any]] = [e.columns for e in examples]
    if scorer.wants_answers:
        columns = with_answers(columns, completions, tokenizer)
    rewards = scorer.score(prompts, texts, columns, ids)
    return [
        Graded(
            c.text,
            r.total,
            plan.extract(c.text),
            len(c.token_ids),
            c.finish_reason == "length",
            r.error,
            None if c.episode is None else c.episode.to_json(),
        )
        for c, r in zip(completions, rewards)
    ]
