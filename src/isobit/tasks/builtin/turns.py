"""What tasks of several turns have in common: their question, and the reward of a last answer."""

from collections.abc import Sequence
from typing import Any

from isobit.data.answers import completion_text
from isobit.data.dataset import Message
from isobit.tasks.rewards.spec import RewardSpec


def user_says(text: str) -> Message:
    """Return a text as a user's message."""
    return {"role": "user", "content": text}


def correct(
    prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[str], **columns: Any
) -> list[float]:
    """Return 1.0 where the last answer of an episode, outer white space aside, is the right one and
    nothing else, else 0.0."""
    return [
        float(completion_text(c).strip() == a) for c, a in zip(completions, answer, strict=True)
    ]


CORRECT = RewardSpec("isobit.tasks.builtin.turns:correct", name="correct")
