"""Problems with the completions of a step, in few lines: each problem is reported once, with the
number of problems like it, and again when their number has doubled. A step in which no completion
could be scored ends the run, unless rewards.on_error is skip.

Two more lines are reported once for each tool: that all its calls of a step failed, and that its
text differs from run to run. Left out: how completions are scored (`scoring.py`).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from isobit.data.episodes import EpisodeRecord
from isobit.distributed import Ranks
from isobit.errors import RunFailed, brief, listed
from isobit.rl import Group, Sample
from isobit.tasks.environments.tools import UNKNOWN
from isobit.tasks.rewards.pool import Reward
from isobit.tasks.workers.variables import hint

_LISTED = 8
"""The most different problems of a step that are reported."""
_SAMPLE = re.compile(r", sample \d+ \(prompt (?:'.{0,200}?'|\".{0,200}?\")(?:\.\.\.)?\)(?=: )")
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,16}\b")
_FEW = 4
"""The fewest calls of a tool in a step after which it is reported that all of them failed."""


class Problems:
    """The problems of a run so far. `stop`: whether a step without a score ends the run;
    `variables`: the environment variables that environments are given."""

    def __init__(self, ranks: Ranks, stop: bool, variables: Sequence[str]) -> None:
        self._ranks, self._stop, self._variables = ranks, stop, variables
        self._counts = Counter[str]()
        self._told: dict[str, int] = {}
        self._tools: set[str] = set()

    def of_step(
        self, step: int, notes: Sequence[str], rewards: Sequence[Reward], groups: Sequence[Group]
    ) -> Iterator[str]:
        """Yield the lines to report for a step, from the `rewards` and `notes` of all ranks and the
        `groups`. Raises RunFailed, if a step without a score ends the run, where no sample has a
        reward and some have an error or an episode."""
        mine: list[Sequence[str]] = [notes, [r.error for r in rewards if r.error is not None]]
        errors = Counter[str]()
        first: dict[str, str] = {}
        for notes_of_rank, problems in self._ranks.all_gather_json(mine):
            yield from notes_of_rank
            for problem in problems:
                alike = _SAMPLE.sub("", problem)
                errors[alike] += 1
                first.setdefault(alike, problem)
        episodes = [s.episode for group in groups for s in group if s.episode is not None]
        scored = [s for group in groups for s in group if s.reward is not None]
        if self._stop and not scored and (errors or episodes):
            problem, _ = (errors.most_common(1) or [("", 0)])[0]
            remaining = Counter({text: count for text, count in errors.items() if text != problem})
            yield from self._counted("unscored", remaining, first)
            self._ranks.raise_on_all(self._nothing(step, problem, bool(remaining), groups))
        yield from self._counted("unscored", errors, first)
        yield from self._counted("scored all the same", _of_scored(scored), {})
        yield from self._of_tools(step, episodes)

    def _counted(
        self, heading: str, errors: Counter[str], first: Mapping[str, str]
    ) -> Iterator[str]:
        for alike, count in errors.most_common(_LISTED):
            line = f"{heading}: {alike}"
            self._counts[line] += count
            total = self._counts[line]
            if total < 2 * self._told.get(line, 0):
                continue
            self._told[line] = total
            more = "" if count == 1 else f" ... {count - 1:,} more like it"
            so_far = "" if total == count else f" ... {total:,} so far"
            yield f"{heading}: {self._explained(first.get(alike, alike))}{more}{so_far}"
        if len(errors) > _LISTED:
            remaining = sum(count for _, count in errors.most_common()[_LISTED:])
            yield f"{heading}: {remaining:,} more, for {len(errors) - _LISTED:,} other reasons"

    def _explained(self, problem: str) -> str:
        """Return the problem with a hint at the variable that an environment seems to lack. The
        problem of a reward function already has such a hint, and is returned unchanged."""
        if _SAMPLE.search(problem):
            return problem
        return problem + hint(problem, self._variables, option="environment.variables")

    def _of_tools(self, step: int, episodes: Sequence[EpisodeRecord]) -> Iterator[str]:
        calls, failures = Counter[str](), Counter[str]()
        last: dict[str, str] = {}
        for episode in episodes:
            for name, error in episode.uses:
                calls[name] += 1
                failures[name] += error is not None
                _, prefix, problem = (episode.problem or "").partition(f"tool {name}: ")
                last[name] = problem if prefix else last.get(name) or error or ""
        for name, count in calls.items():
            if count == failures[name] >= _FEW and name != UNKNOWN and self._anew(f"calls {name}"):
                why = self._explained(last[name])
                yield (
                    f"tool {name} failed in each of its {count:,} calls of step {step}, and the model "
                    f"was told: {why}"
                )
        for source, text in _said(episodes):
            if _ADDRESS.search(text) and self._anew(source):
                shown = brief(_ADDRESS.sub("at 0x...", text), 80)
                yield (
                    f"{source} says an address of memory ({shown}), which is another in each run: "
                    "return text, or give the object a __str__"
                )

    def _anew(self, topic: str) -> bool:
        anew = topic not in self._tools
        self._tools.add(topic)
        return anew

    def _nothing(
        self, step: int, problem: str, more_reasons: bool, groups: Sequence[Group]
    ) -> RunFailed:
        count = sum(map(len, groups))
        none = f"none of the {count:,} completions of step {step} could be scored"
        on = "; rewards.on_error: skip would go on"
        if not problem:
            names = {name for group in groups for s in group for name in (s.rewards or {})}
            return RunFailed(f"{none}: no reward was given ({listed(sorted(names))} said None){on}")
        more = " (other reasons are above)" if more_reasons else ""
        return RunFailed(f"{none}: {self._explained(problem)}{more}{on}")


def _of_scored(samples: Sequence[Sample]) -> Counter[str]:
    """Count the problems of episodes that have a reward in spite of them. Problems of tools, which
    the model has read, are not counted."""
    problems = (s.episode.problem for s in samples if s.episode is not None)
    return Counter(
        problem for problem in problems if problem is not None and not problem.startswith("tool ")
    )


def _said(episodes: Sequence[EpisodeRecord]) -> Iterator[tuple[str, str]]:
    """Yield (source, text) of every message of the episodes that the model has not written; the
    source is `reset`, `step` or `tool NAME`."""
    for episode in episodes:
        if isinstance(episode.prompt, list) and episode.prompt:
            yield "reset", str(episode.prompt[-1].get("content", ""))
        for message in episode.messages:
            if message.get("role") == "tool":
                yield f"tool {message.get('name', '')}", str(message.get("content", ""))
            elif message.get("role") != "assistant":
                yield "step", str(message.get("content", ""))
