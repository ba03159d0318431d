"""A step's groups, sampled and scored by whichever rank claims them, and gathered by all.

Placement cannot move a bit: what a group's completions are depends on the seed and the prompt alone
(`isobit.engine.engine`). So ranks claim the next group when they have room, and a slow one takes fewer. What travels
are token ids and log-probabilities as tensors, the rest as JSON. Left out: what a step needs (`sources.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from isobit.distributed import Ranks
from isobit.engine.engine import Engine
from isobit.engine.prompts import Prompt
from isobit.engine.sequences import Stats
from isobit.engine.types import Completion, Request, Sampling
from isobit.rl import Group, Sample

_LONG: dict[str, torch.dtype] = {
    "prompt_ids": torch.int64,
    "completion_ids": torch.int64,
    "rollout_logprobs": torch.float64,  # which holds every float32
}


def sample_claimed(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    ids: Sequence[int],
    ranks: Ranks,
    name: str,
    on_group: Callable[[int, list[Completion]], None],
) -> tuple[dict[int, list[Completion]], Stats]:
    """The completions of the groups that this rank claims under `name`, by index, and what the engine did.

    A rank begins with three quarters of an equal share and claims one more whenever a group is done, so that the last
    ones go to those that are ahead. `on_group(index, completions)` is called as soon as a group is done.
    """
    if ranks.size == 1:  # who is alone has claimed them all
        groups = engine.generate(prompts, sampling, ids, on_group=on_group)
        return dict(enumerate(groups)), _done(engine)
    hold = max(1, 3 * len(prompts) // (4 * ranks.size))
    places: dict[Request, int] = {}
    found: dict[int, list[Completion]] = {}
    done, left = Stats(), True
    try:
        while True:
            while left and len(places) < hold:
                index = ranks.claim(name)
                left = index < len(prompts)
                if left:
                    places[engine.submit(prompts[index], sampling, ids[index])] = index
                    found[index] = []
            if not places:
                return found, done
            finished = engine.step()
            for request, completion in finished:
                found[places[request]].append(completion)
            for request in dict.fromkeys(request for request, _ in finished):
                group = found[places[request]]
                if len(group) == sampling.n:
                    group.sort(key=lambda completion: completion.sample_index)
                    on_group(places.pop(request), group)
            if not engine.num_open:  # the engine counts anew from the next request on
                done = _sum(done, _done(engine))
    finally:
        for request in places:
            engine.cancel(request)


def gather_groups(ranks: Ranks, mine: Mapping[int, Group]) -> list[Group]:
    """The groups of all ranks, in order."""
    if ranks.size == 1:
        return [group for _, group in sorted(mine.items())]
    said = ranks.all_gather_json([[index, [_short(sample) for sample in group]] for index, group in mine.items()])
    long = ranks.all_gather_tensors(
        {f"{i}.{n}.{k}": t for i, g in mine.items() for n, s in enumerate(g) for k, t in _tensors(s)}
    )
    found: dict[int, Group] = {}
    for groups, tensors in zip(said, long):
        for index, samples in groups:
            found[index] = [
                Sample.from_json({**values, **{key: tensors[f"{index}.{n}.{key}"].tolist() for key in _LONG}})
                for n, values in enumerate(samples)
            ]
    return [group for _, group in sorted(found.items())]


def gather_stats(ranks: Ranks, mine: Stats) -> Stats:
    """What all engines did."""
    total = Stats()
    for values in ranks.all_gather_json(vars(mine)):
        total = _sum(total, Stats(**values))
    return total


def _done(engine: Engine) -> Stats:
    clamped, written = engine.clamped
    return replace(engine.stats, kv_clamped=clamped, kv_written=written)


def _sum(left: Stats, right: Stats) -> Stats:
    return Stats(**{f.name: getattr(left, f.name) + getattr(right, f.name) for f in fields(Stats)})


def _short(sample: Sample) -> dict[str, Any]:
    """What of a sample is not in `_tensors`."""
    return {name: value for name, value in vars(sample).items() if name not in _LONG}


def _tensors(sample: Sample) -> list[tuple[str, Tensor]]:
    return [(key, torch.tensor(getattr(sample, key), dtype=dtype)) for key, dtype in _LONG.items()]
