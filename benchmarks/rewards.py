"""The rewards of the step benchmarks, the same functions for every contestant."""

import time
import zlib


def digits(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """The share of digits among five characters."""
    return [sum(c.isdigit() for c in text) / 5 for text in completions]


def slow_digits(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """The same, as slowly as a reward that asks somebody else: 20 ms a completion."""
    time.sleep(0.02 * len(completions))
    return digits(prompts, completions)


def in_turn(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """1 for every other completion: groups have a spread whatever a random model says."""
    return [float(i % 2) for i in range(len(completions))]


def digits_of_half(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """The same for half of the prompts; to completions of the others no answer is better than any."""
    rewards = digits(prompts, completions)
    return [reward if zlib.crc32(prompt.encode()) % 2 else 0.0 for prompt, reward in zip(prompts, rewards)]
