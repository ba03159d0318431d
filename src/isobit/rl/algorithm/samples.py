"""What a rollout leaves behind: `Sample`, one scored completion, and its exact form in JSON.

A float32 widened to a Python float prints as text that reads back as the same float, so the
log-probabilities of a checkpoint are the bits that were sampled; those of `completions.jsonl.gz`
are too (`run/completions.py`). Left out: tensors (`learner/packing.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

from isobit.environments.recorded import EpisodeRecord
from isobit.errors import IsobitError


@dataclass(frozen=True)
class Sample:
    """One completion. `prompt_index` is the data cursor of its prompt, unique within a run, and
    names its group.

    `completion_mask` is True for each completion token that was sampled and is trained, and False
    for one that a tool or a user gave: context, never a target. None: all were sampled.
    `rollout_logprobs` were recorded while sampling, one per completion token; that of a given token
    is 0.0 and has no meaning. `reward` is None if the completion could not be scored. `truncated`:
    it ended at the length limit. `weights_version`: of the weights that sampled it; `rollout_step`:
    how many steps had been learned by then. `routes`: the experts that served it in the rollout, as
    text (`model/forward/moe.py`). `reference_kl`: of each trained token, the estimate of KL(policy
    ‖ reference), if it is part of the reward. `episode`: what happened in a conversation with an
    environment, whose last turn's text `completion` is. `forks`: the places in the completion where
    a context of its own begins, with given tokens: what is behind one sees nothing in front of it.
    `teacher_ids`: the tokens that a teacher reads before the completion, where it is compared with
    the teacher's distribution and they are not the prompt's.
    """

    prompt_index: int
    sample_index: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    completion: str
    truncated: bool
    weights_version: int
    reward: float | None = None
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    reference_kl: tuple[float, ...] | None = None
    routes: str | None = None
    rollout_step: int = 0
    completion_mask: tuple[bool, ...] | None = None
    episode: EpisodeRecord | None = None
    forks: tuple[int, ...] = ()
    teacher_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        assert len(self.completion_ids) == len(self.rollout_logprobs)
        assert self.completion_mask is None or len(self.completion_mask) == len(self.completion_ids)
        assert list(self.forks) == sorted(set(self.forks))
        for fork in self.forks:  # which a given token begins
            assert self.completion_mask is not None
            assert 0 < fork < len(self.completion_ids)
            assert not self.completion_mask[fork]

    @property
    def trained(self) -> Sequence[int]:
        """The positions in the completion of the tokens that are trained."""
        if self.completion_mask is None:
            return range(len(self.completion_ids))
        return [i for i, trained in enumerate(self.completion_mask) if trained]

    @property
    def num_trained(self) -> int:
        return len(self.trained)

    @property
    def contexts(self) -> list[tuple[int, ...]]:
        """The tokens of each context, from the prompt's on: one, where it forks nowhere."""
        edges = [*self.forks, len(self.completion_ids)]
        first = (*self.prompt_ids, *self.completion_ids[: edges[0]])
        return [first, *(self.completion_ids[a:b] for a, b in pairwise(edges))]

    def before(self, place: int) -> tuple[int, ...]:
        """What stands in front of a token of the completion, in its context."""
        begins = [fork for fork in self.forks if fork <= place]
        if begins:
            return self.completion_ids[begins[-1] : place]
        return (*self.prompt_ids, *self.completion_ids[:place])

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`; without an environment there is no `episode`, and where it
        forks nowhere there are no `forks`."""
        values = {**vars(self), "rewards": dict(self.rewards)}
        episode, forks = values.pop("episode"), values.pop("forks")
        values |= {"forks": list(forks)} if forks else {}
        read = values.pop("teacher_ids")
        values |= {} if read is None else {"teacher_ids": list(read)}
        return values if episode is None else {**values, "episode": episode.to_json()}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Sample":
        """The inverse of `to_json`; further keys are ignored."""
        known = {f.name for f in fields(Sample)}
        given = {key: value for key, value in values.items() if key in known}
        for key in ("prompt_ids", "completion_ids", "rollout_logprobs"):
            given[key] = tuple(given[key])
        if given.get("completion_mask") is not None:
            given["completion_mask"] = tuple(given["completion_mask"])
        given["forks"] = tuple(given.get("forks", ()))
        if (read := given.get("teacher_ids")) is not None:
            given["teacher_ids"] = tuple(read)
        if given.get("episode") is not None:
            given["episode"] = EpisodeRecord.from_json(given["episode"])
        if (distance := given.get("reference_kl")) is not None:
            if not isinstance(distance, list):
                raise IsobitError(f"reference_kl: expected a list of numbers, got {distance!r:.80}")
            given["reference_kl"] = tuple(distance)
        return Sample(**given)


Group = Sequence[Sample]
"""The samples of one prompt."""


def groups_to_json(groups: Sequence[Group]) -> list[list[dict[str, Any]]]:
    """Plain values for `json.dumps`."""
    return [[sample.to_json() for sample in group] for group in groups]


def groups_from_json(values: Sequence[Sequence[Mapping[str, Any]]]) -> list[Group]:
    """The inverse of `groups_to_json`."""
    return [[Sample.from_json(sample) for sample in group] for group in values]
