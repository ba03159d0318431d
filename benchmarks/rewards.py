"""The reward of the step benchmark, the same function for every contestant."""


def digits(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """The share of digits among five characters."""
    return [sum(c.isdigit() for c in text) / 5 for text in completions]
