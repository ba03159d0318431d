"""The pieces of a streamed text, joined, are the completion's text, and no piece is taken back."""

import random

import pytest

from isobit.engine.stopping import StopStrings
from isobit.model.text.tokenizer import Tokenizer
from isobit.serve.streams import TextStream
from tests.models import STORIES

from .helpers import ALPHABET

STOPS = [
    (),
    ("a",),
    ("\n",),
    ("ed", "was"),
    (" to",),
    ("</s>",),
    ("e</s>",),
    ("</s>a",),
    ("…", "the end"),
    ("~</s>",),
]


def tokenizers() -> list[Tokenizer]:
    found = [Tokenizer.characters(ALPHABET)]
    return [*found, Tokenizer.load(STORIES)] if STORIES.exists() else found


def sampled(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], stop: tuple[str, ...]
) -> tuple[list[int], str]:
    """The tokens up to where an engine would end, and the completion's text."""
    finder = StopStrings(stop, tokenizer, tokenizer.vocab_size) if stop else None
    for count in range(1, len(ids) + 1):
        if (
            finder is not None
            and finder.may_end(ids[count - 1])
            and finder.found(prompt, ids[:count])
        ):
            ids = ids[:count]
            break
        if ids[count - 1] in tokenizer.eos_ids and stop == ():
            ids = ids[:count]
            break
    visible = ids[:-1] if ids[-1] in tokenizer.eos_ids else ids
    text = tokenizer.decode_completion(prompt, visible)
    return ids, text if finder is None else finder.cut(prompt, ids, text)


def joined(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], stop: tuple[str, ...], text: str
) -> list[str]:
    stream = TextStream(tokenizer, prompt, stop, ends=tokenizer.eos_ids)
    pieces = [stream.feed(token) for token in ids]
    return [*pieces, stream.rest(text)]


@pytest.mark.parametrize("stop", STOPS, ids=repr)
def test_pieces_are_the_text(stop: tuple[str, ...]) -> None:
    """Random tokens: bytes that are no character, special tokens, spaces, and what a model would
    write."""
    for tokenizer in tokenizers():
        size, rng = tokenizer.vocab_size, random.Random(5)
        for case in range(150):
            prompt = [rng.randrange(size) for _ in range(rng.randrange(1, 8))]
            low = 0 if case % 2 else min(259, size // 2)  # in the second half no bytes
            ids, text = sampled(
                tokenizer, prompt, [rng.randrange(low, size) for _ in range(40)], stop
            )
            pieces = joined(tokenizer, prompt, ids, stop, text)
            assert "".join(pieces) == text, (prompt, ids)


def test_text_comes_as_it_is_sampled() -> None:
    """The control: with a stop string, what may begin it is held back."""
    tokenizer = Tokenizer.characters(ALPHABET)
    prompt, ids = tokenizer.encode("one "), tokenizer.encode("two stops stop")
    text = "two stops stop"
    assert joined(tokenizer, prompt, ids, (), text) == [*text, ""]
    ids, text = sampled(tokenizer, prompt, ids, ("stop!",))
    held = ["", "", "", "", "stop", "s ", "", "", "", "", "stop"]
    assert joined(tokenizer, prompt, ids, ("stop!",), text) == [*"two ", *held]


def test_negative_control_text_that_is_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobit.serve.streams.overlap", lambda text, string: 0)
    with pytest.raises(AssertionError):
        test_pieces_are_the_text(("ed", "was"))
    if STORIES.exists():
        monkeypatch.undo()
        monkeypatch.setattr("isobit.serve.streams.LOST", "nothing")
        monkeypatch.setattr(Tokenizer, "is_byte", lambda self, token: False)
        with pytest.raises(AssertionError):
            test_pieces_are_the_text(())
