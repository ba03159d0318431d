"""Which prompts come again in later epochs, by how many of their completions were solved when they
were last sampled.

The order of the data does not change (`dataset.py`): a prompt whose turn has come is taken or passed
over. It is passed over by a random word of (seed, epoch, position), so what a run takes next is a
function of the cursor and of the fractions that it has seen, and a checkpoint holds both. Left out:
prompts that are dropped after they were sampled (dynamic sampling, `rl/algorithm/credit.py`).
"""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

from isobit.data.dataset import SPLIT_STREAM, Dataset, random_words
from isobit.errors import IsobitError
from isobit.options.declare import above, at_most

_WORDS = 2**64


@dataclass(frozen=True)
class CurriculumConfig:
    """The choice of prompts that are taken again in later epochs, by the fraction p of their
    completions that were solved when they were last sampled."""

    mode: Annotated[
        Literal["none", "skip", "weighted"],
        "none: all are. skip: a prompt with p = 0 or p = 1 is taken with probability floor, "
        "and the others always. weighted: each is taken with probability 4p(1 - p), or with "
        "floor if that is more",
    ] = "none"
    floor: Annotated[
        float, above(0), at_most(1), "the smallest probability with which a prompt is taken"
    ] = 0.1
    solved_at: Annotated[float, "a completion with at least this reward is solved"] = 1.0

    @property
    def chooses(self) -> bool:
        """Whether any prompt may be passed over."""
        return self.mode != "none"

    def check(self, *, distills: bool, engines: int) -> None:
        """Raise IsobitError in a run where nothing is solved, or where it is not known here."""
        if self.chooses and distills:
            raise IsobitError(
                "curriculum: a distillation has no rewards, so nothing is solved: leave it out"
            )
        if self.chooses and engines:
            raise IsobitError(
                "curriculum: engines of a fleet sample beside the learner, and are not told what is "
                "solved yet: set fleet.engines: 0, or leave it out"
            )

    def chance(self, solved: float | None) -> float:
        """Return the chance to take a prompt of which this fraction was solved; None: it has not
        been sampled."""
        if not self.chooses or solved is None:
            return 1.0
        if self.mode == "skip":
            return self.floor if solved in (0.0, 1.0) else 1.0
        return max(self.floor, 4 * solved * (1 - solved))


class Curriculum:
    """The choice among the prompts of `train`. `solved`: the fraction by the example's index, which
    is changed here and kept in a run's state."""

    def __init__(
        self, config: CurriculumConfig, train: Dataset, solved: MutableMapping[int, float]
    ) -> None:
        self._config, self._train, self._solved = config, train, solved

    @property
    def chooses(self) -> bool:
        """Whether any prompt may be passed over."""
        return self._config.chooses

    def take(self, cursor: int, count: int) -> tuple[list[int], int]:
        """Return (the positions of the next `count` prompts that are taken, from `cursor` on; the
        position after the last of them)."""
        positions: list[int] = []
        while len(positions) < count:
            if self._takes(cursor):
                positions.append(cursor)
            cursor += 1
        return positions, cursor

    def _takes(self, cursor: int) -> bool:
        chance = self._config.chance(self._solved.get(self._train.at(cursor).index))
        if chance >= 1:
            return True
        epoch, position = divmod(cursor, len(self._train))
        words = _words(self._train.seed, epoch, len(self._train))
        return int(words[position]) < int(chance * _WORDS)

    def see(self, position: int, rewards: Sequence[float | None]) -> None:
        """Record the rewards of the completions of the prompt at a position; None where
        unscored."""
        scored = [reward for reward in rewards if reward is not None]
        if self.chooses and scored:
            solved = sum(reward >= self._config.solved_at for reward in scored)
            self._solved[self._train.at(position).index] = solved / len(scored)


@lru_cache(maxsize=4)
def _words(seed: int, epoch: int, size: int) -> Any:
    """Return a random word for each position of an epoch, of streams that no order of the data
    has."""
    return random_words(seed, SPLIT_STREAM - 1 - epoch, size)
