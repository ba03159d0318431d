import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from isobit.engine.engine import Engine
from isobit.engine.stopping import StopStrings, cut
from isobit.engine.types import Completion, Sampling
from isobit.model.text.tokenizer import Tokenizer
from tests.models import ALPHABET, STORIES

from .helpers import tiny

MakeEngine = Callable[..., Engine]
EOS = 2


@pytest.fixture
def spell(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Completion]:
    """Complete a prompt with a text of ours, whatever the model says, as far as the engine lets it
    go."""

    def run(text: str, ending: tuple[int, ...] = (), **sampling: object) -> Completion:
        model = tiny()
        script = [*model.tokenizer.encode(text), *ending]
        prompt = model.tokenizer.encode("ask:".replace(":", "?"))

        def draw(hidden, weight, draws, ops, source, cap):  # type: ignore[no-untyped-def]
            return torch.tensor([script[int(draws.keys[0, 3]) - len(prompt)]]), torch.zeros(1)

        monkeypatch.setattr("isobit.engine.runner.draw", draw)
        return make_engine(model).generate([prompt], Sampling(**sampling))[0][0]  # type: ignore[arg-type]

    return run


def test_the_text_ends_before_the_stop_string_and_the_tokens_with_it(
    spell: Callable[..., Completion],
) -> None:
    completion = spell("one two three", stop=("two",))
    assert completion.text == "one "
    assert tiny().tokenizer.decode(completion.token_ids) == "one two"
    assert len(completion.logprobs) == len(completion.token_ids) == 7
    assert completion.finish_reason == "stop"


def test_of_several_stop_strings_the_first_to_be_completed_counts(
    spell: Callable[..., Completion],
) -> None:
    assert spell("a bb ccc d", stop=("ccc", "bb", "x")).text == "a "
    # both end at the same token: the text ends before the one that begins first
    assert spell("a bcd", stop=("cd", "bcd")).text == "a "


def test_a_stop_string_may_be_the_first_token_and_may_end_in_a_space(
    spell: Callable[..., Completion],
) -> None:
    first = spell("xyz", stop=("x",))
    assert (first.text, len(first.token_ids), first.finish_reason) == ("", 1, "stop")
    assert spell("ab c d", stop=("c ",)).text == "ab "


def test_the_prompt_does_not_count(spell: Callable[..., Completion]) -> None:
    completion = spell("k?no", ending=(EOS,), stop=("ask?", "sk?no"))
    assert (completion.text, completion.finish_reason) == ("k?no", "stop")


def test_end_of_sequence(spell: Callable[..., Completion]) -> None:
    completion = spell("done", ending=(EOS,))
    assert (completion.text, completion.finish_reason) == ("done", "stop")
    assert completion.token_ids[-1] == EOS
    assert len(completion.token_ids) == 5


def test_ignored_end_of_sequence_goes_on_to_the_length(spell: Callable[..., Completion]) -> None:
    completion = spell("do", ending=(EOS, EOS, 5, 6), ignore_eos=True, max_new_tokens=6)
    assert completion.token_ids[2:4] == [EOS, EOS]
    assert (len(completion.token_ids), completion.finish_reason) == (6, "length")


def test_length_and_stop_at_the_same_token_is_a_stop(spell: Callable[..., Completion]) -> None:
    assert spell("abcdef", max_new_tokens=4).finish_reason == "length"
    assert spell("abcdef", max_new_tokens=4).text == "abcd"
    assert spell("abcdef", max_new_tokens=4, stop=("d",)).finish_reason == "stop"
    assert spell("abc", ending=(EOS,), max_new_tokens=4).finish_reason == "stop"


@pytest.mark.slow
def test_the_models_context_is_a_length(spell: Callable[..., Completion]) -> None:
    completion = spell("a" * 100, max_new_tokens=1000)
    assert (len(completion.token_ids), completion.finish_reason) == (96 - 4, "length")


def test_cut() -> None:
    assert cut("one two", ()) == "one two"
    assert cut("one two", ("three",)) == "one two"
    assert cut("one two", ("two", "ne")) == "o"


