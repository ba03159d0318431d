"""The rewards of the step benchmarks, the same functions for every contestant."""


def digits(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """The share of digits among five characters."""
    return [sum(c.isdigit() for c in text) / 5 for text in completions]
