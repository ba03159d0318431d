"""The completions that a page shows: their choice, within a byte budget, and their tokens.

If not all fit, a page shows steps evenly spread from first to last; for each step the best
completion, the worst, and others evenly spread. Token texts come from the tokenizer of the run's
newest checkpoint; without a tokenizer a completion is shown without tokens.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from isobit.data.foreign import check_readable
from isobit.monitor.report.rollouts import RolloutIndex
from isobit.run.completions import conversation
from isobit.run.directory import CHECKPOINTS

_STEP_ROWS = 8  # the least rows of a step before rows of further steps
_LONGEST_PROMPT, _LONGEST_TEXT, _MOST_TOKENS = 4000, 8000, 2000
_CONTEXT = 6  # tokens before the completion that its first token's text may depend on

Data = dict[str, Any]


def sample_completions(rollouts: RolloutIndex, directory: Path, budget: int) -> Data:
    """Return the completions for a page's browser, at most about `budget` bytes as JSON: `rows`,
    and `prompts` and `pieces` (token texts) that rows refer to by number; `special`: the numbers of
    special tokens' texts; `total`: the number of all completions; `steps`: the number of their
    steps; `recorded`: whether the tokens of the rows are recorded, which those of held-out
    completions are not."""
    tokens, prompts = _Pieces(directory), _Numbered()
    rows: list[Data] = []
    spent, recorded = 0, False
    for row in rollouts.rows(_places(rollouts, budget)):
        known = len(prompts.texts), len(tokens.numbered.texts)
        shown = _row(row, prompts, tokens)
        spent += len(json.dumps(shown, ensure_ascii=False).encode("utf-8", "replace"))
        spent += sum(len(text.encode("utf-8", "replace")) + 4 for text in prompts.texts[known[0] :])
        spent += sum(
            len(text.encode("utf-8", "replace")) + 4 for text in tokens.numbered.texts[known[1] :]
        )
        if spent > budget and rows:
            break
        rows.append(shown)
        recorded |= "completion_ids" in row
    rows.sort(key=lambda row: (row["step"], row["prompt_index"], row["sample_index"]))
    return {
        "rows": rows,
        "prompts": prompts.texts,
        "pieces": tokens.numbered.texts,
        "special": sorted(tokens.special),
        "total": rollouts.count,
        "steps": len(rollouts.steps),
        "recorded": recorded,
    }


def coarse_to_fine(items: Sequence[int]) -> Iterator[int]:
    """Yield all items: the two ends first, then the middle between them, then the middles of both
    halves, and so on."""
    seen: set[int] = set()
    count = 1
    while len(seen) < len(items):
        for i in range(count + 1):
            index = round(i * (len(items) - 1) / count)
            if index not in seen:
                seen.add(index)
                yield items[index]
        count *= 2


def _places(rollouts: RolloutIndex, budget: int) -> list[int]:
    """Return the indices of rows, those to be shown first at the front."""
    if not rollouts.steps:
        return []
    # a row of the page takes about half of its line in the file, unpacked
    whole = sum(len(offsets) for offsets, _ in rollouts.steps.values())
    fitting = max(2 * budget // max(rollouts.whole_bytes // whole, 1), 2 * _STEP_ROWS)
    steps = list(coarse_to_fine(sorted(rollouts.steps)))
    share = max(_STEP_ROWS, fitting // len(steps))
    return [
        offsets[i]
        for step in steps[: fitting // _STEP_ROWS + 1]
        for offsets, rewards in (rollouts.steps[step],)
        for i in best_worst_and_between(rewards, share)
    ]


def best_worst_and_between(rewards: Sequence[float], count: int) -> list[int]:
    """Return the numbers of `count` completions of a step to show: the best, the worst, and others
    evenly spread. A NaN is not counted as a reward."""
    scored = [i for i, reward in enumerate(rewards) if not math.isnan(reward)]
    order = (
        [max(scored, key=rewards.__getitem__), min(scored, key=rewards.__getitem__)]
        if scored
        else []
    )
    return list(dict.fromkeys([*order, *coarse_to_fine(range(len(rewards)))]))[:count]


def _row(row: Mapping[str, Any], prompts: "_Numbered", tokens: "_Pieces") -> Data:
    ids = row.get("completion_ids") or []
    rollout, policy = row.get("rollout_logprobs"), row.get("policy_logprobs")
    entry: Data = {
        "step": row["step"],
        "prompt_index": row.get("prompt_index") or 0,
        "sample_index": row.get("sample_index") or 0,
        "prompt": prompts.number(_shortened(str(row.get("prompt") or ""), _LONGEST_PROMPT)),
        "reward": row.get("reward"),
        "truncated": bool(row.get("truncated")),
        "length": len(ids) or row.get("tokens") or 0,
    }
    by_function = row.get("rewards") or {}
    if len(by_function) > 1:
        entry["rewards"] = by_function
    if (happened := _happened(row.get("episode"))) is not None:
        entry["episode"] = happened
    shown = ids[:_MOST_TOKENS]
    pieces = tokens.of(row.get("prompt_ids") or [], shown)
    if pieces is None or not rollout:
        return {**entry, "text": _shortened(_text(row), _LONGEST_TEXT)}
    entry |= {"pieces": pieces, "logprobs": [round(value, 3) for value in rollout[: len(shown)]]}
    mask = row.get("completion_mask")
    if isinstance(mask, list) and len(mask) == len(ids) and not all(mask):
        entry["given"] = [
            position for position, sampled in enumerate(mask[: len(shown)]) if not sampled
        ]
    if policy:
        differences = [
            float(f"{abs(new - old):.2g}") for new, old in zip(policy[: len(shown)], rollout)
        ]
        entry["differences"] = differences if any(differences) else 0
    return entry


def _text(row: Mapping[str, Any]) -> str:
    """Return the text of a completion without tokens: all messages of an episode, or else the
    completion's text."""
    episode = row.get("episode")
    messages = episode.get("messages") if isinstance(episode, dict) else None
    if isinstance(messages, list) and messages:
        return conversation(messages)
    return str(row.get("completion") or "")


