"""Conversations for the tests: a chat template for models of characters, and environments in this
process whose replies come in a seeded order."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isobit.data.dataset import Message, Prompt
from isobit.data.turns import Reply, Step, ToolUse, Turn
from isobit.engine.dialogue import Dialogue
from isobit.model import Model

TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'][0] + ' ' + m['content'] }}"
    "{{ '</s>' }}{% endfor %}{% if add_generation_prompt %}<s>a {% endif %}"
)
"""`<s>` begins a turn and `</s>`, which ends a completion, ends it."""
SHORTENING = TEMPLATE.replace(
    "m['content'] }}", "(m['content'][:3] if m['role'] == 'assistant' else m['content']) }}"
)
"""Writes no more than three letters of an answer, once it is past."""
Answer = Callable[[Mapping[str, Any], Sequence[Turn]], Step]


def adding(columns: Mapping[str, Any], turns: Sequence[Turn]) -> Step:
    """A tool for the tests: the count of each turn's letters; over after as many turns as the row
    says. The reward is the share of digits."""
    text = turns[-1].text
    digits = sum(c.isdigit() for turn in turns for c in turn.text)
    message = {"role": "tool", "content": f"{len(text)} {digits}"}
    return Step((message,), digits / 10, len(turns) >= columns["turns"])


@dataclass
class FakeEnvironments:
    """`answer` says what follows the turns so far. With a `seed` replies come in its order, a few
    at a time, and polls that would not wait may find none."""

    answer: Answer = adding
    max_turns: int = 4
    seed: int | None = None
    reward_weights: Mapping[str, float] = field(default_factory=lambda: {"earned": 1.0})
    tools: Sequence[Mapping[str, Any]] = ()
    added: Callable[[Mapping[str, Any], int], str] = lambda columns, key: ""
    columns: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    turns: dict[int, list[Turn]] = field(default_factory=dict)
    earned: dict[int, float | None] = field(default_factory=dict)
    waiting: list[Reply] = field(default_factory=list)
    ended: int = 0
    asked: int = 0

    def begin(self, key: int, prompt: Prompt, columns: Mapping[str, Any]) -> None:
        self.columns[key], self.turns[key], self.earned[key] = columns, [], None
        messages = [dict(message) for message in prompt]  # type: ignore[call-overload]
        messages[-1]["content"] += self.added(columns, key)
        self.waiting.append(Reply(key, prompt=messages))

    def turn(self, key: int, turn: Turn) -> None:
        self.asked += 1
        assert turn.number == len(self.turns[key])
        self.turns[key].append(turn)
        step = self.answer(self.columns[key], self.turns[key])
        self.earned[key] = step.reward
        self.waiting.append(Reply(key, step, (ToolUse("count", 0.5),)))

    def finish(self, key: int, arguments: Mapping[str, Any]) -> None:
        assert arguments["completions"][0]["role"] == "assistant"
        self.waiting.append(Reply(key, rewards={"earned": self.earned[key]}))

    def end(self, key: int) -> None:
        self.ended += self.columns.pop(key, None) is not None
        self.waiting = [reply for reply in self.waiting if reply.key != key]

    def poll(self, wait_s: float) -> list[Reply]:
        if self.seed is None:
            found, self.waiting = self.waiting, []
            return found
        draw = random.Random(f"{self.seed} {len(self.waiting)} {self.asked} {self.ended}")
        draw.shuffle(self.waiting)
        least = 1 if wait_s and self.waiting else 0
        count = draw.randint(least, max(least, min(3, len(self.waiting))))
        found, self.waiting = self.waiting[:count], self.waiting[count:]
        self.seed += 1
        return found


def dialogue_of(model: Model, environments: Any, max_tokens: int | None = None) -> Dialogue:
    """Conversations of a model of characters."""
    tokenizer = model.tokenizer
    tokenizer.chat_template = TEMPLATE
    return Dialogue.of(tokenizer, environments, "hermes", max_tokens)


def chat(text: str) -> list[Message]:
    """A prompt."""
    return [{"role": "user", "content": text}]
