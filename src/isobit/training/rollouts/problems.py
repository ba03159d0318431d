"""What goes wrong with the completions of a step, in few lines: each problem once, with how many
are like it, and again when there are twice as many. A step in which nothing could be scored ends
the run, unless rewards.on_error is skip.

Besides, once for each tool: that all its calls of a step failed, and that what it says differs from
run to run. Left out: how they are scored (`scoring.py`).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from isobit.distributed import Ranks
from isobit.environments.recorded import EpisodeRecord
from isobit.environments.tools import UNKNOWN
from isobit.errors import RunFailed, brief, listed
from isobit.rewards.pool import Reward
from isobit.rl import Group
from isobit.workers.variables import hint

_LISTED = 8
"""Different problems of a step that are said."""
_SAMPLE = re.compile(r", sample \d+ \(prompt (?:'.{0,200}?'|\".{0,200}?\")(?:\.\.\.)?\)(?=: )")
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,16}\b")
_FEW = 4
"""So many calls of a tool say nothing of it yet."""


class Problems:
    """Those of a run so far. `stop`: whether a step without a score ends it; `variables`: those that
    environments are given."""

    def __init__(self, ranks: Ranks, stop: bool, variables: Sequence[str]) -> None:
        self._ranks, self._stop, self._variables = ranks, stop, variables
        self._counts = Counter[str]()
        self._told: dict[str, int] = {}
        self._tools: set[str] = set()

    def of_step(
        self, step: int, notes: Sequence[str], rewards: Sequence[Reward], groups: Sequence[Group]
    ) -> Iterator[str]:
        """Yield the lines to say of a step: of the `rewards` and `notes` of this rank and the
        others, and of the `groups` of all. Raises RunFailed where none of them has a reward."""
        mine: list[Sequence[str]] = [notes, [r.error for r in rewards if r.error is not None]]
        errors = Counter[str]()
        first: dict[str, str] = {}
        for said, problems in self._ranks.all_gather_json(mine):
            yield from said
            for problem in problems:
                alike = _SAMPLE.sub("", problem)
                errors[alike] += 1
                first.setdefault(alike, problem)
        scored = any(sample.reward is not None for group in groups for sample in group)
        ends = self._stop and not scored
        if not (ends and len(errors) == 1):  # which the error says
            yield from self._of_rewards(errors, first)
        episodes = [s.episode for group in groups for s in group if s.episode is not None]
        yield from self._of_tools(step, episodes)
        if ends and (errors or episodes):
            raise self._nothing(step, errors, groups)

    def _of_rewards(self, errors: Counter[str], first: Mapping[str, str]) -> Iterator[str]:
        for alike, count in errors.most_common(_LISTED):
            self._counts[alike] += count
            total = self._counts[alike]
            if total < 2 * self._told.get(alike, 0):
                continue
            self._told[alike] = total
            more = "" if count == 1 else f" ... {count - 1:,} more like it"
            so_far = "" if total == count else f" ... {total:,} so far"
            yield f"unscored: {self._explained(first[alike])}{more}{so_far}"
        if len(errors) > _LISTED:
            others = sum(count for _, count in errors.most_common()[_LISTED:])
            yield f"unscored: {others:,} more, for {len(errors) - _LISTED:,} other reasons"

    def _explained(self, problem: str) -> str:
        """A problem with the variable that an environment seems to lack; what a reward function
        lacks is said already."""
        if problem.startswith("reward "):
            return problem
        return problem + hint(problem, self._variables, option="environment.variables")

    def _of_tools(self, step: int, episodes: Sequence[EpisodeRecord]) -> Iterator[str]:
        calls, failures = Counter[str](), Counter[str]()
        last: dict[str, str] = {}
        for episode in episodes:
            for name, error in episode.uses:
                calls[name] += 1
                failures[name] += error is not None
                last[name] = error or ""
        for name, count in calls.items():
            if count == failures[name] >= _FEW and name != UNKNOWN and self._anew(f"calls {name}"):
                yield (
                    f"tool {name} failed in each of its {count:,} calls of step {step}: {last[name]}"
                    "; the model was told"
                )
        for what, text in _said(episodes):
            if _ADDRESS.search(text) and self._anew(what):
                shown = brief(_ADDRESS.sub("at 0x...", text), 80)
                yield (
                    f"{what} says an address of memory ({shown}), which is another in each run: "
                    "return text, or give the object a __str__"
                )

    def _anew(self, what: str) -> bool:
        anew = what not in self._tools
        self._tools.add(what)
        return anew

    def _nothing(self, step: int, errors: Counter[str], groups: Sequence[Group]) -> RunFailed:
        count = sum(map(len, groups))
        none = f"none of the {count:,} completions of step {step} could be scored"
        on = "; rewards.on_error: skip would go on"
        if not errors:
            names = {name for group in groups for s in group for name in (s.rewards or {})}
            return RunFailed(f"{none}: no reward was given ({listed(sorted(names))} said None){on}")
        (problem, _), *others = errors.most_common()
        of_them = f" (and {len(others):,} other reasons)" if others else ""
        return RunFailed(f"{none}: {self._explained(problem)}{of_them}{on}")


def _said(episodes: Sequence[EpisodeRecord]) -> Iterator[tuple[str, str]]:
    """Yield (who says it, text) of all that is not the model's."""
    for episode in episodes:
        if isinstance(episode.prompt, list) and episode.prompt:
            yield "reset", str(episode.prompt[-1].get("content", ""))
        for message in episode.messages:
            if message.get("role") == "tool":
                yield f"tool {message.get('name', '')}", str(message.get("content", ""))
            elif message.get("role") != "assistant":
                yield "step", str(message.get("content", ""))
