"""The record of an episode apart from its tokens; and environments that replay it.

A record has no times: a repetition of the run, in which tools take longer, records the same bytes.
Left out: the tokens, their mask and log-probabilities, which are the completion's
(`engine/types.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isobit.data.dataset import Message, Prompt
from isobit.data.turns import Reply, Step, Turn


def last_answer(messages: Sequence[Message]) -> str:
    """Return the text of the model's last message; empty without one."""
    answers = (m for m in reversed(messages) if m.get("role") == "assistant")
    return str(next(answers, {}).get("content") or "")


@dataclass(frozen=True)
class EpisodeRecord:
    """An episode that is over. `turns`: of the model. `messages`: all that follow the prompt, the
    model's own and its environment's, also those behind the last turn. `uses`: each call of a tool
    that was carried out, its name and the line that says how it failed (None: it did not).
    `rewards`: what its environment and the reward functions that ask for it say, by name; None is
    unscored. `done`: the environment ended it, and no limit did. `problem`: how the environment
    itself went wrong, in one line. `prompt`: as reset has changed it; None: it is the row's."""

    turns: int
    messages: tuple[Message, ...]
    uses: tuple[tuple[str, str | None], ...] = ()
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    done: bool = True
    problem: str | None = None
    prompt: Prompt | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`; a prompt that is the row's is left out."""
        values = {
            **vars(self),
            "messages": list(self.messages),
            "uses": [list(use) for use in self.uses],
            "rewards": dict(self.rewards),
        }
        return {name: value for name, value in values.items() if name != "prompt" or value}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "EpisodeRecord":
        """Return a record of the values that `to_json` returned."""
        uses = tuple((str(name), error) for name, error in values["uses"])
        return EpisodeRecord(**{**values, "messages": tuple(values["messages"]), "uses": uses})

    def said(self) -> list[Message]:
        """Return the conversation up to the model's last answer."""
        messages = list(self.messages)
        while messages and messages[-1].get("role") != "assistant":
            messages.pop()
        return messages

    def observations(self) -> list[Sequence[Message]]:
        """Return the environment's messages after each turn."""
        by_turn: list[list[Message]] = []
        for message in self.messages:
            if message.get("role") == "assistant":
                by_turn.append([])
            else:
                by_turn[-1].append(message)
        return list(by_turn)


@dataclass(eq=False)
class RecordedEnvironments:
    """`Environments` that say what was said in a run that recorded it, at once: no tool is called,
    and nothing is scored. An episode's columns are `episode`, as recorded, and where turns
    may fork the `contexts` of all turns but the first. Behind the last turn of the record there is
    nothing to say."""

    max_turns: int
    tools: Sequence[Mapping[str, Any]] = ()
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    _episodes: dict[int, tuple[EpisodeRecord, Sequence[Sequence[int]]]] = field(
        default_factory=dict
    )
    _replies: list[Reply] = field(default_factory=list)

    def begin(self, key: int, prompt: Prompt, columns: Mapping[str, Any]) -> None:
        self._episodes[key] = columns["episode"], columns.get("contexts", ())
        self._replies.append(Reply(key, prompt=prompt))

    def turn(self, key: int, turn: Turn) -> None:
        episode, contexts = self._episodes[key]
        replies = episode.observations()
        messages: Sequence[Message] = replies[turn.number] if turn.number < len(replies) else ()
        done = episode.done and turn.number + 1 >= episode.turns
        context = contexts[turn.number] if turn.number < len(contexts) else None
        self._replies.append(Reply(key, Step(tuple(messages), done=done), context=context))

    def finish(self, key: int, arguments: Mapping[str, Any]) -> None:
        self._replies.append(Reply(key))

    def end(self, key: int) -> None:
        self._episodes.pop(key, None)
        self._replies = [reply for reply in self._replies if reply.key != key]

    def poll(self, wait_s: float) -> list[Reply]:
        replies, self._replies = self._replies, []
        return replies
