"""Bounds on the length of a client's text, checked before the text is encoded."""

from isobit.model.text.tokenizer import Check, Tokenizer
from isobit.serve.requests import BadRequest, too_long

_MOST_CHARACTERS = 1 << 20  # of a text that is encoded to count its tokens


def check_prompt(tokenizer: Tokenizer, positions: int, key: str) -> Check:
    """Return a check that raises BadRequest, with this `key`, for a text that surely has more
    tokens than a context of `positions`."""

    def check(text: str) -> None:
        if tokenizer.surely_longer(text, positions):
            raise too_long(
                f"{key}: a text of {len(text):,} characters has more tokens than the model's maximum "
                f"context length of {positions:,}; send a shorter one",
                key,
            )

    return check


def check_counted(positions: int) -> Check:
    """Return a check that raises BadRequest for a text that is too long to count its tokens; the
    bound grows with `positions`, the model's context."""
    most = max(_MOST_CHARACTERS, 16 * positions)

    def check(text: str) -> None:
        if len(text) > most:
            raise BadRequest(
                f"prompt: at most {most:,} characters are encoded at a time, got {len(text):,}; "
                "send them in pieces",
                "prompt",
            )

    return check
