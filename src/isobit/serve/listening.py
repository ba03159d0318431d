"""The port of a server, taken before anything that takes long: who has it already is noticed at
once. Whoever connects while the model is read waits for it.
"""

import errno
import logging
from typing import Any, Protocol

import uvicorn

from isobit.data.foreign import reason_of
from isobit.errors import IsobitError

_BACKLOG = 2048  # connections that wait; as uvicorn's own


class Listener(Protocol):
    """A socket that listens."""

    def getsockname(self) -> Any:
        """(host, port) and more."""

    def close(self) -> None:
        """Let others have the port."""


def listen(host: str, port: int, option: str) -> Listener:
    """A socket that listens there; `port` 0: at a free one. Raises IsobitError, which names the
    `option` of the port."""
    config = uvicorn.Config("", host=host, port=port, log_config=None)
    logging.getLogger("uvicorn.error").addFilter(_not_of_listening)
    found: BaseException | None
    try:
        listener = config.bind_socket()
        listener.set_inheritable(False)
        listener.listen(_BACKLOG)
        return listener
    except SystemExit as error:  # uvicorn's, of what it caught
        found = error.__context__
    except (OSError, UnicodeError, TypeError) as error:  # of a name that cannot be encoded too
        found = error
    reason = "that is no name of a machine"
    if isinstance(found, OSError):
        reason = reason_of(found)
        if found.errno == errno.EADDRINUSE:
            reason = "it is in use; give another port, or end what listens there"
    raise IsobitError(f"{option} {port}: cannot listen on {host}: {reason}")


def _not_of_listening(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn's log is another one than that it cannot listen, which we say."""
    return not isinstance(record.msg, OSError)
