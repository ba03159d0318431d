"""How single tokens are called in answers."""

from collections.abc import Sequence

from isobit.model.text.tokenizer import Tokenizer


def token_words(tokenizer: Tokenizer, before: int, tokens: Sequence[int], by_id: bool) -> list[str]:
    """How tokens are called: by the text that each adds to the one in front of it, or
    `token_id:5`."""
    if by_id:
        return [f"token_id:{token}" for token in tokens]
    pairs = zip((before, *tokens), tokens)
    return [tokenizer.decode_completion([last], [token], special=True) for last, token in pairs]


def prompt_words(tokenizer: Tokenizer, tokens: Sequence[int], by_id: bool) -> list[str]:
    """How those of a prompt are called, in front of whose first one nothing stands."""
    first = f"token_id:{tokens[0]}" if by_id else tokenizer.decode(tokens[:1], special=True)
    return [first, *token_words(tokenizer, tokens[0], tokens[1:], by_id)]
