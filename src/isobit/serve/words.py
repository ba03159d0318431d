"""How single tokens are called in answers, and the bytes and characters of text that each adds."""

from collections.abc import Sequence

from isobit.model.text.tokenizer import Tokenizer

LOST = "\ufffd"
"""What stands in a text for bytes that are no whole character."""
_PLAIN = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTES = {chr(byte): byte for byte in _PLAIN} | {
    chr(256 + index): byte for index, byte in enumerate(sorted({*range(256)} - {*_PLAIN}))
}
"""How vocabularies of bytes write each, as GPT-2 did."""


def token_words(tokenizer: Tokenizer, before: int, tokens: Sequence[int], by_id: bool) -> list[str]:
    """Return the names of tokens: the text that each adds to the one in front of it, or
    `token_id:5`."""
    if by_id:
        return [f"token_id:{token}" for token in tokens]
    pairs = zip((before, *tokens), tokens)
    return [tokenizer.decode_completion([last], [token], special=True) for last, token in pairs]


def prompt_words(tokenizer: Tokenizer, tokens: Sequence[int], by_id: bool) -> list[str]:
    """Return the names of a prompt's tokens, whose first one has no token in front."""
    first = f"token_id:{tokens[0]}" if by_id else tokenizer.decode(tokens[:1], special=True)
    return [first, *token_words(tokenizer, tokens[0], tokens[1:], by_id)]


def token_bytes(tokenizer: Tokenizer, token: int, word: str) -> bytes | None:
    """Return the bytes of a token that is called by this text; for a part of a character its own
    bytes, which together make the character; None: they are not known."""
    if word and LOST not in word:
        return word.encode()
    name = tokenizer.fast.id_to_token(token) or ""
    if tokenizer.is_byte(token):
        return bytes.fromhex(name[3:5])  # <0xE2>
    if all(character in _BYTES for character in name):
        content = bytes(_BYTES[character] for character in name)
        if content.decode(errors="replace") == tokenizer.decode([token]):
            return content
    return None if word else b""


def text_sizes(tokenizer: Tokenizer, tokens: Sequence[int], words: Sequence[str]) -> list[int]:
    """Return the number of characters that begin in each token with these texts. A special token
    has no text."""

    def size(token: int, word: str) -> int:
        if tokenizer.is_special(token):
            return 0
        content = token_bytes(tokenizer, token, word) if LOST in word else None
        if content is None:
            return len(word)
        return sum(byte & 0xC0 != 0x80 for byte in content)  # the others go on with a character

    return [size(token, word) for token, word in zip(tokens, words, strict=True)]
