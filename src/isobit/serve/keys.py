"""The tokens by which clients may use a server: a file of mode 600 with one in each line, a tenant
each.

They are compared in constant time. Left out: permissions, which are the same for all tenants,
except that the first one sees the server's counters of all.
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
"""The tenant of the first token, which sees the server's counters of all tenants."""
_SHORTEST, _MOST_BYTES = 16, 1 << 16
_WORD = re.compile(r"[\x21-\x7e]+")


def default_file() -> Path:
    """Return the path of the file with the token, for a server that is given no file."""
    state = folder_of_user("XDG_STATE_HOME", ".local", "state")
    return state / "isobit" / "serve-token"


def read_or_make(path: Path, option: str = "--token") -> tuple[tuple[str, ...], bool]:
    """Return (the tokens of a file, which an `option` names; whether the file was made now, with a
    random token). Raises IsobitError for a file that others may read or replace, one that cannot be
    read or made, and tokens that are too short."""
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
    """Return a state's names of tenants, by tenant: each is a hash of the tenant's token, so that
    it does not depend on the token's line."""
    return {
        str(line): hashlib.sha256(token.encode()).hexdigest()[:32]
        for line, token in enumerate(tokens)
    }


def tenant_of(authorization: bytes, key: bytes, tokens: tuple[str, ...]) -> str | None:
    """Return the tenant whose token is in the header `Authorization`, or else in `X-Api-Key`; None:
    no tenant's is. All tokens are compared, in constant time."""
    credential = authorization[7:] if authorization[:7].lower() == b"bearer " else key
    equal = [hmac.compare_digest(credential, token.encode()) for token in tokens]
    return str(equal.index(True)) if True in equal else None
