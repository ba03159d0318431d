"""Tokens that a model directory adds to its tokenizer.json: names, ids and flags as `transformers`
gives them.

Besides tokenizer.json, tokens are named by `added_tokens_decoder` and `extra_special_tokens` (older:
`additional_special_tokens`) of tokenizer_config.json, by its `eos_token` and others of the kind,
and, where it has no `added_tokens_decoder`, by added_tokens.json and special_tokens_map.json. What
the vocabulary does not have gets the next ids, in the order of the ids that are given; where those
are others, embeddings would be of other tokens, so that is refused. Left out: tokenizer classes
that make tokens of their own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from isobit.data.foreign import exists
from isobit.errors import IsobitError, brief
from isobit.model.hub.checkpoint import read_json

TOKEN_SETTINGS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_DECODER = "added_tokens_decoder"
_EXTRA = "extra_special_tokens"
_OLD_EXTRA = "additional_special_tokens"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_settings(directory: Path) -> dict[str, Any]:
    """Return tokenizer_config.json; the entries of an older special_tokens_map.json replace its
    own."""
    path = directory / "tokenizer_config.json"
    settings = read_json(path) if exists(path) else {}
    for name in TOKEN_SETTINGS:
        if not isinstance(settings.get(name), (str, Mapping, type(None))):
            raise IsobitError(
                f"{path}: {name}: expected the token's text, got {brief(repr(settings[name]))}"
            )
    older = directory / "special_tokens_map.json"
    if _DECODER in settings or not exists(older):
        return settings
    older_settings = read_json(older)
    if settings.get(_EXTRA) or settings.get(_OLD_EXTRA):
        older_settings.pop(_OLD_EXTRA, None)
    if (
        _EXTRA in older_settings
        and isinstance(settings.get(_EXTRA), list)
        and isinstance(older_settings[_EXTRA], list)
    ):
        older_settings[_EXTRA] = [
            *settings[_EXTRA],
            *(token for token in older_settings[_EXTRA] if token not in settings[_EXTRA]),
        ]
    return {**settings, **older_settings}


def named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens that have a name, such as `eos_token`, by which a chat template knows
    them."""
    named = {name: token_text(settings[name]) for name in TOKEN_SETTINGS if settings.get(name)}
    named |= {
        name: value
        for name, value in settings.items()
        if name.endswith("_token") and isinstance(value, str) and value
    }
    extra = settings.get(_EXTRA)
    if isinstance(extra, Mapping):
        named |= {str(name): token_text(value) for name, value in extra.items()}
    return {name: text for name, text in named.items() if text}


def token_text(token: Any) -> str:
    """Return a token as settings have it: its text, or a mapping with that as its content."""
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token or "")


def add_tokens(fast: FastTokenizer, settings: Mapping[str, Any], directory: Path) -> None:
    """Add the tokens that the directory names to its tokenizer. Raises IsobitError where a token
    would get another id than the directory gives it, and for an entry that is not a token."""
    declared, where = _declared(settings, directory)
    present = fast.get_added_tokens_decoder()
    present_tokens = {repr(token) for token in present.values()}
    known = {token.content for token in present.values()}
    named, adding = named_tokens(settings), list[AddedToken]()
    for index, token in sorted(declared.items()):
        if repr(token) not in present_tokens and (
            _DECODER in settings or index not in present
        ):  # which has its flags
            token.special = token.special or token.content in named.values()
            adding.append(token)
    known |= {token.content for token in adding}
    special_tokens = [*((settings.get(name), text) for name, text in named.items())]
    special_tokens += [(token, token_text(token)) for token in _extra(settings, directory)]
    for setting, text in special_tokens:
        if text and text not in known:
            known.add(text)
            adding.append(_special(setting, text))
    fast.add_tokens(adding)
    for index, token in sorted(declared.items()):
        if (actual := fast.token_to_id(token.content)) != index:
            raise IsobitError(
                f"{where} gives token {brief(token.content)!r} the id {brief(str(index))}, but "
                f"with the vocabulary of tokenizer.json it is {actual}; correct it there, or save "
                "the tokenizer anew with transformers"
            )


def _declared(settings: Mapping[str, Any], directory: Path) -> tuple[dict[int, AddedToken], Path]:
    """Return the tokens that are given with their ids, and the file that does."""
    where = directory / "tokenizer_config.json"
    if _DECODER in settings:
        decoder = settings[_DECODER]
        if not isinstance(decoder, Mapping):
            raise IsobitError(f"{where}: {_DECODER}: expected tokens by id, got {decoder!r:.80}")
        return {_id(where, index): _read(where, token) for index, token in decoder.items()}, where
    where = directory / "added_tokens.json"
    special = {token_text(settings.get(name)) for name in TOKEN_SETTINGS}
    special |= {token_text(token) for token in _extra(settings, directory)}
    return {
        _id(where, index): AddedToken(text, normalized=text not in special, special=text in special)
        for text, index in (read_json(where) if exists(where) else {}).items()
    }, where


def _id(where: Path, value: Any) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise IsobitError(f"{where}: {value!r:.80} is not a token id")
    return value


def _read(where: Path, value: Any) -> AddedToken:
    flags = (
        {name: value[name] for name in _FLAGS if name in value}
        if isinstance(value, Mapping)
        else {}
    )
    if (
        not isinstance(value, Mapping)
        or not isinstance(value.get("content"), str)
        or not _are_flags(flags)
    ):
        raise IsobitError(f"{where}: {_DECODER}: {value!r:.80} is not a token with its flags")
    return AddedToken(value["content"], **flags)


def _are_flags(values: Mapping[str, Any]) -> bool:
    return all(isinstance(value, bool) for value in values.values())


def _special(setting: Any, text: str) -> AddedToken:
    flags = (
        {name: setting[name] for name in _FLAGS if name in setting}
        if isinstance(setting, Mapping)
        else {}
    )
    return AddedToken(text, **{**(flags if _are_flags(flags) else {}), "special": True})


def _extra(settings: Mapping[str, Any], directory: Path) -> list[Any]:
    extra = settings.get(_EXTRA) or settings.get(_OLD_EXTRA) or []
    if isinstance(extra, Mapping):
        return []  # each has a name
    if not isinstance(extra, list):
        raise IsobitError(
            f"{directory / 'tokenizer_config.json'}: {_EXTRA}: expected a list, got {extra!r:.80}"
        )
    return extra
