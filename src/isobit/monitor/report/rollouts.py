"""A run's completions.jsonl.gz, read once: the results of every prompt, and where the rows of each
step are.

Most rows are read for their text and reward only: their lists of numbers are cut out of the line
before it is parsed, which is several times faster. The rows that a page shows are read whole
(`RolloutIndex.rows`), by their place: their number in the file. Left out: which rows a page shows
(`selection.py`).
"""

import json
import math
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isobit.errors import IsobitError
from isobit.monitor.report.intervals import mean_interval
from isobit.run.completions import Member, cut_off, is_reward, lines, members, parse
from isobit.run.directory import in_use
from isobit.run.rows import BadRow, check_step, warn

_LISTS = re.compile(
    rb',"(?:prompt_ids|completion_(?:ids|mask)|(?:rollout|policy)_logprobs|reference_kl)":\[[^\]]*\]'
)
"""Lists of numbers. Within a text every quote has a backslash before it, so these bytes are never
part of one."""
_MOST_TOKENS = 1 << 31


@dataclass
class Visit:
    """A group: when, how many of its completions were scored, the sum of their rewards, and how
    many were solved."""

    step: int
    scored: int = 0
    total: float = 0.0
    solved: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.scored


@dataclass
class RolloutIndex:
    """Visits by prompt text, in order; and for each step the places and the rewards of its whole
    rows, of `whole_bytes` together: a sampled run has others, which count and cannot be shown.
    `lost`: rows and steps that cannot be read, and about the first of them `why`.

    `solved_from`: the reward from which a completion counts as solved: 1, or the highest there is,
    if that is less.
    """

    path: Path
    visits: dict[str, list[Visit]] = field(default_factory=dict)
    steps: dict[int, tuple["array[int]", "array[float]"]] = field(default_factory=dict)
    count: int = 0
    lost: int = 0
    why: str = ""
    whole_bytes: int = 0
    members: list[tuple[int, Member]] = field(default_factory=list)
    solved_from: float = 1.0
    lowest: float = math.inf
    highest: float = -math.inf
    """Rewards of the whole run."""

    def reward_intervals(self) -> dict[int, float]:
        """Step to half the width of the 95 % interval (Student's) of its mean reward, over its
        prompts: completions of one prompt are not independent."""
        means: dict[int, list[float]] = {}
        for visits in self.visits.values():
            for visit in visits:
                means.setdefault(visit.step, []).append(visit.mean)
        intervals = {
            step: mean_interval(values) for step, values in means.items() if len(values) > 1
        }
        return {step: (high - low) / 2 for step, (_, low, high) in intervals.items()}

    def lose(self, why: str) -> None:
        """Count one more row or step that cannot be read."""
        self.lost += 1
        self.why = self.why or why

    def rows(self, indices: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield the rows of these indices (counted from the first), whole; quick where those of a
        step follow one another."""
        starts, opened, texts = [first for first, _ in self.members], -1, list[bytes]()
        for offset in indices:
            index = bisect_right(starts, offset) - 1
            if index != opened:
                opened, texts = index, lines(self.path, self.members[index][1])
            row = parse(texts[offset - starts[index]])
            if _shows(row):
                yield row


def read_rollouts(path: Path) -> RolloutIndex:
    """Read the file, if it is there. A line on stderr says how many rows and steps are none, or are
    damaged, and one where the file ends within a step, unless its run still writes. Raises
    IsobitError for a file that may not be read."""
    index_, groups = RolloutIndex(path), dict[tuple[str, int, int], list[float]]()
    for line in _lines(index_):
        try:
            row = _row(line)
        except BadRow as error:
            index_.count += 1
            index_.lose(f"row {index_.count:,}: {error}")
            continue
        prompt = str(row.get("prompt") or "")
        step = row["step"]
        index = row.get("prompt_index") or 0
        reward = None if row.get("reward") is None else float(row["reward"])
        if "completion" in row:
            offsets, rewards = index_.steps.setdefault(step, (array("q"), array("d")))
            offsets.append(index_.count)
            rewards.append(float("nan") if reward is None else reward)
            index_.whole_bytes += len(line)
        scored = groups.setdefault((prompt, step, index), [])
        if reward is not None:
            scored.append(reward)
            index_.lowest, index_.highest = min(index_.lowest, reward), max(index_.highest, reward)
        index_.count += 1
    index_.solved_from = min(1.0, index_.highest)
    if index_.lost:
        label = "1 row or step" if index_.lost == 1 else f"{index_.lost:,} rows or steps"
        warn(f"{path}: {label} cannot be read and left out; the first: {index_.why}")
    if (warning := cut_off(path)) is not None and not in_use(path.parent):
        warn(warning)
    for (prompt, step, _), scored in groups.items():
        if scored:
            solved = sum(reward >= index_.solved_from for reward in scored)
            index_.visits.setdefault(prompt, []).append(
                Visit(step, len(scored), sum(scored), solved)
            )
    return index_


def _lines(index: RolloutIndex) -> Iterator[bytes]:
    """Yield all rows; note where each step begins. A damaged step is counted as lost."""
    for member in members(index.path):
        try:
            rows = lines(index.path, member)
        except IsobitError as error:
            index.lose(str(error).removeprefix(f"{index.path}: "))
            continue
        index.members.append((index.count, member))
        yield from rows


def _row(line: bytes) -> dict[str, Any]:
    """Return a row without its lists of numbers. Raises BadRow."""
    try:
        row = json.loads(_LISTS.sub(b"", line))
    except (ValueError, RecursionError):
        raise BadRow("not valid JSON") from None
    if not isinstance(row, dict) or not is_reward(row.get("reward")):
        raise BadRow("not a row of completions")
    check_step(row)
    if any(
        type(row.get(name) or 0) is not int for name in ("step", "prompt_index", "sample_index")
    ):
        raise BadRow("not a row of completions")
    return row


def _shows(row: Mapping[str, Any]) -> bool:
    """Return whether a whole row can be shown: its tokens are ids, its log-probabilities go with
    them, its rewards are numbers."""
    ids, rollout, policy = (
        row.get(name) or [] for name in ("completion_ids", "rollout_logprobs", "policy_logprobs")
    )
    prompt, rewards = row.get("prompt_ids") or [], row.get("rewards") or {}
    if not isinstance(ids, list) or not isinstance(prompt, list) or not isinstance(rewards, dict):
        return False
    tokens = all(type(token) is int and 0 <= token < _MOST_TOKENS for token in (*prompt, *ids))
    together = len(rollout) in (0, len(ids)) and len(policy) in (0, len(ids))
    return (
        tokens
        and together
        and isinstance(row.get("completion"), str)
        and all(map(is_reward, rewards.values()))
    )