def _happened(episode: Any) -> str | None:
    """Describe an episode as text: its number of turns, then of tool calls; None for a value that
    is not a recorded episode."""
    if not isinstance(episode, dict) or type(turns := episode.get("turns")) is not int:
        return None
    uses = episode.get("uses")
    calls = (
        [use for use in uses if isinstance(use, list) and len(use) == 2]
        if isinstance(uses, list)
        else []
    )
    failed = sum(error is not None for _, error in calls)
    counts = [f"{turns:,} turn{'s' if turns != 1 else ''}"]
    if calls:
        counts.append(f"{len(calls):,} call{'s' if len(calls) != 1 else ''} of tools")
    return ", ".join([*counts, *([f"{failed:,} failed"] if failed else [])])


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + " …"


class _Numbered:
    """Distinct texts, each with a number."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[tuple[str, bool], int] = {}

    def number(self, text: str, special: bool = False) -> int:
        """Return the text's number, a new one for a new text; the name of a special token has
        another number than the same characters."""
        if (text, special) not in self._numbers:
            self._numbers[text, special] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text, special]


class _Pieces:
    """The numbered texts that token ids add one after the other; `special`: the numbers of special
    tokens' texts."""

    def __init__(self, directory: Path) -> None:
        self.numbered, self.special = _Numbered(), set[int]()
        self._tokenizer = _tokenizer(directory)
        added = {} if self._tokenizer is None else self._tokenizer.get_added_tokens_decoder()
        self._special_names = {
            token: entry.content for token, entry in added.items() if entry.special
        }

    def of(self, prompt: Sequence[int], completion: Sequence[int]) -> list[int] | None:
        """Return the numbers of a completion's token texts; None without a tokenizer.

        A token's text is the text that it adds to the text before it. If several tokens make one
        character together, the last one has the character, and the texts of the others are empty.
        """
        if self._tokenizer is None:
            return None
        pieces, window = [], list(prompt[-_CONTEXT:])
        shown = len(self._tokenizer.decode(window))
        for token in completion:
            window.append(token)
            if token in self._special_names:
                number = self.numbered.number(self._special_names[token], special=True)
                self.special.add(number)
                pieces.append(number)
                continue
            text = self._tokenizer.decode(window)
            whole = not text.endswith("\ufffd")
            pieces.append(self.numbered.number(text[shown:] if whole else ""))
            if whole:
                window = window[-_CONTEXT:]
                shown = len(self._tokenizer.decode(window))
        return pieces


def _tokenizer(directory: Path) -> Tokenizer | None:
    for path in sorted((directory / CHECKPOINTS).glob("step-*/tokenizer.json"), reverse=True):
        try:
            check_readable(path)
            return Tokenizer.from_file(str(path))
        except Exception:  # tokenizers raises plain Exception; the page has no tokens then
            continue
    return None
