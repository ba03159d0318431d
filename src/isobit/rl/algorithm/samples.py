"""What a rollout leaves behind: `Sample`, one scored completion, and its exact form in JSON.

A float32 widened to a Python float prints as text that reads back as the same float, so the
log-probabilities of a checkpoint are the bits that were sampled; those of `completions.jsonl.gz`
are too (`run/completions.py`). Left out: tensors (`learner/packing.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

from isobit.data.episodes import EpisodeRecord
from isobit.errors import IsobitError


class Segment(NamedTuple):
    """Tokens [start, stop) of a completion: the version of the weights that drew them, and how many
    steps had been learned by then."""

    start: int
    stop: int
    weights_version: int
    rollout_step: int


@dataclass(frozen=True)
class Sample:
    """A completion. `prompt_index` is the data cursor of its prompt, unique within a run, and names
    its group.

    `completion_mask` is True for each completion token that was sampled and is trained, and False
    for one that a tool or a user gave, or that weights drew which are too old to learn from:
    context, never a target. None: all are trained. `rollout_logprobs` were recorded while sampling,
    one per completion token; that of a given token is 0.0 and has no meaning. `reward` is None if
    the completion could not be scored. `truncated`: it ended at the length limit.
    `weights_version`: of the weights that sampled it; `rollout_step`: how many steps had been
    learned by then. `routes`: the experts that served it in the rollout, as text
    (`model/forward/moe.py`). `reference_kl`: of each trained token, the estimate of KL(policy ‖
    reference), if it is part of the reward. `episode`: what happened in a conversation with an
    environment, whose last turn's text `completion` is. `forks`: the places in the completion where
    a context of its own begins, with given tokens: what is behind one sees nothing in front of it.
    `segments`: where several versions of the weights drew it, which of them drew what; version and
    step of the sample are then the newest ones. Empty: one drew all. `teacher_ids`: the tokens that
    a teacher reads before the completion, where it is compared with the teacher's distribution and
    they are not the prompt's.
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
    segments: tuple[Segment, ...] = ()
    teacher_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        assert len(self.completion_ids) == len(self.rollout_logprobs)
        if self.segments:
            self._check_segments()
        assert self.completion_mask is None or len(self.completion_mask) == len(self.completion_ids)
        assert list(self.forks) == sorted(set(self.forks))
        for fork in self.forks:  # which a given token begins
            assert self.completion_mask is not None
            assert 0 < fork < len(self.completion_ids)
            assert not self.completion_mask[fork]

    def _check_segments(self) -> None:
        assert all(type(number) is int for segment in self.segments for number in segment)
        edges = [0, *(segment.stop for segment in self.segments)]
        assert [segment.start for segment in self.segments] == edges[:-1]
        assert edges[-1] == len(self.completion_ids)
        assert all(start < stop for start, stop in pairwise(edges))
        assert not self.forks
        assert self.episode is None
        newest = self.segments[-1]
        assert (newest.weights_version, newest.rollout_step) == (
            self.weights_version,
            self.rollout_step,
        )

    @property
    def drawn(self) -> tuple[Segment, ...]:
        """Its segments, of which there is one where one version of the weights drew all."""
        whole = Segment(0, len(self.completion_ids), self.weights_version, self.rollout_step)
        return self.segments or (whole,)

    def until(self, segment: Segment) -> "Sample":
        """Return the sample as it stood when a segment was drawn; where later segments follow, its
        length limit had interrupted it, and its text is not known."""
        ended = segment.stop == len(self.completion_ids)
        earlier = tuple(s for s in self.segments if s.stop <= segment.stop)
        return replace(
            self,
            completion_ids=self.completion_ids[: segment.stop],
            rollout_logprobs=self.rollout_logprobs[: segment.stop],
            completion=self.completion if ended else "",
            truncated=self.truncated if ended else True,
            completion_mask=None,
            reference_kl=None,
            weights_version=segment.weights_version,
            rollout_step=segment.rollout_step,
            segments=earlier if len(earlier) > 1 else (),
        )

    def trained_from(self, start: int) -> "Sample":
        """Return the sample with the tokens in front of `start` as context: no targets any more."""
        if not start:
            return self
        left = [index for index in self.trained if index >= start]
        mask = [False] * len(self.completion_ids)
        for index in left:
            mask[index] = True
        distance = self.reference_kl
        if distance is not None:
            distance = distance[len(distance) - len(left) :]
        return replace(self, completion_mask=tuple(mask), reference_kl=distance)

    @property
    def num_sampled(self) -> int:
        """Tokens that were sampled, those included that are not trained since older weights drew
        them."""
        return len(self.completion_ids) if self.segments else self.num_trained

    @property
    def oldest_step(self) -> int:
        """The number of steps that had been learned when the oldest of its trained tokens was
        drawn."""
        first = min(self.trained, default=len(self.completion_ids))
        steps = [segment.rollout_step for segment in self.segments if segment.stop > first]
        return steps[0] if steps else self.rollout_step

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
    def observed(self) -> list[int]:
        """The positions in the completion of what an environment said, as the chat template writes
        it: of each context the tokens that are `given_behind` a sampled one. Those that a context
        begins with are none: they are its prompt."""
        edges = [0, *self.forks, len(self.completion_ids)]
        mask = self.completion_mask or ()
        return [
            begin + index
            for begin, end in pairwise(edges)
            for index in given_behind(mask[begin:end])
        ]

    @property
    def contexts(self) -> list[tuple[int, ...]]:
        """The tokens of each context, from the prompt's on: one, where it forks nowhere."""
        edges = [*self.forks, len(self.completion_ids)]
        first = (*self.prompt_ids, *self.completion_ids[: edges[0]])
        return [first, *(self.completion_ids[a:b] for a, b in pairwise(edges))]

    def before(self, position: int) -> tuple[int, ...]:
        """Return the tokens in front of a token of the completion, in its context."""
        begins = [fork for fork in self.forks if fork <= position]
        if begins:
            return self.completion_ids[begins[-1] : position]
        return (*self.prompt_ids, *self.completion_ids[:position])

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`; without an environment they have no `episode`, and
        no `forks` or `segments` where the sample has none."""
        values = {**vars(self), "rewards": dict(self.rewards)}
        episode, forks, segments = (values.pop(name) for name in ("episode", "forks", "segments"))
        values |= {"forks": list(forks)} if forks else {}
        values |= {"segments": [list(segment) for segment in segments]} if segments else {}
        read = values.pop("teacher_ids")
        values |= {} if read is None else {"teacher_ids": list(read)}
        return values if episode is None else {**values, "episode": episode.to_json()}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Sample":
        """Return the sample that `to_json` wrote; further keys are ignored."""
        known = {f.name for f in fields(Sample)}
        arguments = {key: value for key, value in values.items() if key in known}
        for key in ("prompt_ids", "completion_ids", "rollout_logprobs"):
            arguments[key] = tuple(arguments[key])
        if arguments.get("completion_mask") is not None:
            arguments["completion_mask"] = tuple(arguments["completion_mask"])
        arguments["forks"] = tuple(arguments.get("forks", ()))
        arguments["segments"] = tuple(Segment(*s) for s in arguments.get("segments", ()))
        if (read := arguments.get("teacher_ids")) is not None:
            arguments["teacher_ids"] = tuple(read)
        if arguments.get("episode") is not None:
            arguments["episode"] = EpisodeRecord.from_json(arguments["episode"])
        if (distance := arguments.get("reference_kl")) is not None:
            if not isinstance(distance, list):
                raise IsobitError(f"reference_kl: expected a list of numbers, got {distance!r:.80}")
            arguments["reference_kl"] = tuple(distance)
        return Sample(**arguments)


Group = Sequence[Sample]
"""The samples of one prompt."""


def given_behind(mask: Sequence[bool]) -> list[int]:
    """Return the positions of a context's tokens that were given behind a sampled one, without the
    token right behind it: of an answer that was cut off that is its end, which the model did not
    choose. `mask`: which were sampled."""
    first = next((index for index, sampled in enumerate(mask) if sampled), len(mask))
    return [index for index in range(first + 1, len(mask)) if not (mask[index] or mask[index - 1])]


def groups_to_json(groups: Sequence[Group]) -> list[list[dict[str, Any]]]:
    """Return groups as plain values for `json.dumps`."""
    return [[sample.to_json() for sample in group] for group in groups]


def groups_from_json(values: Sequence[Sequence[Mapping[str, Any]]]) -> list[Group]:
    """Return the groups that `groups_to_json` wrote."""
    return [[Sample.from_json(sample) for sample in group] for group in values]
