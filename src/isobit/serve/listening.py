"""The port of a server, taken before anything that takes long: who has it already is noticed at
once. Whoever connects while the model is read waits for it.
"""

import errno
import socket

from isobit.data.foreign import reason_of
from isobit.errors import IsobitError

_BACKLOG = 2048  # connections that wait; as uvicorn's own


def listen(host: str, port: int, option: str) -> socket.socket:
    """A socket that listens there; `port` 0: at a free one. Raises IsobitError, which names the
    `option` of the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (UnicodeError, TypeError):  # of a name that cannot be encoded
        reason = "that is no name of a machine"
    except OSError as error:
        reason = reason_of(error).partition(" (while ")[0]  # where, which we say
        if error.errno == errno.EADDRINUSE:
            reason = "it is in use; give another port, or end what listens there"
    raise IsobitError(f"{option} {port}: cannot listen on {host}: {reason}")
