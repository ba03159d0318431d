"""A reward by name: a frozen dataclass whose fields are its options (`isobit.options`) and whose
`score` rates one completion.

Left out: the rewards themselves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from isobit.data.answers import completion_text
from isobit.tasks.rewards.by_name import Unscored


@dataclass(frozen=True)
class NamedReward:
    """The base of all of them. The first sentence of a subclass's docstring stands in the table of
    names."""

    chunk_size: ClassVar[int | None] = None
    """Samples of one call; None: the pool's. 1 where a single sample can be slow, so that the
    deadline is for it."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the data must have."""
        return ()

    @property
    def wants_tokens(self) -> bool:
        """Whether `score` needs the token ids of the completion."""
        return False

    @property
    def wants_answers(self) -> bool:
        """Whether `score` is given what a completion says without its thoughts, not all of it."""
        return False

    @property
    def time_limit_s(self) -> float | None:
        """The seconds that the reward itself allows for one sample, or None."""
        return None

    def prepare(self) -> None:
        """Import and try what scoring needs, once in each worker. Raises IsobitError where it
        cannot be had."""

    def check(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError for a row for which no completion could be scored, quickly."""

    def score(
        self, text: str, row: Mapping[str, Any], token_ids: Sequence[int] | None
    ) -> float | Unscored:
        """Score one completion; `row` holds the columns. Raises ValueError for a row that cannot be
        used."""
        raise NotImplementedError

    def __call__(
        self,
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        completion_answers: Sequence[str] | None = None,
        **columns: Sequence[Any],
    ) -> list[float | Unscored]:
        """Score a batch of completions, texts or chats, in TRL's signature."""
        rows = [
            {name: values[i] for name, values in columns.items()} for i in range(len(completions))
        ]
        tokens = completion_ids if completion_ids is not None else [None] * len(completions)
        texts = completion_answers or [completion_text(c) for c in completions]
        return [self.score(text, row, ids) for text, row, ids in zip(texts, rows, tokens)]
