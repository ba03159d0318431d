"""The ids of special tokens in a config.json, each one number, a list or nothing."""

from collections.abc import Mapping
from typing import Any

from isobit.errors import IsobitError


def token_ids(value: Any) -> tuple[int, ...]:
    """Return the token ids in a config value: one id, a list of them, or nothing. Raises ValueError
    for anything else."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ValueError(f"{token!r:.80} is not a token id")
    return tuple(ids)


def special_ids(
    values: Mapping[str, Any], where: str, vocabulary: int
) -> dict[str, tuple[int, ...]]:
    """Return the ids of `bos`, `eos` and `pad`. Raises IsobitError for an invalid token id, and for
    an `eos` outside the vocabulary; of `pad`, which nothing reads, -1 is usual."""
    try:
        ids = {key: token_ids(values.get(f"{key}_token_id")) for key in ("bos", "eos", "pad")}
    except ValueError as error:
        raise IsobitError(f"{where}: a value has the wrong type: {error}") from None
    if outside := [token for token in ids["eos"] if not 0 <= token < vocabulary]:
        raise IsobitError(
            f"{where}: eos_token_id {outside[0]} is not in the vocabulary: vocab_size is "
            f"{vocabulary}, so ids are from 0 to {vocabulary - 1}"
        )
    return ids


def first_id(ids: tuple[int, ...]) -> int | None:
    """Return the first of some token ids; None without any."""
    return ids[0] if ids else None
