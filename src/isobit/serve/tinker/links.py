"""Links to single files of a checkpoint, which need no token: Tinker's client fetches them without
one.

A link names a checkpoint by the state's own id, a file and a time, and is signed by a key that the
server makes when it begins. So only the server makes links, and one ends after `SECONDS`, and with
its server.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping

from isobit.serve.requests import BadRequest
from isobit.serve.tinker.wire import PREFIX

FILES = "files"
LINKS = f"{PREFIX}/{FILES}/"
"""What the path of every link begins with."""
SECONDS = 3600
_HEX = hashlib.sha256().digest_size * 2


class Links:
    """The signed links of one server."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def link(self, checkpoint: str, file: str, expires: int) -> str:
        """Return path and query of a link that ends at `expires`, in seconds since 1970. `file`: a
        name that the server gave, which needs no escapes in a path."""
        query = f"expires={expires}&signature={self._signature(checkpoint, file, expires)}"
        return f"{LINKS}{checkpoint}/{file}?{query}"

    def check(self, checkpoint: str, file: str, query: Mapping[str, str]) -> None:
        """Raise BadRequest (403) unless the query makes this a link of this server that has not
        ended. Signatures are compared in constant time."""
        signature, expires = query.get("signature", ""), query.get("expires", "")
        whole = expires.isascii() and expires.isdigit() and len(expires) < 20
        signed = self._signature(checkpoint, file, int(expires) if whole else 0)
        same = hmac.compare_digest(signature.encode(errors="replace")[: _HEX + 1], signed.encode())
        if not whole or not same or int(expires) < time.time():
            raise BadRequest(
                "the link is none of this server's, or has ended; ask for another one", status=403
            )

    def _signature(self, checkpoint: str, file: str, expires: int) -> str:
        message = f"{checkpoint}\n{file}\n{expires}".encode(errors="replace")
        return hmac.new(self._key, message, "sha256").hexdigest()
