"""Tokens that files beside tokenizer.json add: ids and flags of `transformers`, also after
`save`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from isobit.errors import IsobitError
from isobit.model import Tokenizer
from tests.loaders.cases import byte_tokenizer

CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{{ "
    "image_token }}"
)
TEXTS = (
    "a<one>b",
    "a <two> b",
    "x<three>y<one>",
    " <|im_end|> <three>  <TWO>",
    "one<four>two",
    "a<|endoftext|><pad>",
)


def entry(content: str, **flags: bool) -> dict[str, Any]:
    kinds = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return {"content": content, **{kind: flags.get(kind, False) for kind in kinds}}


def write(folder: Path, settings: dict[str, Any] | None = None, **files: Any) -> int:
    """A tokenizer of which only tokenizer.json knows, and files beside it; returns its next free
    id."""
    size = byte_tokenizer(folder, None).vocab_size
    own = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **(settings or {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    (folder / "chat_template.jinja").write_text(CHAT)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return size


def alike(folder: Path) -> Tokenizer:
    """The tokenizer, which does what transformers' does: ids, texts, chats, and what is left out of
    a text."""
    mine, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert mine.fast.get_vocab() == theirs.get_vocab()
    for text in TEXTS:
        ids = mine.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert mine.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    chat = [{"role": "user", "content": "a<one>b"}]
    wanted = theirs.apply_chat_template(chat, tokenize=False)
    assert mine.render_chat(chat, False) == wanted
    assert {i: repr(t) for i, t in mine.fast.get_added_tokens_decoder().items()} == {
        i: repr(t) for i, t in theirs.added_tokens_decoder.items()
    }
    if (eos := theirs.eos_token_id) is not None:
        assert eos in mine.eos_ids
    return mine


def test_tokens_of_the_decoder(tmp_path: Path) -> None:
    size = write(tmp_path)
    tokens = [
        entry("<one>", special=True), entry("<two>", lstrip=True, rstrip=True),
        entry("<three>", normalized=True),
        entry("four", single_word=True), entry("<TWO>", special=True, normalized=True),
    ]  # fmt: skip
    settings = {
        "added_tokens_decoder": {str(size + i): token for i, token in enumerate(tokens)},
        "pad_token": "<pad>",
    }
    write(tmp_path, settings)
    mine = alike(tmp_path)
    assert mine.fast.token_to_id("<one>") == size
    assert mine.is_special(size)
    assert not mine.is_special(size + 1)
    assert mine.fast.token_to_id("<pad>") == size + len(tokens)


def test_the_flags_of_the_decoder_count(tmp_path: Path) -> None:
    size = write(tmp_path)
    decoder = {
        size - 1: entry("<|im_end|>"),
        size - 2: entry("<|im_start|>", special=True, lstrip=True),
    }
    write(tmp_path, {"added_tokens_decoder": decoder})
    assert not alike(tmp_path).is_special(size - 1)


@pytest.mark.parametrize("key", ["extra_special_tokens", "additional_special_tokens"])
def test_extra_special_tokens(tmp_path: Path, key: str) -> None:
    size = write(
        tmp_path, {key: ["<one>", "<|im_start|>", "<three>", "<one>"], "bos_token": "<bos>"}
    )
    mine = alike(tmp_path)
    assert [mine.fast.token_to_id(name) for name in ("<bos>", "<one>", "<three>")] == [
        size,
        size + 1,
        size + 2,
    ]
    assert mine.decode(mine.encode("a<one>b")) == "ab"


def test_tokens_with_names_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, {"image_token": "<one>"})
    assert alike(tmp_path).is_special(alike(tmp_path).fast.token_to_id("<one>"))
    write(tmp_path, {"extra_special_tokens": {"image_token": "<one>", "other_token": "<two>"}})
    assert alike(tmp_path).render_chat([{"role": "user", "content": "a"}]) == "a<one>"


def test_older_files(tmp_path: Path) -> None:
    size = write(tmp_path)
    decoded = Tokenizer.load(tmp_path).fast.get_added_tokens_decoder()
    added = {token.content: i for i, token in decoded.items()} | {"<one>": size, "<two>": size + 1}
    named = {
        "bos_token": "<|endoftext|>", "eos_token": entry("<|im_end|>", lstrip=True),
        "unk_token": "<two>",
        "additional_special_tokens": ["<three>"],
    }  # fmt: skip
    named["eos_token"].pop("special")  # type: ignore[attr-defined]
    write(tmp_path, {"eos_token": "<|im_start|>"}, added_tokens=added, special_tokens_map=named)
    mine = alike(tmp_path)
    assert mine.render_chat([{"role": "user", "content": "a"}]) == "<|endoftext|>a<|im_end|>"
    assert [mine.is_special(size), mine.is_special(size + 1), mine.is_special(size + 2)] == [
        False,
        True,
        True,
    ]


def test_older_files_do_not_count_beside_a_decoder(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"added_tokens_decoder": {}},
        added_tokens={"<one>": 9999},
        special_tokens_map={"eos_token": "<x>"},
    )
    assert alike(tmp_path).eos_ids == ()


@pytest.mark.parametrize("saved_by", ["isobit", "transformers"])
def test_ids_stay_where_they_are_saved(tmp_path: Path, saved_by: str) -> None:
    size = write(tmp_path / "a")
    added = {"<one>": size, "<two>": size + 1}
    named = {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "additional_special_tokens": ["<three>"],
    }
    write(tmp_path / "a", {}, added_tokens=added, special_tokens_map=named)
    before = alike(tmp_path / "a")
    (tmp_path / "b").mkdir()
    if saved_by == "isobit":
        before.save(tmp_path / "b")
    else:
        transformers.AutoTokenizer.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    after = alike(tmp_path / "b")
    assert before.fast.get_vocab() == after.fast.get_vocab()
    tokens, again = (each.fast.get_added_tokens_decoder() for each in (before, after))
    assert {i: repr(token) for i, token in tokens.items()} == {
        i: repr(token) for i, token in again.items()
    }
    assert before.eos_ids == after.eos_ids
    assert before.render_chat([{"role": "user", "content": "a"}]) == after.render_chat(
        [{"role": "user", "content": "a"}]
    )


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (
            {5: entry("<one>")},
            "gives token '<one>' the id 5, but with the vocabulary of tokenizer.json it is SIZE",
        ),
        ({"9000": entry("<one>")}, "'<one>' the id 9000, but"),
        (
            {"SIZE": entry("<one>"), "NEXT": entry("<one>")},
            "'<one>' the id NEXT, but .* it is SIZE",
        ),
        ({"SIZE": "<one>"}, "'<one>' is not a token with its flags"),
        ({"SIZE": entry("<one>") | {"lstrip": 3}}, "is not a token with its flags"),
        ({"first": entry("<one>")}, "'first' is not a token id"),
        ([], "expected tokens by id, got"),
    ],
)
def test_what_disagrees_is_refused(tmp_path: Path, decoder: Any, message: str) -> None:
    """transformers gives such tokens other ids than their embeddings have, without a word."""
    size = write(tmp_path)
    known = {"SIZE": str(size), "NEXT": str(size + 1)}
    if isinstance(decoder, dict):
        decoder = {known.get(str(key), key): value for key, value in decoder.items()}
    write(tmp_path, {"added_tokens_decoder": decoder})
    for name, value in known.items():
        message = message.replace(name, value)
    with pytest.raises(
        IsobitError, match=re.escape(str(tmp_path / "tokenizer_config.json")) + f".*{message}"
    ):
        Tokenizer.load(tmp_path)


def test_added_tokens_that_disagree_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {}, added_tokens={"<one>": 3})
    with pytest.raises(IsobitError, match=r"added_tokens.json gives token '<one>' the id 3, but"):
        Tokenizer.load(tmp_path)
