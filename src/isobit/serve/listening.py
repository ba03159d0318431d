"""The port of a server, taken before anything that takes long: a port in use is noticed at once. A
client that connects while the model is read waits for it.
"""

import errno
import logging
from typing import Any, Protocol

import uvicorn

from isobit.data.foreign import reason_of
from isobit.errors import IsobitError

_BACKLOG = 2048  # connections that wait; as uvicorn's own


class Listener(Protocol):
    """A socket that listens for connections."""

    def getsockname(self) -> Any:
        """Return (host, port) and more."""

    def close(self) -> None:
        """Let others have the port."""


def listen(host: str, port: int, option: str) -> Listener:
    """Return a socket that listens there; `port` 0: at a free one. Raises IsobitError, which names
    the `option` of the port."""
    config = uvicorn.Config("", host=host, port=port, log_config=None)
    logging.getLogger("uvicorn.error").addFilter(_not_of_listening)
    failure: BaseException | None
    try:
        listener = config.bind_socket()
        listener.set_inheritable(False)
        listener.listen(_BACKLOG)
        return listener
    except SystemExit as error:  # uvicorn's, of what it caught
        failure = error.__context__
    except (OSError, UnicodeError, TypeError) as error:  # of a name that cannot be encoded too
        failure = error
    reason = "that is no name of a machine"
    if isinstance(failure, OSError):
        reason = reason_of(failure)
        if failure.errno == errno.EADDRINUSE:
            reason = "it is in use; give another port, or end what listens there"
    raise IsobitError(f"{option} {port}: cannot listen on {host}: {reason}")


def _not_of_listening(record: logging.LogRecord) -> bool:
    """Return whether a line of uvicorn's log is another one than that it cannot listen, which we
    say."""
    return not isinstance(record.msg, OSError)
