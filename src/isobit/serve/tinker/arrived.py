"""Requests to training runs in the form in which they are kept, and their kept responses."""

import hashlib
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from isobit.serve.state.rows import Answer


@dataclass(frozen=True)
class Before:
    """A mark on a request that an earlier server has taken; `done`: and has answered too."""

    done: bool


def taken_before(request: Request) -> Before | None:
    """Return the mark of a request that an earlier server has taken; None: the request is new."""
    return getattr(request.state, "before", None)


def as_it_came(request: Request) -> tuple[str, bytes]:
    """Return a request's (kind, body) as they are kept. Behind the kind stand the body's encoding
    and the digest by which the request is recognized when it comes again:
    `KIND:ENCODING:DIGEST`."""
    kind = request.url.path.rpartition("/")[2]
    encoding = request.headers.get("content-encoding", "identity")
    digest = getattr(request.state, "digest", "") or hashlib.sha256(request.state.body).hexdigest()
    return f"{kind}:{encoding}:{digest}", request.state.body


def digest_of(kind: str) -> str:
    """Return the digest in a kept `kind`, as `as_it_came` returns it; empty: the kind is of an
    older server, which kept no digests."""
    return kind.rpartition(":")[2] if kind.count(":") == 2 else ""


def answer_of(response: Response) -> Answer:
    """Return a response's status, media type and body, as they are kept."""
    return Answer(response.status_code, response.media_type or "", bytes(response.body))
