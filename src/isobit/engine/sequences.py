"""Requests on their way through the engine: each with its sequences, and the steps that compute
these."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from isobit.engine.rows import DecodeRows
from isobit.engine.shaping import Shaped
from isobit.engine.stopping import StopStrings
from isobit.engine.types import Request


@dataclass
class Stats:
    """The counts of an engine since it had no open request.

    Tokens count what was computed: a preempted sequence's are counted again, and those of prompts
    that were in the cache are not. `kv_clamped` of `kv_written` keys and values were clamped by
    calibrated scales, if `Engine.clamped` was read. Sequences were given drafts `num_drafts` times,
    of `num_draft_tokens` in all, which are among those decoded; `num_accepted_tokens` of these
    equal the sampled token. `episodes` with an environment are over, and the tools that these
    called took `tool_s` seconds, by the tool's name.
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    shared_pages: int = 0
    copied_pages: int = 0
    peak_pages: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    kv_clamped: int = 0
    kv_written: int = 0
    episodes: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    tool_s: Mapping[str, float] = field(default_factory=dict)


COUNTS = tuple(stat.name for stat in fields(Stats) if stat.name != "tool_s")
"""What of `Stats` is a number."""


def summed(left: Stats, right: Stats) -> Stats:
    """Return the sum of two engines' counts, or of one engine's at two times."""
    counts = {name: getattr(left, name) + getattr(right, name) for name in COUNTS}
    return Stats(**counts, tool_s=added_seconds(left.tool_s, right.tool_s))


def added_seconds(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    """Return the sum of two mappings of names to seconds."""
    return {name: left.get(name, 0.0) + right.get(name, 0.0) for name in {**left, **right}}


def clamped_fraction(clamped: int, written: int) -> dict[str, float]:
    """Return the metric of the clamped fraction; empty where nothing was written."""
    return {"quant/kv_saturated_fraction": clamped / written} if written else {}


@dataclass(eq=False)
class RunningRequest:
    """An open request: a prompt, and those of its samples that have not ended, each of at most
    `limit` new tokens. `number`: that of its first sequence; `where`: its name in messages;
    `turns`: of the prompt's tokens, as `Layout.turns`."""

    request: Request
    where: str
    number: int
    limit: int
    most_pages: int
    stop: StopStrings | None
    prompt: NDArray[np.int64]
    turns: NDArray[np.int64]
    members: "list[Sequence]" = field(default_factory=list)


@dataclass(eq=False)
class Sequence:
    """A sequence. A smaller `number` is older. It has a `slot` of the record (-1: not yet) from
    when its prompt is begun, and pages while it is being prefilled (`computed` tokens so far) or
    decodes. `shaped`: its place in the request's grammar, from its first draw on."""

    number: int
    owner: RunningRequest
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    shaped: Shaped | None = None

    @property
    def sample_index(self) -> int:
        return self.owner.request.sample_index + self.number - self.owner.number


@dataclass(frozen=True, eq=False)
class Chunk:
    """Tokens [start, stop) of a sequence that is being prefilled; `samples` are drawn from its last
    row."""

    sequence: Sequence
    start: int
    stop: int
    samples: tuple[Sequence, ...]


@dataclass(frozen=True, eq=False)
class StepPlan:
    """A step: the first `decode` rows of the table, then the chunks. `sampled`: the slots of those
    who get a token, in that order. `drafts`: by decoding row, tokens that are computed as if they
    had been sampled after its next one."""

    decode: int
    chunks: tuple[Chunk, ...]
    sampled: NDArray[np.int64]
    drafts: Mapping[int, list[int]] = field(default_factory=dict)

    @property
    def num_drafted(self) -> int:
        """Tokens that are drafted."""
        return sum(map(len, self.drafts.values()))

    @property
    def draws(self) -> NDArray[np.int64]:
        """The slot of each token that is drawn: for the decoding rows, then behind each draft, then
        for the chunks."""
        if not self.drafts:
            return self.sampled
        of = np.repeat(list(self.drafts), [len(tokens) for tokens in self.drafts.values()])
        decoding, chunks = self.sampled[: self.decode], self.sampled[self.decode :]
        return np.concatenate([decoding, decoding[of], chunks])

    def rows(self, table: DecodeRows) -> DecodeRows:
        """Return the rows of the table that decode, followed by those of drafts."""
        return table.with_drafts(self.decode, self.drafts) if self.drafts else table

    @property
    def prompts(self) -> "StepPlan":
        """The step's chunks alone."""
        return StepPlan(0, self.chunks, self.sampled[self.decode :])

    def parent_pages(self, sequence: Sequence) -> list[int]:
        """Return the pages of a sample's prompt, from which it draws its first token and which it
        has yet to share."""
        return next(chunk.sequence.pages for chunk in self.chunks if sequence in chunk.samples)
