"""The interface of an environment, and the messages between a rollout and environments' processes.

An episode is a prompt and what follows it: the model's turns and, after each, the messages that an
environment appends. One environment serves one episode. A rollout sees all of them as
`Environments`: it asks, goes on decoding other episodes, and polls for replies. Left out: how text
becomes tokens (`model/text`), and who decodes the turns (`engine`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from isobit.data.dataset import Message, Prompt


@dataclass(frozen=True)
class Call:
    """A call of a tool, as the model wrote it; `arguments`: the JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Turn:
    """An answer of the model, as an environment sees it. `number` counts from 0; `text` is the
    whole answer, `content` the text without calls and thoughts, and `reasoning` the thoughts.
    `problems`: a line for each text that looks like a call but is not a call, with the reason.
    `truncated`: the answer ended at a length limit."""

    number: int
    text: str
    content: str
    calls: tuple[Call, ...] = ()
    problems: tuple[str, ...] = ()
    truncated: bool = False
    reasoning: str = ""


@dataclass(frozen=True)
class Step:
    """An environment's answer to a turn: messages to append, of role "tool" or "user", the
    episode's reward so far (None: the environment gives none), and whether the episode is over."""

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = False


class Environment(Protocol):
    """The environment of an episode."""

    def reset(self, **columns: Any) -> str | Sequence[Message] | None:
        """Begin an episode on a row of the data. Return the text or the messages that are added to
        the row's prompt, or None."""
        ...

    async def step(self, turn: Turn) -> Step:
        """Answer this turn: return the messages that follow it, the reward, and whether the episode
        is over."""
        ...


@dataclass(frozen=True)
class ToolUse:
    """A call of a tool that was carried out: its seconds, and one line of error if it failed. For a
    call that an environment's `step` answered: an equal part of the step's seconds, and the step's
    error."""

    name: str
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class Reply:
    """The answer to one question about the episode `key`.

    To `begin`: `prompt` with what reset adds to it (a text to the content of its last message, as
    TRL does; messages behind it), and the episode's `tools`; where reset failed, the prompt as it
    was, and done. To `turn`: `step`, and a `ToolUse` for
    each call that was carried out. To `finish`: `rewards`, of the names in `reward_weights` that
    apply to the episode; None is unscored. `problem`: the environment raised, hung or died, in one
    line; what `on_error` says of it is in `step` already (observe: a message says so; end: done).
    `mistake`: the problem is the program's, the same in every episode, and ends the run.
    `context`: the tokens that the next turn begins with, where a record says them.
    """

    key: int
    step: Step = Step()
    uses: tuple[ToolUse, ...] = ()
    problem: str | None = None
    mistake: bool = False
    prompt: Prompt | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    context: Sequence[int] | None = None


class Environments(Protocol):
    """The environments of a rollout together, as the rollout sees them. Every method but `poll`
    returns at once.

    `tools`: JSON schemas of all tools, empty where there are none; an episode's own come with its
    `begin`, since a row may choose among several environments. `max_turns`: turns of the model in
    an episode, at most. `reward_weights`: what `finish` may score, by name, and its weight in the
    sum of rewards: the environment's own reward, under its class's name, and reward functions that
    ask for `environments`.
    """

    tools: Sequence[Mapping[str, Any]]
    max_turns: int
    reward_weights: Mapping[str, float]

    def begin(self, key: int, prompt: Prompt, columns: Mapping[str, Any]) -> None:
        """Open an episode on a row of the data, whose prompt and other columns these are."""
        ...

    def turn(self, key: int, turn: Turn) -> None:
        """Ask what follows this turn. One question about an episode may be open at a time. A turn
        that is the last of `max_turns` calls no tools."""
        ...

    def finish(self, key: int, arguments: Mapping[str, Any]) -> None:
        """Ask for the rewards of an episode that is over, for whatever reason. `arguments`: what a
        reward function is given of this one episode, under TRL's names: `prompts`, `completions`,
        `completion_ids` and the columns, each without the list around it."""
        ...

    def end(self, key: int) -> None:
        """End an episode and free its environment; safe at any time, no reply follows."""
        ...

    def poll(self, wait_s: float) -> list[Reply]:
        """Return the replies that have come, in any order; wait at most `wait_s` seconds for the
        first. Raises RunFailed for a mistake of the program, and for every problem if `on_error` is
        stop."""
        ...
