"""A step's groups, sampled and scored by whichever rank claims them, and gathered by all.

Placement cannot move a bit: what a group's completions are depends on the seed and the prompt alone
(`isobit.engine.engine`). So ranks claim the next group when they have room, and a slow one takes
fewer. What travels are token ids and log-probabilities as tensors, the rest as JSON. Left out: what
a step needs (`sources.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.data.dataset import Example
from isobit.distributed import Ranks
from isobit.engine.dialogue import Dialogue
from isobit.engine.engine import Engine, OnGroup
from isobit.engine.episodes import Episodes
from isobit.engine.groups import OpenGroups
from isobit.engine.sequences import Stats, summed
from isobit.engine.types import Completion, Request, Sampling
from isobit.rl import Group, Sample

_LONG: dict[str, torch.dtype] = {
    "prompt_ids": torch.int64,
    "completion_ids": torch.int64,
    "rollout_logprobs": torch.float64,  # which holds every float32
}


class ClaimedGroups:
    """A `sources.Sampler`: the groups that this rank claims of each call's, sampled by its
    `engine`, with a `dialogue` as episodes of several turns; `between` is called after each step of
    the engine."""

    def __init__(
        self,
        engine: Engine,
        sampling: Sampling,
        ranks: Ranks,
        between: Callable[[], None] = lambda: None,
        dialogue: Dialogue | None = None,
    ) -> None:
        self._engine, self._sampling, self._ranks = engine, sampling, ranks
        self._between, self._dialogue = between, dialogue
        self._name, self._calls = ranks.fresh_name(), 0

    @property
    def n(self) -> int:
        return self._sampling.n

    def __call__(
        self, examples: Sequence[Example], ids: Sequence[int], on_group: OnGroup
    ) -> tuple[dict[int, list[Completion]], Stats]:
        """Sample the groups that this rank claims; return them by index, with its engine's
        statistics.

        A rank begins with three quarters of an equal share (a single rank with all groups) and
        claims one more whenever a group is done, so that the last groups go to the ranks that are
        ahead. Ranks that hold a model together claim and sample as one, for which the first of them
        speaks.
        """
        ranks, episodes = self._ranks, Episodes(self._engine, self._dialogue)
        together = self._engine.model.transformer.group
        self._calls += 1
        count, engines = len(examples), ranks.size // together.size
        hold = count if engines == 1 else max(1, 3 * count // (4 * engines))
        finished: dict[int, list[Completion]] = {}
        left = True
        with OpenGroups(episodes) as gathering:
            while True:
                while left and len(gathering) < hold:
                    index = together.all_gather_json(
                        ranks.claim(f"{self._name} {self._calls}") if together.first else 0
                    )[0]
                    left = index < count
                    if left:
                        requests, known = self._ask(episodes, examples[index], ids[index])
                        gathering.add(index, *requests, known=known)
                if not gathering:
                    return finished, episodes.stats if together.first else Stats()
                for index, group in gathering.step():
                    if together.first:
                        finished[index] = group
                        on_group(index, group)
                self._between()

    def _ask(
        self, episodes: Episodes, example: Example, prompt_id: int
    ) -> tuple[Sequence[Request], Sequence[Completion]]:
        """Submit the requests of a group; return them, with the completions that the group has
        already."""
        prompt, columns = example.prompt, example.columns
        return [episodes.submit(prompt, self._sampling, prompt_id, columns)], ()


def gather_groups(ranks: Ranks, mine: Mapping[int, Group]) -> list[Group]:
    """Return the groups of all ranks, in order."""
    if ranks.size == 1:
        return [group for _, group in sorted(mine.items())]
    reports = ranks.all_gather_json(
        [[index, [_short(sample) for sample in group]] for index, group in mine.items()]
    )
    long = ranks.all_gather_tensors(
        {
            f"{i}.{n}.{k}": t
            for i, g in mine.items()
            for n, s in enumerate(g)
            for k, t in _tensors(s)
        }
    )
    by_index: dict[int, Group] = {}
    for groups, tensors in zip(reports, long):
        for index, samples in groups:
            by_index[index] = [
                Sample.from_json(
                    {**values, **{key: tensors[f"{index}.{n}.{key}"].tolist() for key in _LONG}}
                )
                for n, values in enumerate(samples)
            ]
    return [group for _, group in sorted(by_index.items())]


def gather_stats(ranks: Ranks, mine: Stats) -> Stats:
    """Return the sum of the engine statistics of all ranks."""
    total = Stats()
    for values in ranks.all_gather_json(vars(mine)):
        total = summed(total, Stats(**values))
    return total


def _short(sample: Sample) -> dict[str, Any]:
    """Return a sample as JSON values, without the long columns of `_tensors`."""
    return {name: value for name, value in sample.to_json().items() if name not in _LONG}


def _tensors(sample: Sample) -> list[tuple[str, Tensor]]:
    return [(key, torch.tensor(getattr(sample, key), dtype=dtype)) for key, dtype in _LONG.items()]
