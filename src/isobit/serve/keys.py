"""The tokens by which clients may use a server: a file of mode 600 with one in each line, a tenant
each.

They are compared in constant time. Left out: what a tenant may do, which is the same for all, but
that the first one sees what the server counts of all.
"""

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path

from isobit.data.foreign import read_bytes, reason_of
from isobit.errors import IsobitError
from isobit.run.durable import make_directory
from isobit.run.own_folder import replaceable
from isobit.run.surroundings import folder_of_user

OPERATOR = "0"
"""The tenant of the first token, who sees what the server counts of all."""
_SHORTEST, _MOST_BYTES = 16, 1 << 16
_WORD = re.compile(r"[\x21-\x7e]+")


def default_file() -> Path:
    """Where a token is kept unless a file is given."""
    state = folder_of_user("XDG_STATE_HOME", ".local", "state")
    return state / "isobit" / "serve-token"


def read_or_make(path: Path, option: str = "--token") -> tuple[tuple[str, ...], bool]:
    """The tokens of a file, which an `option` names, and whether it was made now, with a random
    one. Raises IsobitError for a file that others may read or replace, one that cannot be read or
    made, and tokens that are too short."""
    try:
        make_directory(path.parent, 0o700)
        if (at := replaceable(path)) is not None:
            raise IsobitError(
                f"{option} {path}: others may put another file in its place, at {at}; keep it in a "
                "folder that only you may write"
            )
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _read(path, option), False
    except OSError as error:
        raise IsobitError(f"{option} {path}: cannot be made: {reason_of(error)}") from None
    token = f"tml-{secrets.token_urlsafe(32)}"  # as keys of Tinker's client begin
    with os.fdopen(file, "w") as opened:
        opened.write(token + "\n")
    return (token,), True


def _read(path: Path, option: str) -> tuple[str, ...]:
    try:
        mode = path.stat().st_mode
        lines = read_bytes(path, _MOST_BYTES).decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise IsobitError(f"{option} {path}: cannot be read: {reason_of(error)}") from None
    if mode & 0o077:
        raise IsobitError(f"{option} {path}: others may read it; run chmod 600 {path}")
    tokens = tuple(line.strip() for line in lines if line.strip())
    if not tokens or any(len(token) < _SHORTEST or not _WORD.fullmatch(token) for token in tokens):
        raise IsobitError(
            f"{option} {path}: expected in each line a token of at least {_SHORTEST} characters "
            "without spaces"
        )
    return tokens


def owners_of(tokens: tuple[str, ...]) -> dict[str, str]:
    """By tenants, what a state calls them: a tenant is who has the token, in whatever line."""
    return {
        str(place): hashlib.sha256(token.encode()).hexdigest()[:32]
        for place, token in enumerate(tokens)
    }


def tenant_of(authorization: bytes, key: bytes, tokens: tuple[str, ...]) -> str | None:
    """Whose headers `Authorization` and `X-Api-Key` these are; None: nobody's. All tokens are
    compared, in constant time."""
    given = authorization[7:] if authorization[:7].lower() == b"bearer " else key
    equal = [hmac.compare_digest(given, token.encode()) for token in tokens]
    return str(equal.index(True)) if True in equal else None
