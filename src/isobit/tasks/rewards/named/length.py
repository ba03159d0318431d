"""`length_penalty`: a completion longer than a soft limit pays, up to 1 at the hard limit and
beyond."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from isobit.options.declare import at_least
from isobit.options.reading import OptionError
from isobit.tasks.rewards.by_name import Unscored
from isobit.tasks.rewards.named.base import NamedReward


@dataclass(frozen=True)
class LengthPenalty(NamedReward):
    """0 up to `soft_limit`, falling to -1 at `hard_limit`, and -1 beyond.

    Linear is DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, equation 13) with
    L_max = hard_limit and L_cache = hard_limit - soft_limit. Cosine has the same ends and no
    corner: (cos(πx) - 1) / 2 for the part x of the way from soft to hard.
    """

    soft_limit: Annotated[
        int, at_least(0), "the longest completion that pays nothing; required"
    ] = 0
    hard_limit: Annotated[int, at_least(0), "the length from which on it pays 1; required"] = 0
    unit: Annotated[
        Literal["tokens", "characters"], "what is counted; tokens include the end of sequence"
    ] = "tokens"
    shape: Annotated[Literal["linear", "cosine"], "of the way between the limits"] = "linear"

    def __post_init__(self) -> None:
        if self.hard_limit <= self.soft_limit:
            raise OptionError(
                ("hard_limit",),
                f"must be above soft_limit, got {self.hard_limit} and {self.soft_limit}",
            )

    @property
    def wants_tokens(self) -> bool:
        return self.unit == "tokens"

    def score(
        self, text: str, row: Mapping[str, Any], token_ids: Sequence[int] | None
    ) -> float | Unscored:
        if self.unit == "tokens" and token_ids is None:
            raise ValueError("these completions have no token ids; use options.unit: characters")
        length = len(token_ids) if self.unit == "tokens" and token_ids is not None else len(text)
        way = min(max((length - self.soft_limit) / (self.hard_limit - self.soft_limit), 0.0), 1.0)
        return -way if self.shape == "linear" else (math.cos(math.pi * way) - 1) / 2