def byte_tokenizer() -> Tokenizer:
    """A token a byte, so that characters take several."""
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fast = FastTokenizer(models.BPE(vocabulary, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    return Tokenizer(fast, {}, [], None)


def fallback_tokenizer() -> Tokenizer:
    """A token for each printable character, and <0xE2> and the like for the bytes of all others, as
    Llama 2 has them: a decoder writes bytes next to one another together, and U+FFFD for each where
    one is wrong."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(33, 127)), "▁"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    fast = FastTokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return Tokenizer(fast, {}, [], None)


TOKENIZERS = {
    "characters": Tokenizer.characters(ALPHABET),
    "bytes": byte_tokenizer(),
    "fallback": fallback_tokenizer(),
}
if STORIES.is_dir():
    TOKENIZERS["stories"] = Tokenizer.load(STORIES)
TEXTS = [
    "Once upon a time, there was a girl. ",
    "\n\n",
    "naïve → 😀é",
    "one two  three",
    "a b c\t",
    "12+34=46.",
]


def first_by_definition(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], stop: tuple[str, ...]
) -> int | None:
    for end in range(1, len(ids) + 1):
        if any(text in tokenizer.decode_completion(prompt, ids[:end]) for text in stop):
            return end
    return None


def first_found(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], stop: tuple[str, ...]
) -> int | None:
    strings = StopStrings(stop, tokenizer, tokenizer.vocab_size)
    for end in range(1, len(ids) + 1):
        if strings.may_end(ids[end - 1]) and strings.found(prompt, ids[:end]):
            return end
    return None


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.data(), st.sampled_from(sorted(TOKENIZERS)))
def test_stop_strings_are_found_at_the_token_that_completes_them(
    data: st.DataObject, name: str
) -> None:
    """Against the definition, which decodes everything after every token."""
    tokenizer = TOKENIZERS[name]
    pieces = data.draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3))
    written = "".join(pieces)
    if name == "characters":
        written = "".join(symbol for symbol in written.lower() if symbol in ALPHABET)
    ids = tokenizer.encode(written, add_special=False)[:90]
    noise = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6))
    ids = ids[: len(ids) // 2] + noise + ids[len(ids) // 2 :]
    prompt = tokenizer.encode("hi", add_special=False)
    text = tokenizer.decode_completion(prompt, ids)
    if not text:
        return
    begin = data.draw(st.integers(0, len(text) - 1))
    stop = (text[begin : begin + data.draw(st.integers(1, 6))], "zzzz")
    assert first_found(tokenizer, prompt, ids, stop) == first_by_definition(
        tokenizer, prompt, ids, stop
    )


@pytest.mark.parametrize(
    ("before", "stop", "after"),
    [
        ("→é" * 20, "→ü→", []),  # the last tokens begin inside a character
        ("→" + "😀é" * 12, "😀éa b", []),
        ("→" + "😀" * 30, "。", []),
        ("", "\ufffd" * 3, [0xF0, 0xD9, 0x69]),  # the third is an i by itself
        ("", "\ufffdb", [0xFF, *"→".encode() * 16, "b"]),  # one wrong byte makes all others wrong
    ],
    ids=["two and three", "four and two", "four", "a byte that is text", "all wrong"],
)
def test_a_stop_string_after_many_bytes_is_found_at_once(
    before: str, stop: str, after: list[int | str]
) -> None:
    """Bytes next to one another are decoded together: a part of them says something else."""
    tokenizer = TOKENIZERS["fallback"]
    names = [one if isinstance(one, str) else f"<0x{one:02X}>" for one in after]
    ids = tokenizer.encode(f"x{before}", add_special=False)
    ids += [tokenizer.fast.token_to_id(name) for name in names] or tokenizer.encode(
        stop, add_special=False
    )
    ids += tokenizer.encode(" c", add_special=False)
    assert first_by_definition(tokenizer, [], ids, (stop,)) == len(ids) - 2
    assert first_found(tokenizer, [], ids, (stop,)) == len(ids) - 2


def test_a_stop_string_is_searched_for_in_time_that_grows_with_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens decoded for each of a long text, whose every token could end the stop string; the
    control searches in all that is there."""
    decoded = []
    decode = Tokenizer.decode
    monkeypatch.setattr(
        Tokenizer, "decode", lambda self, ids, **_: decoded.append(len(ids)) or decode(self, ids)
    )
    tokenizer, stop = TOKENIZERS["bytes"], ("xx ",)
    ids = tokenizer.encode("no more " * 250, add_special=False)

    def cost(count: int) -> float:
        decoded.clear()
        assert first_found(tokenizer, [], ids[:count], stop) is None
        return sum(decoded) / count

    assert cost(2000) < 1.1 * cost(500)
    monkeypatch.setattr("isobit.engine.stopping._Finder._reaches", lambda *_: False)
    assert cost(2000) > 3 * cost(500)


def test_stories_tokenizer_is_among_them(stories: Path) -> None:
    assert "stories" in TOKENIZERS


def special_tokenizer() -> Tokenizer:
    """Characters, and special tokens of which one is another's beginning."""
    made = Tokenizer.characters(ALPHABET + "<|>")
    made.fast.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in ("<|e|>", "<|e|>x", "#")]
    )
    return Tokenizer(made.fast, made.settings, made.eos_ids, None)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_special_tokens_are_found_in_stop_strings(data: st.DataObject) -> None:
    """Against the definition: a stop string that spells one is looked for in the text that has
    them, and what is left of the text ends where it begins."""
    tokenizer = special_tokenizer()
    words = ("<|e|>", "<|e|>x", "#", "a", "b", "x", " ", "<", "one two ")
    ids = tokenizer.encode(
        "".join(data.draw(st.lists(st.sampled_from(words), min_size=1, max_size=30)))
    )
    prompt = tokenizer.encode("hi#<|e|>")
    special = data.draw(
        st.lists(
            st.sampled_from(("<|e|>", "#", "a<|e|>", "<|e|>b", "##", "b#a", " #", "#x")), max_size=2
        )
    )
    plain = data.draw(st.lists(st.sampled_from(("ab", "x", "one", "<")), max_size=2))
    stop = (*special, *plain)

    def wholes(end: int) -> list[tuple[str, tuple[str, ...]]]:
        texts = (tokenizer.decode(ids[:end], special=True), tokenizer.decode(ids[:end]))
        return [(texts[0], tuple(special)), (texts[1], tuple(plain))]

    ends = range(1, len(ids) + 1)
    expected = next(
        (e for e in ends if any(s in text for text, stops in wholes(e) for s in stops)), None
    )
    if not stop:
        return
    assert first_found(tokenizer, prompt, ids, stop) == expected
    ids = ids[: expected or len(ids)]
    (marked, _), (text, _) = wholes(len(ids))
    shown = StopStrings(stop, tokenizer, tokenizer.vocab_size).cut(prompt, ids, text)
    left = [marked[:place] for place in (marked.find(s) for s in special) if place >= 0]
    cuts = [re.sub(r"<\|e\|>x|<\|e\|>|#", "", each) for each in left] + [cut(text, tuple(plain))]
    assert shown == min(cuts, key=len)


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("stop", [("</s>",), ("two</s>",), ("o</s>", "zz"), ("</s>", "one </s>")])
def test_a_special_token_ends_a_completion_as_any_stop_string_does(
    spell: Callable[..., Completion], stop: tuple[str, ...], ignore_eos: bool
) -> None:
    """The token is the last one, and the text ends before the string; also where it would end a
    sequence anyway."""
    completion = spell("one two", ending=(EOS, 5, 6), stop=stop, ignore_eos=ignore_eos)
    assert completion.text == {"</s>": "one two", "two</s>": "one ", "o</s>": "one tw"}[stop[0]]
    assert completion.token_ids == [*tiny().tokenizer.encode("one two"), EOS]
    assert completion.finish_reason == "stop"


def test_negative_control_part_of_a_special_token_is_no_text(
    spell: Callable[..., Completion],
) -> None:
    completion = spell(
        "one two", ending=(EOS, 5, 6), stop=("/s", "s>"), ignore_eos=True, max_new_tokens=10
    )
    assert (len(completion.token_ids), completion.finish_reason) == (10, "length")
