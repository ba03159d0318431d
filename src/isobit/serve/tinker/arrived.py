"""A request to a training run as it arrives and is kept, and what is kept of its response."""

import hashlib
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from isobit.serve.state.rows import Answer


@dataclass(frozen=True)
class Before:
    """What an earlier server did with a request: took it, or has `done` it too."""

    done: bool


def taken_before(request: Request) -> Before | None:
    """Return what an earlier server did with a request; None: it is new."""
    return getattr(request.state, "before", None)


def as_it_came(request: Request) -> tuple[str, bytes]:
    """A request's kind, and its body; behind the kind stand the body's encoding, and the digest by
    which it is known again."""
    kind = request.url.path.rpartition("/")[2]
    encoding = request.headers.get("content-encoding", "identity")
    digest = getattr(request.state, "digest", "") or hashlib.sha256(request.state.body).hexdigest()
    return f"{kind}:{encoding}:{digest}", request.state.body


def digest_of(kind: str) -> str:
    """Return the digest in what `as_it_came` has returned; empty: an older server has kept none."""
    return kind.rpartition(":")[2] if kind.count(":") == 2 else ""


def answer_of(response: Response) -> Answer:
    """What is kept of a response."""
    return Answer(response.status_code, response.media_type or "", bytes(response.body))
