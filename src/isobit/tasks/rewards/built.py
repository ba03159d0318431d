"""The rewards by name among a run's functions: made from their options, and asked whether they can
score the data.

Left out: scoring (`pool.py`), and the rewards themselves (`named/`).
"""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from isobit.errors import IsobitError, printable
from isobit.options.reading import OptionError
from isobit.tasks.rewards.named import NamedReward
from isobit.tasks.rewards.spec import RewardSpec
from isobit.tasks.workers.loading import check_reference


def built(functions: Sequence[RewardSpec], deadline_s: float) -> list[NamedReward | None]:
    """Return, for each function, the reward built from its name, or None for a function of the
    user's. Raises IsobitError for one that cannot be used or has another's name."""
    rewards: list[NamedReward | None] = []
    for spec in functions:
        try:
            rewards.append(spec.build(deadline_s))
        except OptionError as error:
            raise IsobitError(f"reward {spec.function}: {error}") from None
        if not spec.by_name and not spec.is_object:
            check_reference(spec.function)
        if not math.isfinite(spec.weight):
            raise IsobitError(
                f"reward function {spec.function}: its weight must be finite, got {spec.weight}"
            )
    labels = [spec.label for spec in functions]
    twice = [label for label in labels if labels.count(label) > 1]
    if twice:
        raise IsobitError(
            f"two reward functions are called {twice[0]!r}; rename one by rewards.functions.name"
        )
    return rewards


def check_rows(
    rewards: Sequence[tuple[RewardSpec, NamedReward | None]],
    rows: Iterable[tuple[str, Mapping[str, Any]]],
    stop: bool,
) -> None:
    """Find the rows that a reward by name cannot score, whatever the completion; `rows` are (file
    and line, columns). Raises IsobitError for the first; without `stop` prints on stderr how many
    there are."""
    by_name = [(spec, reward) for spec, reward in rewards if reward is not None]
    problems: list[str] = []
    for where, row in rows if by_name else ():
        for spec, reward in by_name:
            try:
                reward.check(row)
            except ValueError as error:
                problems.append(
                    f"{where}: reward function {spec.function} cannot score it: {error}"
                )
        if stop and problems:
            raise IsobitError(problems[0])
    if problems:
        count = f"{len(problems):,} rows" if len(problems) > 1 else "a row"
        print(f"warning: {count} without a reward: {printable(problems[0])}", file=sys.stderr)
