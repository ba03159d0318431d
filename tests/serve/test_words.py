"""Log-probabilities of tokens that are parts of characters, special ones, and ones called by their
ids."""

from typing import Any

import pytest

from isobit.engine.types import Sampling
from isobit.model.text.tokenizer import Tokenizer
from isobit.serve.answers import Asked
from isobit.serve.protocol import TextRequest
from isobit.serve.words import text_sizes, token_words
from tests.engine.test_stopping import byte_tokenizer, fallback_tokenizer

from .helpers import ALPHABET

TEXT = "a\u00e9 \u2014b\U0001f600c"


def shown(tokenizer: Tokenizer, tokens: list[int], chat: bool = False, **asked: Any) -> Any:
    """Of an answer of these tokens behind a prompt of the first one of them."""
    keys = TextRequest(**asked)
    request = Asked("m", tokenizer, [tokens[:1]], Sampling(), chat, True, keys=keys)
    return request.shown(tokens[0], tokens[1:], [0.0] * (len(tokens) - 1), (), 1)


@pytest.mark.parametrize("made", [byte_tokenizer, fallback_tokenizer])
@pytest.mark.parametrize("by_id", [False, True])
def test_parts_of_characters(made: Any, by_id: bool) -> None:
    """Their bytes, joined, are the text's, and a character is counted once, in its first part."""
    tokenizer = made()
    tokens = tokenizer.encode(TEXT, add_special=False)
    assert len(tokens) > len(TEXT)
    content = shown(tokenizer, tokens, chat=True)["content"]
    assert b"".join(bytes(each["bytes"]) for each in content) == TEXT[1:].encode()
    offsets = shown(tokenizer, tokens, return_tokens_as_token_ids=by_id)["text_offset"]
    assert offsets == sorted(offsets)
    places = dict(zip(tokens[1:], offsets))
    for character in "bc":
        (token,) = tokenizer.encode(character, add_special=False)
        assert places[token] == TEXT.index(character)


def test_special_tokens_are_no_text_and_ids_have_its_offsets() -> None:
    tokenizer = Tokenizer.characters(ALPHABET)
    end = tokenizer.eos_ids[0]
    a, b = tokenizer.encode("ab", add_special=False)
    tokens = [a, end, b, end, b]
    plain = shown(tokenizer, tokens)
    assert plain["tokens"] == ["</s>", "b", "</s>", "b"]
    assert plain["text_offset"] == [1, 1, 2, 2]
    assert (
        shown(tokenizer, tokens, return_tokens_as_token_ids=True)["text_offset"]
        == plain["text_offset"]
    )
    by_id = shown(tokenizer, tokens, return_tokens_as_token_ids=True, chat=True)["content"][1]
    assert (by_id["token"], by_id["bytes"]) == (f"token_id:{b}", None)


def test_what_no_bytes_are_known_of_has_none() -> None:
    """A character that is the mark of lost bytes itself, in a vocabulary of characters."""
    tokenizer = Tokenizer.characters("ab\ufffd")
    a, lost = tokenizer.encode("a\ufffd", add_special=False)
    (only,) = shown(tokenizer, [a, lost], chat=True)["content"]
    assert (only["token"], only["bytes"]) == ("\ufffd", None)
    assert text_sizes(tokenizer, [lost], token_words(tokenizer, a, [lost], False)) == [1]
