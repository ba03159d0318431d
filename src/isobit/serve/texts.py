"""How long a stranger's text may be, asked before it is encoded."""

from isobit.model.text.tokenizer import Check, Tokenizer
from isobit.serve.requests import BadRequest

_MOST_CHARACTERS = 1 << 20  # that are encoded to be counted


def check_prompt(tokenizer: Tokenizer, positions: int, key: str) -> Check:
    """Refuse a text that is longer than any prompt."""

    def check(text: str) -> None:
        if tokenizer.surely_longer(text, positions):
            raise BadRequest(
                f"{key}: a text of {len(text):,} characters has more tokens than the model's "
                f"context of {positions:,}; send a shorter one",
                key,
            )

    return check


def check_counted(positions: int) -> Check:
    """Refuse a text that is too long to be counted in tokens."""
    most = max(_MOST_CHARACTERS, 16 * positions)

    def check(text: str) -> None:
        if len(text) > most:
            raise BadRequest(
                f"prompt: at most {most:,} characters are encoded at a time, got {len(text):,}; "
                "send them in pieces",
                "prompt",
            )

    return check
